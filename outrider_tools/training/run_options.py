"""What `outrider train` was asked for, as values."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from outrider.errors import ConfigError
from outrider_tools.training.corpus import CorpusOptions
from outrider_tools.training.options import TrainerOptions
from outrider_tools.training.tree import TreeShape

STATE_FILE = "state.safetensors"
# What a state on disk fits to, and the options that decide it.
DRAFTER_FILE = "drafter.json"
DRAFTER_OPTIONS = {
    "algorithm": "algorithm",
    "draft_vocab_size": "draft-vocab-size",
    "feature_layers": "feature-layers",
    "intermediate_size": "intermediate-size",
    "feature_weight": "feature-weight",
    "layers": "layers",
    "hidden": "hidden",
    "init_from": "init-from",
}
# Weight of the features' distance in the loss, by the kind of head: EAGLE's own paper learns from both.
FEATURE_WEIGHTS = {"EAGLE": 0.5}


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Paths and devices apart, all of it goes into the record."""

    algorithm: str = "EAGLE3"
    """As `--speculative-algorithm` has it: EAGLE3, EAGLE, NEXTN or STANDALONE."""
    prompts: Path | None = None
    eval_prompts: Path | None = None
    text: Path | None = None
    """A folder in which an earlier run has left its text; none is made then."""
    init_from: Path | None = None
    """The folder of an EAGLE-3 head of this target that the training begins as."""
    draft_vocab_size: int = 0
    """Of EAGLE-3 heads; the other kinds have the target's vocabulary. 0 is that of `init_from`, or 8192."""
    feature_layers: tuple[int, ...] = ()
    """Of EAGLE-3 heads; empty takes those of `init_from`, or the default ones."""
    intermediate_size: int = 0
    """Of an EAGLE-3 head's MLP; 0 is that of `init_from`, or the target's."""
    own_feature_weight: float | None = None
    """Of the distance to the target's features in the loss of EAGLE and NEXTN; None takes the kind's own."""
    layers: int = 4
    """Of STANDALONE models."""
    hidden: int = 0
    """Hidden size of STANDALONE models; 0 is the target's."""
    eval_new_tokens: int = 256
    eval_temperatures: tuple[float, ...] = (0.0, 1.0)
    corpus: CorpusOptions = field(default_factory=CorpusOptions)
    trainer: TrainerOptions = field(default_factory=TrainerOptions)
    tree: TreeShape = field(default_factory=TreeShape)

    @property
    def feature_weight(self) -> float:
        """See `own_feature_weight`."""
        if self.own_feature_weight is not None:
            return self.own_feature_weight
        return FEATURE_WEIGHTS.get(self.algorithm, 0.0)


def check_resumed(work: Path, options: RunOptions) -> None:
    """Compare the drafter with the one whose training `work` holds the state of, and write down which it is.

    Raises:
        ConfigError: it is another one.
    """
    wanted = json.loads(json.dumps({name: getattr(options, name) for name in DRAFTER_OPTIONS}, default=str))
    path = work / DRAFTER_FILE
    if (work / STATE_FILE).exists() and path.exists():
        found = json.loads(path.read_text("utf-8"))
        for name, option in DRAFTER_OPTIONS.items():
            if found.get(name) != wanted[name]:
                raise ConfigError(
                    f"{work} holds the state of a training with another --{option} ({found.get(name)}, not "
                    f"{wanted[name]}); choose another --out or remove it"
                )
    # All processes of a training write the same.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps(wanted) + "\n", "utf-8")
    os.replace(part, path)

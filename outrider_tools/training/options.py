"""What `outrider train` was asked for, as values."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from outrider.errors import ConfigError

OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How a drafter is trained. `steps` 0 fits as many as `minutes` allow, by the speed of the first ones."""

    steps: int = 0
    minutes: float = 2.0
    batch_tokens: int = 16384
    """Of each process; so a step on several GPUs sees several times as many."""
    optimizer: str = "muon"
    """One of OPTIMIZERS: "muon" moves the new 2-D weights by Muon, and what begins as the target's own by AdamW."""
    learning_rate: float = 1e-3
    """Peak rate of AdamW for weights that begin at random."""
    muon_learning_rate: float = 5e-3
    """Peak rate of Muon; scaled by a matrix's size, so that a step moves weights about as far as one of AdamW."""
    output_share: float = 0.3
    """Learning rate of the output matrix and the norm before it, as a share: they begin as the target's own."""
    warmup_share: float = 0.04
    final_share: float = 0.02
    """Learning rate at the end, as a share of its peak."""
    unroll: int = 8
    """Steps that the drafter runs on its own features (training-time test)."""
    decay: float = 1.0
    """Weight of an unrolled step against the one before it."""
    hit_weight: float = 0.0
    """Of EAGLE-3 heads: share of the hit loss (`loss.Teaching`) beside the cross-entropy, 0 to 1."""
    clip: float = 1.0
    average: float = 0.0
    """How much of the running average of the weights each step keeps, as 0.999; the average is what is exported. 0 is
    off."""
    packed: bool = True
    """On a GPU: batches padded to one shape."""
    compile: bool = True
    """On a GPU, of batches of one shape: compile the pieces of a step."""
    seed: int = 0
    save_seconds: float = 60.0


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
class CorpusOptions:
    """How much text, of what kind."""

    tokens: int = 10_000_000
    """Answer tokens to make; a little more come, since answers that have begun are finished."""
    invented: int = -1
    """Questions that the target makes up; what does not end in time or repeats is left out. -1: enough for `tokens`."""
    opened: float = 0.6
    """Share of them whose first words are given (`openings`), so that they are of many kinds."""
    given_repeats: int = 1
    """Answers to each given question."""
    question_tokens: int = 192
    answer_tokens: int = 512
    question_temperature: float = 1.0
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.8, 1.0)
    """Answers take these in turn."""
    held_out: int = 64
    """Invented questions that are left out, for the evaluation."""
    text_minutes: float = 0.0
    """After so long no more questions begin, and as long after that no more answers; 0 is no limit."""
    num_rows: int = 1024
    """Conversations at once."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Bounds of a tree: nodes below the root, edges from the root to a leaf, children of a node."""

    nodes: int = 32
    depth: int = 8
    branching: int = 8


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

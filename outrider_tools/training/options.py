"""The options of `outrider train` as values. A `flag` is also an option of the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.cli.options import number, whole_number
from outrider.config.base import expand

ALGORITHMS = ("EAGLE3", "EAGLE", "DFLASH", "DSPARK", "NEXTN", "STANDALONE")
OPTIMIZERS = ("adamw", "muon")
FLAGS = {"own_feature_weight": "feature_weight", "packed": "no_packed", "compile": "no_compile"}
"""Flags whose names differ from their fields'."""


def flag(default: Any, help: str, **how: Any) -> Any:
    """Return a field that the command line may set. `how` is for `add_argument`; a `group` may replace the class's."""
    return field(default=default, metadata={"help": help, **how})


_MINUTES, _RATE, _SHARE = number(0, 1e6), number(1e-9, 10), number(0, 1)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise ArgumentTypeError(f"{text}: expected numbers with commas between them") from None


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How a drafter is trained. `steps` 0 fits as many as `minutes` allow, by the speed of the first ones."""

    steps: int = flag(0, "Training steps, instead of --minutes.", type=whole_number(1, 10**8))
    minutes: float = flag(2.0, "Minutes of training, not counting text. Default: 2.", type=_MINUTES)
    batch_tokens: int = flag(16384, "Tokens per step on each GPU. Default: 16384.", type=whole_number(64, 10**7))
    unroll: int = flag(
        8, "Steps on own features; for DFLASH and DSPARK, positions of a block. Default: 8.", type=whole_number(1, 32)
    )
    hit_weight: float = flag(
        0.0,
        "EAGLE3: share of the hit loss, which aims at answers sampled at temperature 1; the rest is cross-entropy. "
        "Default: 0.",
        type=_SHARE,
    )
    cuts: float = flag(
        0.25,
        "Heads: share of texts that are read in two parts, the second as if nothing came before it. Default: 0.25.",
        type=_SHARE,
    )
    decay: float = flag(
        1.0, "Weight of each step on own features relative to the one before. Default: 1.", type=number(0, 100)
    )
    learning_rate: float = flag(1e-3, "Peak learning rate. Default: 0.001.", type=_RATE)
    """AdamW's rate for weights that begin at random."""
    optimizer: str = flag("muon", "Optimizer of new matrices. Default: muon.", choices=OPTIMIZERS)
    """AdamW always moves weights that begin as the target's own."""
    muon_learning_rate: float = flag(5e-3, "Muon's peak learning rate. Default: 0.005.", type=_RATE)
    """Scaled by a matrix's size, so that a step moves weights about as far as a step of AdamW."""
    average: float = flag(
        0.0,
        "Export a running average of the weights that keeps this share at each step, such as 0.999.",
        type=number(0, 0.999999),
    )
    """0 exports the last weights."""
    packed: bool = flag(True, "Do not pad batches to one shape on a GPU.", action="store_false")
    """Pad batches to one shape, on a GPU."""
    compile: bool = flag(True, "Do not compile the steps.", action="store_false")
    """Compile the parts of a step, on a GPU with batches of one shape."""
    output_share: float = 0.3
    """Relative learning rate of the output matrix and the norm before it, which begin as the target's own."""
    warmup_share: float = 0.04
    final_share: float = 0.02
    """Learning rate at the end, as a share of its peak."""
    clip: float = 1.0
    seed: int = 0
    save_seconds: float = 60.0


WORK_FOLDER = "work"
"""Folder inside the drafter's, from which an interrupted run continues."""
STATE_FILE = "state.safetensors"
RECORD_FILE = "training.json"
# Weight of the features' distance in the loss, by kind of head: EAGLE's own paper learns from both.
FEATURE_WEIGHTS = {"EAGLE": 0.5}


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """How much text to make, and of what kind."""

    tokens: int = flag(10_000_000, "Answer tokens to generate. Default: 10 million.", type=whole_number(1, 10**10))
    """There will be a few more, since answers that have begun are finished."""
    invented: int = flag(
        -1, "Questions that the target invents. Default: enough for --tokens.", type=whole_number(0, 10**8)
    )
    """Questions that the target makes up. Unfinished ones and repeats are left out. -1: enough for `tokens`."""
    opened: float = flag(0.6, "Share of invented questions whose first words are given. Default: 0.6.", type=_SHARE)
    """First words come from `prompts.OPENINGS`, so that questions are of many kinds."""
    beginnings: float = flag(
        0.5,
        "Share of texts with a system message other than the chat template's, with none, or without a chat. Default: "
        "0.5.",
        type=_SHARE,
    )
    temperatures: tuple[float, ...] = flag(
        (0.0, 0.0, 0.8, 1.0),
        "Temperatures that answers use in turn. Default: 0,0,0.8,1.",
        type=lambda text: tuple(map(number(0, 100), text.split(","))),
    )
    text_minutes: float = flag(
        0.0, "Most minutes for questions, and again for answers. Default: no limit.", type=_MINUTES
    )
    """No more questions begin after this time, and no more answers after the same time again; 0 is no limit."""
    num_rows: int = flag(1024, "Conversations generated at once. Default: 1024.", type=whole_number(1, 65536))
    given_repeats: int = 1
    """Number of answers to each given question."""
    question_tokens: int = 192
    answer_tokens: int = 512
    system_tokens: int = 48
    """Most tokens of an invented system message."""
    question_temperature: float = 1.0
    held_out: int = 64
    """Number of invented questions that are left out, for the evaluation."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Bounds of a tree: nodes below the root, edges from the root to a leaf, children of a node."""

    nodes: int = 32
    depth: int = 8
    branching: int = 8


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run. All of them but paths and devices go into the record."""

    algorithm: str = "EAGLE3"
    """One of ALGORITHMS."""
    prompts: Path | None = flag(
        None, "JSONL file of questions to train on, besides the invented ones.", group="text", type=expand
    )
    eval_prompts: Path | None = flag(
        None, "JSONL file of questions to evaluate with; never trained on.", group="text", type=expand
    )
    text: Path | None = flag(
        None, "Folder (--out) of an earlier run whose text is used; no text is generated.", group="text", type=expand
    )
    init_from: Path | None = flag(
        None, "EAGLE3: start from this head of the same target, a folder or hub id, with its sizes and vocabulary."
    )
    draft_vocab_size: int = flag(
        0,
        "EAGLE3, DFLASH, DSPARK: number of tokens that the head may guess. Default: 8192, or those of --init-from; "
        "others are added to these.",
        type=whole_number(1, 10**6),
    )
    output_dtype: str = flag(
        "bfloat16",
        "EAGLE3: how the head's output matrix is stored: bfloat16, or float8_e4m3 in half the bytes, rounded so that "
        "guesses change least. Default: bfloat16.",
        choices=("bfloat16", "float8_e4m3"),
    )
    intermediate_size: int = flag(
        0,
        "EAGLE3, DFLASH, DSPARK: width of the head's MLP. Default: the target's, or that of --init-from.",
        type=whole_number(0, 10**6),
    )
    feature_layers: tuple[int, ...] = flag(
        (),
        "EAGLE3, DFLASH, DSPARK: target layers whose input the head reads, such as 2,15,27 (the default for 30 "
        "layers).",
        type=_layers,
    )
    own_feature_weight: float | None = flag(
        None,
        "EAGLE, NEXTN: weight in the loss of the distance to the target's features. Default: EAGLE 0.5, NEXTN 0.",
        type=number(0, 1e6),
    )
    """None takes the default of the kind of drafter."""
    layers: int = flag(
        0, "STANDALONE, DFLASH, DSPARK: number of layers. Default: 4, for a block head 2.", type=whole_number(1, 1000)
    )
    markov_rank: int = flag(32, "DSPARK: width of the head's sequential part. Default: 32.", type=whole_number(1, 4096))
    hidden: int = flag(
        0,
        "STANDALONE: hidden size; attention heads keep the target's size. Default: the target's.",
        type=whole_number(0, 10**6),
    )
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

    @property
    def of_drafter(self) -> dict[str, Any]:
        """The options that determine the drafter, by their names on the command line."""
        own = (
            "draft_vocab_size",
            "feature_layers",
            "intermediate_size",
            "layers",
            "hidden",
            "init_from",
            "markov_rank",
        )
        names = ("algorithm", "feature_weight", *own)
        return {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}

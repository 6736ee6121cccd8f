"""How a drafter is trained, as values."""

from __future__ import annotations

from dataclasses import dataclass

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
    """On a GPU: texts one after the other in batches of one shape, instead of padded rectangles."""
    compile: bool = True
    """On a GPU, of packed batches: compile the pieces of a step."""
    seed: int = 0
    save_seconds: float = 60.0

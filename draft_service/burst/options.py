"""How a draft model's trees grow."""

from __future__ import annotations

from dataclasses import dataclass

from draft_service.burst.plan import BurstShape
from outrider.config.draft import DraftOptions

_STEADY_STEPS = 2
"""Steps of a burst while trees survive: a commit waits for the burst that runs."""
_FRESH_STEPS = 4
"""Steps of a burst after a miss: nothing is there yet, so depth counts."""
_LOCKSTEP_STEPS = 8
_LOCKSTEP_WIDTH = 8
_GPU_REGION = 256
"""Regions from here on are a GPU's: prompt chunks are larger there."""


@dataclass(frozen=True, slots=True)
class GrowthOptions:
    """Figures of a burst growth."""

    max_positions: int
    """Longest sequence that is served."""
    steady_steps: int = _STEADY_STEPS
    fresh_steps: int = _FRESH_STEPS
    prompt_chunk: int = 128
    """Prompt tokens of a request that are computed between two bursts."""
    own_features: bool = False
    """Whether the context takes tokens that were run with the draft's own features."""
    lockstep_steps: int = 0
    """Steps of the one tree that is grown after each commit; 0 grows ahead."""
    lockstep_width: int = _LOCKSTEP_WIDTH
    """Nodes of such a step, of each request."""
    max_entries: int = 0
    """Entries of all trees; 0 chooses."""

    @classmethod
    def choose(cls, options: DraftOptions, shape: BurstShape, max_positions: int) -> GrowthOptions:
        """What the options and the runner make of it."""
        return cls(
            max_positions=min(max_positions, options.max_positions, shape.max_context + shape.lag),
            steady_steps=min(_STEADY_STEPS, shape.max_steps),
            fresh_steps=min(_FRESH_STEPS, shape.max_steps),
            own_features=options.own_features,
            prompt_chunk=512 if shape.region >= _GPU_REGION else 128,
            lockstep_steps=(options.speculative_num_steps or _LOCKSTEP_STEPS) if options.lockstep else 0,
            lockstep_width=options.speculative_eagle_topk or _LOCKSTEP_WIDTH,
        )

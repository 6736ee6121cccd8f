"""A draft model with what runs it, and how its trees grow."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.config.draft import DraftOptions
from outrider.drafting.base import ANY_TOKEN, AnyDrafter, Needs, parts_of
from outrider.drafting.model.burst import BurstShape
from outrider.drafting.model.features import MemoryMapper

if TYPE_CHECKING:
    from outrider.drafting.model.runner import BurstRunner

_STEADY_STEPS = 2
"""Steps of a burst while trees survive: a commit waits for the burst that runs."""
_FRESH_STEPS = 4
"""Steps of a burst after a miss: nothing is there yet, so depth counts."""
_FIRST_STEPS = 2
"""Steps of the first part after a miss where a burst goes on: verify gets its nodes while the device runs the next."""
MAX_BURST_STEPS = 64
"""Steps of all parts of a burst: many rounds of a large target, since the device is idle between two bursts."""
BRANCHING, LONE_BRANCHING = 8, 16
"""Candidates of a node on a GPU, of several requests and of a lone one. More of them hold the target's token more
often, and take the host time for each."""
_FEW_ROWS = 4
"""Requests of a burst at most whose parts may be a single step."""
PART_SECONDS = 0.0004
"""The host's time for a part before any was measured."""
_MAX_PART_STEPS = 2
_LOCKSTEP_STEPS = 8
_LOCKSTEP_WIDTH = 8
_TURN_STEPS = 8
_TURN_WIDTH = 2
_TURN_MIN_CHANCE = 0.2
"""Sum of the chances of the nodes of a step below which verify has waited long enough, however little a step takes
(see TorchRunner)."""
_BLOCK_NODES = 32
"""Nodes of a lone request's tree of a block head on a GPU: about what a round takes. What is left of more of them below
a commit is what the block before guessed, and a round that is launched with it brings less than a wait for the next."""
_GPU_REGION = 256
"""Least region, in tree slots, of a runner on a GPU."""


@dataclass(frozen=True, slots=True)
class GrowthOptions:
    """Figures of a burst growth."""

    max_positions: int
    """Longest sequence that is served."""
    vocab_size: int = ANY_TOKEN
    """Sequences with token ids from here on are not served."""
    steady_steps: int = _STEADY_STEPS
    fresh_steps: int = _FRESH_STEPS
    prompt_chunk: int = 128
    """Prompt tokens of a request that are computed between two bursts."""
    lockstep_steps: int = 0
    """Steps of the one tree that is grown after each commit; 0 grows ahead."""
    withholds: bool = False
    """Whether nothing is sent to verify until such a tree is complete."""
    min_chance: float = 0.0
    """Such a tree is complete, too, when the chances of the nodes of a step add up to less."""
    lockstep_width: int = _LOCKSTEP_WIDTH
    """Nodes of such a step, of each request."""
    most_steps: int = 0
    """Steps of a burst at most with those by which it goes on while nothing waits for its end, past commits that it can
    be told of; 0: it never does."""

    renews_roots: bool = False
    """Whether a root that was run before its features came is run again with them: a block head's."""
    lone_nodes: int = 0
    """Nodes that a lone request is sent after a commit at most, in one answer, once its root was run with the target's
    features; nothing is run before. 0 grows ahead there, too."""

    @property
    def takes_in(self) -> bool:
        """Whether what other growers append becomes entries: that would end bursts which go on past commits."""
        return not self.most_steps

    def part_steps(self, num_rows: int, step_seconds: float = 0.0, host_seconds: float = PART_SECONDS) -> int:
        """Steps by which a burst of so many requests goes on: what the host has to do for a part fits in them.

        `step_seconds`: what a step takes, 0 if that is not known.
        """
        least = 1 if num_rows <= _FEW_ROWS else self.steady_steps
        return max(least, min(math.ceil(host_seconds / step_seconds), _MAX_PART_STEPS)) if step_seconds else least

    @classmethod
    def choose(cls, options: DraftOptions, shape: BurstShape, needs: Needs) -> GrowthOptions:
        """What the options and the runner make of it."""
        max_positions = needs.max_positions or options.max_positions
        on_gpu = shape.region >= _GPU_REGION
        alone = options.draft_ahead == "never" or (options.draft_ahead == "auto" and not on_gpu)
        in_turns = alone and not options.lockstep
        answers_once = options.draft_ahead == "auto" and on_gpu and shape.has_blocks and not options.lockstep
        steps = _LOCKSTEP_STEPS if options.lockstep else _TURN_STEPS if in_turns else 0
        goes_on = on_gpu and not steps and not shape.has_blocks
        return cls(
            max_positions=min(max_positions, options.max_positions, shape.max_context + shape.lag),
            vocab_size=needs.vocab_size or ANY_TOKEN,
            steady_steps=min(_STEADY_STEPS, shape.max_steps),
            fresh_steps=min(
                _TURN_STEPS if in_turns or shape.has_blocks else _FIRST_STEPS if goes_on else _FRESH_STEPS,
                shape.max_steps,
            ),
            prompt_chunk=512 if on_gpu else 128,
            lockstep_steps=(options.speculative_num_steps or steps) if steps else 0,
            lockstep_width=_TURN_WIDTH if in_turns else options.speculative_eagle_topk or _LOCKSTEP_WIDTH,
            withholds=options.lockstep,
            min_chance=_TURN_MIN_CHANCE if in_turns else 0.0,
            most_steps=min(MAX_BURST_STEPS, shape.max_steps) if goes_on else 0,
            renews_roots=shape.has_blocks and not steps,
            lone_nodes=(options.speculative_num_draft_tokens or _BLOCK_NODES) if answers_once else 0,
        )


@dataclass(frozen=True)
class ModelDrafter(AnyDrafter):
    """What the service knows of a draft model."""

    runner: BurstRunner
    sources: tuple[str, ...]
    needs: Needs


def workplace(drafter: AnyDrafter) -> AbstractContextManager[None]:
    """What the thread is in that drafts: that of the model, if there is one."""
    model = _model_of(drafter)
    return nullcontext() if model is None else model.runner.at_work()


def find_mapper(drafter: AnyDrafter) -> MemoryMapper | None:
    """Maps verify's memory where a model runs that takes features; None where none does, or not on a GPU."""
    model = _model_of(drafter)
    return model.runner.memory_mapper() if model is not None and model.needs.feature_layers else None


def _model_of(drafter: AnyDrafter) -> ModelDrafter | None:
    return next((part for part in parts_of(drafter) if isinstance(part, ModelDrafter)), None)

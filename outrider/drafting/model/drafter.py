"""A draft model with its runner, and the options of how its trees grow."""

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
"""Steps of a burst while trees survive: a commit waits for the running burst."""
_FRESH_STEPS = 4
"""Steps of a burst after a miss: the tree is empty, so depth counts."""
_FIRST_STEPS = 2
"""Steps of the first part after a miss if the burst goes on: verify gets nodes while the device runs the next part."""
MAX_BURST_STEPS = 64
"""Most steps in all parts of a burst: many rounds of a large target, since the device is idle between two bursts."""
BRANCHING, LONE_BRANCHING = 8, 16
"""Candidates of a node on a GPU, with several requests and with a lone one. More candidates include the target's token
more often, but each takes time of the host."""
_FEW_ROWS = 4
"""Most requests in a burst whose parts may be a single step."""
PART_SECONDS = 0.0004
"""The host's time for a part, before any was measured."""
_MAX_PART_STEPS = 2
_LOCKSTEP_STEPS = 8
_LOCKSTEP_WIDTH = 8
_TURN_STEPS = 8
_TURN_WIDTH = 2
_TURN_MIN_CHANCE = 0.2
"""A tree that verify waits for is complete once the chances of a step's nodes add up to less than _TURN_MIN_CHANCE,
however quick a step is (see TorchRunner)."""
_BLOCK_NODES = 32
"""Nodes of a lone request's tree of a block head on a GPU: about as many as a round takes. If there were more, the ones
left below a commit would be guesses of an old block, and a round with them brings less than waiting for a new block."""
_GPU_REGION = 256
"""Least region, in tree slots, of a runner on a GPU."""


@dataclass(frozen=True, slots=True)
class GrowthOptions:
    """Parameters of the growth with bursts."""

    max_positions: int
    """Longest sequence that is served."""
    vocab_size: int = ANY_TOKEN
    """Sequences with token ids at or past this are not served."""
    steady_steps: int = _STEADY_STEPS
    fresh_steps: int = _FRESH_STEPS
    prompt_chunk: int = 128
    """Most prompt tokens that are computed between two bursts."""
    lockstep_steps: int = 0
    """Steps of the one tree that is grown after each commit; 0 grows ahead."""
    withholds: bool = False
    """Whether nothing is sent to verify until a tree of `lockstep_steps` is complete."""
    min_chance: float = 0.0
    """A tree of `lockstep_steps` is also complete when the chances of a step's nodes add up to less."""
    lockstep_width: int = _LOCKSTEP_WIDTH
    """Nodes of each request in a step of such a tree."""
    most_steps: int = 0
    """Most steps in all parts of a burst. A burst goes on, past commits that can be passed to it, until something waits
    for its end; with 0 it has one part."""

    renews_roots: bool = False
    """Whether a root that was run before its features came is run again with them, as for a block head."""
    lone_nodes: int = 0
    """Most nodes that a lone request is sent after a commit. They go in one answer once the root was run with the
    target's features, and nothing is run before. 0 grows ahead for a lone request, too."""

    @property
    def adopts_foreign_nodes(self) -> bool:
        """Whether nodes of other growers become entries, which would end bursts that go on past commits."""
        return not self.most_steps

    def part_steps(self, num_rows: int, step_seconds: float = 0.0, host_seconds: float = PART_SECONDS) -> int:
        """Return the steps of a further part of a burst of `num_rows` requests, which last as long as the host's work.

        `step_seconds`: time of a step, 0 if not known. `host_seconds`: the host's time for a part.
        """
        least = 1 if num_rows <= _FEW_ROWS else self.steady_steps
        return max(least, min(math.ceil(host_seconds / step_seconds), _MAX_PART_STEPS)) if step_seconds else least

    @classmethod
    def choose(cls, options: DraftOptions, shape: BurstShape, needs: Needs) -> GrowthOptions:
        """Return the growth options for these options, this runner's shape, and the drafter's needs."""
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
    """A draft model as the service knows it."""

    runner: BurstRunner
    sources: tuple[str, ...]
    needs: Needs


def workplace(drafter: AnyDrafter) -> AbstractContextManager[None]:
    """Return the context manager for the drafting thread: the model runner's, if there is a model."""
    model = _model_of(drafter)
    return nullcontext() if model is None else model.runner.at_work()


def find_mapper(drafter: AnyDrafter) -> MemoryMapper | None:
    """Return the mapper of verify's memory for a model on a GPU that takes features; None without such a model."""
    model = _model_of(drafter)
    return model.runner.memory_mapper() if model is not None and model.needs.feature_layers else None


def _model_of(drafter: AnyDrafter) -> ModelDrafter | None:
    return next((part for part in parts_of(drafter) if isinstance(part, ModelDrafter)), None)

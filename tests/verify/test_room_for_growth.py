"""What of a round's tokens and pages is left for trees that grow inside it; no engine, and nothing grows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cuda_harness import VOCAB
from harness import Answer, make_request

from outrider.sampling.params import SamplingParams
from verify_service.engine.memory import Memory
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth
from verify_service.engine.round_growth import GrowthCost, GrowthPolicy, RoundGrowth
from verify_service.engine.scheduler import EngineLimits

GREEDY = SamplingParams(temperature=0.0)


class Grown:
    """Trees of so many nodes."""

    num_behind = 0

    failed = False

    def __init__(self, num_grown: int) -> None:
        self.num_grown = num_grown

    def has_tree(self, request: Request) -> bool:
        return request.committed_len == request.cached_len + 1

    def rest(self, rests: bool) -> None:
        pass


@pytest.mark.parametrize("num_recomputed", [0, 9, 31, 32, 62])
def test_tokens_that_are_computed_again_leave_less_room_for_trees(num_recomputed: int) -> None:
    """A resumed request's own tokens are part of a --deterministic round, though nothing is sampled there."""
    memory, policy = (
        Memory(64, 16),
        GrowthPolicy(lambda tokens: 1.0, lambda rows: GrowthCost(0.1, 0.1), lambda rows: (32,), 3),
    )
    decoding, resumed = (make_request(Answer(), [5] * 100, GREEDY, VOCAB, max_tokens=50) for _ in range(2))
    resumed.tokens += [5] * 70
    decoding.cached_len = resumed.cached_len = 99
    limits = EngineLimits(VOCAB, 200, max_nodes=63, max_round_tokens=64, root_apart=True, deterministic=True)
    growth = RoundGrowth(Grown(63), policy, memory, lambda rows: 32, limits)  # type: ignore[arg-type]
    assert growth.plan([Entry(decoding, 1)])
    entries = [Entry(decoding, 1), Entry(resumed, num_recomputed)] if num_recomputed else [Entry(decoding, 1)]
    growth.take(entries)
    assert 0 < entries[0].max_grown <= 64 - 1 - num_recomputed


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("grows", [False, True])
def test_pages_behind_a_round_are_for_drafters_at_work(grows: bool, is_ahead: bool) -> None:
    """The new root's KV is the drafter's to write where something grows, in the page after a full one."""
    memory, trees = Memory(64, 16), Grown(0)
    trees.num_behind = 1
    planned = Growth(3, 16) if grows else None
    policy: Any = SimpleNamespace(plan=lambda rows: planned, rests=lambda rows, rounds: False)
    request = make_request(Answer(), [5] * (31 if is_ahead else 32), GREEDY, VOCAB, max_tokens=50)
    request.cached_len = request.committed_len - 1
    assert memory.reserve(request, 32)
    limits = EngineLimits(VOCAB, 200, max_nodes=63, max_round_tokens=64)
    growth = RoundGrowth(trees, policy, memory, lambda rows: 32, limits)  # type: ignore[arg-type]
    assert (growth.plan([Entry(request, 1, is_ahead=is_ahead)]) is not None) == grows
    assert len(request.pages) == (3 if grows else 2)

"""The choice of a step from pools of all sizes and contents, by kernel and by reference."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
import torch
import triton
import triton.language as tl
from examples import examples
from frontier_burst import BRANCHING, Burst, make_burst
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.frontier_state import NUM_FIELDS, ROW, SCORE, SLOT, STEP, BurstRows, CandidatePool, StepTokens
from kernels.jit.frontier import _shorten
from kernels.launch import triton_on_cpu
from kernels.reference import frontier as reference

FORCED = 1e30
NEVER = float("-inf")
CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter; the other tests run on the GPU")
# A draft service's widest common step: 512 seeds and 32 steps of 64 nodes with 8 candidates each.
LARGE = 512 + 32 * 64 * 8


def pool_of(
    scores: Tensor,
    width: int,
    device: str,
    *,
    floor: float = -100.0,
    rows: Tensor | None = None,
    slots: Tensor | None = None,
    num_candidates: int = 0,
    step: int = 0,
) -> Burst:
    """A burst whose pool has these scores, the last `num_candidates` behind its seeds. Row 2 has no free slot."""
    burst = make_burst([], [[1, 2], [3], []], width, floor=floor, device=device)
    count = len(scores)
    entries = torch.full((NUM_FIELDS, count), 55, dtype=torch.int32)
    entries[ROW] = torch.zeros(count, dtype=torch.int32) if rows is None else rows.int()
    entries[SLOT] = torch.full((count,), -1, dtype=torch.int32) if slots is None else slots.int()
    entries[SCORE] = scores.float().view(torch.int32)
    burst.pool = CandidatePool(entries.to(device), count - num_candidates)
    burst.step = StepTokens.new(width, 3, 1, torch.device(device), count)
    burst.step.keys.fill_(1 << 51)
    burst.header[STEP] = step
    return burst


def expected(burst: Burst) -> list[int]:
    """What the reference chooses."""
    rows = BurstRows(*(getattr(burst.rows, field.name).cpu() for field in fields(burst.rows)))
    step = StepTokens.new(burst.width, 3, 1, torch.device("cpu"))
    pool = CandidatePool(burst.pool.entries.cpu(), burst.pool.max_seeds)
    reference.choose_entries(burst.header.cpu(), pool, rows, step, BRANCHING)
    return step.order.tolist()


def chosen(burst: Burst, times: int = 2) -> list[int]:
    """What the kernel chooses, the same every time."""
    found = None
    for _ in range(times):
        burst.step.order.fill_(-1)
        burst.choose()
        again = burst.step.order.tolist()
        assert found in (None, again) and burst.step.tally.tolist() == [0]
        found = again
    assert found is not None
    return found


def spread(count: int, seed: int = 0) -> Tensor:
    """Scores from 0 to -12, some of them equal."""
    scores = -12 * torch.rand(count, generator=torch.Generator().manual_seed(seed))
    return torch.where(torch.arange(count) % 3 == 0, scores.mul(8).round() / 8, scores)


@pytest.mark.parametrize("width", [1, 64, 200])
@pytest.mark.parametrize("alive", [0, 1, 130, 700, 3000])
def test_some_alive_among_many_dead(device: str, width: int, alive: int) -> None:
    scores = torch.full((LARGE + 13,), NEVER)
    where = torch.randperm(len(scores), generator=torch.Generator().manual_seed(alive))[:alive]
    scores[where] = spread(alive)
    burst = pool_of(scores, width, device)
    order = chosen(burst, 1)
    assert order == expected(burst)
    assert sum(entry >= 0 for entry in order) == min(width, alive)


@pytest.mark.parametrize("width", [8, 128])
def test_all_alive(device: str, width: int) -> None:
    burst = pool_of(spread(LARGE), width, device)
    assert chosen(burst, 1) == expected(burst)


@pytest.mark.parametrize("score", [FORCED, 0.0, -0.0, -1.25, -99.0])
def test_all_equal(device: str, score: float) -> None:
    """The lowest indices then."""
    burst = pool_of(torch.full((2000,), score), 33, device)
    assert chosen(burst, 1) == list(range(33))


def test_zeros_of_both_signs_are_equal(device: str) -> None:
    burst = pool_of(torch.tensor([-1.0, 0.0, -0.0, 0.0, -0.0]), 4, device)
    assert chosen(burst) == [1, 2, 3, 4]


def test_all_of_the_best_in_one_place(device: str) -> None:
    """More than a step takes lie side by side, among others that are alive and not as good."""
    scores = spread(5000) - 13
    scores[700:900] = torch.linspace(-0.5, -0.6, 200)
    burst = pool_of(scores, 64, device)
    assert chosen(burst) == list(range(700, 764))


def test_scores_of_all_magnitudes(device: str) -> None:
    """Forced entries, and scores that lie closer than any borders."""
    scores = torch.cat([
        torch.tensor([FORCED, 2.0, math.inf, 0.0, -1e-30, NEVER, math.nan, -3e38]),
        torch.full((300,), -2.0),
        torch.full((300,), -2.0).nextafter(torch.tensor(0.0)),
        torch.full((50,), FORCED),
        -torch.logspace(-30, 30, 400),
    ])  # fmt: skip
    for floor in (-2.0, -3.4e38, NEVER, math.nan):
        burst = pool_of(scores, 100, device, floor=floor)
        assert chosen(burst) == expected(burst)


def test_used_up_entries_lie_below_every_floor(device: str) -> None:
    burst = pool_of(torch.tensor([NEVER, -4.0, NEVER]), 2, device, floor=NEVER)
    assert chosen(burst) == [1, -1]


def test_candidates_of_steps_to_come_do_not_count(device: str) -> None:
    """Whatever stands there, rows that there are not included."""
    width, seeds, steps = 8, 300, 30
    scores = spread(seeds + steps * width * BRANCHING)
    for step in (0, 1, 17, steps, steps + 1):
        limit = min(seeds + step * width * BRANCHING, len(scores))
        rows = torch.full((len(scores),), 1 << 29)
        rows[:limit] = 0
        burst = pool_of(scores, width, device, rows=rows, num_candidates=len(scores) - seeds, step=step)
        assert chosen(burst) == expected(burst)


def test_a_pool_that_its_scratch_does_not_fit_is_refused(device: str) -> None:
    burst = pool_of(spread(100), 4, device)
    burst.step = StepTokens.new(4, 3, 1, torch.device(device), 99)
    with pytest.raises(ValueError, match="scratch for 99"):
        burst.choose()


@triton.jit
def _shorten_one(keys, left, low, total, WIDTH: tl.constexpr, MOST: tl.constexpr):
    low = tl.load(low)
    tl.store(left, _shorten(keys, tl.load(total), low, WIDTH, MOST, 1024))


@pytest.mark.parametrize("width", [1, 64, 256])
@pytest.mark.parametrize("score", ["spread", "zero", "floor", "forced", "some forced", "large", "small"])
def test_a_list_is_cut_down_to_few(device: str, width: int, score: str) -> None:
    """With scores of any kind, and with all of the best in it."""
    scores = {
        "spread": spread(3000),
        "zero": torch.zeros(1500),
        "floor": torch.full((1500,), -13.0),
        "forced": torch.full((1500,), FORCED),
        "some forced": torch.cat([torch.full((300,), FORCED), spread(1000)]),
        "large": torch.rand(1500, generator=torch.Generator().manual_seed(2)) * 1e6,
        "small": -torch.logspace(-38, 0, 1500),
    }[score]
    bits = torch.cat([scores, torch.tensor([-13.0])]).view(torch.int32)
    orders = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 20
    keys = (orders[:-1] | torch.randperm(len(scores))).to(device)
    best = keys.sort(descending=True).values[:width]
    left, total = (torch.tensor([value], dtype=torch.int32, device=device) for value in (0, len(keys)))
    most = max(128, 2 * width)
    _shorten_one[(1,)](keys, left, orders[-1:].to(device), total, WIDTH=width, MOST=most, num_warps=8)
    kept = keys[: int(left)].sort(descending=True).values
    assert width <= len(kept) <= most and torch.equal(kept[:width], best)


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 3000),
    width=st.sampled_from([1, 3, 8, 64, 129, 256]),
    alive=st.sampled_from([0.05, 0.5, 1.0]),
    kinds=st.sampled_from([1, 2, 40, 10**6]),
    floor=st.sampled_from([-100.0, -6.0, 0.0]),
)
@CPU_ONLY
def test_random_pools(seed: int, count: int, width: int, alive: float, kinds: int, floor: float) -> None:
    """Rows with and without free slots, fixed slots, forced entries, and scores of few or of many values."""
    generator = torch.Generator().manual_seed(seed)

    def chance(threshold: float) -> Tensor:
        return torch.rand(count, generator=generator) < threshold

    values = -12 * torch.rand(kinds, generator=generator)
    scores = values[torch.randint(0, kinds, (count,), generator=generator)]
    scores[chance(0.02)] = FORCED
    scores[~chance(alive)] = NEVER
    rows = torch.randint(0, 3, (count,), generator=generator)
    slots = torch.where(chance(0.1), 5, -1)
    with triton_on_cpu():
        burst = pool_of(scores, width, "cpu", floor=floor, rows=rows, slots=slots)
        assert chosen(burst, 1) == expected(burst)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [8, 32, 64, 128])
def test_captured_choices_are_always_the_same(width: int) -> None:
    """Programs end in another order each time."""
    count = 768 + 32 * width * 8
    bursts = [
        pool_of(torch.where(torch.rand(count) < 0.2, spread(count, seed), NEVER), width, "cuda") for seed in (1, 2)
    ]
    orders = [expected(burst) for burst in bursts]
    for burst in bursts:
        burst.choose()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for burst in bursts:
            burst.choose()
    for _ in range(300):
        for burst in bursts:
            burst.step.order.fill_(-1)
        graph.replay()
        assert [burst.step.order.tolist() for burst in bursts] == orders
    assert [burst.step.tally.tolist() for burst in bursts] == [[0], [0]]

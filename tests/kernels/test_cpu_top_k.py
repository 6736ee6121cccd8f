"""The top k of rows of values against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.layout import LANES, MAX_BEST
from kernels.cpu.rows import fits_top_k, write_top_k

pytestmark = pytest.mark.usefixtures("isa")


@settings(max_examples=60)
@given(
    count=st.integers(1, 5),
    vectors=st.integers(1, 40),
    best=st.integers(1, MAX_BEST),
    levels=st.sampled_from([1, 3, 1000]),
    hidden=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_best_are_torchs(count: int, vectors: int, best: int, levels: int, hidden: float, seed: int) -> None:
    """Few levels make many equals, of which the first come first."""
    generator, size = torch.Generator().manual_seed(seed), vectors * LANES
    ranks = (torch.randint(0, levels, (count, size), generator=generator) / levels * 20).float()
    ranks[torch.rand(count, size, generator=generator) < hidden] = -torch.inf
    best = min(best, size)
    assert fits_top_k(ranks, best)
    ids = torch.randperm(size, generator=generator).int()
    tokens, scores = torch.empty(count, best, dtype=torch.int32), torch.empty(count, best)
    write_top_k(ranks, ids, tokens, scores)
    values, places = ranks.sort(dim=1, descending=True, stable=True)
    wanted = torch.log_softmax(ranks, 1).gather(1, places)[:, :best]
    is_there = values[:, :best] > -torch.inf
    assert torch.equal(tokens, torch.where(is_there, ids[places[:, :best]], -1))
    torch.testing.assert_close(scores, torch.where(is_there, wanted.clamp(max=0.0), -torch.inf), atol=2e-5, rtol=1e-5)


def test_rows_with_nothing_to_compare_have_no_best() -> None:
    ranks = torch.zeros(3, 2 * LANES)
    ranks[0, 5], ranks[1, 3], ranks[2] = torch.nan, torch.inf, -torch.inf
    tokens, scores = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4)
    write_top_k(ranks, torch.arange(2 * LANES, dtype=torch.int32), tokens, scores)
    assert (tokens == -1).all() and (scores == -torch.inf).all()

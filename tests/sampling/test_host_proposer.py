from __future__ import annotations

import pytest
import torch

from outrider.sampling.params import SamplingParams
from outrider.sampling.proposer import HEAD_SCALE, EdgeScale, HostProposer, Proposer

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=2**64 - 5, choice_index=3),
    SamplingParams(temperature=1.3, seed=12),
    SamplingParams(temperature=0.05, seed=3),
]


@pytest.mark.parametrize("rank_by_noise", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("branching", [1, 4, 16])
@pytest.mark.parametrize("scale", [EdgeScale(), HEAD_SCALE])
@pytest.mark.parametrize("size", [40, 48])
def test_proposes_what_the_kernels_reference_does(
    rank_by_noise: bool, mapped: bool, branching: int, scale: EdgeScale, size: int
) -> None:
    limit = 90
    ids = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:size].int() if mapped else None
    if ids is not None:
        ids[3] = -1
    theirs = Proposer(4, 8, size, limit, ids, torch.device("cpu"), rank_by_noise, scale)
    ours = HostProposer(4, size, limit, ids, rank_by_noise, scale)
    for row, params in enumerate(PARAMS):
        theirs.admit(row, params)
        ours.admit(row, params)
    # Halves, so that some are equal.
    logits = (torch.randn(8, size, generator=torch.Generator().manual_seed(2)) * 4).round() / 2
    logits[5, 7] = torch.nan
    logits[6, 1:] = -torch.inf
    rows = torch.tensor([0, 1, 2, -1, 0, 1, 0, 3], dtype=torch.int32)
    positions = torch.arange(10, 18, dtype=torch.int32)
    found = []
    for proposer in (ours, theirs):
        tokens = torch.full((8, branching), 77, dtype=torch.int32)
        scores = torch.full((8, branching), 77.0)
        proposer(logits.clone(), rows, positions, tokens, scores)
        found.append((tokens, scores))
    (tokens, scores), (wanted_tokens, wanted_scores) = found
    assert torch.equal(tokens, wanted_tokens)
    torch.testing.assert_close(scores, wanted_scores, atol=1e-5, rtol=1e-5)
    assert (tokens[[3, 5]] == -1).all() and (tokens[6] >= 0).sum() == 1

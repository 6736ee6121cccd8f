"""Torch reference of kernels.sampling.propose: one node at a time, with sorts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import sampling_state as state
from kernels.reference.sampling import noise_of_rows
from kernels.sampling_state import ProposeBuffers, ProposeTables


def propose(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    tables: ProposeTables,
    buffers: ProposeBuffers,
    tokens: Tensor,
    scores: Tensor,
    vocab_limit: int,
    target_ids: Tensor | None,
) -> None:
    """Implement kernels.sampling.propose."""
    tokens.fill_(-1)
    scores.fill_(-torch.inf)
    ids = torch.arange(logits.shape[1], device=logits.device) if target_ids is None else target_ids.long()
    legal = ((ids >= 0) & (ids < vocab_limit)).nonzero()[:, 0]
    ids = ids[legal]
    by_noise = tables.ints[:, state.PROPOSE_FLAGS] & state.RANK_BY_NOISE > 0
    noisy = (tables.floats[:, state.TEMPERATURE] > 0) & by_noise
    noise = noise_of_rows(rows.tolist(), noisy, tables.ints, positions, ids)
    for index, row in enumerate(rows.tolist()):
        values = logits[index, legal].float()
        if row < 0 or not ids.numel() or bool((values.isnan() | (values == torch.inf)).any()):
            continue
        ranks = _ranks(values, noise.get(index), tables.floats[row])
        if bool(ranks.max() == -torch.inf):
            continue
        best = ranks.sort(descending=True, stable=True).indices[: tokens.shape[1]]
        best = best[ranks[best] > -torch.inf]
        tokens[index, : len(best)] = ids[best].int()
        scores[index, : len(best)] = ranks.log_softmax(0)[best].float().clamp(max=0.0)


def _ranks(values: Tensor, noise: Tensor | None, floats: Tensor) -> Tensor:
    """Return float64 ranks [N]; `noise` is that of the children, None if it does not count."""
    temperature, tau = floats[state.TEMPERATURE], floats[state.TAU]
    if not float(temperature) > 0:
        return values.double()
    values = values.double() / temperature.clamp(min=state.MIN_TEMPERATURE).double()
    return values if noise is None else (values + noise.double()) / tau.double()

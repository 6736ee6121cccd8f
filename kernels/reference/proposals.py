"""Torch reference of kernels.sampling.propose, with sorts."""

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
    values = logits[:, legal].float()
    # NaN is not less.
    usable = (rows >= 0) & (values < torch.inf).all(1)
    used = usable.nonzero()[:, 0]
    if not ids.numel() or not used.numel():
        return
    ranks = _ranks(values[used], [noise.get(index) for index in used.tolist()], tables.floats[rows[used].long()])
    best = ranks.sort(dim=1, descending=True, stable=True).indices[:, : tokens.shape[1]]
    is_possible = ranks.gather(1, best) > -torch.inf
    found = ranks.log_softmax(1).gather(1, best).float().clamp(max=0.0)
    tokens[used, : best.shape[1]] = torch.where(is_possible, ids[best].int(), -1)
    scores[used, : best.shape[1]] = torch.where(is_possible, found, -torch.inf)


def _ranks(values: Tensor, noise: list[Tensor | None], floats: Tensor) -> Tensor:
    """Return float64 ranks [M, N]; `noise` of each row is that of the children, None if it does not count."""
    temperature, tau = floats[:, state.TEMPERATURE], floats[:, state.TAU].double()
    divisor = torch.where(temperature > 0, temperature.clamp(min=state.MIN_TEMPERATURE), 1.0)
    ranks = values.double() / divisor.double().unsqueeze(1)
    for place, drawn in enumerate(noise):
        if drawn is not None:
            ranks[place] = (ranks[place] + drawn.double()) / tau[place]
    return ranks

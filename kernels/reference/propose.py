"""See kernels.propose. One node at a time, with sorts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import sampling_state as state
from kernels.reference.sampling import gumbel
from kernels.sampling_state import ProposeTables


def propose(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    tables: ProposeTables,
    tokens: Tensor,
    scores: Tensor,
    vocab_limit: int,
    target_ids: Tensor | None,
) -> None:
    """As kernels.propose.propose."""
    tokens.fill_(-1)
    scores.fill_(-torch.inf)
    ids = torch.arange(logits.shape[1], device=logits.device) if target_ids is None else target_ids.long()
    legal = ((ids >= 0) & (ids < vocab_limit)).nonzero()[:, 0]
    ids = ids[legal]
    for index, row in enumerate(rows.tolist()):
        values = logits[index, legal].float()
        if row < 0 or not ids.numel() or bool((values.isnan() | (values == torch.inf)).any()):
            continue
        ranks = _ranks(values, ids, positions[index : index + 1] + 1, tables.floats[row], tables.ints[row])
        if bool(ranks.max() == -torch.inf):
            continue
        best = ranks.sort(descending=True, stable=True).indices[: tokens.shape[1]]
        best = best[ranks[best] > -torch.inf]
        tokens[index, : len(best)] = ids[best].int()
        scores[index, : len(best)] = ranks.log_softmax(0)[best].float().clamp(max=0.0)


def _ranks(values: Tensor, ids: Tensor, position: Tensor, floats: Tensor, ints: Tensor) -> Tensor:
    """float64 [N]; `position` [1] is the child's."""
    temperature, tau = floats[state.TEMPERATURE], floats[state.TAU]
    if not float(temperature) > 0:
        return values.double()
    values = values.double() / temperature.clamp(min=state.MIN_TEMPERATURE).double()
    if not int(ints[state.PROPOSE_FLAGS]) & state.RANK_BY_NOISE:
        return values
    noise = gumbel(ints[None, : state.CHOICE_INDEX + 1], position, ids[None])[0]
    return (values + noise.double()) / tau.double()

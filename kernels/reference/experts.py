"""See kernels.experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.experts import Gating, Routes


def choose(logits: Tensor, num_active: int, normed: bool, slots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Experts int32 and weights float32, both [M, K]."""
    lowest = torch.finfo(torch.float32).min
    logits = torch.where(logits.isnan(), lowest, logits).clamp(min=lowest)
    found, experts = logits.sort(dim=1, descending=True, stable=True)
    found, experts = found[:, :num_active], experts[:, :num_active].int()
    weights = found.softmax(1) if normed else (found - logits.logsumexp(1, keepdim=True)).exp()
    if slots is not None:
        experts = torch.where((slots < 0)[:, None], -1, experts)
    return experts, weights


def align(experts: Tensor, num_experts: int, tile: int, max_tiles: int) -> tuple[Tensor, Tensor]:
    """`tile_experts` and `places` of Routes."""
    flat = experts.flatten()
    tile_experts = torch.full((max_tiles,), -1, dtype=torch.int32, device=experts.device)
    places = torch.full((max_tiles * tile,), -1, dtype=torch.int32, device=experts.device)
    first = 0
    for expert in range(num_experts):
        pairs = (flat == expert).nonzero().flatten()
        count = -(-len(pairs) // tile)
        tile_experts[first : first + count] = expert
        places[first * tile : first * tile + len(pairs)] = pairs.int()
        first += count
    return tile_experts, places


def gate(gate_up: Tensor, gating: Gating, interleaved: bool) -> Tensor:
    """[P, 2F] to [P, F], in the dtype given."""
    if interleaved:
        gates, ups = gate_up[:, ::2], gate_up[:, 1::2]
    else:
        gates, ups = gate_up.chunk(2, 1)
    gates, ups = gates.clamp(max=gating.limit), ups.clamp(-gating.limit, gating.limit)
    return gates * (gating.alpha * gates).sigmoid() * (ups + gating.shift)


def expert_linear(
    rows: Tensor, weight: Tensor, routes: Routes, bias: Tensor | None, gating: Gating | None, interleaved: bool
) -> Tensor:
    """As kernels.experts.expert_linear: only experts that were woken are looked at."""
    num_pairs = routes.experts.numel()
    per_row = num_pairs // rows.shape[0]
    flat = routes.experts.flatten()
    num_out = weight.shape[1] // (2 if gating else 1)
    out = rows.new_zeros(num_pairs, num_out)
    for expert in flat[flat >= 0].unique().tolist():
        pairs = (flat == expert).nonzero().flatten()
        product = rows[pairs // per_row].float() @ weight[expert].float().T
        if bias is not None:
            product += bias[expert].float()
        out[pairs] = (gate(product, gating, interleaved) if gating else product).to(out.dtype)
    return out


def combine(pairs: Tensor, routes: Routes, residual: Tensor) -> Tensor:
    """As kernels.experts.combine."""
    num_tokens, num_active = routes.experts.shape
    weighted = pairs.float().view(num_tokens, num_active, -1) * routes.weights.unsqueeze(2)
    weighted = torch.where((routes.experts < 0).unsqueeze(2), 0.0, weighted)
    return (residual.float() + weighted.sum(1)).to(residual.dtype)

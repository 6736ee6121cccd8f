"""Torch reference of kernels.experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.expert_tiles import Gating, Routes, by_expert
from kernels.quant_weight import QuantWeight


def route(logits: Tensor, num_active: int, normed: bool, slots: Tensor | None, tile: int) -> Routes:
    """Implement kernels.experts.route, without tiles: products need only the experts."""
    lowest = torch.finfo(torch.float32).min
    logits = torch.where(logits.isnan(), lowest, logits).clamp(min=lowest)
    found, experts = logits.sort(dim=1, descending=True, stable=True)
    found, experts = found[:, :num_active], experts[:, :num_active].int()
    weights = found.softmax(1) if normed else (found - logits.logsumexp(1, keepdim=True)).exp()
    if slots is not None:
        experts = torch.where((slots < 0)[:, None], -1, experts)
    nothing = experts.new_empty(0)
    return Routes(experts, weights, nothing, nothing, nothing, tile)


def gate(gate_up: Tensor, gating: Gating, interleaved: bool) -> Tensor:
    """Implement kernels.experts.gate."""
    wide = gate_up.float()
    gates, ups = (wide[:, ::2], wide[:, 1::2]) if interleaved else wide.chunk(2, 1)
    gates, ups = gates.clamp(max=gating.limit), ups.clamp(-gating.limit, gating.limit)
    return (gates * (gating.alpha * gates).sigmoid() * (ups + gating.shift)).to(gate_up.dtype)


def expert_linear(
    rows: Tensor,
    weight: Tensor | QuantWeight,
    routes: Routes,
    bias: Tensor | None,
    gating: Gating | None,
    interleaved: bool,
) -> Tensor:
    """Implement kernels.experts.expert_linear, reading only experts that were chosen."""
    height = weight.num_out if isinstance(weight, QuantWeight) else weight.shape[1]

    def product(expert: int, own: Tensor) -> Tensor:
        matrix = weight.of_expert(expert).dequantized(rows.dtype) if isinstance(weight, QuantWeight) else weight[expert]
        found = functional.linear(own, matrix, None if bias is None else bias[expert])
        return gate(found.float(), gating, interleaved) if gating else found

    return by_expert(rows, routes.experts, height // (2 if gating else 1), product)


def combine(pairs: Tensor, routes: Routes, residual: Tensor) -> Tensor:
    """Implement kernels.experts.combine."""
    num_tokens, num_active = routes.experts.shape
    weighted = pairs.float().view(num_tokens, num_active, -1) * routes.weights.unsqueeze(2)
    weighted = torch.where((routes.experts < 0).unsqueeze(2), 0.0, weighted)
    return (residual.float() + weighted.sum(1)).to(residual.dtype)

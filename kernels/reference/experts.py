"""See kernels.experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.expert_tiles import Gating, Routes
from kernels.quant_weight import QuantWeight


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


def gate(gate_up: Tensor, gating: Gating, interleaved: bool) -> Tensor:
    """[P, 2F] to [P, F], in the dtype given."""
    if interleaved:
        gates, ups = gate_up[:, ::2], gate_up[:, 1::2]
    else:
        gates, ups = gate_up.chunk(2, 1)
    gates, ups = gates.clamp(max=gating.limit), ups.clamp(-gating.limit, gating.limit)
    return gates * (gating.alpha * gates).sigmoid() * (ups + gating.shift)


def expert_linear(
    rows: Tensor,
    weight: Tensor | QuantWeight,
    routes: Routes,
    bias: Tensor | None,
    gating: Gating | None,
    interleaved: bool,
) -> Tensor:
    """As kernels.experts.expert_linear: only experts that were woken are looked at."""
    num_pairs = routes.experts.numel()
    per_row = num_pairs // rows.shape[0]
    flat = routes.experts.flatten()
    height = weight.num_out if isinstance(weight, QuantWeight) else weight.shape[1]
    num_out = height // (2 if gating else 1)
    out = rows.new_zeros(num_pairs, num_out)
    for expert in flat[flat >= 0].unique().tolist():
        pairs = (flat == expert).nonzero().flatten()
        matrix = weight.of_expert(expert).dequantized(rows.dtype) if isinstance(weight, QuantWeight) else weight[expert]
        product = functional.linear(rows[pairs // per_row], matrix, None if bias is None else bias[expert])
        out[pairs] = gate(product.float(), gating, interleaved).to(out.dtype) if gating else product
    return out


def combine(pairs: Tensor, routes: Routes, residual: Tensor) -> Tensor:
    """As kernels.experts.combine."""
    num_tokens, num_active = routes.experts.shape
    weighted = pairs.float().view(num_tokens, num_active, -1) * routes.weights.unsqueeze(2)
    weighted = torch.where((routes.experts < 0).unsqueeze(2), 0.0, weighted)
    return (residual.float() + weighted.sum(1)).to(residual.dtype)

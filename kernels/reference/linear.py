"""See kernels.linear, and kernels.experts for products with the weights of a row's experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.expert_tiles import Gating, Routes, by_expert
from kernels.quant_weight import QuantWeight
from kernels.reference.elementwise import rms_norm, rope_write


def stream_linear(
    rows: Tensor,
    weight: Tensor | QuantWeight,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """As kernels.linear.stream_linear."""
    wide = weight.dequantized(torch.float32) if isinstance(weight, QuantWeight) else weight.float()
    product = rows.float() @ wide.T
    if bias is not None:
        product += bias.float()
    if gated:
        gate, up = product.chunk(2, 1)
        product = functional.silu(gate) * up
    if residual is not None:
        product += residual.float()
    return product.to(out_dtype)


def norm_linear(
    rows: Tensor,
    weight: Tensor,
    norm: Tensor | None,
    eps: float,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
) -> Tensor:
    """As kernels.linear.norm_linear, into a new tensor."""
    normed = rows if norm is None else rms_norm(rows, norm, eps)
    return stream_linear(normed, weight, bias, residual, gated, rows.dtype)


def norm_qkv(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    norm: Tensor | None, eps: float, bias: Tensor | None, qk_norm: Tensor | None, qk_eps: float, q: Tensor,
) -> None:  # fmt: skip
    """As kernels.linear.norm_qkv, into `q`."""
    normed = rows if norm is None else rms_norm(rows, norm, eps)
    product = stream_linear(normed, weight, bias, None, False, torch.float32)
    heads = product.view(rows.shape[0], -1, q.shape[2])
    # In float32 all the way, so the caches' rounding is the only one.
    written = slots >= 0
    wide_k, wide_v, wide_q = (tensor.to(torch.float32, copy=True) for tensor in (k_cache, v_cache, q))
    rope_write(heads, cos, sin, slots, wide_k, wide_v, qk_norm, qk_eps, wide_q)
    q.copy_(wide_q)
    places = slots[written].long()
    k_cache[places], v_cache[places] = wide_k[places].to(q.dtype), wide_v[places].to(q.dtype)


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
    height = weight.num_out if isinstance(weight, QuantWeight) else weight.shape[1]

    def product(expert: int, own: Tensor) -> Tensor:
        matrix = weight.of_expert(expert).dequantized(rows.dtype) if isinstance(weight, QuantWeight) else weight[expert]
        found = functional.linear(own, matrix, None if bias is None else bias[expert])
        return gate(found.float(), gating, interleaved) if gating else found

    return by_expert(rows, routes.experts, height // (2 if gating else 1), product)


def combine(pairs: Tensor, routes: Routes, residual: Tensor) -> Tensor:
    """As kernels.experts.combine."""
    num_tokens, num_active = routes.experts.shape
    weighted = pairs.float().view(num_tokens, num_active, -1) * routes.weights.unsqueeze(2)
    weighted = torch.where((routes.experts < 0).unsqueeze(2), 0.0, weighted)
    return (residual.float() + weighted.sum(1)).to(residual.dtype)

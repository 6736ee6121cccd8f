"""Torch reference of kernels.linear."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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
    """Implement kernels.linear.stream_linear."""
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
    """Implement kernels.linear.norm_linear, in a new tensor."""
    normed = rows if norm is None else rms_norm(rows, norm, eps)
    return stream_linear(normed, weight, bias, residual, gated, rows.dtype)


def norm_qkv(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    norm: Tensor | None, eps: float, bias: Tensor | None, qk_norm: Tensor | None, qk_eps: float, q: Tensor,
) -> None:  # fmt: skip
    """Implement kernels.linear.norm_qkv, writing to `q`."""
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

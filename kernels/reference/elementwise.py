"""Torch references of kernels.elementwise, and of the sums and joins of kernels.exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

E4M3_MAX = 448.0
"""The largest number of float8_e4m3fn."""


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement kernels.elementwise.rms_norm, in a new tensor."""
    wide = rows.float()
    scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(rows.dtype)


def add_rms_norm(stream: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Implement kernels.elementwise.add_rms_norm."""
    total = (stream.float() + part.float()).to(stream.dtype)
    return total, rms_norm(total, weight, eps)


def norm_pairs(
    table: Tensor, token_ids: Tensor, token_weight: Tensor, stream: Tensor, weight: Tensor, eps: float, pairs: Tensor
) -> None:
    """Implement kernels.elementwise.norm_pairs."""
    embedded = functional.embedding(token_ids, table)
    torch.cat((rms_norm(embedded, token_weight, eps), rms_norm(stream, weight, eps)), 1, out=pairs)


def gate_mul(gate_up: Tensor, gelu: bool) -> Tensor:
    """Implement kernels.elementwise.gate_mul."""
    gate, up = gate_up.float().chunk(2, 1)
    return ((functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up).to(gate_up.dtype)


def recur(joint: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Implement kernels.elementwise.recur."""
    keep, fresh, output = joint.float().chunk(3, 1)
    keep = keep.sigmoid()
    kept = keep * memory.float() + (1 - keep) * fresh.tanh()
    return output.tanh().to(joint.dtype), kept.to(joint.dtype)


def rotary_angles(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Implement kernels.elementwise.rotary_angles."""
    angles = positions.float().unsqueeze(1) * inv_freq
    factors = torch.where(inv_freq == 0.0, 1.0, scale)
    return angles.cos() * factors, angles.sin() * factors


def write_keys(
    heads: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    k_norm: Tensor | None, eps: float,
) -> None:  # fmt: skip
    """Implement kernels.elementwise.write_keys."""
    no_q = heads.new_empty(heads.shape[0], 0, heads.shape[-1])
    for layer, (k, v) in enumerate(zip(k_cache, v_cache, strict=True)):
        norm = None if k_norm is None else k_norm[layer]
        rope_write(heads[:, layer], cos, sin, slots, k, v, norm, eps, no_q)


def rope_write(
    heads: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    qk_norm: Tensor | None, eps: float, q: Tensor,
) -> None:  # fmt: skip
    """Implement kernels.elementwise.rope_write."""
    num_heads, kv_heads = q.shape[1], k_cache.shape[1]
    queries_keys, values = heads[:, : num_heads + kv_heads].float(), heads[:, num_heads + kv_heads :]
    if qk_norm is not None:
        power = queries_keys.square().mean(-1, keepdim=True)
        queries_keys = queries_keys * torch.rsqrt(power + eps) * qk_norm.float()
    low, high = queries_keys.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(heads.dtype)
    q.copy_(rotated[:, :num_heads])
    written = slots >= 0
    for cache, made in ((k_cache, rotated[:, num_heads:]), (v_cache, values)):
        new, target = made[written], cache
        if cache.dtype == torch.float8_e4m3fn:
            new = new.clamp(-E4M3_MAX, E4M3_MAX).to(cache.dtype).view(torch.uint8)
            target = cache.view(torch.uint8)
        target[slots[written].long()] = new


def sum_rows(parts: Sequence[Tensor], residual: Tensor | None = None) -> Tensor:
    """Return the result of kernels.exchange.sum_rows for all ranks' rows [M, width]."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    if residual is not None:
        total += residual.float()
    # Zeros are +0.0.
    return total.to(parts[0].dtype) + 0.0


def sum_rows_normed(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Implement kernels.exchange.sum_rows_normed."""
    stream = sum_rows(parts, residual)
    return stream, rms_norm(stream, weight, eps)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Implement kernels.exchange.join_columns."""
    return torch.cat(list(parts), 1) + 0.0

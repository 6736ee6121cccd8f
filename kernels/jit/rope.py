"""See kernels.rope."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import power_of_two


@triton.jit(do_not_specialize=["num_tokens"])
def _angles(
    positions, inv_freq, cos, sin, num_tokens, scale,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, HALF_PAD)
    position = tl.load(positions + token, mask=token < num_tokens, other=0).to(tl.float32)
    frequency = tl.load(inv_freq + pair, mask=pair < HALF, other=0.0)
    angle = position[:, None] * frequency[None, :]
    at = token[:, None] * HALF + pair[None, :]
    inside = (token < num_tokens)[:, None] & (pair < HALF)[None, :]
    tl.store(cos + at, tl.cos(angle) * scale, mask=inside)
    tl.store(sin + at, tl.sin(angle) * scale, mask=inside)


@triton.jit
def _rope_write(
    heads, cos, sin, slots, k_cache, v_cache, norm, q, eps,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of HEADS heads)."""
    ROTATED: tl.constexpr = NUM_HEADS + KV_HEADS
    ALL: tl.constexpr = NUM_HEADS + 2 * KV_HEADS
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < ROTATED)
    is_v = (head >= ROTATED) & (head < ALL)
    turns = (head < ROTATED)[:, None]
    if NORM:
        weight = norm + head[:, None] * DIM + pair[None, :]
        low_weight = tl.load(weight, mask=turns, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + HALF, mask=turns, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    source = heads + token * (ALL * DIM) + head[:, None] * DIM + pair[None, :]
    there = (head < ALL)[:, None]
    low = tl.load(source, mask=there, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=there, other=0.0).to(tl.float32)
    slot = tl.load(slots + token).to(tl.int64)
    cosine = tl.load(cos + token * HALF + pair)[None, :]
    sine = tl.load(sin + token * HALF + pair)[None, :]
    a, b = low, high
    if NORM:
        power = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM
        factor = tl.rsqrt(power + eps)[:, None]
        a = low * factor * low_weight
        b = high * factor * high_weight
    new_low = tl.where(turns, a * cosine - b * sine, low).to(heads.dtype.element_ty)
    new_high = tl.where(turns, b * cosine + a * sine, high).to(heads.dtype.element_ty)

    target = q + (token * NUM_HEADS + head)[:, None] * DIM + pair[None, :]
    tl.store(target, new_low, mask=is_q[:, None])
    tl.store(target + HALF, new_high, mask=is_q[:, None])
    written = slot >= 0
    target = k_cache + (slot * KV_HEADS + head - NUM_HEADS)[:, None] * DIM + pair[None, :]
    tl.store(target, new_low, mask=(is_k & written)[:, None])
    tl.store(target + HALF, new_high, mask=(is_k & written)[:, None])
    target = v_cache + (slot * KV_HEADS + head - ROTATED)[:, None] * DIM + pair[None, :]
    tl.store(target, new_low, mask=(is_v & written)[:, None])
    tl.store(target + HALF, new_high, mask=(is_v & written)[:, None])


def rotary_angles(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As kernels.rope.rotary_angles."""
    num_tokens, half = positions.shape[0], inv_freq.shape[0]
    cos, sin = (torch.empty(num_tokens, half, dtype=torch.float32, device=positions.device) for _ in range(2))
    tokens = 8
    _angles[(triton.cdiv(num_tokens, tokens),)](
        positions, inv_freq, cos, sin, num_tokens, scale,
        HALF=half, HALF_PAD=power_of_two(half), TOKENS=tokens, num_warps=4,
    )  # fmt: skip
    return cos, sin


def rope_write(
    heads: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    qk_norm: Tensor | None, eps: float, q: Tensor, pdl: bool,
) -> None:  # fmt: skip
    """As kernels.rope.rope_write."""
    num_tokens, num_all, dim = heads.shape
    # Few heads a program where tokens are few: latency counts, and the device has room.
    tile = 8 if num_tokens <= 64 else 16
    _rope_write[(num_tokens, triton.cdiv(num_all, tile))](
        heads, cos, sin, slots, k_cache, v_cache, heads if qk_norm is None else qk_norm, q, eps,
        NUM_HEADS=q.shape[1], KV_HEADS=k_cache.shape[1], DIM=dim, HEADS=tile, NORM=qk_norm is not None, PDL=pdl,
        num_warps=max(1, tile * dim // 1024), launch_pdl=pdl,
    )  # fmt: skip

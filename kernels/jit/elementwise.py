"""Triton kernels of kernels.elementwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.expert_tiles import SWIGLU, Gating
from kernels.jit.memory import release_and_wait
from kernels.launch import power_of_two, starts_early


@triton.jit
def _rms_norm(rows, part, total, weight, out, size, eps, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    # A weight never changes, so it can be read before the previous kernel has ended.
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0).to(tl.int64) * size
    row = tl.load(rows + first + columns, mask=inside, other=0.0).to(tl.float32)
    if part is not None:
        row += tl.load(part + first + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = row.to(total.dtype.element_ty)
        tl.store(total + first + columns, rounded, mask=inside)
        row = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(row * row, axis=0) / size + eps)
    tl.store(out + first + columns, (row * scale * factors).to(out.dtype.element_ty), mask=inside)


def rms_norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Implement kernels.elementwise.rms_norm."""
    return _launch_norm(rows, None, None, weight, eps)


def add_rms_norm(stream: Tensor, part: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Implement kernels.elementwise.add_rms_norm."""
    total = torch.empty_like(stream)
    return total, _launch_norm(stream, part, total, weight, eps)


def row_warps(block: int) -> int:
    """Return the warps of a program for a row of `block` elements: eight a thread, 16 bytes of two-byte numbers."""
    return min(max(block // 256, 1), 16)


def _launch_norm(rows: Tensor, part: Tensor | None, total: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    (num_rows, size), out = rows.shape, torch.empty_like(rows)
    block = triton.next_power_of_2(size)
    _rms_norm[(num_rows,)](
        rows, part, total, weight, out, size, eps, BLOCK=block, num_warps=row_warps(block), **starts_early(rows)
    )
    return out


@triton.jit
def _norm_pairs(
    table, token_ids, token_weight, stream, weight, pairs, size, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Grid (rows, 2): embeddings, then the stream."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    row, of_stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    factors = tl.load((weight if of_stream else token_weight) + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    source = stream + row * size
    if of_stream == 0:
        source = table + tl.load(token_ids + row).to(tl.int64) * size
    found = tl.load(source + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(found * found, axis=0) / size + eps)
    out = pairs + (2 * row + of_stream) * size + columns
    tl.store(out, (found * scale * factors).to(pairs.dtype.element_ty), mask=inside)


def norm_pairs(
    table: Tensor, token_ids: Tensor, token_weight: Tensor, stream: Tensor, weight: Tensor, eps: float, pairs: Tensor
) -> None:
    """Implement kernels.elementwise.norm_pairs."""
    (num_rows, size), block = stream.shape, triton.next_power_of_2(stream.shape[1])
    _norm_pairs[(num_rows, 2)](
        table, token_ids, token_weight, stream, weight, pairs, size, eps,
        BLOCK=block, num_warps=row_warps(block), **starts_early(stream),
    )  # fmt: skip


@triton.jit
def gated(gates, ups, alpha, limit, shift):
    """Compute SwiGLU with the parameters of kernels.expert_tiles.Gating that are not None."""
    if limit is not None:
        gates = tl.minimum(gates, limit)
        ups = tl.minimum(tl.maximum(ups, -limit), limit)
    if shift is not None:
        ups += shift
    return gates * tl.sigmoid(gates if alpha is None else alpha * gates) * ups


@triton.jit
def _gate_mul(
    gate_up, out, size, alpha, limit, shift,
    INTERLEAVED: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, pieces of BLOCK columns)."""
    release_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gates = gate_up + row * 2 * size
    ups = gates + 1 if INTERLEAVED else gate_up + (row * 2 + 1) * size
    places = columns * 2 if INTERLEAVED else columns
    gate = tl.load(gates + places, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(ups + places, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh x) / 2 is the sigmoid of 2 x.
        found = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        found = gated(gate, up, alpha, limit, shift)
    tl.store(out + row * size + columns, found.to(out.dtype.element_ty), mask=inside)


def gate_mul(gate_up: Tensor, gelu: bool = False, gating: Gating = SWIGLU, interleaved: bool = False) -> Tensor:
    """Implement kernels.elementwise.gate_mul and kernels.experts.gate."""
    num_rows, size, block = gate_up.shape[0], gate_up.shape[1] // 2, 1024
    out = gate_up.new_empty(num_rows, size)
    _gate_mul[(num_rows, triton.cdiv(size, block))](
        gate_up, out, size, *gating.for_kernels(),
        INTERLEAVED=interleaved, GELU=gelu, BLOCK=block, num_warps=4, **starts_early(gate_up),
    )  # fmt: skip
    return out


@triton.jit
def _tanh(values):
    return 2 * tl.sigmoid(2 * values) - 1


@triton.jit(do_not_specialize=["memory_stride"])
def _recur(joint, memory, output, kept, memory_stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    release_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    source = joint + row * 3 * size + columns
    keep = tl.sigmoid(tl.load(source, mask=inside, other=0.0).to(tl.float32))
    fresh = _tanh(tl.load(source + size, mask=inside, other=0.0).to(tl.float32))
    out = _tanh(tl.load(source + 2 * size, mask=inside, other=0.0).to(tl.float32))
    old = tl.load(memory + row * memory_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * size + columns, out.to(output.dtype.element_ty), mask=inside)
    new = keep * old + (1 - keep) * fresh
    tl.store(kept + row * size + columns, new.to(kept.dtype.element_ty), mask=inside)


def recur(joint: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Implement kernels.elementwise.recur."""
    num_rows, size = memory.shape
    output, kept = (joint.new_empty(num_rows, size) for _ in range(2))
    _recur[(num_rows, triton.cdiv(size, 512))](
        joint, memory, output, kept, memory.stride(0), size, BLOCK=512, num_warps=4, **starts_early(joint)
    )
    return output, kept


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
    factor = tl.where(frequency == 0.0, 1.0, scale)[None, :]
    tl.store(cos + at, tl.cos(angle) * factor, mask=inside)
    tl.store(sin + at, tl.sin(angle) * factor, mask=inside)


@triton.jit
def _rope_write(
    heads, cos, sin, slots, k_cache, v_cache, norm, q, eps, layer_stride,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
    NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of HEADS heads, layers): heads [tokens, layers, ALL, DIM], `layer_stride` of the caches.

    With query heads there is only one layer.
    """
    ROTATED: tl.constexpr = NUM_HEADS + KV_HEADS
    ALL: tl.constexpr = NUM_HEADS + 2 * KV_HEADS
    HALF: tl.constexpr = DIM // 2
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    is_q = head < NUM_HEADS
    is_k = (head >= NUM_HEADS) & (head < ROTATED)
    is_v = (head >= ROTATED) & (head < ALL)
    turns = (head < ROTATED)[:, None]
    if NORM:
        weight = norm + (layer * ROTATED + head)[:, None] * DIM + pair[None, :]
        low_weight = tl.load(weight, mask=turns, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + HALF, mask=turns, other=0.0).to(tl.float32)
    release_and_wait(PDL)

    source = heads + (token * tl.num_programs(2) + layer) * (ALL * DIM) + head[:, None] * DIM + pair[None, :]
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
    if k_cache.dtype.element_ty == tl.float8e4nv:
        new_low = tl.clamp(new_low.to(tl.float32), -448.0, 448.0)
        new_high = tl.clamp(new_high.to(tl.float32), -448.0, 448.0)
    new_low, new_high = new_low.to(k_cache.dtype.element_ty), new_high.to(k_cache.dtype.element_ty)
    target = k_cache + layer * layer_stride + (slot * KV_HEADS + head - NUM_HEADS)[:, None] * DIM + pair[None, :]
    tl.store(target, new_low, mask=(is_k & written)[:, None])
    tl.store(target + HALF, new_high, mask=(is_k & written)[:, None])
    target = v_cache + layer * layer_stride + (slot * KV_HEADS + head - ROTATED)[:, None] * DIM + pair[None, :]
    tl.store(target, new_low, mask=(is_v & written)[:, None])
    tl.store(target + HALF, new_high, mask=(is_v & written)[:, None])


def rotary_angles(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Implement kernels.elementwise.rotary_angles."""
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
    qk_norm: Tensor | None, eps: float, q: Tensor,
) -> None:  # fmt: skip
    """Implement kernels.elementwise.rope_write."""
    write_keys(heads.unsqueeze(1), cos, sin, slots, k_cache[None], v_cache[None], qk_norm, eps, q)


def write_keys(
    heads: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    norm: Tensor | None, eps: float, q: Tensor | None = None,
) -> None:  # fmt: skip
    """Implement kernels.elementwise.write_keys. With `q`, query heads precede the keys and are rotated into `q`."""
    num_tokens, layers, num_all, dim = heads.shape
    # Few heads a program if there are few tokens: latency counts, and the device has room.
    tile = 8 if num_tokens <= 64 else 16
    _rope_write[(num_tokens, triton.cdiv(num_all, tile), layers)](
        heads, cos, sin, slots, k_cache, v_cache, heads if norm is None else norm, heads if q is None else q, eps,
        k_cache.stride(0), NUM_HEADS=0 if q is None else q.shape[1], KV_HEADS=k_cache.shape[2], DIM=dim, HEADS=tile,
        NORM=norm is not None, num_warps=max(1, tile * dim // 1024), **starts_early(heads),
    )  # fmt: skip

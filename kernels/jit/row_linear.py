"""See kernels.row_linear.

Launches of a small model are bound by latency, one chain of waiting after another. So a program does not walk over
columns: it has all its weights in registers before the launch in front ends, then loads whole rows at once, norms them
where they are, and multiplies. There is no loop, and nothing is pipelined.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.row_configs import TILE, RowConfig, pairs_of, pieces


@triton.jit
def _load_pieces(matrix, row, inside, size, FIRST: tl.constexpr, REST: tl.constexpr):
    """Whole rows of a matrix, as FIRST columns and the others: those behind the row's end are zeros."""
    places = matrix + row[:, None] * size
    columns = tl.arange(0, FIRST)[None, :]
    first = tl.load(places + columns, mask=inside[:, None], other=0.0)
    rest = first
    if REST > 0:
        columns = FIRST + tl.arange(0, REST)[None, :]
        rest = tl.load(places + columns, mask=inside[:, None] & (columns < size), other=0.0)
    return first, rest


@triton.jit
def _load_factors(norm, size, FIRST: tl.constexpr, REST: tl.constexpr):
    """The weight of a norm."""
    first = tl.load(norm + tl.arange(0, FIRST)).to(tl.float32)
    rest = first
    if REST > 0:
        columns = FIRST + tl.arange(0, REST)
        rest = tl.load(norm + columns, mask=columns < size, other=0.0).to(tl.float32)
    return first, rest


@triton.jit
def _normed(first, rest, factors, more_factors, size, eps, REST: tl.constexpr):
    """RMS norm of rows in float32, rounded once, as kernels.norm does it."""
    wide = first.to(tl.float32)
    power = tl.sum(wide * wide, 1)
    if REST > 0:
        more = rest.to(tl.float32)
        power += tl.sum(more * more, 1)
    scale = tl.rsqrt(power / size + eps)[:, None]
    normed = (wide * scale * factors[None, :]).to(first.dtype)
    others = normed
    if REST > 0:
        others = (more * scale * more_factors[None, :]).to(first.dtype)
    return normed, others


@triton.jit
def _product(first, rest, weights, more_weights, REST: tl.constexpr):
    """float32 [weight rows, rows]."""
    acc = tl.dot(weights, tl.trans(first), input_precision="ieee")
    if REST > 0:
        acc = tl.dot(more_weights, tl.trans(rest), acc, input_precision="ieee")
    return acc


@triton.jit
def _halves(acc):
    """Of [2 * N, rows] the first N weight rows and the others, [rows, N] each."""
    return tl.split(tl.permute(tl.reshape(acc, [2, acc.shape[0] // 2, acc.shape[1]]), (2, 1, 0)))


@triton.jit(do_not_specialize=["num_rows"])
def _norm_linear(
    rows, weight, norm, bias, residual, out, num_rows, num_out, size, eps,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of weight rows, tiles of rows). A tile is half gate and half up where gated."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = TILE // 2 if GATED else TILE
    local = tl.arange(0, TILE)
    column = tl.program_id(0) * WIDTH + local % WIDTH
    weights, more_weights = _load_pieces(
        weight, (column + local // WIDTH * num_out).to(tl.int64), column < num_out, size, FIRST, REST
    )
    if NORM:
        factors, more_factors = _load_factors(norm, size, FIRST, REST)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first, rest = _load_pieces(rows, row, row < num_rows, size, FIRST, REST)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = (row[:, None] < num_rows) & (column[None, :] < num_out)
    places = row[:, None] * num_out + column[None, :]
    if residual is not None:
        added = tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        first, rest = _normed(first, rest, factors, more_factors, size, eps, REST)
    acc = _product(first, rest, weights, more_weights, REST)
    if GATED:
        gate, up = _halves(acc)
        if bias is not None:
            gate += tl.load(bias + column, mask=column < num_out, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + num_out + column, mask=column < num_out, other=0.0).to(tl.float32)[None, :]
        result = gate * tl.sigmoid(gate) * up
    else:
        result = tl.trans(acc)
        if bias is not None:
            result += tl.load(bias + column, mask=column < num_out, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        result += added
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_qkv(
    rows, weight, norm, bias, cos, sin, slots, k_cache, v_cache, qk_norm, q, num_rows, size, eps, qk_eps,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    NORM: tl.constexpr, QK_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads times parts of a head, tiles of rows). A part is PAIRS pairs of channels that turn together."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = DIM // 2
    ROTATED: tl.constexpr = NUM_HEADS + KV_HEADS
    PARTS: tl.constexpr = HALF // PAIRS
    head = tl.program_id(0) // PARTS
    local = tl.arange(0, 2 * PAIRS)
    begin = head * DIM + tl.program_id(0) % PARTS * PAIRS
    source = (begin + local % PAIRS + local // PAIRS * HALF).to(tl.int64)
    weights, more_weights = _load_pieces(weight, source, source >= 0, size, FIRST, REST)
    if NORM:
        factors, more_factors = _load_factors(norm, size, FIRST, REST)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < num_rows
    first, rest = _load_pieces(rows, row, there, size, FIRST, REST)
    pair = tl.program_id(0) % PARTS * PAIRS + tl.arange(0, PAIRS)
    channel = head * DIM + pair
    turn = row[:, None] * HALF + pair[None, :]
    slot = tl.load(slots + row, mask=there, other=-1).to(tl.int64)
    cosine = tl.load(cos + turn, mask=there[:, None], other=0.0)
    sine = tl.load(sin + turn, mask=there[:, None], other=0.0)
    if NORM:
        first, rest = _normed(first, rest, factors, more_factors, size, eps, REST)
    low, high = _halves(_product(first, rest, weights, more_weights, REST))
    if bias is not None:
        low += tl.load(bias + channel).to(tl.float32)[None, :]
        high += tl.load(bias + channel + HALF).to(tl.float32)[None, :]

    # Where v heads go: as they are, to their cache.
    target = v_cache + (slot * KV_HEADS + head - ROTATED)[:, None] * DIM + pair[None, :]
    mask = (there & (slot >= 0))[:, None]
    if head < ROTATED:
        if QK_NORM:
            # A part is a whole head then.
            power = (tl.sum(low * low, 1) + tl.sum(high * high, 1)) / DIM
            scale = tl.rsqrt(power + qk_eps)[:, None]
            low = low * scale * tl.load(qk_norm + channel).to(tl.float32)[None, :]
            high = high * scale * tl.load(qk_norm + channel + HALF).to(tl.float32)[None, :]
        low, high = low * cosine - high * sine, high * cosine + low * sine
        target = k_cache + (slot * KV_HEADS + head - NUM_HEADS)[:, None] * DIM + pair[None, :]
        if head < NUM_HEADS:
            target = q + (row.to(tl.int64) * NUM_HEADS + head)[:, None] * DIM + pair[None, :]
            mask = there[:, None]
    tl.store(target, low.to(q.dtype.element_ty), mask=mask)
    tl.store(target + HALF, high.to(q.dtype.element_ty), mask=mask)


def norm_linear(
    rows: Tensor, weight: Tensor, norm: Tensor | None, eps: float, bias: Tensor | None, residual: Tensor | None,
    gated: bool, out: Tensor, config: RowConfig, pdl: bool,
) -> None:  # fmt: skip
    """As kernels.row_linear.norm_linear, into `out`."""
    (num_rows, size), num_out = rows.shape, out.shape[1]
    (first, rest), block_m = pieces(size), config.rows(num_rows)
    options = {"launch_pdl": True} if pdl else {}
    width = TILE // 2 if gated else TILE
    _norm_linear[(triton.cdiv(num_out, width), triton.cdiv(num_rows, block_m))](
        rows, weight, weight if norm is None else norm, bias, residual, out, num_rows, num_out, size, eps,
        BLOCK_M=block_m, TILE=TILE, FIRST=first, REST=rest,
        NORM=norm is not None, GATED=gated, PDL=pdl, num_warps=config.warps, **options,
    )  # fmt: skip


def norm_qkv(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    norm: Tensor | None, eps: float, bias: Tensor | None, qk_norm: Tensor | None, qk_eps: float, q: Tensor,
    config: RowConfig, pdl: bool,
) -> None:  # fmt: skip
    """As kernels.row_linear.norm_qkv, into `q`."""
    num_rows, size = rows.shape
    (num_heads, dim), kv_heads = q.shape[1:], k_cache.shape[1]
    (first, rest), block_m = pieces(size), config.rows(num_rows)
    pairs = pairs_of(dim, qk_norm is not None)
    programs = (num_heads + 2 * kv_heads) * (dim // 2 // pairs)
    options = {"launch_pdl": True} if pdl else {}
    _norm_qkv[(programs, triton.cdiv(num_rows, block_m))](
        rows, weight, weight if norm is None else norm, bias, cos, sin, slots, k_cache, v_cache,
        weight if qk_norm is None else qk_norm, q, num_rows, size, eps, qk_eps,
        NUM_HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, PAIRS=pairs, BLOCK_M=block_m, FIRST=first, REST=rest,
        NORM=norm is not None, QK_NORM=qk_norm is not None, PDL=pdl, num_warps=config.warps, **options,
    )  # fmt: skip

"""Triton kernels of kernels.linear for few rows that are not wide.

Launches of a small model are bound by latency: each waits for a chain of dependent operations. So a program does not
loop over columns: it loads all its weights into registers before the previous launch ends, then loads whole rows at
once, norms them in registers, and multiplies. There is no loop, and nothing is pipelined. Rows without a norm may be
cut instead, since no program needs a whole row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.jit.memory import scratch
from kernels.launch import starts_early
from kernels.linear_configs import RowConfig, pieces


@triton.jit
def _load_piece(
    matrix, row, inside, SIZE: tl.constexpr, BEGIN: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):
    """Load COLUMNS columns of rows from BEGIN on, zeros past the row's end: [PARTS, rows, COLUMNS // PARTS].

    `inside` is None if all rows are inside. A load without a mask takes one instruction instead of five, many times
    over.
    """
    WIDTH: tl.constexpr = COLUMNS // PARTS
    column = BEGIN + tl.arange(0, PARTS)[:, None, None] * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    where = matrix + row[None, :, None] * SIZE + column
    if BEGIN + COLUMNS > SIZE:
        mask = column < SIZE
        if inside is not None:
            mask = mask & inside[None, :, None]
        values = tl.load(where, mask=mask, other=0.0)
    elif inside is not None:
        values = tl.load(where, mask=inside[None, :, None], other=0.0)
    else:
        values = tl.load(where)
    return values


@triton.jit
def _load_pieces(matrix, row, inside, SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr):
    """Load whole rows of a matrix, as the FIRST columns and the rest."""
    first = _load_piece(matrix, row, inside, SIZE, 0, FIRST, PARTS)
    rest = first
    if REST > 0:
        rest = _load_piece(matrix, row, inside, SIZE, FIRST, REST, PARTS)
    return first, rest


@triton.jit
def _load_factors(norm, SIZE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr):
    """Load the weight of a norm."""
    first, rest = _load_pieces(norm, tl.zeros([1], tl.int32), None, SIZE, FIRST, REST, PARTS)
    return first.to(tl.float32), rest.to(tl.float32)


@triton.jit
def _power(values):
    """Return the sum of the squares of each row of [PARTS, rows, columns]."""
    wide = values.to(tl.float32)
    return tl.sum(tl.sum(wide * wide, 2), 0)


@triton.jit
def _norm_scale(first, rest, SIZE: tl.constexpr, eps, REST: tl.constexpr):
    """Return the factor of an RMS norm for each row, float32 [rows]."""
    power = _power(first)
    if REST > 0:
        power += _power(rest)
    return tl.rsqrt(power / SIZE + eps)


@triton.jit
def _times(values, scale, factors):
    return (values.to(tl.float32) * scale * factors).to(values.dtype)


@triton.jit
def _normed_product(
    first, rest, weights, more_weights, factors, more_factors, eps,
    SIZE: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Multiply normed rows, or rows without a norm, by weights: float32 [weight rows, rows].

    The product need not wait for the sum of the squares: it can be scaled afterwards, except in float16, whose range
    rows times the norm's weight may exceed.
    """
    EARLY: tl.constexpr = NORM and first.dtype == tl.float16
    left, more_left = first, rest
    scale = _norm_scale(first, rest, SIZE, eps, REST)[None, :, None] if EARLY else 1.0
    if NORM:
        left = _times(first, scale, factors)
        if REST > 0:
            more_left = _times(rest, scale, more_factors)
    # Parts of the columns are multiplied by different warps.
    acc = _dot(weights, left)
    if REST > 0:
        acc += _dot(more_weights, more_left)
    if NORM and not EARLY:
        acc *= _norm_scale(first, rest, SIZE, eps, REST)[None, :]
    return acc


@triton.jit
def _dot(weights, rows):
    if weights.shape[0] == 1:
        flat = tl.reshape(rows, [rows.shape[1], rows.shape[2]])
        acc = tl.dot(tl.reshape(weights, [weights.shape[1], weights.shape[2]]), tl.trans(flat), input_precision="ieee")
    else:
        acc = tl.sum(tl.dot(weights, tl.permute(rows, (0, 2, 1)), input_precision="ieee"), 0)
    return acc


@triton.jit
def _halves(acc):
    """Split [2 * N, rows] into the first N weight rows and the others, [rows, N] each."""
    return tl.split(tl.permute(tl.reshape(acc, [2, acc.shape[0] // 2, acc.shape[1]]), (2, 1, 0)))


@triton.jit(do_not_specialize=["num_rows"])
def _norm_linear(
    rows, weight, norm, bias, residual, out, num_rows, eps, NUM_OUT: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr,
    NORM: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of weight rows, tiles of rows). If GATED, a tile is half gate and half up."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    WIDTH: tl.constexpr = TILE // 2 if GATED else TILE
    local = tl.arange(0, TILE)
    begin = tl.program_id(0) * WIDTH
    source = (local % WIDTH).to(tl.int64) + local // WIDTH * NUM_OUT
    there = None if NUM_OUT % WIDTH == 0 else begin + local % WIDTH < NUM_OUT
    weights, more_weights = _load_pieces(weight + begin.to(tl.int64) * SIZE, source, there, SIZE, FIRST, REST, PARTS)
    factors, more_factors = weights, more_weights
    if NORM:
        factors, more_factors = _load_factors(norm, SIZE, FIRST, REST, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    first, rest = _load_pieces(rows, row, row < num_rows, SIZE, FIRST, REST, PARTS)
    column = begin + tl.arange(0, WIDTH)
    inside = (row[:, None] < num_rows) & (column[None, :] < NUM_OUT)
    places = row[:, None] * NUM_OUT + column[None, :]
    if residual is not None:
        added = tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    acc = _normed_product(first, rest, weights, more_weights, factors, more_factors, eps, SIZE, REST, NORM)
    if GATED:
        gate, up = _halves(acc)
        if bias is not None:
            gate += tl.load(bias + column, mask=column < NUM_OUT, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + NUM_OUT + column, mask=column < NUM_OUT, other=0.0).to(tl.float32)[None, :]
        result = gate * tl.sigmoid(gate) * up
    else:
        result = tl.trans(acc)
        if bias is not None:
            result += tl.load(bias + column, mask=column < NUM_OUT, other=0.0).to(tl.float32)[None, :]
    if residual is not None:
        result += added
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _cut_linear(
    rows, weight, bias, residual, out, partials, counters, num_rows, NUM_OUT: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, CUT: tl.constexpr, CUTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of weight rows, tiles of rows, CUTS cuts of CUT columns).

    The last program of a tile to end adds up the results of all, in the order of the columns.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    cut = tl.program_id(2)
    column = cut * CUT + tl.arange(0, CUT)
    local = tl.arange(0, TILE)
    target = tl.program_id(0) * TILE + local
    tile_weight = weight + (tl.program_id(0) * TILE).to(tl.int64) * SIZE + cut * CUT
    tile_weight += local[:, None].to(tl.int64) * SIZE + tl.arange(0, CUT)[None, :]
    if NUM_OUT % TILE == 0 and SIZE % CUT == 0:
        weights = tl.load(tile_weight)
    else:
        weights = tl.load(tile_weight, mask=(target < NUM_OUT)[:, None] & (column < SIZE)[None, :], other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < num_rows
    seen = there[:, None]
    if SIZE % CUT > 0:
        seen = seen & (column < SIZE)[None, :]
    part = tl.load(rows + row[:, None] * SIZE + column[None, :], mask=seen, other=0.0)
    inside = (target < NUM_OUT)[:, None] & there[None, :]
    places = row[None, :] * NUM_OUT + target[:, None]
    # Loaded early, not where it is used at the end of the launch, where all would wait for it.
    if residual is not None:
        added = tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    acc = tl.dot(weights, tl.trans(part), input_precision="ieee")

    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    place = partials + (tile * CUTS).to(tl.int64) * (TILE * BLOCK_M)
    place += local[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    tl.store(place + cut * (TILE * BLOCK_M), acc)
    tl.debug_barrier()
    if tl.atomic_add(counters + tile, 1, sem="acq_rel") == CUTS - 1:
        acc = tl.load(place)
        for other in tl.static_range(1, CUTS):
            acc += tl.load(place + other * (TILE * BLOCK_M))
        tl.store(counters + tile, 0)
        if bias is not None:
            acc += tl.load(bias + target, mask=target < NUM_OUT, other=0.0).to(tl.float32)[:, None]
        if residual is not None:
            acc += added
        tl.store(out + places, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_qkv(
    rows, weight, norm, bias, cos, sin, slots, k_cache, v_cache, qk_norm, q, num_rows, eps, qk_eps, SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, PARTS: tl.constexpr,
    NORM: tl.constexpr, QK_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads times cuts of a head, tiles of rows). A cut is PAIRS pairs of channels that rotate together."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    HALF: tl.constexpr = DIM // 2
    ROTATED: tl.constexpr = NUM_HEADS + KV_HEADS
    CUTS: tl.constexpr = HALF // PAIRS
    head = tl.program_id(0) // CUTS
    local = tl.arange(0, 2 * PAIRS)
    begin = head * DIM + tl.program_id(0) % CUTS * PAIRS
    source = (local % PAIRS + local // PAIRS * HALF).to(tl.int64)
    weights, more_weights = _load_pieces(weight + begin.to(tl.int64) * SIZE, source, None, SIZE, FIRST, REST, PARTS)
    factors, more_factors = weights, more_weights
    if NORM:
        factors, more_factors = _load_factors(norm, SIZE, FIRST, REST, PARTS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = row < num_rows
    first, rest = _load_pieces(rows, row, there, SIZE, FIRST, REST, PARTS)
    pair = tl.program_id(0) % CUTS * PAIRS + tl.arange(0, PAIRS)
    channel = head * DIM + pair
    turn = row[:, None] * HALF + pair[None, :]
    slot = tl.load(slots + row, mask=there, other=-1).to(tl.int64)
    cosine = tl.load(cos + turn, mask=there[:, None], other=0.0)
    sine = tl.load(sin + turn, mask=there[:, None], other=0.0)
    low, high = _halves(
        _normed_product(first, rest, weights, more_weights, factors, more_factors, eps, SIZE, REST, NORM)
    )
    if bias is not None:
        low += tl.load(bias + channel).to(tl.float32)[None, :]
        high += tl.load(bias + channel + HALF).to(tl.float32)[None, :]

    # Value heads go to their cache without rotation.
    target = v_cache + (slot * KV_HEADS + head - ROTATED)[:, None] * DIM + pair[None, :]
    mask = (there & (slot >= 0))[:, None]
    if head < ROTATED:
        if QK_NORM:
            # With a head norm, a cut is a whole head.
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
    gated: bool, out: Tensor, config: RowConfig,
) -> None:  # fmt: skip
    """Implement kernels.linear.norm_linear, writing to `out`."""
    (num_rows, size), num_out = rows.shape, out.shape[1]
    block_m, (parts, first, rest) = config.rows(num_rows), pieces(size, config.parts)
    if config.cut and norm is None and not gated:
        grid = (triton.cdiv(num_out, config.tile), triton.cdiv(num_rows, block_m), triton.cdiv(size, config.cut))
        tiles = grid[0] * grid[1]
        partials, counters = scratch(rows.device, tiles * grid[2] * config.tile * block_m, tiles)
        _cut_linear[grid](
            rows, weight, bias, residual, out, partials, counters, num_rows, num_out, size,
            BLOCK_M=block_m, TILE=config.tile, CUT=config.cut, CUTS=grid[2],
            num_warps=config.warps, **starts_early(rows),
        )  # fmt: skip
        return
    width = config.tile // 2 if gated else config.tile
    _norm_linear[(triton.cdiv(num_out, width), triton.cdiv(num_rows, block_m))](
        rows, weight, weight if norm is None else norm, bias, residual, out, num_rows, eps, num_out, size,
        BLOCK_M=block_m, TILE=config.tile, FIRST=first, REST=rest, PARTS=parts,
        NORM=norm is not None, GATED=gated, num_warps=config.warps, **starts_early(rows),
    )  # fmt: skip


def norm_qkv(
    rows: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor,
    norm: Tensor | None, eps: float, bias: Tensor | None, qk_norm: Tensor | None, qk_eps: float, q: Tensor,
    config: RowConfig,
) -> None:  # fmt: skip
    """Implement kernels.linear.norm_qkv, writing to `q`."""
    num_rows, size = rows.shape
    (num_heads, dim), kv_heads = q.shape[1:], k_cache.shape[1]
    block_m, (parts, first, rest) = config.rows(num_rows), pieces(size, config.parts)
    pairs = dim // 2 if qk_norm is not None else config.tile // 2
    programs = (num_heads + 2 * kv_heads) * (dim // 2 // pairs)
    _norm_qkv[(programs, triton.cdiv(num_rows, block_m))](
        rows, weight, weight if norm is None else norm, bias, cos, sin, slots, k_cache, v_cache,
        weight if qk_norm is None else qk_norm, q, num_rows, eps, qk_eps, size,
        NUM_HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, PAIRS=pairs, BLOCK_M=block_m,
        FIRST=first, REST=rest, PARTS=parts, NORM=norm is not None, QK_NORM=qk_norm is not None,
        num_warps=config.warps, **starts_early(rows),
    )  # fmt: skip

"""Triton kernels of kernels.linear that stream weights.

The steps of all tiles (block_k columns of block_n weight rows) are in one sequence, tile by tile, and every program
takes an equal stretch of it. A tile that several programs share is added up, in the order of the programs, by the last
of them to finish it.

Weights of eight and four bits (kernels.quant_weight) are converted to the rows' dtype in registers, where they are the
left operand of the product. Scales are applied to each step's product as it is added or, if a row has only one, to its
sum. A library multiplies fp8 weights by many rows: kernels here split each row into two in fp8, and add up their
products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.jit.memory import prefetch_rows, release_and_wait, scratch
from kernels.jit.quantized import add_words, code_values, of_group
from kernels.launch import num_processors, power_of_two, starts_early, supports_pdl
from kernels.linear_configs import GemmConfig, stretches, tile_rows
from kernels.quant_weight import QuantWeight

_LOW = tl.constexpr(16.0)
"""Factor of second parts, the remainders of a rounding to four bits, so that e4m3 holds all their bits."""


@triton.jit
def first_step_of(program, base, extra):
    """Return the first step of a program. The first `extra` programs take base + 1 steps, the others base."""
    return program * base + tl.minimum(program, extra)


@triton.jit
def owner_of(place, base, extra):
    """Return the program whose stretch holds step `place`."""
    edge = extra * (base + 1)
    return tl.where(place < edge, place // (base + 1), extra + (place - edge) // base)


@triton.jit
def _load(
    tensor, first, last, column, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """Load weight rows first .. first + ROWS - 1. Rows past `last` repeat it; their results are never stored."""
    if TMA:
        values = tensor.load([first, column])
    else:
        row = tl.minimum(first + tl.arange(0, ROWS), last).to(tl.int64)
        columns = column + tl.arange(0, COLUMNS)
        places = tensor + row[:, None] * size + columns[None, :]
        # Evict weights from L2 first: they are read once a round, rows and partial sums several times.
        if EVEN:
            values = tl.load(places, eviction_policy="evict_first")
        else:
            values = tl.load(places, mask=columns[None, :] < size, other=0.0, eviction_policy="evict_first")
    return values


@triton.jit
def _load_rows(
    rows, num_rows, column, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """Load all rows; rows that only fill the tile are zeros and cost no memory traffic."""
    if TMA:
        values = rows.load([0, column])
    else:
        row = tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        inside = row[:, None] < num_rows
        if not EVEN:
            inside = inside & (columns[None, :] < size)
        values = tl.load(rows + row[:, None] * size + columns[None, :], mask=inside, other=0.0)
    return values


@triton.jit
def multiply(acc, rows, weights, SWAP: tl.constexpr):
    """Return acc plus rows [M, K] times weights [N, K]: [M, N], or [N, M] with SWAP."""
    if SWAP:
        acc = tl.dot(weights, tl.trans(rows), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")
    return acc


@triton.jit
def _save(acc, acc_up, place, index, GATED: tl.constexpr):
    """Store a partial sum at `place`. After the barrier one thread can announce the stores of all."""
    tl.store(place + index, acc)
    if GATED:
        tl.store(place + acc.numel + index, acc_up)
    tl.debug_barrier()


@triton.jit
def _add_saved(acc, acc_up, place, index, GATED: tl.constexpr):
    acc += tl.load(place + index, cache_modifier=".cg")
    if GATED:
        acc_up += tl.load(place + acc.numel + index, cache_modifier=".cg")
    return acc, acc_up


@triton.jit
def _write(acc, acc_up, bias, residual, out, first, num_rows, num_out, GATED: tl.constexpr, SWAP: tl.constexpr):
    """Apply bias, gate and residual, round once and store the tile whose first weight row is `first`."""
    if SWAP:
        acc = tl.trans(acc)
    row = tl.arange(0, acc.shape[0])
    column = first + tl.arange(0, acc.shape[1])
    inside = (row[:, None] < num_rows) & (column[None, :] < num_out)
    if bias is not None:
        acc += tl.load(bias + column, mask=column < num_out, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if SWAP:
            acc_up = tl.trans(acc_up)
        if bias is not None:
            up_bias = tl.load(bias + num_out + column, mask=column < num_out, other=0.0)
            acc_up += up_bias.to(tl.float32)[None, :]
        acc = acc * tl.sigmoid(acc) * acc_up
    places = row[:, None] * num_out + column[None, :]
    if residual is not None:
        acc += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "steps", "base", "extra"])
def _stream(
    rows, weight, weight_start, scales, zeros, bias, residual, out, partials, counters, num_rows, num_out, size,
    num_scales, steps, base, extra, one,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, SHARED: tl.constexpr,
    PREFETCH: tl.constexpr, BULK: tl.constexpr, PDL: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 1 if KIND is None else 2 if KIND == "fp8" else 4
    STORED_K: tl.constexpr = BLOCK_K // PARTS
    stored = size // PARTS
    HEIGHT: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    SLOT: tl.constexpr = 2 * BLOCK_M * BLOCK_N
    NUM_WEIGHT_ROWS = num_out * 2 if GATED else num_out
    program = tl.program_id(0)
    start = first_step_of(program, base, extra)
    stop = first_step_of(program + 1, base, extra)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if PREFETCH > 0:
        tile = start // steps
        column = (start - tile * steps) * STORED_K
        end = tl.minimum((stop - tile * steps) * STORED_K, stored)
        prefetch_rows(
            weight_start, tile * BLOCK_N, NUM_WEIGHT_ROWS, column, end, stored, BLOCK_N, PREFETCH * STORED_K, BULK
        )
        if GATED:
            first = num_out + tile * BLOCK_N
            prefetch_rows(weight_start, first, NUM_WEIGHT_ROWS, column, end, stored, BLOCK_N, PREFETCH * STORED_K, BULK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    index = tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    for tile in range(start // steps, (stop - 1) // steps + 1):
        acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
        acc_up = tl.zeros([HEIGHT, WIDTH], tl.float32)
        first = tile * BLOCK_N
        first_step = tl.maximum(start - tile * steps, 0)
        last_step = tl.minimum(stop - tile * steps, steps)
        # Only the products may use what is loaded here. If a tile is also read into registers, Triton 3.6 allocates one
        # buffer too few, and the next copy into it overtakes the product that still reads it.
        for step in tl.range(first_step, last_step, num_stages=STAGES):
            column = step * BLOCK_K
            if KIND is None:
                factors = _load_rows(rows, num_rows, column, size, BLOCK_M, BLOCK_K, EVEN, TMA)
                weights = _load(weight, first, NUM_WEIGHT_ROWS - 1, column, size, BLOCK_N, BLOCK_K, EVEN, TMA)
                acc = multiply(acc, factors, weights, SWAP)
                if GATED:
                    up = num_out + first
                    weights = _load(weight, up, NUM_WEIGHT_ROWS - 1, column, size, BLOCK_N, BLOCK_K, EVEN, TMA)
                    acc_up = multiply(acc_up, factors, weights, SWAP)
            else:
                last = NUM_WEIGHT_ROWS - 1
                words = _load(weight, first, last, column // PARTS, stored, BLOCK_N, STORED_K, True, TMA)
                factors = _load_rows(rows, num_rows, column, size, BLOCK_M, BLOCK_K, True, TMA)
                of_row = tl.minimum(first + tl.arange(0, BLOCK_N), last) // SPAN
                acc = add_words(acc, words, factors, scales, zeros, of_row, column, num_scales, KIND, GROUP, ASM, one)
                if GATED:
                    up = num_out + first
                    words = _load(weight, up, last, column // PARTS, stored, BLOCK_N, STORED_K, True, TMA)
                    of_row = tl.minimum(up + tl.arange(0, BLOCK_N), last) // SPAN
                    acc_up = add_words(
                        acc_up, words, factors, scales, zeros, of_row, column, num_scales, KIND, GROUP, ASM, one
                    )  # fmt: skip
        if one is not None:
            of_row = tl.minimum(first + tl.arange(0, BLOCK_N), NUM_WEIGHT_ROWS - 1) // SPAN
            acc *= of_group(scales, 0, of_row, num_scales, GROUP)[:, None]
            if GATED:
                of_row = tl.minimum(num_out + first + tl.arange(0, BLOCK_N), NUM_WEIGHT_ROWS - 1) // SPAN
                acc_up *= of_group(scales, 0, of_row, num_scales, GROUP)[:, None]
        mine = tile >= 0
        if SHARED:
            first_program = owner_of(tile * steps, base, extra)
            last_program = owner_of(tile * steps + steps - 1, base, extra)
            if first_program != last_program:
                # A program shares at most two tiles: its first and its last.
                slot = program * 2 + (tile != start // steps).to(tl.int32)
                _save(acc, acc_up, partials + slot.to(tl.int64) * SLOT, index, GATED)
                before = tl.atomic_add(counters + tile, 1, sem="acq_rel")
                mine = before == last_program - first_program
                if mine:
                    acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
                    acc_up = tl.zeros([HEIGHT, WIDTH], tl.float32)
                    for other in range(first_program, last_program + 1):
                        slot = other * 2 + (tile != first_step_of(other, base, extra) // steps).to(tl.int32)
                        place = partials + slot.to(tl.int64) * SLOT
                        acc, acc_up = _add_saved(acc, acc_up, place, index, GATED)
                    tl.store(counters + tile, 0)
        if mine:
            _write(acc, acc_up, bias, residual, out, first, num_rows, num_out, GATED, SWAP)


@triton.jit
def _dequantize(
    weight, scales, zeros, out, num_rows, size, num_scales, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of weight rows, pieces of columns)."""
    PARTS: tl.constexpr = 2 if KIND == "fp8" else 4
    first, piece = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    row = tl.minimum(first + tl.arange(0, BLOCK_N), num_rows - 1)
    of_row = row // SPAN
    inside = (first + tl.arange(0, BLOCK_N) < num_rows)[:, None]
    words = _load(weight, first, num_rows - 1, piece * DEPTH, size // PARTS, BLOCK_N, DEPTH, True, False)
    for PART in tl.static_range(PARTS):
        column = (piece * PARTS + PART) * DEPTH
        values = code_values(words, PART, KIND)
        if KIND == "int4":
            zero = tl.full([BLOCK_N], 8.0, tl.float32)
            if zeros is not None:
                zero = of_group(zeros, column, of_row, num_scales, GROUP)
            values -= zero[:, None]
        values *= of_group(scales, column, of_row, num_scales, GROUP)[:, None]
        places = out + row.to(tl.int64)[:, None] * size + column + tl.arange(0, DEPTH)[None, :]
        tl.store(places, values.to(out.dtype.element_ty), mask=inside)


def dequantize(weight: QuantWeight, out: Tensor) -> None:
    """Implement kernels.linear.dequantize, writing to `out`."""
    block_n = 16
    num_out, size = out.shape
    _dequantize[(triton.cdiv(num_out, block_n), size // weight.piece)](
        weight.codes, weight.scales, weight.zeros, out, num_out, size, weight.scales.shape[1],
        BLOCK_N=block_n, DEPTH=weight.piece // weight.per_word, KIND=weight.kind, GROUP=weight.group, SPAN=weight.span,
    )  # fmt: skip


def stream_linear(
    rows: Tensor, weight: Tensor | QuantWeight, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor,
    config: GemmConfig,
) -> None:  # fmt: skip
    """Implement kernels.linear.stream_linear, writing to `out`."""
    num_rows, size = rows.shape
    num_out = out.shape[1]
    block_m, block_n, block_k = tile_rows(num_rows), config.block_n, config.block_k
    tiles, steps = triton.cdiv(num_out, block_n), triton.cdiv(size, block_k)
    programs, base, extra, shared = stretches(config.split_k, config.per_sm, tiles, steps, num_processors(rows))
    slot = block_m * block_n * 2
    partials, counters = scratch(rows.device, 2 * programs * slot if shared else 0, tiles)
    scales, zeros, kind, group, span, per_word, one = None, None, None, 0, 1, 1, None
    if isinstance(weight, QuantWeight):
        scales, zeros, kind, group, span = weight.scales, weight.zeros, weight.kind, weight.group, weight.span
        codes, per_word = weight.codes, weight.per_word
        one = 1.0 if group == size and zeros is None else None
    else:
        codes = weight
    stored = codes.shape[1]
    row_bytes = stored * codes.element_size()
    tma = config.tma and row_bytes % 16 == 0 and rows.element_size() <= 2
    bulk = config.bulk and row_bytes % 16 == 0
    _stream[(programs,)](
        TensorDescriptor(rows, [num_rows, size], [size, 1], [block_m, block_k]) if tma else rows,
        TensorDescriptor(codes, list(codes.shape), [stored, 1], [block_n, block_k // per_word]) if tma else codes,
        codes, scales, zeros, bias, residual, out, partials, counters, num_rows, num_out, size,
        0 if scales is None else scales.shape[1], steps, base, extra, one,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=config.stages, EVEN=size % block_k == 0,
        GATED=gated, SWAP=config.swap, TMA=tma, SHARED=shared,
        PREFETCH=config.prefetch if supports_pdl(rows) else 0, BULK=bulk, KIND=kind, GROUP=group, SPAN=span,
        ASM=rows.is_cuda and rows.dtype == torch.bfloat16,
        num_warps=config.warps, **starts_early(rows),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _split(
    rows, parts, scales, num_rows, size, PIECE: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,)."""
    release_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    # Columns are ordered like those of a weight's words: the two of a word are half a piece apart.
    HALF: tl.constexpr = PIECE // 2
    word = tl.arange(0, BLOCK // 2)
    source = rows + row * size + word // HALF * PIECE + word % HALF
    first = tl.load(source, mask=word < size // 2, other=0.0)
    second = tl.load(source + HALF, mask=word < size // 2, other=0.0)
    values = tl.reshape(tl.join(first, second), [BLOCK]).to(tl.float32)
    place = tl.arange(0, BLOCK)
    inside = place < size
    # A power of two, so division is exact; the largest number becomes 128 to 255.
    largest = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-30)
    scale = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 0.0078125
    values = tl.div_rn(values, scale)
    high = values.to(parts.dtype.element_ty)
    tl.store(parts + row * size + place, high, mask=inside)
    tl.store(scales + row, scale)
    if not ROUNDS:
        low = ((values - high.to(tl.float32)) * _LOW).to(parts.dtype.element_ty)
        tl.store(parts + (num_rows + row) * size + place, low, mask=inside)
        tl.store(scales + num_rows + row, scale * (1.0 / _LOW))


def split(rows: Tensor, piece: int, parts: Tensor, scales: Tensor, *, rounds: bool = False) -> None:
    """Split rows [M, K] into `parts` [2 M, K], larger parts first, times `scales` [2 M, 1]; columns as in codes.

    `rounds`: write the larger parts alone, which are the rows rounded to e4m3.
    """
    num_rows, size = rows.shape
    block = power_of_two(size)
    warps = min(max(block // 512, 1), 16)
    _split[(num_rows,)](
        rows, parts, scales, num_rows, size, PIECE=piece, BLOCK=block, ROUNDS=rounds, num_warps=warps,
        **starts_early(rows),
    )  # fmt: skip


@triton.jit
def _sum_parts(products, place, low, bias, column, inside, ROUNDED: tl.constexpr):
    found = tl.load(products + place, mask=inside, other=0.0).to(tl.float32)
    if not ROUNDED:
        found += tl.load(products + low + place, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        found += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["num_rows"])
def _join(
    products, bias, residual, out, num_rows, size, GATED: tl.constexpr, ROUNDED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, pieces of BLOCK columns)."""
    release_and_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    width = size * 2 if GATED else size
    low = width.to(tl.int64) * num_rows
    found = _sum_parts(products, row * width + column, low, bias, column, inside, ROUNDED)
    if GATED:
        up = _sum_parts(products, row * width + size + column, low, bias, size + column, inside, ROUNDED)
        found = found * tl.sigmoid(found) * up
    if residual is not None:
        found += tl.load(residual + row * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, found.to(out.dtype.element_ty), mask=inside)


def join(
    products: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor, *, rounded: bool = False
) -> None:
    """Add up both parts' products [2 M, N], apply bias, gate and residual, and write `out` [M, N or N / 2].

    `rounded`: rows have one part, so that products are [M, N].
    """
    num_rows, size = out.shape
    _join[(num_rows, triton.cdiv(size, 1024))](
        products, bias, residual, out, num_rows, size, GATED=gated, ROUNDED=rounded, BLOCK=1024, num_warps=4,
        **starts_early(products),
    )  # fmt: skip

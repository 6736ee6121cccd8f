"""See kernels.linear.

The steps of all tiles (block_k columns of block_n weight rows) stand in one line, tile by tile, and every program takes
an equal stretch of it. A tile that several programs share is added up, in the order of the programs, by the last of
them to get there.

Weights of four bits (kernels.quant_weight) become those of the rows' dtype in registers, where they are the left
operand of the product; each group's product is scaled as it is added. Those of e4m3 are multiplied as they are, with
rows that each step turns into e4m3 by a scale of its own; weights' scales are applied to the step, or to a whole row at
the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.jit.memory import prefetch_rows, scratch
from kernels.jit.quantized import add_nibbles, decode_mxfp4, e2m1, of_group
from kernels.launch import num_processors, supports_pdl
from kernels.linear_configs import GemmConfig, tile_rows
from kernels.quant_weight import QuantWeight


@triton.jit
def _start(program, base, extra):
    """First step of a program. The first `extra` programs take base + 1 steps, the others base."""
    return program * base + tl.minimum(program, extra)


@triton.jit
def _owner(place, base, extra):
    """Program whose stretch holds step `place`."""
    edge = extra * (base + 1)
    return tl.where(place < edge, place // (base + 1), extra + (place - edge) // base)


@triton.jit
def _load(
    tensor, first, last, column, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """Weight rows first .. first + ROWS - 1. Those behind `last` are read as the last, and never stored."""
    if TMA:
        values = tensor.load([first, column])
    else:
        row = tl.minimum(first + tl.arange(0, ROWS), last).to(tl.int64)
        columns = column + tl.arange(0, COLUMNS)
        places = tensor + row[:, None] * size + columns[None, :]
        # Weights leave L2 first: they are read once a round, rows and partial sums several times.
        if EVEN:
            values = tl.load(places, eviction_policy="evict_first")
        else:
            values = tl.load(places, mask=columns[None, :] < size, other=0.0, eviction_policy="evict_first")
    return values


@triton.jit
def _load_rows(
    rows, num_rows, column, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """All rows; those that only fill the tile are zeros and cost no memory traffic."""
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
    """acc plus rows [M, K] times weights [N, K]: [M, N], or [N, M] with SWAP."""
    if SWAP:
        acc = tl.dot(weights, tl.trans(rows), acc, input_precision="ieee")
    else:
        acc = tl.dot(rows, tl.trans(weights), acc, input_precision="ieee")
    return acc


@triton.jit
def _in_fp8(factors, ASM: tl.constexpr):
    """Rows of a step rounded to e4m3, each by a scale of its own that makes its largest value e4m3's; and these."""
    wide = factors.to(tl.float32)
    top = tl.maximum(tl.max(tl.abs(wide), 1), 1e-12)
    scale = top / 448.0
    wide = wide * (448.0 / top)[:, None]
    if ASM:
        values = wide.to(tl.float8e4nv)
    else:
        # The interpreter's rounding loses carries, and its dot does not know these numbers.
        bits = wide.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        values = tl.where(tl.abs(wide) < 0.015625, (wide + 24576.0) - 24576.0, normal).to(tl.float16)
    return values, scale


@triton.jit
def _fp8_part(
    values, row_scale, weight, scales, first, last, column, size, num_scales,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Product [BLOCK_N, rows] of a step. Sums of the tensor cores in e4m3 keep few bits: the caller adds in float32."""
    codes = _load(weight, first, last, column, size, BLOCK_N, BLOCK_K, EVEN, False)
    if ASM:
        part = tl.dot(codes, tl.trans(values))
    else:
        part = tl.dot(codes.to(tl.float16), tl.trans(values), input_precision="ieee")
    if GROUP > 0:
        of_row = tl.minimum(first + tl.arange(0, BLOCK_N), last) // SPAN
        part *= of_group(scales, column, of_row, num_scales, GROUP)[:, None]
    return part * row_scale[None, :]


@triton.jit
def _nibble_step(
    acc, rows, weight, scales, zeros, first, last, num_rows, column, size, num_scales,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_M] plus the product of BLOCK_K columns with 4-bit weights."""
    of_row = tl.minimum(first + tl.arange(0, BLOCK_N), last) // SPAN
    HALF: tl.constexpr = BLOCK_K // 2
    codes = _load(weight, first, last, column // 2, size // 2, BLOCK_N, HALF, True, False)
    left = _load_rows(rows, num_rows, column, size, BLOCK_M, HALF, True, False)
    right = _load_rows(rows, num_rows, column + HALF, size, BLOCK_M, HALF, True, False)
    return add_nibbles(
        acc, codes, left, right, scales, zeros, of_row, column, num_scales, BLOCK_K, KIND, GROUP, ASM
    )  # fmt: skip


@triton.jit
def _wide_int4(codes, ASM: tl.constexpr):
    """Low and high nibbles of bytes less 8, float32."""
    if ASM:
        # A nibble in a mantissa of 2^23 is exact at any place: one instruction puts it there, one takes it out.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 t, a;
            shr.b32 t, $8, 16;
            lop3.b32 a, $8, 0x0000000f, 0x4b000000, 0xea;
            add.f32 $0, a, 0fCB000008;
            lop3.b32 a, $8, 0x00000f00, 0x4b000000, 0xea;
            fma.rn.f32 $1, a, 0f3B800000, 0fC7000800;
            lop3.b32 a, t, 0x0000000f, 0x4b000000, 0xea;
            add.f32 $2, a, 0fCB000008;
            lop3.b32 a, t, 0x00000f00, 0x4b000000, 0xea;
            fma.rn.f32 $3, a, 0f3B800000, 0fC7000800;
            lop3.b32 a, $8, 0x000000f0, 0x4b000000, 0xea;
            fma.rn.f32 $4, a, 0f3D800000, 0fC9000080;
            lop3.b32 a, $8, 0x0000f000, 0x4b000000, 0xea;
            fma.rn.f32 $5, a, 0f39800000, 0fC5008000;
            lop3.b32 a, t, 0x000000f0, 0x4b000000, 0xea;
            fma.rn.f32 $6, a, 0f3D800000, 0fC9000080;
            lop3.b32 a, t, 0x0000f000, 0x4b000000, 0xea;
            fma.rn.f32 $7, a, 0f39800000, 0fC5008000;
            }""",
            "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r",
            [codes.to(tl.int8, bitcast=True)],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=4,
        )
    else:
        low = (codes & 15).to(tl.float32) - 8.0
        high = (codes >> 4).to(tl.float32) - 8.0
    return low, high


@triton.jit
def _single_step(
    acc, rows, weight, scales, zeros, first, last, column, size, num_scales,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_N, BLOCK_K / 2] plus products of one row with 4-bit weights, to be added up at the end.

    Without the tensor cores weights need not go to where they are read from.
    """
    HALF: tl.constexpr = BLOCK_K // 2
    of_row = tl.minimum(first + tl.arange(0, BLOCK_N), last) // SPAN
    codes = _load(weight, first, last, column // 2, size // 2, BLOCK_N, HALF, True, False)
    left = tl.load(rows + column + tl.arange(0, HALF)).to(tl.float32)[None, :]
    right = tl.load(rows + column + HALF + tl.arange(0, HALF)).to(tl.float32)[None, :]
    scale = of_group(scales, column, of_row, num_scales, GROUP)
    other = scale
    if GROUP % BLOCK_K != 0:
        other = of_group(scales, column + HALF, of_row, num_scales, GROUP)
    if KIND == "mxfp4":
        low, high = decode_mxfp4(codes, left.to(tl.bfloat16), ASM)
        low, high = low.to(tl.float32), high.to(tl.float32)
    else:
        low, high = _wide_int4(codes, ASM)
        if zeros is not None:
            low -= of_group(zeros, column, of_row, num_scales, GROUP)[:, None] - 8.0
            high -= of_group(zeros, column + HALF, of_row, num_scales, GROUP)[:, None] - 8.0
    if GROUP % BLOCK_K == 0:
        acc += (low * left + high * right) * scale[:, None]
    else:
        acc += low * left * scale[:, None] + high * right * other[:, None]
    return acc


@triton.jit
def _save(acc, acc_up, place, index, GATED: tl.constexpr):
    """Put a partial sum at `place`. The barrier lets one thread announce the stores of all."""
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
def _write(acc, acc_up, scales, bias, residual, out, first, num_rows, num_out, GATED: tl.constexpr, SWAP: tl.constexpr):
    """Rows' scales, bias, gate, residual and the one rounding, for the tile whose first weight row is `first`."""
    if SWAP:
        acc = tl.trans(acc)
    row = tl.arange(0, acc.shape[0])
    column = first + tl.arange(0, acc.shape[1])
    inside = (row[:, None] < num_rows) & (column[None, :] < num_out)
    if scales is not None:
        acc *= tl.load(scales + column, mask=column < num_out, other=0.0).to(tl.float32)[None, :]
    if bias is not None:
        acc += tl.load(bias + column, mask=column < num_out, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if SWAP:
            acc_up = tl.trans(acc_up)
        if scales is not None:
            acc_up *= tl.load(scales + num_out + column, mask=column < num_out, other=0.0).to(tl.float32)[None, :]
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
    num_scales, steps, base, extra,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EVEN: tl.constexpr,
    GATED: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, SHARED: tl.constexpr,
    PREFETCH: tl.constexpr, BULK: tl.constexpr, PDL: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    PER_CODE: tl.constexpr = 2 if KIND == "int4" or KIND == "mxfp4" else 1
    STORED_K: tl.constexpr = BLOCK_K // PER_CODE
    stored = size // PER_CODE
    HEIGHT: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    WIDTH: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    SLOT: tl.constexpr = 2 * BLOCK_M * BLOCK_N
    NUM_WEIGHT_ROWS = num_out * 2 if GATED else num_out
    program = tl.program_id(0)
    start = _start(program, base, extra)
    stop = _start(program + 1, base, extra)
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
        SUMS: tl.constexpr = STORED_K if SINGLE else WIDTH
        acc = tl.zeros([HEIGHT, SUMS], tl.float32)
        acc_up = tl.zeros([HEIGHT, SUMS], tl.float32)
        first = tile * BLOCK_N
        first_step = tl.maximum(start - tile * steps, 0)
        last_step = tl.minimum(stop - tile * steps, steps)
        # Nothing but the products may use what is loaded here. Triton 3.6 gives a tile that is read into registers as
        # well one buffer too few, and the next copy into it overtakes the product that still reads it.
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
            elif KIND == "fp8":
                factors = _load_rows(rows, num_rows, column, size, BLOCK_M, BLOCK_K, EVEN, False)
                values, row_scale = _in_fp8(factors, ASM)
                acc += _fp8_part(
                    values, row_scale, weight, scales, first, NUM_WEIGHT_ROWS - 1, column, size, num_scales,
                    BLOCK_N, BLOCK_K, EVEN, GROUP, SPAN, ASM,
                )  # fmt: skip
                if GATED:
                    acc_up += _fp8_part(
                        values, row_scale, weight, scales, num_out + first, NUM_WEIGHT_ROWS - 1, column, size,
                        num_scales, BLOCK_N, BLOCK_K, EVEN, GROUP, SPAN, ASM,
                    )  # fmt: skip
            elif SINGLE:
                acc = _single_step(
                    acc, rows, weight, scales, zeros, first, NUM_WEIGHT_ROWS - 1, column, size, num_scales,
                    BLOCK_N, BLOCK_K, KIND, GROUP, SPAN, ASM,
                )  # fmt: skip
                if GATED:
                    acc_up = _single_step(
                        acc_up, rows, weight, scales, zeros, num_out + first, NUM_WEIGHT_ROWS - 1, column, size,
                        num_scales, BLOCK_N, BLOCK_K, KIND, GROUP, SPAN, ASM,
                    )  # fmt: skip
            else:
                acc = _nibble_step(
                    acc, rows, weight, scales, zeros, first, NUM_WEIGHT_ROWS - 1, num_rows, column, size, num_scales,
                    BLOCK_M, BLOCK_N, BLOCK_K, KIND, GROUP, SPAN, ASM,
                )  # fmt: skip
                if GATED:
                    up = num_out + first
                    acc_up = _nibble_step(
                        acc_up, rows, weight, scales, zeros, up, NUM_WEIGHT_ROWS - 1, num_rows, column, size,
                        num_scales, BLOCK_M, BLOCK_N, BLOCK_K, KIND, GROUP, SPAN, ASM,
                    )  # fmt: skip
        if SINGLE:
            acc = tl.broadcast_to(tl.sum(acc, 1)[:, None], [HEIGHT, WIDTH])
            acc_up = tl.broadcast_to(tl.sum(acc_up, 1)[:, None], [HEIGHT, WIDTH])
        mine = tile >= 0
        if SHARED:
            first_program = _owner(tile * steps, base, extra)
            last_program = _owner(tile * steps + steps - 1, base, extra)
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
                        slot = other * 2 + (tile != _start(other, base, extra) // steps).to(tl.int32)
                        place = partials + slot.to(tl.int64) * SLOT
                        acc, acc_up = _add_saved(acc, acc_up, place, index, GATED)
                    tl.store(counters + tile, 0)
        if mine:
            of_rows = scales if GROUP == 0 else None
            _write(acc, acc_up, of_rows, bias, residual, out, first, num_rows, num_out, GATED, SWAP)


@triton.jit
def _dequantize(
    weight, scales, zeros, out, num_rows, size, num_scales, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of weight rows, steps of BLOCK_K columns)."""
    first, column = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_K
    row = tl.minimum(first + tl.arange(0, BLOCK_N), num_rows - 1)
    of_row = row // SPAN
    inside = (first + tl.arange(0, BLOCK_N) < num_rows)[:, None]
    scale = of_group(scales, column, of_row, num_scales, GROUP)
    places = out + row.to(tl.int64)[:, None] * size + column
    if KIND == "fp8":
        columns = tl.arange(0, BLOCK_K)[None, :]
        codes = _load(weight, first, num_rows - 1, column, size, BLOCK_N, BLOCK_K, EVEN, False)
        values = codes.to(tl.float32) * scale[:, None]
        tl.store(places + columns, values.to(out.dtype.element_ty), mask=inside & (column + columns < size))
    else:
        HALF: tl.constexpr = BLOCK_K // 2
        columns = tl.arange(0, HALF)[None, :]
        codes = _load(weight, first, num_rows - 1, column // 2, size // 2, BLOCK_N, HALF, True, False)
        other = of_group(scales, column + HALF, of_row, num_scales, GROUP)
        if KIND == "mxfp4":
            low, high = e2m1(codes & 15), e2m1(codes >> 4)
        else:
            zero = tl.full([BLOCK_N], 8.0, tl.float32)
            high_zero = zero
            if zeros is not None:
                zero = of_group(zeros, column, of_row, num_scales, GROUP)
                high_zero = of_group(zeros, column + HALF, of_row, num_scales, GROUP)
            low = (codes & 15).to(tl.float32) - zero[:, None]
            high = (codes >> 4).to(tl.float32) - high_zero[:, None]
        tl.store(places + columns, (low * scale[:, None]).to(out.dtype.element_ty), mask=inside)
        tl.store(places + HALF + columns, (high * other[:, None]).to(out.dtype.element_ty), mask=inside)


def dequantize(weight: QuantWeight, out: Tensor) -> None:
    """As kernels.linear.dequantize, into `out`."""
    block_n, block_k = 16, 2 * weight.half or 128
    num_out, size = out.shape
    _dequantize[(triton.cdiv(num_out, block_n), triton.cdiv(size, block_k))](
        weight.codes, weight.scales, weight.zeros, out, num_out, size, weight.scales.shape[1],
        BLOCK_N=block_n, BLOCK_K=block_k, EVEN=size % block_k == 0, KIND=weight.kind, GROUP=weight.group,
        SPAN=weight.span,
    )  # fmt: skip


def num_programs(config: GemmConfig, num_out: int, size: int, processors: int) -> int:
    """Programs of a launch; never more than there are steps."""
    tiles, steps = -(-num_out // config.block_n), -(-size // config.block_k)
    wanted = tiles * min(config.split_k, steps) if config.split_k else config.per_sm * processors
    return min(wanted, tiles * steps)


def stream_linear(
    rows: Tensor, weight: Tensor | QuantWeight, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor,
    config: GemmConfig,
) -> None:  # fmt: skip
    """As kernels.linear.stream_linear, into `out`."""
    num_rows, size = rows.shape
    num_out = out.shape[1]
    block_m, block_n, block_k = tile_rows(num_rows), config.block_n, config.block_k
    steps = triton.cdiv(size, block_k)
    total = triton.cdiv(num_out, block_n) * steps
    programs = num_programs(config, num_out, size, num_processors(rows))
    base, extra = divmod(total, programs)
    shared = extra > 0 or base % steps > 0
    slot = block_m * block_n * 2
    partials, counters = scratch(rows.device, 2 * programs * slot if shared else 0, total // steps)
    pdl = supports_pdl(rows)
    quantized = isinstance(weight, QuantWeight)
    codes = weight.codes if isinstance(weight, QuantWeight) else weight
    scales, zeros, kind, group, span = None, None, None, 0, 1
    if isinstance(weight, QuantWeight):
        scales, zeros, kind, span = weight.scales, weight.zeros, weight.kind, weight.span
        group = 0 if weight.group == size and kind == "fp8" and span == 1 else weight.group
    stored = codes.shape[1] * codes.element_size()
    tma = config.tma and not quantized and stored % 16 == 0 and rows.element_size() <= 2
    bulk = config.bulk and stored % 16 == 0
    _stream[(programs,)](
        TensorDescriptor(rows, [num_rows, size], [size, 1], [block_m, block_k]) if tma else rows,
        TensorDescriptor(codes, list(codes.shape), [size, 1], [block_n, block_k]) if tma else codes,
        codes, scales, zeros, bias, residual, out, partials, counters, num_rows, num_out, size,
        0 if scales is None else scales.shape[1], steps, base, extra,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=config.stages, EVEN=size % block_k == 0,
        GATED=gated, SWAP=config.swap, TMA=tma, SHARED=shared,
        PREFETCH=config.prefetch if pdl else 0, BULK=bulk, PDL=pdl,
        KIND=kind, GROUP=group, SPAN=span, SINGLE=kind in ("int4", "mxfp4") and num_rows == 1,
        ASM=rows.is_cuda and (kind == "fp8" or rows.dtype == torch.bfloat16),
        num_warps=config.warps, launch_pdl=pdl,
    )  # fmt: skip

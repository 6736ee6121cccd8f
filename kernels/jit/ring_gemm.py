"""Kernels of kernels.linear for Hopper GPUs in Gluon, Triton's language of explicit layouts and copies.

The steps of all tiles are in one sequence and programs take equal stretches of it, as in kernels.jit.gemm. Here a
program keeps its next steps in a ring of shared memory. The copy engine loads weights as soon as the program begins,
while the previous launch still runs, and rows as soon as that launch has ended. Codes are converted to bfloat16 in
registers. While the tensor cores multiply step n, the ring's place of step n - 1 is refilled; if each warp multiplies
its own weight rows, that of step n, which is in registers by then.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.jit.gemm import first_step_of, owner_of
from kernels.jit.memory import scratch
from kernels.jit.quantized import FP8_CODES, INT4_CODES
from kernels.launch import num_processors
from kernels.linear_configs import stretches
from kernels.quant_weight import QuantWeight
from kernels.ring_configs import RingConfig

# Its name differs between Triton 3.6 and 3.7.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _wait_for_grid():
    """Wait until the previous launch has ended and its results can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _release_grid():
    """Let the next launch begin as soon as all programs have come here."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _next(tile, step, steps):
    """Return tile and step of the next step in the sequence of all."""
    crosses = step + 1 == steps
    return gl.where(crosses, tile + 1, tile), gl.where(crosses, 0, step + 1)


@gluon.jit
def _ask_weights(weight, ring, ready, tile, step, slot, num_out, GATED: gl.constexpr, BYTES: gl.constexpr):
    """Copy a step's weights to a place of the ring, whose barrier opens once BYTES have arrived, rows included."""
    column = step * weight.block_shape[1]
    height: gl.constexpr = weight.block_shape[0]
    mbarrier.expect(ready.index(slot), BYTES)
    if GATED:
        tma.async_copy_global_to_shared(weight, [tile * height, column], ready.index(slot), ring.index(slot * 2))
        up = num_out + tile * height
        tma.async_copy_global_to_shared(weight, [up, column], ready.index(slot), ring.index(slot * 2 + 1))
    else:
        tma.async_copy_global_to_shared(weight, [tile * height, column], ready.index(slot), ring.index(slot))


@gluon.jit
def _ask_rows(rows, ring, ready, step, slot):
    tma.async_copy_global_to_shared(rows, [0, step * rows.block_shape[1]], ready.index(slot), ring.index(slot))


@gluon.jit
def _halves(words, A: gl.constexpr):
    """Split words into those of two groups of columns."""
    WIDTH: gl.constexpr = words.shape[1] // 2
    first, second = gl.split(gl.permute(gl.reshape(words, [words.shape[0], 2, WIDTH]), (0, 2, 1)))
    return gl.convert_layout(first, A), gl.convert_layout(second, A)


@gluon.jit
def _wide(words, zero, KIND: gl.constexpr, PIECE: gl.constexpr, A: gl.constexpr):
    """Convert words of pieces to bfloat16 weights [weight rows, columns]; int4 less `zero` [weight rows]."""
    HEIGHT: gl.constexpr = words.shape[0]
    COUNT: gl.constexpr = 2 if KIND == "fp8" else 4
    PIECES: gl.constexpr = words.shape[1] * COUNT // PIECE
    if KIND == "fp8":
        first, second = gl.inline_asm_elementwise(
            FP8_CODES, "=&r,=&r,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
        codes = gl.join(first, second)
    else:
        of_row = gl.convert_layout((zero + 128.0).to(gl.bfloat16), gl.SliceLayout(1, A))
        _, less = gl.broadcast(words, of_row[:, None])
        kinds: gl.constexpr = (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16)
        first, second, third, fourth = gl.inline_asm_elementwise(
            INT4_CODES, "=&r,=&r,=&r,=&r,r,r", [words, less], dtype=kinds, is_pure=True, pack=2
        )
        # Pairs of pairs: a code's number is twice its index in the inner pair plus its index in the outer pair.
        codes = gl.join(gl.join(first, third), gl.join(second, fourth))
        codes = gl.reshape(codes, [HEIGHT, words.shape[1], 4])
    codes = gl.reshape(codes, [HEIGHT, PIECES, PIECE // COUNT, COUNT])
    # No data moves here: only names of registers change.
    return gl.convert_layout(gl.reshape(gl.permute(codes, (0, 1, 3, 2)), [HEIGHT, PIECES * PIECE]), A)


@gluon.jit
def _scaled(part, scale, total):
    """Return total + part * scale [weight rows], rounded once wherever a row is held."""
    return gl.fma(part, gl.broadcast(part, scale[:, None])[1], total)


@gluon.jit
def _of_group(table, group, of_row, num_scales, LIKE: gl.constexpr):
    """Load scales or zeros of a tile's weight rows as float32; without a table all are LIKE."""
    if table is None:
        found = gl.full([of_row.shape[0]], LIKE, gl.float32, of_row.type.layout)
    else:
        # 32 bits suffice: choose_ring takes no matrix with a larger table.
        found = gl.load(table + (group * num_scales + of_row)).to(gl.float32)
    return found


@gluon.jit
def _scale_row(tile, row, num_out, TILE: gl.constexpr, GATED: gl.constexpr, SPAN: gl.constexpr):
    """Return the rows of scales for a tile's weight rows, gate rows before up rows."""
    if GATED:
        HALF: gl.constexpr = TILE // 2
        of_row = gl.minimum(tile * HALF + row % HALF, num_out - 1) + gl.where(row < HALF, 0, num_out)
    else:
        of_row = gl.minimum(tile * TILE + row, num_out - 1)
    return of_row // SPAN


@gluon.jit
def _ask_scales(
    table, size, num_scales, start, stop, steps, num_out,
    TILE: gl.constexpr, GATED: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, SPAN: gl.constexpr,
):  # fmt: skip
    """Prefetch the entries of a table [groups, num_scales] that steps need into L2, as early as their weights."""
    UNIT: gl.constexpr = GROUP if GROUP < BLOCK_K else BLOCK_K
    UNITS: gl.constexpr = BLOCK_K // UNIT
    LINES: gl.constexpr = TILE // 32
    place = gl.arange(0, 128 * gl.num_warps(), gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    unit = gl.minimum(start * UNITS + place // LINES, stop * UNITS - 1)
    tile = unit // (steps * UNITS)
    column = gl.minimum((unit - tile * steps * UNITS) * UNIT, size - 1)
    of_row = _scale_row(tile, place % LINES * 32, num_out, TILE, GATED, SPAN)
    where = table + (column // GROUP).to(gl.int64) * num_scales + of_row
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [where.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _of_step(
    scales, zeros, step, of_row, size, num_scales,
    GROUPED: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Load scales and zeros of a step's first and last group of columns, for a tile's weight rows."""
    first = step * BLOCK_K // GROUP
    last = gl.minimum((step + 1) * BLOCK_K, size) // GROUP - 1 if GROUP < BLOCK_K else first
    scale = _of_group(scales if GROUPED else None, first, of_row, num_scales, 1.0)
    scale_2 = _of_group(scales if GROUPED else None, last, of_row, num_scales, 1.0)
    zero = _of_group(zeros, first, of_row, num_scales, 8.0)
    return scale, scale_2, zero, _of_group(zeros, last, of_row, num_scales, 8.0)


@gluon.jit
def _end(
    total, tile, program, start, scales, bias, residual, out, partials, counters, num_rows, num_out, steps, base, extra,
    TILE: gl.constexpr, GATED: gl.constexpr, SHARED: gl.constexpr, GROUPED: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Add up a tile with other programs that share it, if any; the last of them writes it."""
    WARPS: gl.constexpr = gl.num_warps()
    OUTS: gl.constexpr = TILE // 2 if GATED else TILE
    BLOCK_M: gl.constexpr = total.shape[1]
    # Stores of a warp are contiguous: columns of `out` are weight rows.
    LIKE_OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, WARPS], [0, 1])
    column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LIKE_OUT))
    of = tile * OUTS + gl.arange(0, OUTS, gl.SliceLayout(1, LIKE_OUT))
    inside = of < num_out
    places = of[:, None] + column[None, :] * num_out
    stored = inside[:, None] & (column < num_rows)[None, :]
    # Loaded before waiting for the other programs.
    if residual is not None:
        added = gl.load(residual + places, mask=stored, other=0.0)
    if scales is not None and not GROUPED:
        scale = gl.load(scales + of, mask=inside, other=0.0).to(gl.float32)
        scale_up = gl.load(scales + (num_out if GATED else 0) + of, mask=inside, other=0.0).to(gl.float32)
    mine = tile >= 0
    if SHARED:
        first_program = owner_of(tile * steps, base, extra)
        last_program = owner_of(tile * steps + steps - 1, base, extra)
        if first_program != last_program:
            # A program shares at most two tiles: its first and its last.
            index = gl.arange(0, TILE, gl.SliceLayout(1, D))[:, None] * BLOCK_M
            index += gl.arange(0, BLOCK_M, gl.SliceLayout(0, D))[None, :]
            slot = program * 2 + (tile != start // steps).to(gl.int32)
            gl.store(partials + slot.to(gl.int64) * (TILE * BLOCK_M) + index, total)
            # After the barrier one thread can announce the stores of all.
            _barrier()
            mine = gl.atomic_add(counters + tile, 1, sem="acq_rel") == last_program - first_program
            if mine:
                total = gl.zeros_like(total)
                for other in range(first_program, last_program + 1):
                    slot = other * 2 + (tile != first_step_of(other, base, extra) // steps).to(gl.int32)
                    place = partials + slot.to(gl.int64) * (TILE * BLOCK_M)
                    total += gl.load(place + index, cache_modifier=".cg")
                gl.store(counters + tile, 0)
    if mine:
        if GATED:
            PAIRS: gl.constexpr = gl.BlockedLayout([2, 1, 2], [32, 1, 1], [1, WARPS, 1], [2, 0, 1])
            pairs = gl.permute(gl.reshape(total, [2, OUTS, BLOCK_M]), (1, 2, 0))
            gate, up = gl.split(gl.convert_layout(pairs, PAIRS))
            sums, up = gl.convert_layout(gate, LIKE_OUT), gl.convert_layout(up, LIKE_OUT)
        else:
            sums = gl.convert_layout(total, LIKE_OUT)
        if scales is not None and not GROUPED:
            sums *= scale[:, None]
        if bias is not None:
            sums += gl.load(bias + of, mask=inside, other=0.0).to(gl.float32)[:, None]
        if GATED:
            if scales is not None and not GROUPED:
                up *= scale_up[:, None]
            if bias is not None:
                up += gl.load(bias + num_out + of, mask=inside, other=0.0).to(gl.float32)[:, None]
            sums = sums / (1.0 + gl.exp(-sums)) * up
        if residual is not None:
            sums += added.to(gl.float32)
        gl.store(out + places, sums.to(out.dtype.element_ty), mask=stored)


@gluon.jit(do_not_specialize=["num_rows", "steps", "base", "extra"])
def _ring_gemm(
    rows, weight, scales, zeros, bias, residual, out, partials, counters, num_rows, num_out, num_scales, steps, base,
    extra, BLOCK_M: gl.constexpr, TILE: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, SHARED: gl.constexpr, KIND: gl.constexpr, GROUPED: gl.constexpr, GROUP: gl.constexpr,
    PIECE: gl.constexpr, SPAN: gl.constexpr, BY_WARP: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    HALVES: gl.constexpr = 2 if GATED else 1
    STORED_K: gl.constexpr = weight.block_shape[1]
    # Two groups of columns in a step are summed separately.
    PARTS: gl.constexpr = 2 if GROUPED and GROUP < BLOCK_K else 1
    PART_K: gl.constexpr = BLOCK_K // PARTS
    OUTS: gl.constexpr = TILE // HALVES
    VERSION: gl.constexpr = [2, 0] if BY_WARP else [3, 0]
    INSTRUCTION: gl.constexpr = [16, 8] if BY_WARP else [16, BLOCK_M, 16]
    D: gl.constexpr = gl.NVMMADistributedLayout(VERSION, [WARPS, 1], INSTRUCTION)
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, D, 2)
    OF_ROW: gl.constexpr = gl.SliceLayout(1, D)
    BYTES: gl.constexpr = (TILE * STORED_K + BLOCK_M * BLOCK_K) * 2
    program = gl.program_id(0)
    start = first_step_of(program, base, extra)
    stop = first_step_of(program + 1, base, extra)
    _release_grid()
    halves = gl.allocate_shared_memory(weight.dtype, [STAGES * HALVES, OUTS, STORED_K], weight.layout)
    ring = halves
    if GATED:
        ring = halves._reinterpret(weight.dtype, [STAGES, TILE, STORED_K], weight.layout)
    row_ring = gl.allocate_shared_memory(rows.dtype, [STAGES, BLOCK_M, BLOCK_K], rows.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
    tile = start // steps
    step = start - tile * steps
    ask_tile, ask_step = tile, step
    for slot in gl.static_range(STAGES):
        if start + slot < stop:
            _ask_weights(weight, halves, ready, ask_tile, ask_step, slot, num_out, GATED, BYTES)
        ask_tile, ask_step = _next(ask_tile, ask_step, steps)
    if GROUPED:
        _ask_scales(scales, rows.shape[1], num_scales, start, stop, steps, num_out, TILE, GATED, BLOCK_K, GROUP, SPAN)
    if zeros is not None:
        _ask_scales(zeros, rows.shape[1], num_scales, start, stop, steps, num_out, TILE, GATED, BLOCK_K, GROUP, SPAN)
    row = gl.arange(0, TILE, OF_ROW)
    of_row = _scale_row(tile, row, num_out, TILE, GATED, SPAN)
    scale, scale_2, zero, zero_2 = _of_step(
        scales, zeros, step, of_row, rows.shape[1], num_scales, GROUPED, BLOCK_K, GROUP
    )
    _wait_for_grid()
    row_tile, row_step = tile, step
    for slot in gl.static_range(STAGES):
        if start + slot < stop:
            _ask_rows(rows, row_ring, ready, row_step, slot)
        row_tile, row_step = _next(row_tile, row_step, steps)
    total = gl.zeros([TILE, BLOCK_M], gl.float32, D)
    pending, pending_2 = total, total
    if not BY_WARP:
        pending, pending_2 = warpgroup_mma_init(total), warpgroup_mma_init(total)
    wide = gl.zeros([TILE, PART_K], gl.bfloat16, A)
    wide_2 = wide
    # Separate values: Triton may treat a name as unchanged in a loop if it gets the old value of another name that was
    # equal to it.
    behind, behind_2 = gl.zeros_like(scale), gl.zeros_like(scale_2)
    first = start
    slot, before, phase = 0, 0, 0
    for place in range(start, stop):
        next_tile, next_step = _next(tile, step, steps)
        mbarrier.wait(ready.index(slot), phase)
        factors, begun = row_ring.index(slot), place != first
        if KIND is None:
            pending = warpgroup_mma(ring.index(slot), factors.permute((1, 0)), pending, use_acc=begun, is_async=True)
            pending = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[pending]))
        elif BY_WARP:
            words = ring.index(slot).load(A)
            if PARTS == 1:
                factor = factors.permute((1, 0)).load(B)
            else:
                factor = factors.slice(0, PART_K, dim=1).permute((1, 0)).load(B)
                factor_2 = factors.slice(PART_K, PART_K, dim=1).permute((1, 0)).load(B)
            # The step is not read from the ring again.
            _barrier()
            if place + STAGES < stop:
                _ask_weights(weight, halves, ready, ask_tile, ask_step, slot, num_out, GATED, BYTES)
                _ask_rows(rows, row_ring, ready, ask_step, slot)
                ask_tile, ask_step = _next(ask_tile, ask_step, steps)
            behind, behind_2, less, less_2 = scale, scale_2, zero, zero_2
            # After the copies: the fence before them waits for all loads.
            if GROUPED:
                of_row = _scale_row(next_tile, row, num_out, TILE, GATED, SPAN)
                scale, scale_2, zero, zero_2 = _of_step(
                    scales, zeros, next_step, of_row, rows.shape[1], num_scales, GROUPED, BLOCK_K, GROUP
                )
            total = gl.where(begun, total, 0.0)
            none = gl.zeros_like(total)
            if not GROUPED:
                total = mma_v2(_wide(words, less, KIND, PIECE, A), factor, total)
            elif PARTS == 1:
                total = _scaled(mma_v2(_wide(words, less, KIND, PIECE, A), factor, none), behind, total)
            else:
                words, words_2 = _halves(words, A)
                total = _scaled(mma_v2(_wide(words, less, KIND, PIECE, A), factor, none), behind, total)
                total = _scaled(mma_v2(_wide(words_2, less_2, KIND, PIECE, A), factor_2, none), behind_2, total)
        elif PARTS == 1:
            new = _wide(ring.index(slot).load(A), zero, KIND, PIECE, A)
            sums, wide = warpgroup_mma_wait(0, deps=[pending, wide])
            if GROUPED:
                total = gl.where(begun, _scaled(sums, behind, total), 0.0)
            begun = begun & (not GROUPED)
            pending = warpgroup_mma(new, factors.permute((1, 0)), sums, use_acc=begun, is_async=True)
            wide, behind = new, scale
        else:
            words, words_2 = _halves(ring.index(slot).load(A), A)
            new, new_2 = _wide(words, zero, KIND, PIECE, A), _wide(words_2, zero_2, KIND, PIECE, A)
            sums, wide, sums_2, wide_2 = warpgroup_mma_wait(0, deps=[pending, wide, pending_2, wide_2])
            total = gl.where(begun, _scaled(sums_2, behind_2, _scaled(sums, behind, total)), 0.0)
            factor = factors.slice(0, PART_K, dim=1).permute((1, 0))
            factor_2 = factors.slice(PART_K, PART_K, dim=1).permute((1, 0))
            pending = warpgroup_mma(new, factor, sums, use_acc=False, is_async=True)
            pending_2 = warpgroup_mma(new_2, factor_2, sums_2, use_acc=False, is_async=True)
            wide, wide_2, behind, behind_2 = new, new_2, scale, scale_2
        if not BY_WARP:
            if GROUPED:
                of_row = _scale_row(next_tile, row, num_out, TILE, GATED, SPAN)
                scale, scale_2, zero, zero_2 = _of_step(
                    scales, zeros, next_step, of_row, rows.shape[1], num_scales, GROUPED, BLOCK_K, GROUP
                )
            # The place of the previous step is free now.
            _barrier()
            if (place > start) & (place - 1 + STAGES < stop):
                _ask_weights(weight, halves, ready, ask_tile, ask_step, before, num_out, GATED, BYTES)
                _ask_rows(rows, row_ring, ready, ask_step, before)
                ask_tile, ask_step = _next(ask_tile, ask_step, steps)
        before = slot
        slot += 1
        if slot == STAGES:
            slot = 0
            phase ^= 1
        if (next_step == 0) | (place + 1 == stop):
            if not BY_WARP:
                sums, wide, sums_2, wide_2 = warpgroup_mma_wait(0, deps=[pending, wide, pending_2, wide_2])
                pending, pending_2 = warpgroup_mma_init(sums), warpgroup_mma_init(sums_2)
                total = _scaled(sums, behind, total) if GROUPED else sums
                if PARTS == 2:
                    total = _scaled(sums_2, behind_2, total)
            _end(
                total, tile, program, start, scales, bias, residual, out, partials, counters, num_rows, num_out, steps,
                base, extra, TILE, GATED, SHARED, GROUPED, D,
            )  # fmt: skip
            first = place + 1
        tile, step = next_tile, next_step


def ring_linear(
    rows: Tensor, weight: Tensor | QuantWeight, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor,
    config: RingConfig,
) -> None:  # fmt: skip
    """Implement kernels.linear.stream_linear, writing to `out`."""
    num_rows, size = rows.shape
    num_out = out.shape[1]
    block_m, height = config.rows(num_rows), config.tile // (2 if gated else 1)
    steps, tiles = triton.cdiv(size, config.block_k), triton.cdiv(num_out, height)
    programs, base, extra, shared = stretches(config.split_k, config.per_sm, tiles, steps, num_processors(rows))
    partials, counters = scratch(rows.device, 2 * programs * block_m * config.tile if shared else 0, tiles)
    if isinstance(weight, QuantWeight):
        codes, kind, scales, zeros = weight.codes, weight.kind, weight.scales, weight.zeros
        group, piece, span = weight.group, weight.piece, weight.span
    else:
        codes, kind, scales, zeros, group, piece, span = weight, None, None, None, size, config.block_k, 1
    stored, stored_k = codes.shape[1], config.block_k * codes.shape[1] // size
    # With 128 registers a thread, two programs of eight warps fit on a processor.
    _ring_gemm[(programs,)](
        TensorDescriptor(rows, [num_rows, size], [size, 1], [block_m, config.block_k], _layout(config.block_k)),
        TensorDescriptor(codes, list(codes.shape), [stored, 1], [height, stored_k], _layout(stored_k)),
        scales, zeros, bias, residual, out, partials, counters, num_rows, num_out,
        0 if scales is None else scales.shape[1], steps, base, extra,
        BLOCK_M=block_m, TILE=config.tile, BLOCK_K=config.block_k, STAGES=config.stages, GATED=gated, SHARED=shared,
        KIND=kind, GROUPED=kind is not None and (group != size or zeros is not None), GROUP=group, PIECE=piece,
        SPAN=span, BY_WARP=config.by_warp, num_warps=config.warps, maxnreg=128 if config.warps > 4 else None,
        launch_pdl=True,
    )  # fmt: skip


def _layout(columns: int) -> gl.NVMMASharedLayout:
    """Return the layout for rows of `columns` two-byte numbers that tensor cores read without bank conflicts."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(2 * columns, 128), element_bitwidth=16, rank=2)

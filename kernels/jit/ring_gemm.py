"""See kernels.linear. For Hopper GPUs, in Gluon, Triton's language of explicit layouts and copies.

The steps of all tiles stand in one line and programs take equal stretches of it, as in kernels.jit.gemm. Here a program
keeps its next steps in a ring of shared memory: weights by the copy engine as soon as it begins, while the launch in
front still runs, and what they are multiplied with as soon as that has ended. Codes become bfloat16 in registers. While
the tensor cores multiply step n, the place of step n - 1 in the ring is filled anew.
"""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
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
from kernels.jit.quantized import FP8_CODES
from kernels.launch import num_processors
from kernels.linear_configs import RingConfig, stretches, tile_rows
from kernels.quant_weight import QuantWeight

# Triton 3.7 has another name for it than 3.6.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _wait_for_grid():
    """Until the launch in front has ended, and what it wrote can be read."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _release_grid():
    """The launch behind may begin as soon as all programs have come here."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _next(tile, step, steps):
    """The step behind one, in the line of all."""
    crosses = step + 1 == steps
    return gl.where(crosses, tile + 1, tile), gl.where(crosses, 0, step + 1)


@gluon.jit
def _ask_weights(weight, ring, ready, tile, step, slot, num_out, GATED: gl.constexpr, BYTES: gl.constexpr):
    """Copy the weights of a step into a place of the ring, whose barrier opens once BYTES are there, rows included."""
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
def _wide(words, PIECE: gl.constexpr, LIKE: gl.constexpr):
    """Weights [weight rows, columns] in bfloat16 of words of two codes, in pieces of PIECE columns."""
    HEIGHT: gl.constexpr = words.shape[0]
    PIECES: gl.constexpr = words.shape[1] * 2 // PIECE
    first, second = gl.inline_asm_elementwise(
        FP8_CODES, "=&r,=&r,r", [words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )
    codes = gl.reshape(gl.join(first, second), [HEIGHT, PIECES, PIECE // 2, 2])
    # They stay where they are: what is moved about are names of registers.
    return gl.convert_layout(gl.reshape(gl.permute(codes, (0, 1, 3, 2)), [HEIGHT, PIECES * PIECE]), LIKE)


@gluon.jit
def _end(
    total, tile, program, start, scales, bias, residual, out, partials, counters, num_rows, num_out, steps, base, extra,
    TILE: gl.constexpr, GATED: gl.constexpr, SHARED: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Add a tile up with the other programs that share it, if there are; the last of them writes it."""
    WARPS: gl.constexpr = gl.num_warps()
    OUTS: gl.constexpr = TILE // 2 if GATED else TILE
    BLOCK_M: gl.constexpr = total.shape[1]
    # A warp's stores are neighbours: columns of `out` are weight rows.
    LIKE_OUT: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, WARPS], [0, 1])
    column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LIKE_OUT))
    of = tile * OUTS + gl.arange(0, OUTS, gl.SliceLayout(1, LIKE_OUT))
    inside = of < num_out
    places = of[:, None] + column[None, :] * num_out
    stored = inside[:, None] & (column < num_rows)[None, :]
    # Asked for before the others are waited for.
    if residual is not None:
        added = gl.load(residual + places, mask=stored, other=0.0)
    if scales is not None:
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
            # The barrier lets one thread announce the stores of all.
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
        if scales is not None:
            sums *= scale[:, None]
        if bias is not None:
            sums += gl.load(bias + of, mask=inside, other=0.0).to(gl.float32)[:, None]
        if GATED:
            if scales is not None:
                up *= scale_up[:, None]
            if bias is not None:
                up += gl.load(bias + num_out + of, mask=inside, other=0.0).to(gl.float32)[:, None]
            sums = sums / (1.0 + gl.exp(-sums)) * up
        if residual is not None:
            sums += added.to(gl.float32)
        gl.store(out + places, sums.to(out.dtype.element_ty), mask=stored)


@gluon.jit(do_not_specialize=["num_rows", "steps", "base", "extra"])
def _ring_gemm(
    rows, weight, scales, bias, residual, out, partials, counters, num_rows, num_out, steps, base, extra,
    BLOCK_M: gl.constexpr, TILE: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GATED: gl.constexpr, SHARED: gl.constexpr, PIECE: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = gl.num_warps()
    HALVES: gl.constexpr = 2 if GATED else 1
    STORED_K: gl.constexpr = weight.block_shape[1]
    OUTS: gl.constexpr = TILE // HALVES
    D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, D, 2)
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
    _wait_for_grid()
    row_tile, row_step = tile, step
    for slot in gl.static_range(STAGES):
        if start + slot < stop:
            _ask_rows(rows, row_ring, ready, row_step, slot)
        row_tile, row_step = _next(row_tile, row_step, steps)
    pending = warpgroup_mma_init(gl.zeros([TILE, BLOCK_M], gl.float32, D))
    if PIECE is not None:
        wide = gl.zeros([TILE, BLOCK_K], gl.bfloat16, A)
    first = start
    slot, before, phase = 0, 0, 0
    for place in range(start, stop):
        mbarrier.wait(ready.index(slot), phase)
        factors, begun = row_ring.index(slot).permute((1, 0)), place != first
        if PIECE is None:
            pending = warpgroup_mma(ring.index(slot), factors, pending, use_acc=begun, is_async=True)
            pending = warpgroup_mma_init(warpgroup_mma_wait(1, deps=[pending]))
        else:
            new = _wide(ring.index(slot).load(A), PIECE, A)
            total, wide = warpgroup_mma_wait(0, deps=[pending, wide])
            pending = warpgroup_mma(new, factors, total, use_acc=begun, is_async=True)
            wide = new
        # What the step before read is free now.
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
        if (step + 1 == steps) | (place + 1 == stop):
            if PIECE is None:
                total = warpgroup_mma_wait(0, deps=[pending])
            else:
                total, wide = warpgroup_mma_wait(0, deps=[pending, wide])
            pending = warpgroup_mma_init(total)
            _end(
                total, tile, program, start, scales, bias, residual, out, partials, counters, num_rows, num_out, steps,
                base, extra, TILE, GATED, SHARED, D,
            )  # fmt: skip
            first = place + 1
        tile, step = _next(tile, step, steps)


def ring_linear(
    rows: Tensor, weight: Tensor | QuantWeight, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor,
    config: RingConfig,
) -> None:  # fmt: skip
    """As kernels.linear.stream_linear, into `out`."""
    num_rows, size = rows.shape
    num_out = out.shape[1]
    block_m, height = tile_rows(num_rows), config.tile // (2 if gated else 1)
    steps, tiles = triton.cdiv(size, config.block_k), triton.cdiv(num_out, height)
    programs, base, extra, shared = stretches(config, tiles, steps, num_processors(rows))
    partials, counters = scratch(rows.device, 2 * programs * block_m * config.tile if shared else 0, tiles)
    quantized = weight if isinstance(weight, QuantWeight) else None
    codes = weight.codes if isinstance(weight, QuantWeight) else weight
    stored, stored_k = codes.shape[1], config.block_k * codes.shape[1] // size
    # With 128 registers a thread there is room for two programs of eight warps.
    _ring_gemm[(programs,)](
        TensorDescriptor(rows, [num_rows, size], [size, 1], [block_m, config.block_k], _layout(config.block_k)),
        TensorDescriptor(codes, list(codes.shape), [stored, 1], [height, stored_k], _layout(stored_k)),
        None if quantized is None else quantized.scales, bias, residual, out, partials, counters,
        num_rows, num_out, steps, base, extra,
        BLOCK_M=block_m, TILE=config.tile, BLOCK_K=config.block_k, STAGES=config.stages, GATED=gated, SHARED=shared,
        PIECE=None if quantized is None else quantized.piece, num_warps=config.warps,
        maxnreg=128 if config.warps > 4 else None, launch_pdl=True,
    )  # fmt: skip


def _layout(columns: int) -> gl.NVMMASharedLayout:
    """Of rows of so many two-byte numbers: what the tensor cores read without conflicts."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(2 * columns, 128), element_bitwidth=16, rank=2)

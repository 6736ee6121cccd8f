"""Asking weights, keys and values into L2 while a kernel cannot use them yet."""

from __future__ import annotations

import triton
import triton.language as tl

LINE = tl.constexpr(128)
"""Bytes of a cache line."""


@triton.jit
def prefetch_rows(
    weight, first_row, num_rows, column, stop, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BULK: tl.constexpr
):
    """Ask for columns [column, min(column + COLUMNS, stop)) of ROWS rows from first_row of weight [num_rows, size].

    Needs a Hopper GPU if BULK (rows must be multiples of 16 bytes then); COLUMNS is a power of two. Returns at once.
    """
    itemsize: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    rows = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1)
    starts = weight + rows.to(tl.int64) * size
    if BULK:
        length = tl.maximum(tl.minimum(stop - column, COLUMNS) * itemsize // 16 * 16, 16)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
            "=r,l,r",
            [(starts + column).to(tl.int64), length],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        step: tl.constexpr = LINE // itemsize
        columns = tl.minimum(column + tl.arange(0, COLUMNS // step) * step, stop - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0",
            "=r,l",
            [(starts[:, None] + columns[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_lines(pointers):
    """Ask for the line at each pointer."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )

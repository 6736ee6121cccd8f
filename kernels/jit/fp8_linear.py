"""See kernels.fp8_linear."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import power_of_two, supports_pdl

_LOW = tl.constexpr(16.0)
"""What second parts are multiplied by, so that e4m3 holds all their bits: what a rounding to four bits leaves."""


@triton.jit(do_not_specialize=["num_rows"])
def _split(rows, parts, scales, num_rows, size, PIECE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows,)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    # Columns lie as those of a weight's words: the two of a word are half a piece apart.
    HALF: tl.constexpr = PIECE // 2
    word = tl.arange(0, BLOCK // 2)
    source = rows + row * size + word // HALF * PIECE + word % HALF
    first = tl.load(source, mask=word < size // 2, other=0.0)
    second = tl.load(source + HALF, mask=word < size // 2, other=0.0)
    values = tl.reshape(tl.join(first, second), [BLOCK]).to(tl.float32)
    place = tl.arange(0, BLOCK)
    inside = place < size
    # A power of two, by which numbers are divided exactly: the largest becomes one from 128 to 255.
    largest = tl.maximum(tl.max(tl.abs(values), axis=0), 1e-30)
    scale = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 0.0078125
    values = tl.div_rn(values, scale)
    high = values.to(parts.dtype.element_ty)
    low = ((values - high.to(tl.float32)) * _LOW).to(parts.dtype.element_ty)
    tl.store(parts + row * size + place, high, mask=inside)
    tl.store(parts + (num_rows + row) * size + place, low, mask=inside)
    tl.store(scales + row, scale)
    tl.store(scales + num_rows + row, scale * (1.0 / _LOW))


def split(rows: Tensor, piece: int, parts: Tensor, scales: Tensor) -> None:
    """Rows [M, K] as `parts` [2 M, K], larger ones first, times `scales` [2 M, 1]; columns as in a weight's codes."""
    num_rows, size = rows.shape
    pdl, block = supports_pdl(rows), power_of_two(size)
    warps = min(max(block // 512, 1), 16)
    _split[(num_rows,)](
        rows, parts, scales, num_rows, size, PIECE=piece, BLOCK=block, PDL=pdl, num_warps=warps, launch_pdl=pdl
    )


@triton.jit
def _sum_parts(products, place, low, bias, column, inside):
    found = tl.load(products + place, mask=inside, other=0.0).to(tl.float32)
    found += tl.load(products + low + place, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        found += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["num_rows"])
def _join(products, bias, residual, out, num_rows, size, GATED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Grid (rows, pieces of BLOCK columns)."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    width = size * 2 if GATED else size
    low = width.to(tl.int64) * num_rows
    found = _sum_parts(products, row * width + column, low, bias, column, inside)
    if GATED:
        up = _sum_parts(products, row * width + size + column, low, bias, size + column, inside)
        found = found * tl.sigmoid(found) * up
    if residual is not None:
        found += tl.load(residual + row * size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, found.to(out.dtype.element_ty), mask=inside)


def join(products: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool, out: Tensor) -> None:
    """The sums of both parts' products [2 M, N], and what stands around them, into `out` [M, N or N / 2]."""
    num_rows, size = out.shape
    pdl = supports_pdl(products)
    _join[(num_rows, triton.cdiv(size, 1024))](
        products, bias, residual, out, num_rows, size, GATED=gated, BLOCK=1024, PDL=pdl, num_warps=4, launch_pdl=pdl
    )

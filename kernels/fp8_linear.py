"""Products of many rows in bfloat16 with fp8 weights, by the fp8 instructions of the tensor cores.

A bfloat16 number has eight significant bits, an e4m3 one four. So a row is the sum of two rows in e4m3, and its product
the sum of theirs: the weights are read once, as they are, and nothing is lost that rounding the rows would lose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import ceil_div, use_triton
from kernels.quant_weight import QuantWeight
from kernels.reference import linear as reference

MAX_FP8_ROWS = 512
"""Rows up to which it pays, from more than one launch of kernels.linear.stream_linear takes: of so many a layer's
products at 8B shape take an H200 383 us so, and 477 with the weights made wide; of 1,024 759 and 755."""
PARTS_TILE = 128
"""The library is given a multiple of so many parts; what those without a row hold is multiplied and never read. Of 130,
192 and 256 parts gate and up of an 8B model take an H200 82, 68 and 55 us, of 258 and 384 107 and 80."""


def fits_fp8_linear(weight: QuantWeight, dtype: torch.dtype) -> bool:
    """Whether `fp8_linear` takes the weight, with rows of `dtype`: on Hopper, with one scale a row."""
    if weight.kind != "fp8" or weight.group != weight.size or weight.span > 1 or dtype != torch.bfloat16:
        return False
    if weight.size % 16 or weight.num_out % 16 or not weight.codes.is_cuda:
        return False
    # Some later GPUs refuse products with a scale a row (pytorch issue 192707).
    return torch.cuda.get_device_capability(weight.codes.device) == (9, 0)


def fp8_linear(
    rows: Tensor,
    weight: QuantWeight,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """rows @ weight^T, as kernels.linear.stream_linear with the same arguments, for any number of rows.

    A row's parts are exact for all numbers that are at least 2^-13 of its largest; smaller ones are off by 2^-21 of
    that. The products of both are rounded to bfloat16 before they are added up in float32.
    The library that multiplies them says nothing of what a row's result depends on.

    Raises:
        ValueError: the shapes do not fit.
    """
    num_out = weight.num_out // (2 if gated else 1)
    shape = (rows.shape[0], num_out)
    if rows.dim() != 2 or rows.shape[1] != weight.size or not rows.is_contiguous():
        raise ValueError(f"fp8_linear takes contiguous rows [M, {weight.size}], got {list(rows.shape)}")
    if residual is not None and (residual.shape != shape or not residual.is_contiguous()):
        raise ValueError(f"residual is {list(residual.shape)}, not a contiguous {list(shape)}")
    dtype = out_dtype or rows.dtype
    if not use_triton(rows):
        return reference.stream_linear(rows, weight, bias, residual, gated, dtype)
    from kernels.jit import fp8_linear as jit

    num_parts = ceil_div(2 * rows.shape[0], PARTS_TILE) * PARTS_TILE
    parts = rows.new_empty(num_parts, weight.size, dtype=torch.float8_e4m3fn)
    scales = rows.new_empty(num_parts, 1, dtype=torch.float32)
    jit.split(rows, weight.piece, parts, scales)
    codes = weight.codes.view(torch.float8_e4m3fn)
    products = torch._scaled_mm(parts, codes.T, scale_a=scales, scale_b=weight.scales, out_dtype=torch.bfloat16)
    out = rows.new_empty(shape, dtype=dtype)
    jit.join(products, bias, residual, gated, out)
    return out

"""Matrices laid out for products on a CPU: in blocks of kernels.cpu if these support them, else in oneDNN's layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.isa import needed_isa
from kernels.cpu.layout import GROUP
from kernels.cpu.products import MAX_ROWS, Packed, eight_bits, fits, packed_four, packed_half, prepare, tile_product
from kernels.quant_weight import QuantWeight, unpacked
from outrider.device import bf16_flag

# oneDNN's packed product is slower for fewer than five rows: all of SmolLM2-135M's layers take 21, 25, 20, 20, 18 and
# 18 ms for 1 to 6 rows in float32. So fewer rows are padded with zeros to five.
MIN_ROWS = 5

_STEPS = 15
_ROUNDING = 2.0**-7
"""Twice that of bfloat16: the share of a group's largest weight by which its weights may lie off its levels."""
_SAMPLE = 16
"""Rows that are looked at before the whole matrix, because most matrices have no levels."""


class CpuWeight:
    """W [out, in], packed.

    In bfloat16, kernels.cpu multiplies. If weights lie on 16 or 255 levels in each group, it uses four or eight bits:
    for up to MAX_ROWS rows, which take as long as reading the weights, or for any number of rows if codes are
    multiplied as they are (VNNI). More rows than MAX_ROWS then go to oneDNN if it has bfloat16 instructions but there
    are none for tiles (AMX). A row's result does not depend on the rows beside it, as long as there are at most
    MAX_ROWS in both cases, or more in both.

    Measured on two cores, [3072, 576] with weights of 16 bits, ms for 16, 64 and 512 rows: on a Xeon with AMX 0.08,
    0.26, 1.96, oneDNN 0.14, 0.31, 1.78; on one with AVX-512 without AMX 0.31, 0.78, 5.9, oneDNN in bfloat16 1.9, 5.5,
    32 and in float32 0.47, 1.29, 6.5.
    """

    def __init__(self, wide: Packed | Tensor, few: Packed | None = None) -> None:
        """`wide`: our blocks or oneDNN's; `few`: four or eight bits, only for few rows."""
        self._wide, self._few = wide, few
        for packed in (wide, few):
            if isinstance(packed, Packed):
                prepare(packed.kind)

    @classmethod
    def of(cls, weight: Tensor, quantized: QuantWeight | None = None) -> CpuWeight | None:
        """Pack a matrix; `quantized` is how it was stored, if it was quantized. None if there is no layout for it."""
        if fits(weight):
            few = four_bits(weight) or eight_bits(weight) if quantized is None else four_bits_of(quantized)
            if few is not None and needed_isa().has_dots(few.kind):
                return cls(few)
            has_faster = few is not None and not needed_isa().has_tiles and bf16_flag() and can_pack(weight)
            return cls(_reordered(weight) if has_faster else packed_half(weight), few)
        if weight.dtype == torch.bfloat16 and not bf16_flag():
            # Without instructions for bfloat16, a product in it takes several times as long.
            weight = weight.float()
        return cls(_reordered(weight)) if can_pack(weight) else None

    @property
    def of_few(self) -> Packed | None:
        """The matrix that few rows are multiplied with; None if kernels.cpu does not support it."""
        if self._few is not None:
            return self._few
        return self._wide if isinstance(self._wide, Packed) else None

    def product(self, rows: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
        """Return rows W^T + bias + residual, [M, out] for rows [M, in]."""
        packed = self._few if self._few is not None and rows.shape[0] <= MAX_ROWS else self._wide
        if not isinstance(packed, Packed):
            return _by_onednn(rows, packed, bias, residual)
        total = tile_product(rows if rows.stride(1) == 1 else rows.contiguous(), packed)
        for added in (bias, residual):
            if added is not None:
                total += added
        return total

    def to_float32(self, rows: Tensor) -> Tensor:
        """Return rows W^T in float32, computed by tiles without rounding in between. Weights of four or eight bits, if
        there are any, serve any number of rows, so that a row's result does not depend on the rows beside it."""
        rows = rows.contiguous()
        if (packed := self.of_few) is not None:
            return tile_product(rows, packed, torch.float32)
        return self.product(rows, None).float()


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN's packed product, which torch.compile's CPU backend uses too, supports this weight here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _reordered(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def _by_onednn(rows: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Return the sum, rounded once whatever the number of rows: few rows must give the same as among many."""
    count, missing = rows.shape[0], max(MIN_ROWS - rows.shape[0], 0)
    if rows.dtype != weight.dtype:
        added = (None if part is None else part.to(weight.dtype) for part in (bias, residual))
        return _by_onednn(rows.to(weight.dtype), weight, *added).to(rows.dtype)
    rows = functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    if residual is None:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        residual = functional.pad(residual, (0, 0, 0, missing)) if missing else residual
        product = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, weight, bias, "add")
    return product[:count]


def four_bits(weight: Tensor) -> Packed | None:
    """Pack a bfloat16 weight [out, in] that lies on 16 even levels in each group: a third of the bytes to read.

    Codes and scales stand for the same weights, up to the rounding of wide weights to bfloat16 and of scales to
    float16. Returns None for any other weight.
    """
    found = None if _levels(weight[:_SAMPLE]) is None else _levels(weight)
    return None if found is None else packed_four(*found)


def four_bits_of(quantized: QuantWeight) -> Packed | None:
    """Pack the int4 codes of a checkpoint; None for others.

    W[n, k] = scales[n, g] * (codes[n, k] - 8) + middles[n, g] in each group g of GROUP columns.
    """
    if quantized.kind != "int4" or quantized.group % GROUP or quantized.span > 1:
        return None
    codes = unpacked(quantized.codes, quantized.kind, quantized.piece).to(torch.int32)
    scales = quantized.scales.float().t()
    zeros = 8.0 if quantized.zeros is None else quantized.zeros.float().t()
    groups = quantized.group // GROUP
    return packed_four(codes, *(part.repeat_interleave(groups, 1) for part in (scales, scales * (8.0 - zeros))))


def _levels(weight: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return codes, scales and middles (see packed_four) of a weight, if its groups span 16 even levels each.

    Both ends of such levels are always in use, because they were laid between a group's least and largest weight.
    """
    places = weight.float().view(weight.shape[0], -1, GROUP)
    least, largest = places.aminmax(dim=2, keepdim=True)
    scales = ((largest - least) / _STEPS).clamp_(min=torch.finfo(torch.float32).tiny)
    codes = places.sub_(least).div_(scales).round()
    below, above = places.sub_(codes).aminmax(dim=2, keepdim=True)
    off = torch.maximum(above, below.neg_()).mul_(scales)
    if bool((off > _ROUNDING * torch.maximum(least.abs(), largest.abs())).any()):
        return None
    middles = least + 8 * scales
    return codes.view(weight.shape).to(torch.int32), scales.squeeze(2), middles.squeeze(2)

"""Products of few rows, on a CPU, with matrices whose weights were stored in four bits before they were made wide."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.amx import GROUP, TILE, four_bit_product, has_amx, packed_blocks
from kernels.quant_weight import QuantWeight, unpacked

_STEPS = 15
_ROUNDING = 2.0**-7
"""Of bfloat16, twice: by so much of its largest weight may a group's weights lie off its levels."""
_SAMPLE = 16
"""Rows that are looked at before the whole matrix: most have no levels."""


class FourBitProduct:
    """x W^T for up to MAX_ROWS rows x [M, in] in bfloat16, with the weights as codes: a third of the bytes to read.

    Codes and scales say what the wide weights say, up to the rounding of these to bfloat16 and of those to float16. A
    row's result does not depend on the rows beside it.
    """

    def __init__(self, codes: Tensor, scales: Tensor, middles: Tensor) -> None:
        """W[n, k] = scales[n, g] * (codes[n, k] - 8) + middles[n, g], of each group g of as many columns, a multiple of
        GROUP; codes are int32, 0 to 15."""
        groups = codes.shape[1] // GROUP // scales.shape[1]
        scales, middles = scales.repeat_interleave(groups, 1), middles.repeat_interleave(groups, 1)
        self._num_out, self._blocks = codes.shape[0], packed_blocks(codes, scales, middles)

    @classmethod
    def of(cls, weight: Tensor) -> FourBitProduct | None:
        """For a bfloat16 weight [out, in] that lies on 16 even levels in each group; None for any other."""
        if not _is_served(weight) or _levels(weight[:_SAMPLE]) is None:
            return None
        found = _levels(weight)
        return None if found is None else cls(*found)

    @classmethod
    def of_quantized(cls, quantized: QuantWeight, weight: Tensor) -> FourBitProduct | None:
        """For int4 codes of a checkpoint, of which `weight` is the wide matrix."""
        if quantized.kind != "int4" or quantized.group % GROUP or quantized.span > 1 or not _is_served(weight):
            return None
        codes = unpacked(quantized.codes, quantized.kind, quantized.piece).to(torch.int32)
        scales = quantized.scales.float().t()
        zeros = 8.0 if quantized.zeros is None else quantized.zeros.float().t()
        return cls(codes, scales, scales * (8.0 - zeros))

    def __call__(self, rows: Tensor) -> Tensor:
        """[M, in] to [M, out]."""
        return four_bit_product(rows if rows.stride(1) == 1 else rows.contiguous(), self._blocks, self._num_out)


def _is_served(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return False
    return weight.shape[0] % TILE == 0 and weight.shape[1] % GROUP == 0 and has_amx()


def _levels(weight: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Codes, scales and middles (see FourBitProduct) of a weight, if its groups span 16 even levels each.

    Both ends of such levels are always taken: they were laid between a group's least and largest weight.
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

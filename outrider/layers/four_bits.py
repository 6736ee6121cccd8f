"""Products of few rows, on a CPU, with matrices whose weights were stored in four bits before they were made wide."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant_weight import QuantWeight, unpacked

GROUP = 32
"""Neighbouring columns of a row that share their levels, as in GGUF's Q4_1."""
_GROUPS = (32, 64, 128, 256)
"""What torch's product takes."""
MAX_ROWS = 4
"""The product makes its weights wide once for every four rows. SmolLM2-135M's layers on one core of a Xeon with AMX, ms
for 1, 2, 4, 5 and 8 rows: 9.5, 11.5, 14.8, 22.6 and 28, where oneDNN's product in bfloat16 took 21 to 34 for any."""
_STEPS = 15
_ROUNDING = 2.0**-7
"""Of bfloat16, twice: by so much of its largest weight may a group's weights lie off its levels."""
_SAMPLE = 16
"""Rows that are looked at before the whole matrix: most have no levels."""


class FourBitProduct:
    """x W^T for rows x [M, in] in bfloat16, with the weights as codes: a quarter of the bytes to read.

    Codes and scales say what the wide weights say, up to the rounding of both to bfloat16; neither product is nearer to
    the checkpoint's.
    """

    def __init__(self, codes: Tensor, scales: Tensor, middles: Tensor) -> None:
        """W[n, k] = scales[n, g] * (codes[n, k] - 8) + middles[n, g], of each group g of columns as many as are in
        _GROUPS; codes are int32, 0 to 15."""
        self._group = codes.shape[1] // scales.shape[1]
        self._codes = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._scales = torch.stack((scales.t(), middles.t()), 2).to(torch.bfloat16).contiguous()

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
        if quantized.kind != "int4" or quantized.group not in _GROUPS or quantized.span > 1 or not _is_served(weight):
            return None
        codes = unpacked(quantized.codes, quantized.kind, quantized.piece).to(torch.int32)
        scales = quantized.scales.float().t()
        zeros = 8.0 if quantized.zeros is None else quantized.zeros.float().t()
        return cls(codes, scales, scales * (8.0 - zeros))

    def __call__(self, rows: Tensor) -> Tensor:
        """[M, in] to [M, out], M at most MAX_ROWS where it is to be the fastest."""
        rows = rows.contiguous()
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._codes, self._group, self._scales)
        return product


def _is_served(weight: Tensor) -> bool:
    """Whether torch has the product here. Without AMX products in bfloat16 round alike for any number of rows."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or weight.shape[0] % 16 or weight.shape[1] % GROUP:
        return False
    return hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu") and torch.cpu._is_amx_tile_supported()


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

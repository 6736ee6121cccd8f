"""Rows as products of kernels.cpu read them, and weights that are multiplied in four bits."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.cpu.isa import Isa
from kernels.cpu.layout import GROUP


def rows_as_read(rows: Tensor, kind: str, isa: Isa) -> Tensor:
    """float64 rows [M, K], rounded to 8 bits a group where four-bit weights are multiplied as bytes."""
    wide = rows.double()
    if not (kind == "four" and isa.has_dots(kind)):
        return wide
    # In float32, as kernels.cpu.tiles.integers_of: half of the largest lies between two integers.
    groups = rows.float().view(len(rows), -1, GROUP)
    largest = groups.abs().amax(2, keepdim=True)
    inverse = largest.new_tensor(127.0).div(largest)  # `127 / largest` would multiply 127 by a rounded reciprocal
    return ((groups * inverse).round().double() * (largest * (1 / 127))).view(wide.shape)


def round_to_four_bits(folder: Path) -> None:
    """Round the matrices of a checkpoint's layers to 16 even levels in each group of columns."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if "layers" in name and weight.ndim == 2:
            groups = weight.float().view(len(weight), -1, GROUP)
            least, most = groups.aminmax(dim=2, keepdim=True)
            steps = (most - least) / 15
            tensors[name] = (((groups - least) / steps).round() * steps + least).view(weight.shape).to(weight.dtype)
    save_file(tensors, file, {"format": "pt"})

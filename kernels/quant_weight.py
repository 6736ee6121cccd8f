"""Matrices with eight or four bits a weight, in the layout that our kernels read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_PIECE = 128
"""Most columns of a piece."""
MIN_PIECE = 32
"""Fewest columns of a piece that kernels take: two tensor core instructions."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class QuantWeight:
    """W [num_out, size] as codes and scales: W[n, k] = scale * (code[n, k] - zero).

    Leading dimensions (of stacked experts) are allowed wherever no kernel is called.

    `kind`: "fp8" (e4m3), "int8" (-128 to 127), "int4" (0 to 15) or "mxfp4" (e2m1).
    `codes`: int16 [num_out, size / n], words of n codes: 2 of eight bits, 4 of four. Word e of piece t of a row
    (`piece` columns each) holds, from its lowest bits on, the codes of columns piece * t + i * piece / n + e for i = 0
    .. n - 1. So the i-th codes of consecutive words belong to consecutive columns.
    `scales`: bfloat16, float16 or float32 [groups, rows of scales]; the scale of W[n, k] is at [k // group, n // span].
    `group` is `size` and `span` 1 if a row has one scale.
    `zeros`: uint8, of the shape of `scales`, for int4; None means 8 everywhere.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    group: int
    piece: int
    span: int = 1
    zeros: Tensor | None = None

    @property
    def per_word(self) -> int:
        """Number of codes in a word."""
        return codes_per_word(self.kind)

    @property
    def streams(self) -> bool:
        """Whether kernels can read these weights directly; others must be dequantized."""
        return self.kind != "int8" and self.piece >= MIN_PIECE

    def check_streams(self) -> None:
        """Raise ValueError unless kernels can read these weights directly."""
        if not self.streams:
            raise ValueError(f"{self.kind} weights of {self.size} columns in groups of {self.group}; make them wide")

    @property
    def num_out(self) -> int:
        """Number of rows of the matrix."""
        return self.codes.shape[-2]

    @property
    def size(self) -> int:
        """Number of columns of the matrix."""
        return self.codes.shape[-1] * self.per_word

    def for_streaming(self) -> QuantWeight:
        """Return these weights with float32 scales: four bytes each, they are copied ahead of their use like codes."""
        return replace(self, scales=self.scales.float())

    def of_expert(self, expert: int) -> QuantWeight:
        """Return one of the stacked matrices, as views."""
        zeros = None if self.zeros is None else self.zeros[expert]
        return replace(self, codes=self.codes[expert], scales=self.scales[expert], zeros=zeros)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [num_out, size] in `dtype`, computed in float32 and rounded once."""
        values = _values(unpacked(self.codes, self.kind, self.piece), self.kind)
        if self.kind == "int4":
            values -= 8.0 if self.zeros is None else self._spread(self.zeros)
        return values.mul_(self._spread(self.scales)).to(dtype)

    def _spread(self, grouped: Tensor) -> Tensor:
        """Expand `grouped` to a value for each weight, float32 [num_out, size]; a view if a row has only one value."""
        by_row = grouped.float().transpose(-1, -2)
        if self.span > 1:
            by_row = by_row.repeat_interleave(self.span, -2)[..., : self.num_out, :]
        if self.group == self.size:
            return by_row
        return by_row.repeat_interleave(self.group, -1)[..., : self.size]


def codes_per_word(kind: str) -> int:
    """Return the number of codes in a 16-bit word."""
    return 2 if kind in ("fp8", "int8") else 4


def piece_of(kind: str, size: int, group: int) -> int:
    """Return the `piece` of a QuantWeight with rows of `size` columns: the largest that fits. ValueError: none fits."""
    piece, per_word = MAX_PIECE, codes_per_word(kind)
    while piece >= per_word:
        if size % piece == 0 and group % piece == 0:
            return piece
        piece //= 2
    raise ValueError(f"{kind} rows of {size} columns in groups of {group}; {per_word} must divide both")


def packed(codes: Tensor, kind: str, piece: int) -> Tensor:
    """Pack codes uint8 [..., size] into words, int16 [..., size / codes of a word]."""
    parts = codes.unflatten(-1, (-1, codes_per_word(kind), piece // codes_per_word(kind))).unbind(-2)
    halves = parts if len(parts) == 2 else (parts[0] | parts[1] << 4, parts[2] | parts[3] << 4)
    return torch.stack([half.flatten(-2) for half in halves], -1).flatten(-2).view(torch.int16)


def unpacked(words: Tensor, kind: str, piece: int) -> Tensor:
    """Return the codes that `packed` turned into `words`."""
    halves = words.view(torch.uint8).unflatten(-1, (-1, piece // codes_per_word(kind), 2)).unbind(-1)
    parts = halves if codes_per_word(kind) == 2 else (halves[0] & 15, halves[0] >> 4, halves[1] & 15, halves[1] >> 4)
    return torch.stack(parts, -2).flatten(-3)


def _values(codes: Tensor, kind: str) -> Tensor:
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    if kind == "int8":
        return codes.view(torch.int8).float()
    if kind == "int4":
        return codes.float()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)
    values: Tensor = table[codes.int()]
    return values


def reordered(weight: QuantWeight, order: Tensor) -> QuantWeight:
    """Return the matrix with its rows permuted by `order`, int64 [num_out]."""
    weight = _scales_of_rows(weight)
    zeros = None if weight.zeros is None else weight.zeros[..., order]
    return replace(weight, codes=weight.codes[..., order, :], scales=weight.scales[..., order], zeros=zeros)


def joined(parts: list[QuantWeight]) -> QuantWeight:
    """Stack matrices of one kind and group vertically. Scales of row blocks become scales of rows where necessary."""
    if any(part.num_out % part.span for part in parts[:-1]):
        parts = [_scales_of_rows(part) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        eight = [torch.full_like(part.scales, 8, dtype=torch.uint8) for part in parts]
        given = zip(parts, eight, strict=True)
        zeros = torch.cat([other if part.zeros is None else part.zeros for part, other in given], -1)
    dtypes = {part.scales.dtype for part in parts}
    common = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts], -2),
        scales=torch.cat([part.scales.to(common) for part in parts], -1),
        zeros=zeros,
    )


def _scales_of_rows(weight: QuantWeight) -> QuantWeight:
    scales = weight.scales.repeat_interleave(weight.span, -1)[..., : weight.num_out]
    return replace(weight, scales=scales.contiguous(), span=1)

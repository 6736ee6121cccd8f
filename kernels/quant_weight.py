"""Matrices of eight or four bits a weight, as our kernels read them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

MAX_HALF = 64
"""Columns between the two nibbles of a byte, at most."""
MIN_COLUMNS = 32
"""Columns of a 4-bit matrix come in multiples of it: two products of the tensor cores' least depth."""
ROW_GROUP = 128
"""Columns of a row that share a scale where rows are multiplied in e4m3."""
E4M3_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class QuantWeight:
    """W [num_out, size] as codes and scales: W[n, k] = scale * (code[n, k] - zero).

    Leading dimensions, of stacked experts, are allowed wherever no kernel is called.

    `kind`: "fp8" (e4m3), "int4" (0 to 15) or "mxfp4" (e2m1).
    `codes`: fp8 float8_e4m3fn [num_out, size]; four bits uint8 [num_out, size / 2]: byte j of a row's piece t, of
    `half` bytes, is column 2 * half * t + j in its low nibble and 2 * half * t + half + j in its high one.
    `scales`: bfloat16, float16 or float32 [groups, rows of scales]: that of W[n, k] is [k // group, n // span].
    `group` is `size` and `span` 1 where a row has one scale.
    `zeros`: uint8, of the shape of `scales`, for int4; None is 8 everywhere.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    group: int
    span: int = 1
    zeros: Tensor | None = None
    half: int = 0

    @property
    def num_out(self) -> int:
        """Rows of the matrix."""
        return self.codes.shape[-2]

    @property
    def size(self) -> int:
        """Columns of the matrix."""
        return self.codes.shape[-1] * (2 if self.half else 1)

    @property
    def num_bytes(self) -> int:
        """Memory of it all."""
        return sum(tensor.nbytes for tensor in (self.codes, self.scales, self.zeros) if tensor is not None)

    def to(self, device: torch.device | str) -> QuantWeight:
        """The same on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros)

    def of_expert(self, expert: int) -> QuantWeight:
        """One of stacked matrices, as views."""
        zeros = None if self.zeros is None else self.zeros[expert]
        return replace(self, codes=self.codes[expert], scales=self.scales[expert], zeros=zeros)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """[num_out, size] in `dtype`, computed in float32 and rounded once."""
        values = self.codes.float() if self.kind == "fp8" else _values(unpacked(self.codes, self.half), self.kind)
        if self.kind == "int4":
            values -= 8.0 if self.zeros is None else self._spread(self.zeros)
        return values.mul_(self._spread(self.scales)).to(dtype)

    def _spread(self, grouped: Tensor) -> Tensor:
        """A value for each weight, float32 [num_out, size]; a view where a row has but one."""
        by_row = grouped.float().transpose(-1, -2)
        if self.span > 1:
            by_row = by_row.repeat_interleave(self.span, -2)[..., : self.num_out, :]
        if self.group == self.size:
            return by_row
        return by_row.repeat_interleave(self.group, -1)[..., : self.size]


def nibble_half(size: int, group: int) -> int:
    """`half` of QuantWeight for rows of `size` columns. ValueError: `size` or `group` is no multiple of 16."""
    half = MAX_HALF
    while half >= MIN_COLUMNS // 2:
        if size % (2 * half) == 0 and group % half == 0:
            return half
        half //= 2
    raise ValueError(f"4-bit rows of {size} columns in groups of {group}; both must be multiples of {MIN_COLUMNS // 2}")


def packed(codes: Tensor, half: int) -> Tensor:
    """uint8 codes [..., size] below 16 as bytes [..., size / 2]."""
    pieces = torch.unflatten(codes, -1, (-1, 2, half))
    return (pieces[..., 0, :] | pieces[..., 1, :] << 4).flatten(-2)


def unpacked(bytes_: Tensor, half: int) -> Tensor:
    """What `packed` was given."""
    pieces = torch.unflatten(bytes_, -1, (-1, 1, half))
    return torch.cat((pieces & 15, pieces >> 4), -2).flatten(-3)


def _values(codes: Tensor, kind: str) -> Tensor:
    if kind == "int4":
        return codes.float()
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)
    values: Tensor = table[codes.int()]
    return values


def reordered(weight: QuantWeight, order: Tensor) -> QuantWeight:
    """The matrix with its rows in another order, int64 [num_out]."""
    weight = _scales_of_rows(weight)
    zeros = None if weight.zeros is None else weight.zeros[..., order]
    return replace(weight, codes=weight.codes[..., order, :], scales=weight.scales[..., order], zeros=zeros)


def rounded_rows(rows: Tensor) -> Tensor:
    """Rows [M, size] as products with fp8 weights see them: in e4m3, by a scale of each ROW_GROUP columns; float32."""
    size = rows.shape[1]
    padded = torch.nn.functional.pad(rows.float(), (0, -size % ROW_GROUP))
    groups = torch.unflatten(padded, 1, (-1, ROW_GROUP))
    top = groups.abs().amax(2, keepdim=True).clamp(min=1e-12)
    # A division of tensors: torch makes a number over a tensor a reciprocal and a product.
    codes = (groups * (torch.full_like(top, E4M3_MAX) / top)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return (codes.float() * (top / E4M3_MAX)).flatten(1)[:, :size]


def joined(parts: list[QuantWeight]) -> QuantWeight:
    """Matrices of one kind and group below each other. Scales of row blocks become scales of rows where they must."""
    if any(part.num_out % part.span for part in parts[:-1]):
        parts = [_scales_of_rows(part) for part in parts]
    zeros = None
    if any(part.zeros is not None for part in parts):
        eight = [torch.full_like(part.scales, 8, dtype=torch.uint8) for part in parts]
        zeros = torch.cat([_or(part.zeros, other) for part, other in zip(parts, eight, strict=True)], -1)
    dtypes = {part.scales.dtype for part in parts}
    common = dtypes.pop() if len(dtypes) == 1 else torch.float32
    return replace(
        parts[0],
        codes=torch.cat([part.codes.view(torch.uint8) for part in parts], -2).view(parts[0].codes.dtype),
        scales=torch.cat([part.scales.to(common) for part in parts], -1),
        zeros=zeros,
    )


def stacked(parts: list[QuantWeight]) -> QuantWeight:
    """Matrices of one kind, shape and group as experts: with their number in front."""
    if any(part.zeros is not None for part in parts):
        parts = [
            replace(part, zeros=_or(part.zeros, torch.full_like(part.scales, 8, dtype=torch.uint8))) for part in parts
        ]
    common = parts[0].scales.dtype if len({part.scales.dtype for part in parts}) == 1 else torch.float32
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return replace(
        parts[0],
        codes=torch.stack([part.codes.view(torch.uint8) for part in parts]).view(parts[0].codes.dtype),
        scales=torch.stack([part.scales.to(common) for part in parts]),
        zeros=torch.stack(zeros) if zeros else None,
    )


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor


def _scales_of_rows(weight: QuantWeight) -> QuantWeight:
    scales = weight.scales.repeat_interleave(weight.span, -1)[..., : weight.num_out]
    return replace(weight, scales=scales.contiguous(), span=1)

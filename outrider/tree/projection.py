"""The matrix that a drafter multiplies the target's features with first, and which verify may multiply instead."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from outrider.errors import InvalidRequestError
from outrider.protocol.speculation import FEATURE_ITEM_BYTES, MAX_FEATURE_BYTES, ProjectionPart

PROJECTED = -1
"""Number that stands for the product with a projection where layers are numbered."""

MAX_PROJECTION_BYTES = 512 << 20
"""A larger matrix is not offered: three layers of 8192 values in bfloat16 make 384 MiB."""


@dataclass(frozen=True, slots=True)
class Projection:
    """A matrix [num_columns, hidden_size for each of `layers`] of `dtype` in `data`, row by row, little-endian.

    Two are the same if their names are.
    """

    layers: tuple[int, ...] = field(compare=False)
    num_columns: int = field(compare=False)
    dtype: str = field(compare=False)
    data: bytes | bytearray | memoryview = field(compare=False, repr=False)
    name: str
    """SHA-256 of all the rest, hexadecimal: see `name_projection`."""


def name_projection(layers: tuple[int, ...], num_columns: int, dtype: str, data: bytes | memoryview) -> str:
    """The name of a projection."""
    digest = _begin_name(layers, num_columns, dtype)
    digest.update(data)
    return digest.hexdigest()


class ProjectionReader:
    """Checks the parts of the projection that a draft has offered, and keeps none of them."""

    def __init__(self, layers: tuple[int, ...], hidden_size: int, num_columns: int, name: str) -> None:
        self._layers = layers
        self._width = len(layers) * hidden_size
        self._num_columns = num_columns
        self._name = name
        self._dtype = ""
        self._num_bytes = 0
        self._filled = 0
        self._digest = hashlib.sha256()

    def take(self, part: ProjectionPart) -> bool:
        """Whether the projection is whole with this part. Raises InvalidRequestError for one that is not the next."""
        if not self._dtype:
            self._begin(part)
        if (part.num_columns, part.dtype) != (self._num_columns, self._dtype):
            raise InvalidRequestError("projection", "is not what was offered, or changes its form")
        end = part.offset + len(part.data)
        if part.offset != self._filled or not 0 < len(part.data) <= MAX_FEATURE_BYTES or end > self._num_bytes:
            raise InvalidRequestError(
                "projection.data", f"{len(part.data)} bytes at {part.offset} do not follow {self._filled} bytes"
            )
        self._digest.update(part.data)
        self._filled = end
        if end < self._num_bytes:
            return False
        if self._digest.hexdigest() != self._name:
            raise InvalidRequestError("projection", "is not the one that was offered: its SHA-256 differs")
        return True

    def _begin(self, part: ProjectionPart) -> None:
        if part.dtype not in FEATURE_ITEM_BYTES:
            raise InvalidRequestError("projection.dtype", f"{part.dtype[:32]!r} is not known")
        self._dtype = part.dtype
        self._num_bytes = self._num_columns * self._width * FEATURE_ITEM_BYTES[part.dtype]
        if self._num_bytes > MAX_PROJECTION_BYTES:
            raise InvalidRequestError("projection", f"has {self._num_bytes} bytes, at most {MAX_PROJECTION_BYTES}")
        self._digest = _begin_name(self._layers, self._num_columns, part.dtype)


def _begin_name(layers: tuple[int, ...], num_columns: int, dtype: str) -> hashlib._Hash:
    head = f"{','.join(map(str, layers))} {num_columns} {dtype}\n"
    return hashlib.sha256(head.encode())

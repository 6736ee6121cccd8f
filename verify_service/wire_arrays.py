"""Arrays in frames: the bytes of their numbers, in the order of the machine. Torch-free."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.generic)


def bytes_of(array: NDArray[Any], dtype: type[np.generic]) -> bytes:
    """The numbers of an array as `dtype`."""
    return array.astype(dtype, copy=False).tobytes()


def array_of(data: bytes, dtype: type[Number]) -> NDArray[Number]:
    """Numbers of `dtype`; the array cannot be written to. Raises ValueError for half a number."""
    return np.frombuffer(data, dtype)

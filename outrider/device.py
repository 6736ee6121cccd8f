"""What services need of a device without touching kernels: its clock, its size, and numbers put there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.launch import num_processors
from kernels.pages import stamp

__all__ = ["num_processors", "put", "stamp"]

Numbers = Sequence[int] | NDArray[np.int32] | NDArray[np.float32]


def put(values: Numbers, device: torch.device, into: Tensor | None = None) -> Tensor:
    """A list of int32 numbers, or an array, as a tensor on `device` (or `into` a part of one); waits for nothing.

    From pinned memory that torch keeps until the copy is done: whether a copy from other memory is, when the call
    returns, differs between systems.
    """
    source = torch.from_numpy(np.asarray(values, None if isinstance(values, np.ndarray) else np.int32))
    if device.type == "cuda":
        source = source.pin_memory()
    return source.to(device, non_blocking=True) if into is None else into.copy_(source, non_blocking=True)

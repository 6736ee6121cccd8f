"""What services need of a device without touching kernels: which one, its clock, its size, and numbers put there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.carveout import share_l1
from kernels.launch import num_processors
from kernels.pages import stamp
from outrider.errors import ConfigError

__all__ = ["choose_device", "num_processors", "put", "share_l1", "stamp"]

Numbers = Sequence[int] | NDArray[np.int32] | NDArray[np.float32]


def choose_device(name: str) -> torch.device:
    """The device for "auto", "cpu", "cuda" or "cuda:N". Raises ConfigError for one that is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f'--device: {name!r} is no device; use "auto", "cpu", "cuda" or "cuda:0"') from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f'--device: {device.type} is not supported; use "auto", "cpu", "cuda" or "cuda:0"')
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(f"--device: {name} is not there; torch sees {count} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def put(values: Numbers, device: torch.device, into: Tensor | None = None) -> Tensor:
    """A list of int32 numbers, or an array, as a tensor on `device` (or `into` a part of one); waits for nothing.

    From pinned memory that torch keeps until the copy is done: whether a copy from other memory is, when the call
    returns, differs between systems.
    """
    source = torch.from_numpy(np.asarray(values, None if isinstance(values, np.ndarray) else np.int32))
    if device.type == "cuda":
        source = source.pin_memory()
    return source.to(device, non_blocking=True) if into is None else into.copy_(source, non_blocking=True)

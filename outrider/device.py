"""What services need of a device without touching kernels: which one, its number format, and numbers put there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.compiling import share_l1
from kernels.kv_cache import stamp
from kernels.launch import num_processors
from outrider.errors import ConfigError
from outrider.logs import get_logger

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


log = get_logger(__name__)

_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(name: str, device: torch.device | None = None, checkpoint: str = "") -> torch.dtype:
    """The torch dtype for "float32", "bfloat16", "float16" or "auto".

    "auto" takes the half format of the `checkpoint` on a GPU, bfloat16 if it has none. On a CPU it takes bfloat16 where
    there are instructions for it and a matrix-vector product proves faster with it; bfloat16 without such
    instructions is emulated, and slower than float32.
    """
    if name != "auto":
        return _DTYPES[name]
    if device is not None and device.type != "cpu":
        return torch.float16 if checkpoint == "float16" else torch.bfloat16
    if not _BF16_FLAGS & _cpu_flags():
        log.info("dtype float32: this CPU has no bfloat16 instructions")
        return torch.float32
    full, half = (_product_seconds(dtype) for dtype in (torch.float32, torch.bfloat16))
    chosen = torch.bfloat16 if half < full else torch.float32
    log.info("dtype %s: a product takes %.2f ms in float32, %.2f ms in bfloat16", chosen, full * 1e3, half * 1e3)
    return chosen


def _cpu_flags() -> set[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    words = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return set(words.split())


@torch.inference_mode()
def _product_seconds(dtype: torch.dtype) -> float:
    """Fastest of some products [1, 2048] x [2048, 8192], whose weights do not fit the caches near a core."""
    weight = torch.randn(8192, 2048).to(dtype)
    row = torch.randn(1, 2048).to(dtype)
    times = []
    for _ in range(6):
        start = time.perf_counter()
        torch.nn.functional.linear(row, weight)
        times.append(time.perf_counter() - start)
    return min(times)

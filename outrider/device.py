"""Device helpers for services, so that they need not touch kernels: choose a device and dtype, copy numbers there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.compiling import share_l1
from kernels.cpu.isa import best_isa, cpu_flags
from kernels.kv_cache import stamp
from kernels.launch import num_processors
from outrider.errors import ConfigError
from outrider.logs import get_logger

__all__ = ["choose_device", "num_processors", "put", "share_l1", "stamp"]

Numbers = Sequence[int] | NDArray[Any]


def choose_device(name: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:N". Raises ConfigError if it does not exist."""
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
        raise ConfigError(f"--device: {name} does not exist; torch sees {count} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def put(values: Numbers, device: torch.device, into: Tensor | None = None) -> Tensor:
    """Copy int32 numbers or an array to a new tensor on `device`, or `into` one, without waiting; return the tensor.

    The source is pinned memory, which torch keeps until the copy is done. With other memory, systems differ in
    whether the copy is done when the call returns.
    """
    source = torch.from_numpy(np.asarray(values, None if isinstance(values, np.ndarray) else np.int32))
    if device.type == "cuda":
        source = source.pin_memory()
    return source.to(device, non_blocking=True) if into is None else into.copy_(source, non_blocking=True)


log = get_logger(__name__)

_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Names in /proc/cpuinfo of instructions for bfloat16 products; the last one is ARM's."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(name: str, device: torch.device | None = None, checkpoint: str = "") -> torch.dtype:
    """Return the torch dtype for "float32", "bfloat16", "float16" or "auto"; log the choice for "auto" and its reason.

    "auto" depends only on the hardware and on `checkpoint` (its dtype), so that every start on a machine chooses alike.
    On a GPU it is the checkpoint's half-precision format, or bfloat16 if it has none. On a CPU it is bfloat16 if
    kernels.cpu multiplies with it, or if the CPU has instructions for it that oneDNN uses. On other CPUs it is
    float32, because bfloat16 would be emulated, which is slower.
    """
    if name != "auto":
        return DTYPES[name]
    if device is not None and device.type != "cpu":
        chosen = torch.float16 if checkpoint == "float16" else torch.bfloat16
        why = f"the checkpoint is {checkpoint}" if checkpoint else "the checkpoint names no format"
    else:
        chosen, why = cpu_dtype()
    log.info("dtype auto: %s (%s); --dtype chooses another", str(chosen).removeprefix("torch."), why)
    return chosen


def cpu_dtype() -> tuple[torch.dtype, str]:
    """Return the faster dtype on this CPU, and the reason."""
    if (isa := best_isa()) is not None:
        return torch.bfloat16, f"this CPU has {isa.name}"
    found = bf16_flag()
    if not found:
        return torch.float32, "this CPU has no bfloat16 instructions"
    if not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.float32, f"this CPU has {found}, and this build of torch does not use it"
    return torch.bfloat16, f"this CPU has {found}"


def bf16_flag() -> str:
    """Return the name of this CPU's instructions for bfloat16 products; empty if it has none."""
    return next((flag for flag in _BF16_FLAGS if flag in cpu_flags()), "")


def check_fp8(device: torch.device, what: str) -> None:
    """Raise ConfigError, with a message that begins with `what`, for a GPU without fp8 numbers."""
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        found = ".".join(map(str, capability))
        raise ConfigError(f"{what} needs a GPU of compute capability 8.9 or higher; this one has {found}")


@contextmanager
def out_of_memory(what: str, fix: str) -> Iterator[None]:
    """Turn running out of memory while allocating `what` into a ConfigError that suggests `fix`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = torch.cuda.mem_get_info()[0]
        raise ConfigError(f"the GPU has no memory for {what}: {gib(free)} are free; {fix}") from error
    except MemoryError as error:
        raise ConfigError(f"this machine has no memory for {what}: {error}; {fix}") from error


def gib(size: int) -> str:
    """Format a number of bytes for messages."""
    return f"{size / 2**30:.1f} GiB"

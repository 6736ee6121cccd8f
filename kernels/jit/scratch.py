"""Device memory that programs of one launch use to meet."""

from __future__ import annotations

import torch
from torch import Tensor

_MIN_FLOATS = 1 << 22
_MIN_COUNTERS = 1 << 14
_floats: dict[torch.device, list[Tensor]] = {}
_counters: dict[torch.device, list[Tensor]] = {}


def scratch(device: torch.device, num_floats: int, num_counters: int) -> tuple[Tensor, Tensor]:
    """float32 [>= num_floats] of any content, and int32 [>= num_counters] of zeros that each launch leaves as zeros.

    One pair a device: only launches that follow each other in stream order may use it. Both grow when more is asked
    for; what was given out before stays valid, since CUDA graphs hold its address.

    Raises:
        RuntimeError: it would have to grow while a CUDA graph is captured.
    """
    floats = _grown(_floats, device, max(num_floats, _MIN_FLOATS), torch.float32)
    return floats, _grown(_counters, device, max(num_counters, _MIN_COUNTERS), torch.int32)


def _grown(held: dict[torch.device, list[Tensor]], device: torch.device, size: int, dtype: torch.dtype) -> Tensor:
    buffers = held.setdefault(device, [])
    if not buffers or buffers[-1].numel() < size:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a kernel needs more scratch memory: run it once before it is captured in a CUDA graph")
        buffers.append(torch.zeros(size, dtype=dtype, device=device))
    return buffers[-1]

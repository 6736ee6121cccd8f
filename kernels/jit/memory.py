"""Helpers around launches: scratch memory that programs share, prefetches into L2, order of overlapping launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_MIN_FLOATS = 1 << 22
_MIN_COUNTERS = 1 << 14
_floats: dict[torch.device, list[Tensor]] = {}
_counters: dict[torch.device, list[Tensor]] = {}


def scratch(device: torch.device, num_floats: int, num_counters: int) -> tuple[Tensor, Tensor]:
    """Return float32 [>= num_floats] of any content, and int32 [>= num_counters], zero before and after each launch.

    There is one pair a device: only launches that follow each other in stream order may use it. Both grow when more is
    needed; earlier buffers stay valid, since CUDA graphs hold their addresses.

    Raises:
        RuntimeError: a buffer would have to grow while a CUDA graph is captured.
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


@triton.jit
def release_and_wait(PDL: tl.constexpr):
    """If PDL, let the next launch begin, then wait until the previous one has ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def wait_and_release(PDL: tl.constexpr):
    """If PDL, wait until the previous launch has ended, then let the next one begin."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


LINE = tl.constexpr(128)
"""Bytes of a cache line."""


@triton.jit
def prefetch_rows(
    weight, first_row, num_rows, column, stop, size, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BULK: tl.constexpr
):
    """Prefetch columns [column, min(column + COLUMNS, stop)) of ROWS rows from first_row of weight [num_rows, size].

    BULK needs a Hopper GPU and rows of a multiple of 16 bytes. COLUMNS is a power of two. Does not wait.
    """
    itemsize: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    rows = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1)
    starts = weight + rows.to(tl.int64) * size
    if BULK:
        length = tl.maximum(tl.minimum(stop - column, COLUMNS) * itemsize // 16 * 16, 16)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; // $0",
            "=r,l,r",
            [(starts + column).to(tl.int64), length],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        step: tl.constexpr = LINE // itemsize
        columns = tl.minimum(column + tl.arange(0, COLUMNS // step) * step, stop - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0",
            "=r,l",
            [(starts[:, None] + columns[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_lines(pointers):
    """Prefetch the cache line at each pointer."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )

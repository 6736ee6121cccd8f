"""New entries of page tables, and the time at which the GPU took them."""

from __future__ import annotations

import time

from torch import Tensor

from kernels.launch import use_triton
from kernels.reference import pages as reference


def update_pages(page_tables: Tensor, updates: Tensor) -> None:
    """page_tables[row, place] = page for each row of `updates`.

    Args:
        page_tables: int32 [R, P], written.
        updates: int32 [U, 3] of (row, place, page); a negative row means nothing. No two name the same place.
    """
    if use_triton(page_tables):
        from kernels.jit import pages

        pages.update_pages(page_tables, updates)
    else:
        reference.update_pages(page_tables, updates)


def stamp(times: Tensor, index: int) -> None:
    """times[index] = the GPU's clock in nanoseconds when all work queued before is done; int64 [N].

    On a CPU, and in the interpreter, the host's clock.
    """
    if times.is_cuda:
        from kernels.jit import pages

        pages.stamp(times, index)
    else:
        times[index] = time.perf_counter_ns()

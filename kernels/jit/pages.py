"""See kernels.pages."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_updates"])
def _update(page_tables, updates, num_updates, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_updates
    row = tl.load(updates + index * 3, mask=inside, other=-1)
    place = tl.load(updates + index * 3 + 1, mask=inside, other=0)
    page = tl.load(updates + index * 3 + 2, mask=inside, other=0)
    tl.store(page_tables + row.to(tl.int64) * stride + place, page, mask=inside & (row >= 0))


@triton.jit
def _stamp(times, index):
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(times + index, now)


def update_pages(page_tables: Tensor, updates: Tensor) -> None:
    """As kernels.pages.update_pages."""
    count = updates.shape[0]
    _update[(triton.cdiv(count, 128),)](page_tables, updates, count, page_tables.stride(0), BLOCK=128, num_warps=4)


def stamp(times: Tensor, index: int) -> None:
    """As kernels.pages.stamp."""
    _stamp[(1,)](times, index, num_warps=1)

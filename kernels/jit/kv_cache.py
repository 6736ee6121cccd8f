"""Triton kernels of kernels.kv_cache."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import power_of_two
from kernels.sampling_state import RoundTokens


@triton.jit(do_not_specialize=["num_updates", "num_sinks"])
def _update(page_tables, updates, shifts, num_updates, stride, num_sinks, SHIFTED: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_updates
    row = tl.load(updates + index * 3, mask=inside, other=-1)
    place = tl.load(updates + index * 3 + 1, mask=inside, other=0)
    page = tl.load(updates + index * 3 + 2, mask=inside, other=0)
    put = inside & (row >= 0)
    if SHIFTED:
        shift = tl.load(shifts + row, mask=put, other=0)
        place -= shift
        put = put & ((shift == 0) | (place >= num_sinks))
    tl.store(page_tables + row.to(tl.int64) * stride + place, page, mask=put)


@triton.jit
def _stamp(times, index):
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(times + index, now)


def update_pages(page_tables: Tensor, updates: Tensor, shifts: Tensor | None, num_sinks: int) -> None:
    """Implement kernels.kv_cache.update_pages."""
    count = updates.shape[0]
    _update[(triton.cdiv(count, 128),)](
        page_tables, updates, shifts, count, page_tables.stride(0), num_sinks,
        SHIFTED=shifts is not None, BLOCK=128, num_warps=4,
    )  # fmt: skip


def stamp(times: Tensor, index: int) -> None:
    """Implement kernels.kv_cache.stamp."""
    _stamp[(1,)](times, index, num_warps=1)


@triton.jit
def _logical_slots(table, places, inside, PAGE: tl.constexpr):
    pages = tl.load(table + places // PAGE, mask=inside, other=0)
    return pages.to(tl.int64) * PAGE + places % PAGE


@triton.jit
def _compact(
    k, v, first, cached_len, table_rows, page_tables, root, accepted, num_tokens,
    table_stride, accepted_stride, num_tokens_stride, layer_stride,
    WIDTH: tl.constexpr, PART: tl.constexpr, PAGE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Grid (rows, layers, parts of a slot). No element belongs to two programs."""
    row = tl.program_id(0)
    start = tl.load(root + row)
    moves = tl.load(num_tokens + row * num_tokens_stride) - 1
    if (start < 0) | (moves <= 0):
        return
    begin = tl.load(first + row)
    cached = tl.load(cached_len + row)
    table = page_tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    element = tl.program_id(2) * PART + tl.arange(0, PART)
    for done in tl.range(0, moves, NODES):
        node = done + tl.arange(0, NODES)
        inside = node < moves
        old = tl.load(accepted + row * accepted_stride + node, mask=inside, other=0) - begin
        new = start - begin + 1 + node
        inside = inside & (old != new)
        source = layer + _logical_slots(table, cached + old, inside, PAGE) * WIDTH
        target = layer + _logical_slots(table, cached + new, inside, PAGE) * WIDTH
        both = inside[:, None] & (element < WIDTH)[None, :]
        keys = tl.load(k + source[:, None] + element[None, :], mask=both)
        values = tl.load(v + source[:, None] + element[None, :], mask=both)
        # One thread's source may be another's target, so all are read before any is written.
        tl.debug_barrier()
        tl.store(k + target[:, None] + element[None, :], keys, mask=both)
        tl.store(v + target[:, None] + element[None, :], values, mask=both)


def compact(
    k: Tensor, v: Tensor, tokens: RoundTokens, page_tables: Tensor, accepted: Tensor, num_tokens: Tensor, page_size: int
) -> None:
    """Implement kernels.kv_cache.compact."""
    layers, _, kv_heads, dim = k.shape
    width = kv_heads * dim
    part = min(power_of_two(width), 1024)
    _compact[(tokens.root.shape[0], layers, triton.cdiv(width, part))](
        k, v, tokens.first, tokens.cached_len, tokens.table_rows, page_tables, tokens.root, accepted, num_tokens,
        page_tables.stride(0), accepted.stride(0), num_tokens.stride(0), k.stride(0),
        WIDTH=width, PART=part, PAGE=page_size, NODES=8, num_warps=8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_moves"])
def _move(k, v, moves, num_moves, layer_stride, WIDTH: tl.constexpr, PART: tl.constexpr, PAIRS: tl.constexpr):
    """Grid (groups of PAIRS pairs, layers, parts of a slot)."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < num_moves
    source = tl.load(moves + pair * 2, mask=inside, other=-1)
    target = tl.load(moves + pair * 2 + 1, mask=inside, other=-1)
    inside = (source >= 0) & (target >= 0)
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    element = tl.program_id(2) * PART + tl.arange(0, PART)
    both = inside[:, None] & (element < WIDTH)[None, :]
    old = layer + source.to(tl.int64)[:, None] * WIDTH + element[None, :]
    new = layer + target.to(tl.int64)[:, None] * WIDTH + element[None, :]
    keys = tl.load(k + old, mask=both)
    values = tl.load(v + old, mask=both)
    tl.store(k + new, keys, mask=both)
    tl.store(v + new, values, mask=both)


def move(k: Tensor, v: Tensor, moves: Tensor) -> None:
    """Implement kernels.kv_cache.move."""
    layers, _, kv_heads, dim = k.shape
    width = kv_heads * dim
    part = min(power_of_two(width), 1024)
    pairs = 4
    _move[(triton.cdiv(moves.shape[0], pairs), layers, triton.cdiv(width, part))](
        k, v, moves, moves.shape[0], k.stride(0), WIDTH=width, PART=part, PAIRS=pairs, num_warps=4
    )

"""See kernels.compact."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import power_of_two


@triton.jit
def _slots(table, places, inside, PAGE: tl.constexpr):
    pages = tl.load(table + places // PAGE, mask=inside, other=0)
    return pages.to(tl.int64) * PAGE + places % PAGE


@triton.jit
def _compact(
    k, v, first, cached_len, table_rows, page_tables, root, accepted, num_tokens,
    table_stride, accepted_stride, num_tokens_stride, layer_stride,
    WIDTH: tl.constexpr, PART: tl.constexpr, PAGE: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """Grid (rows, layers, parts of a slot). Programs share no element."""
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
        source = layer + _slots(table, cached + old, inside, PAGE) * WIDTH
        target = layer + _slots(table, cached + new, inside, PAGE) * WIDTH
        both = inside[:, None] & (element < WIDTH)[None, :]
        keys = tl.load(k + source[:, None] + element[None, :], mask=both)
        values = tl.load(v + source[:, None] + element[None, :], mask=both)
        # Another thread's source may be this one's target: all are read before any is written.
        tl.debug_barrier()
        tl.store(k + target[:, None] + element[None, :], keys, mask=both)
        tl.store(v + target[:, None] + element[None, :], values, mask=both)


def compact(
    k: Tensor, v: Tensor, first: Tensor, cached_len: Tensor, table_rows: Tensor, page_tables: Tensor,
    root: Tensor, accepted: Tensor, num_tokens: Tensor, page_size: int,
) -> None:  # fmt: skip
    """As kernels.compact.compact."""
    layers, _, kv_heads, dim = k.shape
    width = kv_heads * dim
    part = min(power_of_two(width), 1024)
    _compact[(root.shape[0], layers, triton.cdiv(width, part))](
        k, v, first, cached_len, table_rows, page_tables, root, accepted, num_tokens,
        page_tables.stride(0), accepted.stride(0), num_tokens.stride(0), k.stride(0),
        WIDTH=width, PART=part, PAGE=page_size, NODES=8, num_warps=8,
    )  # fmt: skip

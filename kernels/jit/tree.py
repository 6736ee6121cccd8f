"""See kernels.tree."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import power_of_two


@triton.jit(do_not_specialize=["num_tokens"])
def _expand(
    parents, rows, first, cached_len, table_rows, page_tables, positions, slots, mask, path,
    num_tokens, table_stride,
    PAGE: tl.constexpr, WORDS: tl.constexpr, WORDS_PAD: tl.constexpr, DEPTH: tl.constexpr, DEPTH_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < num_tokens
    row = tl.load(rows + token, mask=inside, other=-1)
    real = row >= 0
    begin = tl.load(first + row, mask=real, other=0)
    cached = tl.load(cached_len + row, mask=real, other=0)
    table_row = tl.load(table_rows + row, mask=real, other=0)
    depth = tl.load(positions + token, mask=real, other=-1) - cached
    logical = cached + token - begin
    page = tl.load(page_tables + table_row.to(tl.int64) * table_stride + logical // PAGE, mask=real, other=0)
    tl.store(slots + token, tl.where(real, page * PAGE + logical % PAGE, -1), mask=inside)

    word = tl.arange(0, WORDS_PAD)
    step = tl.arange(0, DEPTH_PAD)
    words = tl.zeros([TOKENS, WORDS_PAD], tl.int32)
    places = tl.full([TOKENS, DEPTH_PAD], -1, tl.int32)
    ancestor = token
    for walked in tl.range(0, tl.max(depth, 0) + 1):
        alive = real & (walked <= depth) & (ancestor >= 0)
        place = ancestor - begin
        bit = tl.where(alive, 1 << (place & 31), 0)
        words |= tl.where((place >> 5)[:, None] == word[None, :], bit[:, None], 0)
        here = (step[None, :] == (depth - walked)[:, None]) & alive[:, None]
        places = tl.where(here, place[:, None], places)
        ancestor = tl.load(parents + ancestor, mask=alive, other=-1)
    tl.store(mask + token[:, None] * WORDS + word[None, :], words, mask=inside[:, None] & (word < WORDS)[None, :])
    tl.store(path + token[:, None] * DEPTH + step[None, :], places, mask=inside[:, None] & (step < DEPTH)[None, :])


def expand_tree(
    parents: Tensor, rows: Tensor, first: Tensor, cached_len: Tensor, table_rows: Tensor, page_tables: Tensor,
    positions: Tensor, page_size: int, slots: Tensor, mask: Tensor, path: Tensor,
) -> None:  # fmt: skip
    """As kernels.tree.expand_tree."""
    tokens = 8
    _expand[(triton.cdiv(parents.shape[0], tokens),)](
        parents, rows, first, cached_len, table_rows, page_tables, positions, slots, mask, path,
        parents.shape[0], page_tables.stride(0),
        PAGE=page_size, WORDS=mask.shape[1], WORDS_PAD=power_of_two(mask.shape[1]),
        DEPTH=path.shape[1], DEPTH_PAD=power_of_two(path.shape[1]), TOKENS=tokens, num_warps=4,
    )  # fmt: skip

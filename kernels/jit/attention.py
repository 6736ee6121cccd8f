"""See kernels.attention.tree_attention without `path`."""

from __future__ import annotations

from math import e, log2

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import TileConfig, lone_splits, max_tiles, power_of_two, usual_tiles
from kernels.jit.online import find_tile, key_slots, nothing_seen, online, prefetch_tile, see_context
from kernels.jit.splits import LONG, add_up, put, split_steps, tile_tokens, workspace
from kernels.launch import num_processors


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "lone_splits"])
def attend_tiles(
    q, k_cache, v_cache, page_tables, table_rows, first, cached_len, mask, output, partials, stats,
    num_rows, num_tokens, lone_splits, table_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ROWS_PAD: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr,
    SPAN: tl.constexpr, LONGEST: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads, splits). A tile is ROWS // GROUP tokens of a row times the GROUP heads of a kv head.

    Keys are numbered through: the context, then the row's own tokens.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    LINE: tl.constexpr = KV_HEADS * DIM
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)

    # Lengths and page tables come from before the launch in front of this one: no need to wait for them.
    row, place = find_tile(first, num_rows, num_tokens, tl.program_id(0), TOKENS, ROWS_PAD)
    real = row < num_rows
    row_first = tl.load(first + row, mask=row <= num_rows, other=0)
    row_end = tl.load(first + row + 1, mask=real, other=0)
    row_end = tl.where(row == num_rows, num_tokens, row_end)
    cached = tl.load(cached_len + row, mask=real, other=0)
    table_row = tl.load(table_rows + row, mask=real, other=0)
    table = page_tables + table_row.to(tl.int64) * table_stride
    total = tl.where(real, cached + row_end - row_first, 0)
    span = split_steps(tl.cdiv(total, KEYS), num_splits, lone_splits, SPAN, LONGEST) * KEYS
    low = split * span
    high = tl.minimum(low + span, total)
    # Tiles whose keys are all context, then those that hold keys of the round too.
    open_end = tl.minimum(high, cached // KEYS * KEYS)
    last = tl.maximum(total - 1, 0)
    # Idle splits need not wait, but one of each tile does: when this launch ends, those in front have ended.
    if (split > 0) & (low >= high):
        return

    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    if PREFETCH:
        # Keys and values of the context are old, too. One tile of queries asks for all that share them.
        old_end = tl.minimum(high, cached)
        if (low < old_end) & (place == 0):
            prefetch_tile(k_head, v_head, table, low, old_end, last, LINE, DIM, KEYS, PAGE, ON_GPU)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (row > num_rows) | ((low >= high) & (real | (not DIRECT))):
        return

    token = row_first + place * TOKENS + lanes // GROUP
    row_ok = (lanes < TOKENS * GROUP) & (token < row_end)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    top, mass, acc = nothing_seen(ROWS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + dims[None, :], mask=row_ok[:, None], other=0.0)
    if WORDS <= 2:
        words_low = tl.load(mask + token * WORDS, mask=row_ok, other=0)
        words_high = tl.load(mask + token * WORDS + WORDS - 1, mask=row_ok, other=0)

    top, mass, acc = see_context(
        tile_q, k_head, v_head, table, low, open_end, last, top, mass, acc, scale,
        LINE, DIM, KEYS, PAGE, STAGES, ON_GPU,
    )  # fmt: skip

    for start in tl.range(tl.maximum(low, open_end), high, KEYS, num_stages=2):
        keys = start + tl.arange(0, KEYS)
        inside = keys < total
        where = key_slots(table, keys, last, PAGE, ON_GPU)[:, None] * LINE + dims[None, :]
        tile_k = tl.load(k_head + where, mask=inside[:, None], other=0.0)
        tile_v = tl.load(v_head + where, mask=inside[:, None], other=0.0)
        own = keys - cached
        if WORDS <= 2:
            words = tl.where((own < 32)[None, :], words_low[:, None], words_high[:, None])
        else:
            asked = (row_ok[:, None] & (own >= 0)[None, :]) & inside[None, :]
            words = tl.load(mask + token[:, None] * WORDS + (own >> 5)[None, :], mask=asked, other=0)
        bits = (words >> (own & 31)[None, :]) & 1
        seen = ((bits != 0) | (own < 0)[None, :]) & inside[None, :]
        products = tl.where(seen, tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee"), float("-inf"))
        top, mass, acc = online(products, tile_v, top, mass, acc, scale)

    # Padding tokens come here with nothing summed, and get zeros.
    put(output, partials, stats, at, top, mass, acc, num_tokens * HEADS, split, row_ok & (real | DIRECT), DIM, DIRECT)


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, mask: Tensor,
    out: Tensor,
    page_size: int, num_splits: int, scale: float, pdl: bool, max_row_tokens: int, config: TileConfig,
) -> None:  # fmt: skip
    """As kernels.attention.tree_attention without `path`."""
    num_tokens, num_heads, dim = q.shape
    num_rows, kv_heads = cached_len.shape[0], k_cache.shape[1]
    tokens = tile_tokens(config, num_heads, kv_heads)
    # Where keys are split, `combine` clears padding.
    tiles = max_tiles(num_tokens, num_rows, max_row_tokens, tokens, padding=num_splits == 1)
    usual = usual_tiles(num_tokens, num_rows, max_row_tokens, tokens) * kv_heads
    lone = lone_splits(usual, config.rows, num_splits, num_processors(q))
    line = dim * q.element_size()
    partials, stats = workspace(q, num_splits)
    attend_tiles[(tiles, kv_heads, num_splits)](
        q, k_cache, v_cache, page_tables, table_rows, first, cached_len, mask,
        out, partials, stats, num_rows, num_tokens, lone, page_tables.stride(0), scale * log2(e),
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page_size,
        ROWS=config.rows, KEYS=config.keys, ROWS_PAD=power_of_two(num_rows + 1), WORDS=mask.shape[1],
        STAGES=config.num_stages, SPAN=config.span, LONGEST=LONG, DIRECT=num_splits == 1, PDL=pdl,
        PREFETCH=pdl and config.prefetch and line >= 128, ON_GPU=q.is_cuda,
        num_warps=config.num_warps, maxnreg=config.max_registers, launch_pdl=pdl,
    )  # fmt: skip
    if num_splits > 1:
        add_up(partials, stats, out, first, cached_len, None, num_splits, lone, config, num_heads, pdl)

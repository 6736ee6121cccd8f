"""See kernels.branches."""

from __future__ import annotations

from math import e, log2

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import SMALL_ROWS, TileConfig, lone_splits, max_tiles, power_of_two, usual_tiles
from kernels.jit.online import find_row, find_tile, key_slots, nothing_seen, online, prefetch_tile, read, see_context
from kernels.jit.splits import add_up, put, split_steps, tile_tokens, workspace
from kernels.launch import num_processors

# Tree slots that a token looks at in a step: more than nearly all of them have ancestors.
BRANCH_KEYS = 32
# Steps of a split after which all of them are used: up to there half as many are faster, for their sum is.
LONG_CONTEXT = 2


@triton.jit(do_not_specialize=["num_rows"])
def _list(
    mask, first, table_rows, page_tables, slots, lens, num_rows, table_stride, base,
    WORDS: tl.constexpr, LANES: tl.constexpr, PAGE: tl.constexpr, ROWS_PAD: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,). A lane is a tree slot."""
    token = tl.program_id(0)
    row = find_row(first, num_rows, token, ROWS_PAD)
    real = row < num_rows
    lanes = tl.arange(0, LANES)
    words = tl.load(mask + token * WORDS + (lanes >> 5), mask=(lanes < WORDS * 32) & real, other=0)
    seen = (words >> (lanes & 31)) & 1
    place = tl.cumsum(seen, 0) - 1
    table_row = tl.load(table_rows + row, mask=real, other=0)
    logical = base + lanes
    page = tl.load(page_tables + table_row.to(tl.int64) * table_stride + logical // PAGE, mask=seen != 0, other=0)
    tl.store(slots + token * (WORDS * 32) + place, page * PAGE + logical % PAGE, mask=seen != 0)
    tl.store(lens + token, tl.sum(seen, 0))


@triton.jit
def _attend_branch(
    q, k_head, v_head, branch, count, partials, stats, token, kv_head, num_tokens, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """The heads of a kv head of one token, and the `count` KV slots at `branch`: the first part of its sum."""
    keys = tl.arange(0, KEYS)
    last = tl.maximum(count - 1, 0)
    slots = read(branch + tl.minimum(keys, last), ON_GPU).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes
    top, mass, acc = nothing_seen(ROWS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + dims[None, :], mask=(lanes < GROUP)[:, None], other=0.0)
    # Nearly always once: there is nothing to pipeline.
    for start in tl.range(0, count, KEYS, num_stages=1):
        where = slots[:, None] * LINE + dims[None, :]
        inside = start + keys < count
        tile_k = tl.load(k_head + where, mask=inside[:, None], other=0.0)
        tile_v = tl.load(v_head + where, mask=inside[:, None], other=0.0)
        slots = read(branch + tl.minimum(start + KEYS + keys, last), ON_GPU).to(tl.int64)
        products = tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee")
        products = tl.where(inside[None, :], products, float("-inf"))
        top, mass, acc = online(products, tile_v, top, mass, acc, scale)
    put(partials, partials, stats, at, top, mass, acc, num_tokens * HEADS, token * 0, lanes < GROUP, DIM, False)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles", "num_splits", "lone_splits"])
def attend_branches(
    q, k_cache, v_cache, page_tables, table_rows, first, cached_len, branches, lens, partials, stats,
    num_rows, num_tokens, num_tiles, num_splits, lone_splits, table_stride, branch_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ROWS_PAD: tl.constexpr, STAGES: tl.constexpr, SPAN: tl.constexpr,
    LONGEST: tl.constexpr, BRANCH_ROWS: tl.constexpr, BRANCH_KEYS: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, then tiles times splits; kv heads).

    A program has a token's branch, or a split of the context for a tile: ROWS // GROUP tokens of a row times the GROUP
    heads of a kv head.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    LINE: tl.constexpr = KV_HEADS * DIM
    kv_head = tl.program_id(1)
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    # Lists, lengths and page tables come from before the launch in front of this one: no need to wait for them.
    if tl.program_id(0) < num_tokens:
        own = tl.program_id(0)
        count = tl.load(lens + own)
        _attend_branch(
            q, k_head, v_head, branches + own * branch_stride, count, partials, stats, own, kv_head, num_tokens,
            scale, HEADS, GROUP, LINE, DIM, BRANCH_ROWS, BRANCH_KEYS, PDL, ON_GPU,
        )  # fmt: skip
        return

    tile = (tl.program_id(0) - num_tokens) % num_tiles
    split = (tl.program_id(0) - num_tokens) // num_tiles
    row, place = find_tile(first, num_rows, num_tokens, tile, TOKENS, ROWS_PAD)
    real = row < num_rows
    row_first = tl.load(first + row, mask=real, other=0)
    row_end = tl.load(first + row + 1, mask=real, other=0)
    cached = tl.load(cached_len + row, mask=real, other=0)
    table_row = tl.load(table_rows + row, mask=real, other=0)
    table = page_tables + table_row.to(tl.int64) * table_stride
    span = split_steps(tl.cdiv(cached, KEYS), num_splits, lone_splits, SPAN, LONGEST) * KEYS
    low = split * span
    high = tl.minimum(low + span, cached)
    # Nobody waits for idle programs: those of tokens have all waited when this launch ends.
    if low >= high:
        return

    last = cached - 1
    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    # Keys and values are old, too. One tile of queries asks for all that share them.
    if PREFETCH and place == 0:
        prefetch_tile(k_head, v_head, table, low, high, last, LINE, DIM, KEYS, PAGE, ON_GPU)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    token = row_first + place * TOKENS + lanes // GROUP
    row_ok = (lanes < TOKENS * GROUP) & (token < row_end)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    top, mass, acc = nothing_seen(ROWS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + dims[None, :], mask=row_ok[:, None], other=0.0)
    full_end = tl.minimum(high, cached // KEYS * KEYS)
    top, mass, acc = see_context(
        tile_q, k_head, v_head, table, low, full_end, last, top, mass, acc, scale,
        LINE, DIM, KEYS, PAGE, STAGES, ON_GPU,
    )  # fmt: skip
    if full_end < high:
        keys = full_end + tl.arange(0, KEYS)
        inside = keys < high
        where = key_slots(table, keys, last, PAGE, ON_GPU)[:, None] * LINE + dims[None, :]
        tile_k = tl.load(k_head + where, mask=inside[:, None], other=0.0)
        tile_v = tl.load(v_head + where, mask=inside[:, None], other=0.0)
        products = tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee")
        products = tl.where(inside[None, :], products, float("-inf"))
        top, mass, acc = online(products, tile_v, top, mass, acc, scale)
    put(partials, partials, stats, at, top, mass, acc, num_tokens * HEADS, split + 1, row_ok, DIM, False)


def list_branches(
    mask: Tensor, first: Tensor, table_rows: Tensor, page_tables: Tensor, base: int, page_size: int,
    slots: Tensor, lens: Tensor,
) -> None:  # fmt: skip
    """As kernels.branches.list_branches."""
    num_tokens, words = mask.shape
    num_rows = table_rows.shape[0]
    _list[(num_tokens,)](
        mask, first, table_rows, page_tables, slots, lens, num_rows, page_tables.stride(0), base,
        WORDS=words, LANES=power_of_two(words * 32), PAGE=page_size, ROWS_PAD=power_of_two(num_rows + 1), num_warps=4,
    )  # fmt: skip


def branch_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, slots: Tensor, lens: Tensor,
    out: Tensor, page_size: int, num_splits: int, scale: float, pdl: bool, max_row_tokens: int, config: TileConfig,
) -> None:  # fmt: skip
    """As kernels.branches.branch_attention."""
    num_tokens, num_heads, dim = q.shape
    num_rows, kv_heads = cached_len.shape[0], k_cache.shape[1]
    tokens = tile_tokens(config, num_heads, kv_heads)
    tiles = max_tiles(num_tokens, num_rows, max_row_tokens, tokens)
    usual = usual_tiles(num_tokens, num_rows, max_row_tokens, tokens) * kv_heads
    lone = lone_splits(usual, config.rows, num_splits, num_processors(q))
    if config.rows > SMALL_ROWS:
        lone = max(lone // 2, 1)
    partials, stats = workspace(q, num_splits + 1)
    attend_branches[(num_tokens + tiles * num_splits, kv_heads)](
        q, k_cache, v_cache, page_tables, table_rows, first, cached_len, slots, lens, partials, stats,
        num_rows, num_tokens, tiles, num_splits, lone, page_tables.stride(0), slots.shape[1], scale * log2(e),
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page_size,
        ROWS=config.rows, KEYS=config.keys, ROWS_PAD=power_of_two(num_rows + 1), STAGES=config.num_stages,
        SPAN=config.span, LONGEST=LONG_CONTEXT,
        BRANCH_ROWS=max(SMALL_ROWS, power_of_two(num_heads // kv_heads)), BRANCH_KEYS=BRANCH_KEYS,
        PDL=pdl, PREFETCH=pdl and config.prefetch and dim * q.element_size() >= 128, ON_GPU=q.is_cuda,
        num_warps=config.num_warps, maxnreg=config.max_registers, launch_pdl=pdl,
    )  # fmt: skip
    where = (partials, stats, out, first, cached_len, None)
    add_up(*where, num_splits, lone, config, num_heads, pdl, longest=LONG_CONTEXT, branches=True)

"""See kernels.attention.tree_attention with `path`: the deterministic mode."""

from __future__ import annotations

from math import e, log2

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import TileConfig, max_tiles, power_of_two
from kernels.jit.online import find_tile, key_slots, nothing_seen, online, read
from kernels.jit.splits import add_up, put, tile_tokens, workspace

# Tokens that share a tile; they go along their paths one after the other.
PATH_TOKENS = 4


@triton.jit
def steps_of(num_tiles, split, num_splits, SPAN: tl.constexpr):
    """How many of the first `num_tiles` key tiles are a split's in the deterministic mode: see nth_tile."""
    turns = num_tiles // (SPAN * num_splits)
    rest = num_tiles - turns * SPAN * num_splits - split * SPAN
    return turns * SPAN + tl.minimum(tl.maximum(rest, 0), SPAN)


@triton.jit
def nth_tile(n, split, num_splits, SPAN: tl.constexpr):
    """The n-th key tile of a split: SPAN tiles in a row, then again when all splits had theirs."""
    return (n // SPAN * num_splits + split) * SPAN + n % SPAN


@triton.jit
def _path_slots(table, steps, keys, cached, last, PAGE: tl.constexpr, DEPTH: tl.constexpr, ON_GPU: tl.constexpr):
    """KV slots of absolute positions, behind the context those to which a path leads; and which of them there are."""
    own = keys - cached
    place = read(steps + tl.minimum(tl.maximum(own, 0), DEPTH - 1), ON_GPU)
    there = (own < 0) | ((own < DEPTH) & (place >= 0))
    keys = tl.where(own >= 0, cached + tl.maximum(place, 0), keys)
    return key_slots(table, keys, last, PAGE, ON_GPU), there


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def attend_paths(
    q, k_cache, v_cache, page_tables, table_rows, first, cached_len, path, output, partials, stats,
    num_rows, num_tokens, table_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ROWS_PAD: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    SPAN: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads, splits). A tile is TOKENS tokens of a row times the GROUP heads of a kv head.

    Key tiles lie at absolute positions, and which split takes one follows from that position. Those of context alone
    are the same for all tokens of the row. Behind, every token goes along its own path while all keys are hidden from
    the others, which leaves their sums as they are: a token's result is the same whoever shares its tile.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)

    row, place = find_tile(first, num_rows, num_tokens, tl.program_id(0), TOKENS, ROWS_PAD)
    real = row < num_rows
    row_first = tl.load(first + row, mask=row <= num_rows, other=0)
    row_end = tl.load(first + row + 1, mask=real, other=0)
    row_end = tl.where(row == num_rows, num_tokens, row_end)
    cached = tl.load(cached_len + row, mask=real, other=0)
    table_row = tl.load(table_rows + row, mask=real, other=0)
    table = page_tables + table_row.to(tl.int64) * table_stride
    last = tl.maximum(cached + row_end - row_first - 1, 0)

    tile_first = row_first + place * TOKENS
    members = tile_first + tl.arange(0, ROWS)
    member_ok = (tl.arange(0, ROWS) < TOKENS) & (members < row_end) & real
    marks = tl.load(path + members[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :], mask=member_ok[:, None], other=-1)
    deepest = tl.max(tl.sum((marks >= 0).to(tl.int32), 1), 0)
    shared = steps_of(tl.where(real, cached // KEYS, 0), split, num_splits, SPAN)
    # Steps behind the shared ones that the token of the longest path needs; the others take as many.
    own_steps = steps_of(tl.where(real, tl.cdiv(cached + deepest, KEYS), 0), split, num_splits, SPAN) - shared
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if (row > num_rows) | ((shared + own_steps == 0) & (real | (not DIRECT))):
        return

    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    token = tile_first + lanes // GROUP
    row_ok = (lanes < TOKENS * GROUP) & (token < row_end)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    top, mass, acc = nothing_seen(ROWS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + dims[None, :], mask=row_ok[:, None], other=0.0)

    ahead = nth_tile(0, split, num_splits, SPAN) * KEYS + tl.arange(0, KEYS)
    slots = key_slots(table, ahead, last, PAGE, ON_GPU)
    for n in tl.range(0, shared, num_stages=STAGES):
        where = slots[:, None] * (KV_HEADS * DIM) + dims[None, :]
        ahead = nth_tile(n + 1, split, num_splits, SPAN) * KEYS + tl.arange(0, KEYS)
        slots = key_slots(table, ahead, last, PAGE, ON_GPU)
        tile_k = tl.load(k_head + where)
        tile_v = tl.load(v_head + where)
        products = tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee")
        top, mass, acc = online(products, tile_v, top, mass, acc, scale)

    ahead = nth_tile(shared, split, num_splits, SPAN) * KEYS + tl.arange(0, KEYS)
    slots, there = _path_slots(table, path + tile_first * DEPTH, ahead, cached, last, PAGE, DEPTH, ON_GPU)
    # Also where there is no step: what is read ahead must lie in the path of a token.
    each = tl.maximum(own_steps, 1)
    for n in tl.range(0, own_steps * tl.minimum(TOKENS, row_end - tile_first), num_stages=STAGES):
        where = slots[:, None] * (KV_HEADS * DIM) + dims[None, :]
        tile_k = tl.load(k_head + where, mask=there[:, None], other=0.0)
        tile_v = tl.load(v_head + where, mask=there[:, None], other=0.0)
        seen = there[None, :] & (lanes // GROUP == n // each)[:, None]
        member = tl.minimum(tile_first + (n + 1) // each, row_end - 1)
        ahead = nth_tile(shared + (n + 1) % each, split, num_splits, SPAN) * KEYS + tl.arange(0, KEYS)
        slots, there = _path_slots(table, path + member * DEPTH, ahead, cached, last, PAGE, DEPTH, ON_GPU)
        products = tl.where(seen, tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee"), float("-inf"))
        top, mass, acc = online(products, tile_v, top, mass, acc, scale)

    put(output, partials, stats, at, top, mass, acc, num_tokens * HEADS, split, row_ok & (real | DIRECT), DIM, DIRECT)


def path_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, path: Tensor, out: Tensor,
    page_size: int, num_splits: int, scale: float, pdl: bool, max_row_tokens: int, config: TileConfig,
) -> None:  # fmt: skip
    """As kernels.attention.tree_attention with `path`."""
    num_tokens, num_heads, dim = q.shape
    num_rows, kv_heads = cached_len.shape[0], k_cache.shape[1]
    tokens = min(tile_tokens(config, num_heads, kv_heads), PATH_TOKENS)
    tiles = max_tiles(num_tokens, num_rows, max_row_tokens, tokens, padding=num_splits == 1)
    partials, stats = workspace(q, num_splits)
    attend_paths[(tiles, kv_heads, num_splits)](
        q, k_cache, v_cache, page_tables, table_rows, first, cached_len, path, out, partials, stats,
        num_rows, num_tokens, page_tables.stride(0), scale * log2(e),
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page_size, TOKENS=tokens,
        ROWS=config.rows, KEYS=config.keys, ROWS_PAD=power_of_two(num_rows + 1), DEPTH=path.shape[1],
        STAGES=config.num_stages, SPAN=config.span, DIRECT=num_splits == 1, PDL=pdl, ON_GPU=q.is_cuda,
        num_warps=config.num_warps, maxnreg=config.max_registers, launch_pdl=pdl,
    )  # fmt: skip
    if num_splits > 1:
        add_up(partials, stats, out, first, cached_len, path, num_splits, num_splits, config, num_heads, pdl)

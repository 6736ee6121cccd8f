"""Triton kernels of kernels.attention: trees of a round, paths of the deterministic mode, prompts."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import ScoreRules, TileConfig, exclusive_splits, max_tiles, mean_row_tiles
from kernels.jit.attention_parts import (
    LONG_SPLIT_STEPS,
    attend_context,
    cap_scores,
    first_seen_step,
    init_softmax,
    key_slots,
    launch_combine,
    launch_options,
    load_ints,
    load_tile_row,
    prefetch_tile,
    score_options,
    scores,
    softmax_step,
    split_steps,
    store_tile,
    tile_tokens,
    workspace,
)
from kernels.jit.memory import wait_and_release
from kernels.launch import num_processors


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "exclusive_splits"])
def attend_tiles(
    q, k_cache, v_cache, page_tables, table_rows, first, cached_len, mask, positions, output, partials, stats,
    num_rows, num_tokens, exclusive_splits, table_stride, scale, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ROWS_PAD: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr,
    SPAN: tl.constexpr, LONGEST: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
    ON_GPU: tl.constexpr, WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads, splits). A tile is ROWS // GROUP tokens of a row times the GROUP heads of a kv head.

    Keys are numbered consecutively: the context, then the row's own tokens.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    LINE: tl.constexpr = KV_HEADS * DIM
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)

    # Lengths and page tables were written before the previous launch, so there is no need to wait for it.
    row, place, row_first, row_end, cached, table = load_tile_row(
        first, cached_len, table_rows, page_tables, table_stride, num_rows, num_tokens, tl.program_id(0),
        TOKENS, ROWS_PAD,
    )  # fmt: skip
    real = row < num_rows
    total = tl.where(real, cached + row_end - row_first, 0)
    begin = first_seen_step(cached, WINDOW, KEYS)
    span = split_steps(tl.cdiv(total, KEYS) - begin, num_splits, exclusive_splits, SPAN, LONGEST) * KEYS
    low = begin * KEYS + split * span
    high = tl.minimum(low + span, total)
    # First tiles whose keys are all context, then tiles that also hold keys of the round.
    open_end = tl.minimum(high, cached // KEYS * KEYS)
    last = tl.maximum(total - 1, 0)
    # Idle splits need not wait, but one split of each tile must, so that previous launches have ended when this one
    # ends.
    if (split > 0) & (low >= high):
        return

    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    if PREFETCH:
        # Keys and values of the context are old, too. One tile of queries prefetches them for all tiles that share
        # them.
        old_end = tl.minimum(high, cached)
        if (low < old_end) & (place == 0):
            prefetch_tile(k_head, v_head, table, low, old_end, last, LINE, DIM, KEYS, PAGE, ON_GPU)
    wait_and_release(PDL)
    if (row > num_rows) | ((low >= high) & (real | (not DIRECT))):
        return

    token = row_first + place * TOKENS + lanes // GROUP
    row_ok = (lanes < TOKENS * GROUP) & (token < row_end)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    top, mass, acc = init_softmax(sinks, kv_head * GROUP + lanes % GROUP, split == 0, ROWS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + dims[None, :], mask=row_ok[:, None], other=0.0)
    position = lanes
    if WINDOW:
        position = tl.load(positions + token, mask=row_ok, other=0)
    if WORDS <= 2:
        words_low = tl.load(mask + token * WORDS, mask=row_ok, other=0)
        words_high = tl.load(mask + token * WORDS + WORDS - 1, mask=row_ok, other=0)

    top, mass, acc = attend_context(
        tile_q, k_head, v_head, table, low, open_end, last, position, top, mass, acc, scale,
        LINE, DIM, KEYS, PAGE, STAGES, ON_GPU, WINDOW, CAP_SCALE,
    )  # fmt: skip

    for start in tl.range(tl.maximum(low, open_end), high, KEYS, num_stages=2):
        keys = start + tl.arange(0, KEYS)
        inside = keys < total
        where = key_slots(table, keys, last, PAGE, ON_GPU)[:, None] * LINE + dims[None, :]
        tile_k = tl.load(k_head + where, mask=inside[:, None], other=0.0).to(tile_q.dtype)
        tile_v = tl.load(v_head + where, mask=inside[:, None], other=0.0).to(tile_q.dtype)
        own = keys - cached
        if WORDS <= 2:
            words = tl.where((own < 32)[None, :], words_low[:, None], words_high[:, None])
        else:
            asked = (row_ok[:, None] & (own >= 0)[None, :]) & inside[None, :]
            words = tl.load(mask + token[:, None] * WORDS + (own >> 5)[None, :], mask=asked, other=0)
        bits = (words >> (own & 31)[None, :]) & 1
        seen = ((bits != 0) | (own < 0)[None, :]) & inside[None, :]
        if WINDOW:
            of_own = tl.load(positions + row_first + own, mask=(own >= 0) & inside, other=0)
            seen = seen & (tl.where(own < 0, keys, of_own)[None, :] > (position - WINDOW)[:, None])
        products = scores(tile_q, tile_k, seen, CAP_SCALE)
        top, mass, acc = softmax_step(products, tile_v, top, mass, acc, scale)

    # Padding tokens have empty sums here, and get zeros.
    store_tile(
        output, partials, stats, at, top, mass, acc, num_tokens * HEADS, split, row_ok & (real | DIRECT), DIM, DIRECT
    )


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, mask: Tensor, positions: Tensor | None,
    out: Tensor, page_size: int, num_splits: int, scale: float, pdl: bool, max_row_tokens: int, config: TileConfig,
    rules: ScoreRules,
) -> None:  # fmt: skip
    """Implement kernels.attention.tree_attention without `path`."""
    num_tokens, num_heads, dim = q.shape
    num_rows, kv_heads = cached_len.shape[0], k_cache.shape[1]
    tokens = tile_tokens(config, num_heads, kv_heads)
    # If keys are split, `combine` clears padding.
    tiles = max_tiles(num_tokens, num_rows, max_row_tokens, tokens, padding=num_splits == 1)
    programs = mean_row_tiles(num_tokens, num_rows, max_row_tokens, tokens) * kv_heads
    exclusive = exclusive_splits(programs, config.rows, num_splits, num_processors(q))
    partials, stats = workspace(q, num_splits)
    attend_tiles[(tiles, kv_heads, num_splits)](
        q, k_cache, v_cache, page_tables, table_rows, first, cached_len, mask, positions,
        out, partials, stats, num_rows, num_tokens, exclusive, page_tables.stride(0), **score_options(rules, scale),
        WORDS=mask.shape[1], SPAN=config.span, LONGEST=LONG_SPLIT_STEPS, DIRECT=num_splits == 1,
        PREFETCH=pdl and dim * k_cache.element_size() >= 128,
        **launch_options(q, k_cache, num_rows, page_size, pdl, config),
    )  # fmt: skip
    if num_splits > 1:
        where = (partials, stats, out, first, cached_len, None)
        launch_combine(*where, num_splits, exclusive, config, num_heads, pdl, rules.window)


# Tokens that share a tile; they follow their paths one after the other.
PATH_TOKENS = 4


@triton.jit
def steps_of(num_tiles, split, num_splits, SPAN: tl.constexpr):
    """Return how many of the first `num_tiles` key tiles belong to a split in the deterministic mode; see nth_tile."""
    turns = num_tiles // (SPAN * num_splits)
    rest = num_tiles - turns * SPAN * num_splits - split * SPAN
    return turns * SPAN + tl.minimum(tl.maximum(rest, 0), SPAN)


@triton.jit
def nth_tile(n, split, num_splits, SPAN: tl.constexpr):
    """Return the n-th key tile of a split: splits take SPAN consecutive tiles each, in turns."""
    return (n // SPAN * num_splits + split) * SPAN + n % SPAN


@triton.jit
def _path_slots(table, steps, keys, cached, last, PAGE: tl.constexpr, DEPTH: tl.constexpr, ON_GPU: tl.constexpr):
    """Return KV slots of absolute positions, along a path past the context, and which of them exist."""
    own = keys - cached
    place = load_ints(steps + tl.minimum(tl.maximum(own, 0), DEPTH - 1), ON_GPU)
    there = (own < 0) | ((own < DEPTH) & (place >= 0))
    keys = tl.where(own >= 0, cached + tl.maximum(place, 0), keys)
    return key_slots(table, keys, last, PAGE, ON_GPU), there


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def attend_paths(
    q, k_cache, v_cache, page_tables, table_rows, first, cached_len, path, output, partials, stats,
    num_rows, num_tokens, table_stride, scale, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ROWS_PAD: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    SPAN: tl.constexpr, DIRECT: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr,
    WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads, splits). A tile is TOKENS tokens of a row times the GROUP heads of a kv head.

    Key tiles lie at absolute positions, which determine their splits. Tiles with only context are the same for all
    tokens of the row. After them, each token follows its own path while its keys are hidden from the others, whose sums
    do not change: a token's result does not depend on the tokens that share its tile.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)

    row, place, row_first, row_end, cached, table = load_tile_row(
        first, cached_len, table_rows, page_tables, table_stride, num_rows, num_tokens, tl.program_id(0),
        TOKENS, ROWS_PAD,
    )  # fmt: skip
    real = row < num_rows
    last = tl.maximum(cached + row_end - row_first - 1, 0)

    tile_first = row_first + place * TOKENS
    members = tile_first + tl.arange(0, ROWS)
    member_ok = (tl.arange(0, ROWS) < TOKENS) & (members < row_end) & real
    marks = tl.load(path + members[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :], mask=member_ok[:, None], other=-1)
    deepest = tl.max(tl.sum((marks >= 0).to(tl.int32), 1), 0)
    shared = steps_of(tl.where(real, cached // KEYS, 0), split, num_splits, SPAN)
    # Steps after the shared ones that the token with the longest path needs; the others take equally many.
    own_steps = steps_of(tl.where(real, tl.cdiv(cached + deepest, KEYS), 0), split, num_splits, SPAN) - shared
    wait_and_release(PDL)
    if (row > num_rows) | ((shared + own_steps == 0) & (real | (not DIRECT))):
        return

    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    token = tile_first + lanes // GROUP
    row_ok = (lanes < TOKENS * GROUP) & (token < row_end)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    top, mass, acc = init_softmax(sinks, kv_head * GROUP + lanes % GROUP, split == 0, ROWS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + dims[None, :], mask=row_ok[:, None], other=0.0)
    hidden_end = lanes
    begin = 0
    if WINDOW:
        # Where each query's window begins; a tile whose keys it hides does not change the sums.
        steps = tl.arange(0, DEPTH)
        marks = tl.load(path + token[:, None] * DEPTH + steps[None, :], mask=row_ok[:, None], other=-1)
        hidden_end = cached + tl.sum((marks >= 0).to(tl.int32), 1) - WINDOW
        begin = steps_of(first_seen_step(cached, WINDOW, KEYS), split, num_splits, SPAN)

    ahead = nth_tile(begin, split, num_splits, SPAN) * KEYS + tl.arange(0, KEYS)
    slots = key_slots(table, ahead, last, PAGE, ON_GPU)
    for n in tl.range(begin, shared, num_stages=STAGES):
        keys = ahead
        where = slots[:, None] * (KV_HEADS * DIM) + dims[None, :]
        ahead = nth_tile(n + 1, split, num_splits, SPAN) * KEYS + tl.arange(0, KEYS)
        slots = key_slots(table, ahead, last, PAGE, ON_GPU)
        tile_k = tl.load(k_head + where).to(tile_q.dtype)
        tile_v = tl.load(v_head + where).to(tile_q.dtype)
        products = cap_scores(tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee"), CAP_SCALE)
        if WINDOW:
            products = tl.where(keys[None, :] >= hidden_end[:, None], products, float("-inf"))
        top, mass, acc = softmax_step(products, tile_v, top, mass, acc, scale)

    ahead = nth_tile(shared, split, num_splits, SPAN) * KEYS + tl.arange(0, KEYS)
    slots, there = _path_slots(table, path + tile_first * DEPTH, ahead, cached, last, PAGE, DEPTH, ON_GPU)
    # At least 1: entries that are read ahead must lie in the path of a token.
    each = tl.maximum(own_steps, 1)
    for n in tl.range(0, own_steps * tl.minimum(TOKENS, row_end - tile_first), num_stages=STAGES):
        where = slots[:, None] * (KV_HEADS * DIM) + dims[None, :]
        tile_k = tl.load(k_head + where, mask=there[:, None], other=0.0).to(tile_q.dtype)
        tile_v = tl.load(v_head + where, mask=there[:, None], other=0.0).to(tile_q.dtype)
        seen = there[None, :] & (lanes // GROUP == n // each)[:, None]
        if WINDOW:
            seen = seen & (ahead[None, :] >= hidden_end[:, None])
        member = tl.minimum(tile_first + (n + 1) // each, row_end - 1)
        ahead = nth_tile(shared + (n + 1) % each, split, num_splits, SPAN) * KEYS + tl.arange(0, KEYS)
        slots, there = _path_slots(table, path + member * DEPTH, ahead, cached, last, PAGE, DEPTH, ON_GPU)
        products = scores(tile_q, tile_k, seen, CAP_SCALE)
        top, mass, acc = softmax_step(products, tile_v, top, mass, acc, scale)

    store_tile(
        output, partials, stats, at, top, mass, acc, num_tokens * HEADS, split, row_ok & (real | DIRECT), DIM, DIRECT
    )


def path_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, path: Tensor, out: Tensor,
    page_size: int, num_splits: int, scale: float, pdl: bool, max_row_tokens: int, config: TileConfig,
    rules: ScoreRules,
) -> None:  # fmt: skip
    """Implement kernels.attention.tree_attention with `path`."""
    num_tokens, num_heads = q.shape[:2]
    num_rows, kv_heads = cached_len.shape[0], k_cache.shape[1]
    tokens = min(tile_tokens(config, num_heads, kv_heads), PATH_TOKENS)
    tiles = max_tiles(num_tokens, num_rows, max_row_tokens, tokens, padding=num_splits == 1)
    partials, stats = workspace(q, num_splits)
    attend_paths[(tiles, kv_heads, num_splits)](
        q, k_cache, v_cache, page_tables, table_rows, first, cached_len, path, out, partials, stats,
        num_rows, num_tokens, page_tables.stride(0), **score_options(rules, scale),
        TOKENS=tokens, DEPTH=path.shape[1], SPAN=config.span, DIRECT=num_splits == 1,
        **launch_options(q, k_cache, num_rows, page_size, pdl, config),
    )  # fmt: skip
    if num_splits > 1:
        where = (partials, stats, out, first, cached_len, path)
        launch_combine(*where, num_splits, num_splits, config, num_heads, pdl, rules.window)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def attend_causal(
    q, k_cache, v_cache, page_tables, table_rows, first, cached_len, output,
    num_rows, num_tokens, table_stride, scale, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ROWS_PAD: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, ON_GPU: tl.constexpr, WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads).

    Every query goes through the key tiles from position 0 on, or from one before its window, so it makes no difference
    where a chunk of the prompt begins: a tile whose keys are all hidden from a query does not change its sums.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    kv_head = tl.program_id(1)
    # The last tiles of a row have the most keys, so they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, place, row_first, row_end, cached, table = load_tile_row(
        first, cached_len, table_rows, page_tables, table_stride, num_rows, num_tokens, tile, TOKENS, ROWS_PAD
    )  # fmt: skip
    real = row < num_rows
    wait_and_release(PDL)
    if row > num_rows:
        return

    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    tile_first = row_first + place * TOKENS
    token = tile_first + lanes // GROUP
    row_ok = (lanes < TOKENS * GROUP) & (token < row_end)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    position = cached + token - row_first
    # Keys below `open_end` are seen by every query of the tile; those from `high` on by none.
    open_end = (cached + tile_first - row_first + 1) // KEYS * KEYS
    high = cached + tl.minimum(tile_first + TOKENS, row_end) - row_first
    open_end = tl.where(real, open_end, 0)
    high = tl.where(real, high, 0)
    top, mass, acc = init_softmax(sinks, kv_head * GROUP + lanes % GROUP, True, ROWS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + dims[None, :], mask=row_ok[:, None], other=0.0)

    last = tl.maximum(high - 1, 0)
    begin = tl.minimum(first_seen_step(cached + tile_first - row_first, WINDOW, KEYS) * KEYS, open_end) if WINDOW else 0
    slots = key_slots(table, begin + tl.arange(0, KEYS), last, PAGE, ON_GPU)
    for start in tl.range(begin, open_end, KEYS, num_stages=STAGES):
        where = slots[:, None] * (KV_HEADS * DIM) + dims[None, :]
        slots = key_slots(table, start + KEYS + tl.arange(0, KEYS), last, PAGE, ON_GPU)
        tile_k = tl.load(k_head + where).to(tile_q.dtype)
        tile_v = tl.load(v_head + where).to(tile_q.dtype)
        products = cap_scores(tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee"), CAP_SCALE)
        if WINDOW:
            seen = (start + tl.arange(0, KEYS))[None, :] > (position - WINDOW)[:, None]
            products = tl.where(seen, products, float("-inf"))
        top, mass, acc = softmax_step(products, tile_v, top, mass, acc, scale)

    for start in tl.range(open_end, high, KEYS, num_stages=STAGES):
        where = slots[:, None] * (KV_HEADS * DIM) + dims[None, :]
        slots = key_slots(table, start + KEYS + tl.arange(0, KEYS), last, PAGE, ON_GPU)
        keys = start + tl.arange(0, KEYS)
        inside = (keys < high)[:, None]
        tile_k = tl.load(k_head + where, mask=inside, other=0.0).to(tile_q.dtype)
        tile_v = tl.load(v_head + where, mask=inside, other=0.0).to(tile_q.dtype)
        seen = keys[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > (position - WINDOW)[:, None])
        products = scores(tile_q, tile_k, seen, CAP_SCALE)
        top, mass, acc = softmax_step(products, tile_v, top, mass, acc, scale)

    # Padding tokens have empty sums here, and get zeros.
    store_tile(output, output, output, at, top, mass, acc, 0, 0, row_ok, DIM, True)


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, out: Tensor,
    page_size: int, scale: float, pdl: bool, max_row_tokens: int, config: TileConfig, rules: ScoreRules,
) -> None:  # fmt: skip
    """Implement kernels.attention.prefill_attention."""
    num_tokens, num_heads = q.shape[:2]
    num_rows, kv_heads = cached_len.shape[0], k_cache.shape[1]
    tokens = tile_tokens(config, num_heads, kv_heads)
    tiles = max_tiles(num_tokens, num_rows, max_row_tokens, tokens, padding=True)
    attend_causal[(tiles, kv_heads)](
        q, k_cache, v_cache, page_tables, table_rows, first, cached_len, out,
        num_rows, num_tokens, page_tables.stride(0), **score_options(rules, scale),
        **launch_options(q, k_cache, num_rows, page_size, pdl, config),
    )  # fmt: skip

"""Triton kernels of kernels.attention.branch_attention."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import (
    RESIDENT_TILES,
    SHORT_SPLITS,
    SMALL_ROWS,
    ScoreRules,
    TileConfig,
    exclusive_splits,
    max_tiles,
    mean_row_tiles,
    short_splits,
)
from kernels.jit.attention_parts import (
    attend_context,
    cap_scores,
    find_row,
    find_tile,
    first_seen_step,
    init_softmax,
    keep_in_registers,
    key_slots,
    launch_combine,
    launch_options,
    load_ints,
    prefetch_tile,
    score_options,
    scores,
    softmax_step,
    split_steps,
    store_tile,
    tile_tokens,
    workspace,
)
from kernels.jit.memory import scratch, wait_and_release
from kernels.launch import ceil_div, num_processors, power_of_two

# Tree slots that a token reads in a step; nearly all tokens have fewer ancestors.
BRANCH_KEYS = 32
# Steps of a split above which all splits are used; up to there half as many are faster, since their sum is.
LONG_CONTEXT_STEPS = 2
_RESIDENT_TILES: tl.constexpr = tl.constexpr(RESIDENT_TILES)
# If fewer programs have the context, one more joins them, which has less of the context than others, or none.
_JOIN_BELOW: tl.constexpr = tl.constexpr(4)


@triton.jit(do_not_specialize=["num_rows"])
def _list_branches(
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
    q, k_head, v_head, branch, count, partials, stats, token, kv_head, num_tokens, scale, sinks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, LINE: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr, CAP_SCALE: tl.constexpr,
):  # fmt: skip
    """Let a token's heads of a kv head attend to the `count` KV slots at `branch`: the first part of the sum."""
    keys = tl.arange(0, KEYS)
    last = tl.maximum(count - 1, 0)
    slots = load_ints(branch + tl.minimum(keys, last), ON_GPU).to(tl.int64)
    wait_and_release(PDL)
    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes
    top, mass, acc = init_softmax(sinks, kv_head * GROUP + lanes % GROUP, True, ROWS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + dims[None, :], mask=(lanes < GROUP)[:, None], other=0.0)
    # Nearly always a single iteration, with nothing to pipeline.
    for start in tl.range(0, count, KEYS, num_stages=1):
        where = slots[:, None] * LINE + dims[None, :]
        inside = start + keys < count
        tile_k = tl.load(k_head + where, mask=inside[:, None], other=0.0)
        tile_v = tl.load(v_head + where, mask=inside[:, None], other=0.0)
        slots = load_ints(branch + tl.minimum(start + KEYS + keys, last), ON_GPU).to(tl.int64)
        products = scores(tile_q, tile_k, inside[None, :], CAP_SCALE)
        top, mass, acc = softmax_step(products, tile_v, top, mass, acc, scale)
    store_tile(partials, partials, stats, at, top, mass, acc, num_tokens * HEADS, token * 0, lanes < GROUP, DIM, False)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_tiles", "num_splits", "exclusive_splits"])
def attend_branches(
    q, k_cache, v_cache, page_tables, table_rows, first, cached_len, branches, lens, partials, stats,
    num_rows, num_tokens, num_tiles, num_splits, exclusive_splits, table_stride, branch_stride, scale, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ROWS_PAD: tl.constexpr, STAGES: tl.constexpr, SPAN: tl.constexpr,
    LONGEST: tl.constexpr, BRANCH_ROWS: tl.constexpr, BRANCH_KEYS: tl.constexpr,
    PDL: tl.constexpr, PREFETCH: tl.constexpr, ON_GPU: tl.constexpr, WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, then tiles times splits; kv heads).

    A program handles a token's branch, or a split of the context for a tile: ROWS // GROUP tokens of a row times the
    GROUP heads of a kv head.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    LINE: tl.constexpr = KV_HEADS * DIM
    kv_head = tl.program_id(1)
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    # Lists, lengths and page tables were written before the previous launch, so there is no need to wait for it.
    if tl.program_id(0) < num_tokens:
        own = tl.program_id(0)
        count = tl.load(lens + own)
        _attend_branch(
            q, k_head, v_head, branches + own * branch_stride, count, partials, stats, own, kv_head, num_tokens,
            scale, sinks, HEADS, GROUP, LINE, DIM, BRANCH_ROWS, BRANCH_KEYS, PDL, ON_GPU, CAP_SCALE,
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
    skipped = first_seen_step(cached, WINDOW, KEYS)
    span = split_steps(tl.cdiv(cached, KEYS) - skipped, num_splits, exclusive_splits, SPAN, LONGEST) * KEYS
    low = skipped * KEYS + split * span
    high = tl.minimum(low + span, cached)
    # Idle programs need not wait: those of tokens have all waited when this launch ends.
    if low >= high:
        return

    last = cached - 1
    lanes = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    # The context's keys and values were, too. One tile of queries prefetches them for all tiles that share them.
    if PREFETCH and place == 0:
        prefetch_tile(k_head, v_head, table, low, high, last, LINE, DIM, KEYS, PAGE, ON_GPU)
    wait_and_release(PDL)

    token = row_first + place * TOKENS + lanes // GROUP
    row_ok = (lanes < TOKENS * GROUP) & (token < row_end)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    top, mass, acc = init_softmax(None, lanes, False, ROWS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + dims[None, :], mask=row_ok[:, None], other=0.0)
    position = lanes
    if WINDOW:
        position = cached - 1 + tl.load(lens + token, mask=row_ok, other=0)
    full_end = tl.minimum(high, cached // KEYS * KEYS)
    top, mass, acc = attend_context(
        tile_q, k_head, v_head, table, low, full_end, last, position, top, mass, acc, scale,
        LINE, DIM, KEYS, PAGE, STAGES, ON_GPU, WINDOW, CAP_SCALE,
    )  # fmt: skip
    if full_end < high:
        keys = full_end + tl.arange(0, KEYS)
        inside = keys < high
        where = key_slots(table, keys, last, PAGE, ON_GPU)[:, None] * LINE + dims[None, :]
        tile_k = tl.load(k_head + where, mask=inside[:, None], other=0.0)
        tile_v = tl.load(v_head + where, mask=inside[:, None], other=0.0)
        products = cap_scores(tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee"), CAP_SCALE)
        seen = inside[None, :]
        if WINDOW:
            seen = seen & (keys[None, :] > (position - WINDOW)[:, None])
        products = tl.where(seen, products, float("-inf"))
        top, mass, acc = softmax_step(products, tile_v, top, mass, acc, scale)
    store_tile(partials, partials, stats, at, top, mass, acc, num_tokens * HEADS, split + 1, row_ok, DIM, False)


def list_branches(
    mask: Tensor, first: Tensor, table_rows: Tensor, page_tables: Tensor, base: int, page_size: int,
    slots: Tensor, lens: Tensor,
) -> None:  # fmt: skip
    """Implement kernels.attention.list_branches."""
    num_tokens, words = mask.shape
    num_rows = table_rows.shape[0]
    _list_branches[(num_tokens,)](
        mask, first, table_rows, page_tables, slots, lens, num_rows, page_tables.stride(0), base,
        WORDS=words, LANES=power_of_two(words * 32), PAGE=page_size, ROWS_PAD=power_of_two(num_rows + 1), num_warps=4,
    )  # fmt: skip


def branch_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, slots: Tensor, lens: Tensor,
    out: Tensor, page_size: int, num_splits: int, scale: float, pdl: bool, max_row_tokens: int, config: TileConfig,
    rules: ScoreRules,
) -> None:  # fmt: skip
    """Implement kernels.attention.branch_attention."""
    num_tokens, num_heads, dim = q.shape
    num_rows, kv_heads = cached_len.shape[0], k_cache.shape[1]
    tokens = tile_tokens(config, num_heads, kv_heads)
    tiles = max_tiles(num_tokens, num_rows, max_row_tokens, tokens)
    programs = mean_row_tiles(num_tokens, num_rows, max_row_tokens, tokens) * kv_heads
    exclusive = exclusive_splits(programs, config.rows, num_splits, num_processors(q))
    if config.rows > SMALL_ROWS:
        exclusive = max(exclusive // 2, 1)
    partials, stats = workspace(q, num_splits + 1)
    attend_branches[(num_tokens + tiles * num_splits, kv_heads)](
        q, k_cache, v_cache, page_tables, table_rows, first, cached_len, slots, lens, partials, stats,
        num_rows, num_tokens, tiles, num_splits, exclusive, page_tables.stride(0), slots.shape[1],
        **score_options(rules, scale), SPAN=config.span, LONGEST=LONG_CONTEXT_STEPS,
        BRANCH_ROWS=max(SMALL_ROWS, power_of_two(num_heads // kv_heads)), BRANCH_KEYS=BRANCH_KEYS,
        PREFETCH=pdl and dim * q.element_size() >= 128,
        **launch_options(q, k_cache, num_rows, page_size, pdl, config),
    )  # fmt: skip
    where = (partials, stats, out, first, cached_len, None)
    launch_combine(
        *where, num_splits, exclusive, config, num_heads, pdl, rules.window, longest=LONG_CONTEXT_STEPS, branches=True
    )


# Short contexts in one launch, for small models, whose launches are short and wait for each other. A program loads the
# first keys and values into registers before the previous launch ends, which writes those of branches, not of contexts.
# Programs that share a tile store their parts in memory, and the last one adds them up.


@triton.jit
def _load_heads(heads, slots, inside, LINE: tl.constexpr, DIM: tl.constexpr):
    """Load keys or values [KEYS, DIM] of a kv head."""
    return tl.load(heads + slots[:, None] * LINE + tl.arange(0, DIM)[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _context(
    k_head, v_head, table, start, cached,
    LINE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Load keys and values of the positions from `start` on, and return which of them exist."""
    keys = start + tl.arange(0, KEYS)
    slots = key_slots(table, keys, tl.maximum(cached - 1, 0), PAGE, ON_GPU)
    inside = keys < cached
    return _load_heads(k_head, slots, inside, LINE, DIM), _load_heads(v_head, slots, inside, LINE, DIM), inside


@triton.jit
def _seen(inside, start, position, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """Return which queries at `position` see which of the `inside` keys from `start` on."""
    seen = inside[None, :]
    if WINDOW:
        seen = seen & ((start + tl.arange(0, KEYS))[None, :] > (position - WINDOW)[:, None])
    return seen


@triton.jit
def _load_ancestors(branches, counts, tokens, begin, stride, MEMBERS: tl.constexpr, ON_GPU: tl.constexpr):
    """Load slots of the ancestors from `begin` on, MEMBERS of each token, and return which of them exist."""
    member = begin + tl.arange(0, counts.shape[0]) % MEMBERS
    at = branches + tokens.to(tl.int64) * stride + tl.minimum(member, tl.maximum(counts - 1, 0))
    return load_ints(at, ON_GPU).to(tl.int64), member < counts


@triton.jit
def _accumulate(weights, tile_v, acc):
    return tl.dot(weights.to(tile_v.dtype), tile_v, acc, input_precision="ieee")


@triton.jit
def _clear_padding(
    out, begin, end, num_tokens, kv_head,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Write zeros for those of TOKENS tokens from `begin` on that are not before `end`."""
    lanes = tl.arange(0, ROWS)
    token = begin + lanes // GROUP
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    unused = (lanes < TOKENS * GROUP) & (token >= end) & (token < num_tokens)
    zeros = tl.zeros([ROWS, DIM], out.dtype.element_ty)
    tl.store(out + at[:, None] * DIM + tl.arange(0, DIM)[None, :], zeros, mask=unused[:, None])


@triton.jit
def _combine_last(
    out, partials, stats, counter, at, row_ok, top, mass, acc, split, used,
    DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store a program's part; the last program of a tile adds up all parts, and resets the counter to zero."""
    ROWS: tl.constexpr = acc.shape[0]
    rows = tl.arange(0, ROWS)
    cells = rows[:, None] * DIM + tl.arange(0, DIM)[None, :]
    tl.store(partials + split * (ROWS * DIM) + cells, acc)
    tl.store(stats + split * (2 * ROWS) + rows, top)
    tl.store(stats + split * (2 * ROWS) + ROWS + rows, mass)
    tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
        tl.store(counter, 0)
        best = tl.load(stats + rows)
        for other in tl.static_range(1, SPLITS):
            there = rows * 0 + other < used
            best = tl.maximum(best, tl.load(stats + other * (2 * ROWS) + rows, mask=there, other=float("-inf")))
        base = tl.where(best == float("-inf"), 0.0, best)
        total = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DIM], tl.float32)
        for other in tl.static_range(SPLITS):
            there = rows * 0 + other < used
            where = stats + other * (2 * ROWS) + rows
            share = tl.exp2(tl.load(where, mask=there, other=float("-inf")) - base)
            total += share * tl.load(where + ROWS, mask=there, other=0.0)
            part = tl.load(partials + other * (ROWS * DIM) + cells, mask=there[:, None], other=0.0)
            result += share[:, None] * part
        result = result / tl.where(total > 0.0, total, 1.0)[:, None]
        where = out + at[:, None] * DIM + tl.arange(0, DIM)[None, :]
        tl.store(where, result.to(out.dtype.element_ty), mask=row_ok[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_splits"])
def attend_short(
    q, k_cache, v_cache, page_tables, table_rows, first, cached_len, branches, lens, out, partials, stats, counters,
    num_rows, num_tokens, num_splits, table_stride, branch_stride, scale, sinks,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MEMBERS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS_PAD: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr, WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads, splits). A tile is ROWS // GROUP tokens of a row times the GROUP heads of a kv head.

    Of `used` splits, split s has the context's tiles s, s + used and so on, and MEMBERS ancestors of each branch. The
    last split has the first ancestors, since it has the least of the context, often nothing.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    LINE: tl.constexpr = KV_HEADS * DIM
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row, place = find_tile(first, num_rows, num_tokens, tile, TOKENS, ROWS_PAD)
    real = row < num_rows
    row_first = tl.load(first + row, mask=real, other=0)
    row_end = tl.load(first + row + 1, mask=real, other=0)
    end = tl.load(first + num_rows)
    cached = tl.load(cached_len + row, mask=real, other=0)
    needed = tl.cdiv(cached, _RESIDENT_TILES * KEYS)
    used = tl.minimum(tl.where(needed < _JOIN_BELOW, needed + 1, needed), num_splits)
    # Idle programs need not wait. A program without a row may still have padding to clear.
    if (split >= used) | ((not real) & ((tile + 1) * TOKENS <= end)):
        return
    table = page_tables + tl.load(table_rows + row, mask=real, other=0).to(tl.int64) * table_stride
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    begin = row_first + place * TOKENS

    # Lists, lengths, page tables and the context's keys were written before the previous launch.
    near_k, near_v, near = _context(k_head, v_head, table, split * KEYS, cached, LINE, DIM, KEYS, PAGE, ON_GPU)
    far_k, far_v, far = _context(k_head, v_head, table, (split + used) * KEYS, cached, LINE, DIM, KEYS, PAGE, ON_GPU)
    owner = tl.arange(0, KEYS) // MEMBERS
    tokens = tl.minimum(begin + owner, num_tokens - 1)
    counts = tl.load(lens + tokens)
    counts = tl.where((owner < TOKENS) & (begin + owner < row_end), counts, 0)
    member = (used - 1 - split) * MEMBERS
    slots, own = _load_ancestors(branches, counts, tokens, member, branch_stride, MEMBERS, ON_GPU)
    longest = tl.max(counts, 0)
    lanes = tl.arange(0, ROWS)
    token = begin + lanes // GROUP
    row_ok = (lanes < TOKENS * GROUP) & (token < row_end)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    position = lanes
    if WINDOW:
        position = cached - 1 + tl.load(lens + token, mask=row_ok, other=0)
    of_own = (lanes // GROUP)[:, None] == owner[None, :]
    near_k, near_v = keep_in_registers(near_k, ON_GPU), keep_in_registers(near_v, ON_GPU)
    far_k, far_v = keep_in_registers(far_k, ON_GPU), keep_in_registers(far_v, ON_GPU)
    wait_and_release(PDL)

    if split == 0:
        _clear_padding(out, tile * TOKENS, end, num_tokens, kv_head, ROWS, TOKENS, GROUP, HEADS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=row_ok[:, None], other=0.0)
    own_k = _load_heads(k_head, slots, own, LINE, DIM)
    own_v = _load_heads(v_head, slots, own, LINE, DIM)
    to_near = scores(tile_q, near_k, _seen(near, split * KEYS, position, KEYS, WINDOW), CAP_SCALE)
    to_far = scores(tile_q, far_k, _seen(far, (split + used) * KEYS, position, KEYS, WINDOW), CAP_SCALE)
    to_own = scores(tile_q, own_k, of_own & own[None, :], CAP_SCALE)
    # All three at once: each reduction over a row is an exchange between warps.
    top = tl.max(tl.maximum(tl.maximum(to_near, to_far), to_own), 1) * scale
    if sinks is not None:
        sink, one, _ = init_softmax(sinks, kv_head * GROUP + lanes % GROUP, split == 0, ROWS, DIM)
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    to_near = tl.exp2(tl.fma(to_near, scale, -base[:, None]))
    to_far = tl.exp2(tl.fma(to_far, scale, -base[:, None]))
    to_own = tl.exp2(tl.fma(to_own, scale, -base[:, None]))
    mass = tl.sum(to_near + to_far + to_own, 1)
    if sinks is not None:
        mass += one * tl.exp2(sink - base)
    acc = _accumulate(to_near, near_v, tl.zeros([ROWS, DIM], tl.float32))
    acc = _accumulate(to_far, far_v, acc)
    acc = _accumulate(to_own, own_v, acc)

    # The rest of contexts that are not short, and of branches too deep for all splits together.
    for start in tl.range((split + _RESIDENT_TILES * used) * KEYS, cached, used * KEYS, num_stages=1):
        tile_k, tile_v, inside = _context(k_head, v_head, table, start, cached, LINE, DIM, KEYS, PAGE, ON_GPU)
        products = scores(tile_q, tile_k, _seen(inside, start, position, KEYS, WINDOW), CAP_SCALE)
        top, mass, acc = softmax_step(products, tile_v, top, mass, acc, scale)
    for start in tl.range(member + used * MEMBERS, longest, used * MEMBERS, num_stages=1):
        slots, own = _load_ancestors(branches, counts, tokens, start, branch_stride, MEMBERS, ON_GPU)
        products = scores(tile_q, _load_heads(k_head, slots, own, LINE, DIM), of_own & own[None, :], CAP_SCALE)
        top, mass, acc = softmax_step(products, _load_heads(v_head, slots, own, LINE, DIM), top, mass, acc, scale)

    shared_tile = (kv_head * tl.num_programs(0) + tile).to(tl.int64)
    partials += shared_tile * (SPLITS * ROWS * DIM)
    stats += shared_tile * (SPLITS * 2 * ROWS)
    _combine_last(out, partials, stats, counters + shared_tile, at, row_ok, top, mass, acc, split, used, DIM, SPLITS)


def short_branch_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, slots: Tensor, lens: Tensor,
    out: Tensor, page_size: int, scale: float, pdl: bool, max_row_tokens: int, config: TileConfig, rules: ScoreRules,
) -> None:  # fmt: skip
    """Implement kernels.attention.branch_attention, if `short`."""
    num_tokens, num_heads, dim = q.shape
    num_rows, kv_heads = cached_len.shape[0], k_cache.shape[1]
    tokens = tile_tokens(config, num_heads, kv_heads)
    # Padding may take more tiles than rows can.
    tiles = max(max_tiles(num_tokens, num_rows, max_row_tokens, tokens), ceil_div(num_tokens, tokens))
    shared_tiles = tiles * kv_heads
    splits = short_splits(shared_tiles, num_processors(q))
    floats = shared_tiles * SHORT_SPLITS * config.rows * dim
    partials, counters = scratch(q.device, floats + shared_tiles * SHORT_SPLITS * config.rows * 2, shared_tiles)
    attend_short[(tiles, kv_heads, splits)](
        q, k_cache, v_cache, page_tables, table_rows, first, cached_len, slots, lens, out,
        partials, partials[floats:], counters,
        num_rows, num_tokens, splits, page_tables.stride(0), slots.shape[1],
        **score_options(rules, scale), HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page_size,
        ROWS=config.rows, KEYS=config.keys, MEMBERS=config.keys // power_of_two(tokens), SPLITS=SHORT_SPLITS,
        ROWS_PAD=power_of_two(num_rows + 1), PDL=pdl, ON_GPU=q.is_cuda,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip

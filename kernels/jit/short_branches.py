"""Attention to short contexts and branches in one launch, see kernels.branches.

For small models, whose launches are short and wait for each other. A program has the first keys and values in registers
before the launch in front of this one ends, since contexts are old; those of a branch are not. Programs that share a
tile meet in memory, and the last one to come adds up.
"""

from __future__ import annotations

from math import e, log2

import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import AHEAD, SHORT_SPLITS, TileConfig, ceil_div, max_tiles, power_of_two, short_splits
from kernels.jit.online import find_tile, held, key_slots, online, read
from kernels.jit.scratch import scratch
from kernels.jit.splits import tile_tokens
from kernels.launch import num_processors

_AHEAD: tl.constexpr = tl.constexpr(AHEAD)
# While fewer programs have the context, one more joins them: it has less of the context than others, or nothing.
_FEW: tl.constexpr = tl.constexpr(4)


@triton.jit
def _load(heads, slots, inside, LINE: tl.constexpr, DIM: tl.constexpr):
    """[KEYS, DIM] of a kv head."""
    return tl.load(heads + slots[:, None] * LINE + tl.arange(0, DIM)[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _context(
    k_head, v_head, table, start, cached,
    LINE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Keys and values of the positions from `start` on, and which of them there are."""
    keys = start + tl.arange(0, KEYS)
    slots = key_slots(table, keys, tl.maximum(cached - 1, 0), PAGE, ON_GPU)
    inside = keys < cached
    return _load(k_head, slots, inside, LINE, DIM), _load(v_head, slots, inside, LINE, DIM), inside


@triton.jit
def _members(branches, counts, tokens, begin, stride, MEMBERS: tl.constexpr, ON_GPU: tl.constexpr):
    """Slots of the ancestors from `begin` on, MEMBERS of each token, and which of them there are."""
    member = begin + tl.arange(0, counts.shape[0]) % MEMBERS
    at = branches + tokens.to(tl.int64) * stride + tl.minimum(member, tl.maximum(counts - 1, 0))
    return read(at, ON_GPU).to(tl.int64), member < counts


@triton.jit
def _scores(tile_q, tile_k, seen):
    """Unscaled, -inf where a query does not see a key."""
    return tl.where(seen, tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee"), float("-inf"))


@triton.jit
def _add(weights, tile_v, acc):
    return tl.dot(weights.to(tile_v.dtype), tile_v, acc, input_precision="ieee")


@triton.jit
def _clear_padding(
    out, begin, end, num_tokens, kv_head,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Zeros for those of TOKENS tokens from `begin` on that lie behind `end`."""
    lanes = tl.arange(0, ROWS)
    token = begin + lanes // GROUP
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    unused = (lanes < TOKENS * GROUP) & (token >= end) & (token < num_tokens)
    zeros = tl.zeros([ROWS, DIM], out.dtype.element_ty)
    tl.store(out + at[:, None] * DIM + tl.arange(0, DIM)[None, :], zeros, mask=unused[:, None])


@triton.jit
def _meet(
    out, partials, stats, counter, at, row_ok, top, mass, acc, split, used,
    DIM: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """The last of a tile's programs to come adds up what all have left, and leaves the counter at zero."""
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
    num_rows, num_tokens, num_splits, table_stride, branch_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, MEMBERS: tl.constexpr, SPLITS: tl.constexpr,
    ROWS_PAD: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, kv heads, splits). A tile is ROWS // GROUP tokens of a row times the GROUP heads of a kv head.

    Of `used` splits, split s has the context's tiles s, s + used and so on, and of each branch MEMBERS ancestors, the
    last split the first of them: it has the least of the context, often nothing.
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
    needed = tl.cdiv(cached, _AHEAD * KEYS)
    used = tl.minimum(tl.where(needed < _FEW, needed + 1, needed), num_splits)
    # Nobody waits for idle programs. One without a row may still have padding to see to.
    if (split >= used) | ((not real) & ((tile + 1) * TOKENS <= end)):
        return
    table = page_tables + tl.load(table_rows + row, mask=real, other=0).to(tl.int64) * table_stride
    k_head = k_cache + kv_head * DIM
    v_head = v_cache + kv_head * DIM
    begin = row_first + place * TOKENS

    # Lists, lengths, page tables and the context's keys come from before the launch in front of this one.
    near_k, near_v, near = _context(k_head, v_head, table, split * KEYS, cached, LINE, DIM, KEYS, PAGE, ON_GPU)
    far_k, far_v, far = _context(k_head, v_head, table, (split + used) * KEYS, cached, LINE, DIM, KEYS, PAGE, ON_GPU)
    owner = tl.arange(0, KEYS) // MEMBERS
    tokens = tl.minimum(begin + owner, num_tokens - 1)
    counts = tl.load(lens + tokens)
    counts = tl.where((owner < TOKENS) & (begin + owner < row_end), counts, 0)
    member = (used - 1 - split) * MEMBERS
    slots, own = _members(branches, counts, tokens, member, branch_stride, MEMBERS, ON_GPU)
    longest = tl.max(counts, 0)
    lanes = tl.arange(0, ROWS)
    token = begin + lanes // GROUP
    row_ok = (lanes < TOKENS * GROUP) & (token < row_end)
    at = token.to(tl.int64) * HEADS + kv_head * GROUP + lanes % GROUP
    of_own = (lanes // GROUP)[:, None] == owner[None, :]
    near_k, near_v = held(near_k, ON_GPU), held(near_v, ON_GPU)
    far_k, far_v = held(far_k, ON_GPU), held(far_v, ON_GPU)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    if split == 0:
        _clear_padding(out, tile * TOKENS, end, num_tokens, kv_head, ROWS, TOKENS, GROUP, HEADS, DIM)
    tile_q = tl.load(q + at[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=row_ok[:, None], other=0.0)
    own_k = _load(k_head, slots, own, LINE, DIM)
    own_v = _load(v_head, slots, own, LINE, DIM)
    to_near = _scores(tile_q, near_k, near[None, :])
    to_far = _scores(tile_q, far_k, far[None, :])
    to_own = _scores(tile_q, own_k, of_own & own[None, :])
    # All three at once: each sum over a row is one between warps.
    top = tl.max(tl.maximum(tl.maximum(to_near, to_far), to_own), 1) * scale
    base = tl.where(top == float("-inf"), 0.0, top)
    to_near = tl.exp2(tl.fma(to_near, scale, -base[:, None]))
    to_far = tl.exp2(tl.fma(to_far, scale, -base[:, None]))
    to_own = tl.exp2(tl.fma(to_own, scale, -base[:, None]))
    mass = tl.sum(to_near + to_far + to_own, 1)
    acc = _add(to_near, near_v, tl.zeros([ROWS, DIM], tl.float32))
    acc = _add(to_far, far_v, acc)
    acc = _add(to_own, own_v, acc)

    # Contexts that are not short, and branches deeper than all splits have room for.
    for start in tl.range((split + _AHEAD * used) * KEYS, cached, used * KEYS, num_stages=1):
        tile_k, tile_v, inside = _context(k_head, v_head, table, start, cached, LINE, DIM, KEYS, PAGE, ON_GPU)
        top, mass, acc = online(_scores(tile_q, tile_k, inside[None, :]), tile_v, top, mass, acc, scale)
    for start in tl.range(member + used * MEMBERS, longest, used * MEMBERS, num_stages=1):
        slots, own = _members(branches, counts, tokens, start, branch_stride, MEMBERS, ON_GPU)
        scores = _scores(tile_q, _load(k_head, slots, own, LINE, DIM), of_own & own[None, :])
        top, mass, acc = online(scores, _load(v_head, slots, own, LINE, DIM), top, mass, acc, scale)

    meeting = (kv_head * tl.num_programs(0) + tile).to(tl.int64)
    partials += meeting * (SPLITS * ROWS * DIM)
    stats += meeting * (SPLITS * 2 * ROWS)
    _meet(out, partials, stats, counters + meeting, at, row_ok, top, mass, acc, split, used, DIM, SPLITS)


def branch_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, slots: Tensor, lens: Tensor,
    out: Tensor, page_size: int, scale: float, pdl: bool, max_row_tokens: int, config: TileConfig,
) -> None:  # fmt: skip
    """As kernels.branches.branch_attention, if `short`."""
    num_tokens, num_heads, dim = q.shape
    num_rows, kv_heads = cached_len.shape[0], k_cache.shape[1]
    tokens = tile_tokens(config, num_heads, kv_heads)
    # Padding may take more of them than rows could.
    tiles = max(max_tiles(num_tokens, num_rows, max_row_tokens, tokens), ceil_div(num_tokens, tokens))
    meetings = tiles * kv_heads
    splits = short_splits(meetings, num_processors(q))
    floats = meetings * SHORT_SPLITS * config.rows * dim
    partials, counters = scratch(q.device, floats + meetings * SHORT_SPLITS * config.rows * 2, meetings)
    attend_short[(tiles, kv_heads, splits)](
        q, k_cache, v_cache, page_tables, table_rows, first, cached_len, slots, lens, out,
        partials, partials[floats:], counters,
        num_rows, num_tokens, splits, page_tables.stride(0), slots.shape[1], scale * log2(e),
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, PAGE=page_size,
        ROWS=config.rows, KEYS=config.keys, MEMBERS=config.keys // power_of_two(tokens), SPLITS=SHORT_SPLITS,
        ROWS_PAD=power_of_two(num_rows + 1), PDL=pdl, ON_GPU=q.is_cuda,
        num_warps=config.num_warps, launch_pdl=pdl,
    )  # fmt: skip

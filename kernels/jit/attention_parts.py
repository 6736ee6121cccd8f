"""Shared parts of the attention kernels: rows of tiles, key slots, online softmax, and keys split among programs."""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_tiles import ScoreRules, TileConfig
from kernels.jit.memory import prefetch_lines
from kernels.launch import power_of_two

_LOG2E: tl.constexpr = tl.constexpr(log2(e))


@triton.jit
def find_tile(first, num_rows, num_tokens, tile, TOKENS: tl.constexpr, ROWS_PAD: tl.constexpr):
    """Return the request row of a tile of TOKENS tokens, and the tile's place in it.

    Row `num_rows` stands for the padding tokens; rows past it have no tiles. ROWS_PAD > num_rows.
    """
    lanes = tl.arange(0, ROWS_PAD)
    begin = tl.load(first + lanes, mask=lanes <= num_rows, other=0)
    end = tl.load(first + lanes + 1, mask=lanes < num_rows, other=0)
    end = tl.where(lanes == num_rows, num_tokens, end)
    tiles = (end - begin + TOKENS - 1) // TOKENS
    ends = tl.cumsum(tiles, 0)
    before = ends <= tile
    row = tl.sum(before.to(tl.int32), 0)
    place = tile - tl.sum(tl.where(before, tiles, 0), 0)
    return row, place


@triton.jit
def load_tile_row(
    first, cached_len, table_rows, page_tables, table_stride, num_rows, num_tokens, tile,
    TOKENS: tl.constexpr, ROWS_PAD: tl.constexpr,
):  # fmt: skip
    """Return the results of find_tile and the row's first token, last token + 1, context and page table."""
    row, place = find_tile(first, num_rows, num_tokens, tile, TOKENS, ROWS_PAD)
    real = row < num_rows
    row_first = tl.load(first + row, mask=row <= num_rows, other=0)
    row_end = tl.load(first + row + 1, mask=real, other=0)
    row_end = tl.where(row == num_rows, num_tokens, row_end)
    cached = tl.load(cached_len + row, mask=real, other=0)
    table_row = tl.load(table_rows + row, mask=real, other=0)
    return row, place, row_first, row_end, cached, page_tables + table_row.to(tl.int64) * table_stride


@triton.jit
def find_row(first, num_rows, token, ROWS_PAD: tl.constexpr):
    """Return the request row of a token; num_rows for a padding token."""
    lanes = tl.arange(0, ROWS_PAD)
    end = tl.load(first + lanes + 1, mask=lanes < num_rows, other=2147483647)
    return tl.sum((end <= token).to(tl.int32), 0)


@triton.jit
def load_ints(pointers, ON_GPU: tl.constexpr):
    """Load the int32 at each pointer.

    On a GPU this uses an instruction that the compiler does not recognize as a load. Otherwise it would copy these few
    numbers through shared memory, in a pipeline stage of their own, and keys would wait for them. Callers read a step
    ahead.
    """
    if ON_GPU:
        numbers = tl.inline_asm_elementwise(
            "ld.global.b32 $0, [$1];", "=r,l", [pointers], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        numbers = tl.load(pointers)
    return numbers


@triton.jit
def keep_in_registers(tile, ON_GPU: tl.constexpr):
    """Complete the tile's loads here; the compiler would delay them until the tile is used."""
    if ON_GPU:
        PACK: tl.constexpr = 32 // tile.dtype.primitive_bitwidth
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=PACK)
    return tile


@triton.jit
def key_slots(table, keys, last, PAGE: tl.constexpr, ON_GPU: tl.constexpr):
    """Return int64 KV slots of logical positions `keys`; positions past `last` get the slot of `last`."""
    keys = tl.minimum(keys, last)
    return load_ints(table + keys // PAGE, ON_GPU).to(tl.int64) * PAGE + keys % PAGE


@triton.jit
def page_slots(table, start, last, KEYS: tl.constexpr, PAGE: tl.constexpr, ON_GPU: tl.constexpr):
    """Return KV slots of the key tile at logical position `start`, as int64 base slots and offsets to add.

    If whole pages fill a tile, the offsets are the same for all tiles, so a loop need not compute them again.
    """
    lanes = tl.arange(0, KEYS)
    if KEYS % PAGE == 0:
        # A pipelined loop reads tiles past its last one.
        pages = load_ints(table + tl.minimum(start // PAGE + lanes // PAGE, last // PAGE), ON_GPU)
        first_slots, within = pages.to(tl.int64) * PAGE, lanes % PAGE
    else:
        first_slots, within = key_slots(table, start + lanes, last, PAGE, ON_GPU), tl.zeros([KEYS], tl.int32)
    return first_slots, within


@triton.jit
def prefetch_tile(
    k_head, v_head, table, low, end, last,
    LINE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """Prefetch keys and values of the tile at `low`, for positions before `end`."""
    LINES: tl.constexpr = DIM * k_head.dtype.element_ty.primitive_bitwidth // 1024
    ahead = tl.minimum(low + tl.arange(0, KEYS), end - 1)
    lines = key_slots(table, ahead, last, PAGE, ON_GPU)[:, None] * LINE
    lines += tl.arange(0, LINES)[None, :] * (DIM // LINES)
    prefetch_lines(k_head + lines)
    prefetch_lines(v_head + lines)


@triton.jit
def softmax_step(products, v, top, mass, acc, scale):
    """Do one step of the online softmax, base 2, over a tile of unscaled scores; -inf hides a key.

    Explicit fma: the compiler must not fuse copies of this code differently, or a token's result would depend on which
    copy processed its keys.
    """
    new_top = tl.maximum(top, tl.max(products, 1) * scale)
    # A query that has seen no key yet has -inf, and -inf minus -inf is NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(tl.fma(products, scale, -base[:, None]))
    shrink = tl.exp2(top - base)
    mass = tl.fma(mass, shrink, tl.sum(weights, 1))
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return new_top, mass, acc


@triton.jit
def cap_scores(products, CAP_SCALE: tl.constexpr):
    """Return unscaled scores or, if they are capped, tanh(scores * CAP_SCALE); the cap is then part of the scale."""
    if CAP_SCALE is not None:
        products = 1.0 - 2.0 / (tl.exp(products * (2.0 * CAP_SCALE)) + 1.0)
    return products


@triton.jit
def scores(tile_q, tile_k, seen, CAP_SCALE: tl.constexpr):
    """Return unscaled scores, -inf where a query does not see a key."""
    return tl.where(
        seen, cap_scores(tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee"), CAP_SCALE), float("-inf")
    )


@triton.jit
def init_softmax(sinks, heads, is_first, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Return top score, mass and weighted sum of queries that have seen no key, to start `softmax_step` with.

    `sinks`, if not None, are scores of a key without a value, one a head; only the first of several splits adds them.
    """
    if sinks is None:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        mass = tl.zeros([ROWS], tl.float32)
    else:
        top = tl.where(is_first, tl.load(sinks + heads) * _LOG2E, float("-inf"))
        mass = tl.where(is_first, tl.full([ROWS], 1.0, tl.float32), 0.0)
    return top, mass, tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def first_seen_step(cached, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """Return the first key tile that any token after a context of `cached` tokens sees."""
    return tl.maximum(cached + 1 - WINDOW, 0) // KEYS if WINDOW else 0


@triton.jit
def attend_context(
    tile_q, k_head, v_head, table, low, end, last, positions, top, mass, acc, scale,
    LINE: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    STAGES: tl.constexpr, ON_GPU: tl.constexpr, WINDOW: tl.constexpr, CAP_SCALE: tl.constexpr,
):  # fmt: skip
    """Do steps of `softmax_step` over whole key tiles from `low` to `end`.

    All queries see all these keys, except as WINDOW limits those at `positions`.
    """
    dims = tl.arange(0, DIM)
    for start in tl.range(low, end, KEYS, num_stages=STAGES):
        pages, within = page_slots(table, start, last, KEYS, PAGE, ON_GPU)
        # In this order, since only `pages` differ between steps if whole pages fill a tile.
        inner = within[:, None] * LINE + dims[None, :]
        outer = pages[:, None] * LINE
        tile_k = tl.load(k_head + inner + outer).to(tile_q.dtype)
        tile_v = tl.load(v_head + inner + outer).to(tile_q.dtype)
        products = cap_scores(tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee"), CAP_SCALE)
        if WINDOW:
            seen = (start + tl.arange(0, KEYS))[None, :] > (positions - WINDOW)[:, None]
            products = tl.where(seen, products, float("-inf"))
        top, mass, acc = softmax_step(products, tile_v, top, mass, acc, scale)
    return top, mass, acc


# Most parts, over all (token, head) pairs, that are summed at once by several warps. Warps exchange sums through shared
# memory, of which a small kernel gets little: more programs would not run beside those of the next launch.
LARGE_SUM = 4096
WARP_FLOATS = 1024
"""Floats that a warp reads at once."""


# Steps of a program alone on its processor above which two programs that share a processor are faster.
LONG_SPLIT_STEPS = 16


@triton.jit
def split_steps(num_steps, num_splits, exclusive_splits, SPAN: tl.constexpr, LONGEST: tl.constexpr):
    """Return the steps of each split but the last: as few as possible for all splits together, but at least SPAN.

    More than `exclusive_splits` take part only if each of these would have more than LONGEST steps.
    """
    exclusive = tl.cdiv(num_steps, exclusive_splits)
    return tl.maximum(tl.where(exclusive > LONGEST, tl.cdiv(num_steps, num_splits), exclusive), SPAN)


@triton.jit
def store_tile(
    output, partials, stats, at, top, mass, acc, num_pairs, split, row_ok,
    DIM: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Store a tile: the result of attention if keys are not split, otherwise the parts for `combine`.

    `at` [ROWS] int64 numbers the (token, head) pair of each tile row among `num_pairs`.
    """
    dims = tl.arange(0, DIM)
    if DIRECT:
        result = acc / tl.where(mass > 0.0, mass, 1.0)[:, None]
        where = output + at[:, None] * DIM + dims[None, :]
        tl.store(where, result.to(output.dtype.element_ty), mask=row_ok[:, None])
    else:
        at += split.to(tl.int64) * num_pairs
        tl.store(partials + at[:, None] * DIM + dims[None, :], acc, mask=row_ok[:, None])
        tl.store(stats + at * 2, top, mask=row_ok)
        tl.store(stats + at * 2 + 1, mass, mask=row_ok)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_splits", "exclusive_splits"])
def combine(
    partials, stats, output, first, cached_len, path, num_rows, num_tokens, num_splits, exclusive_splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, SPAN: tl.constexpr,
    ROWS_PAD: tl.constexpr, EACH: tl.constexpr, PATHS: tl.constexpr, DEPTH: tl.constexpr,
    BRANCHES: tl.constexpr, LONGEST: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, heads): add up the splits of a (token, head) pair, EACH at a time. Padding tokens get zeros.

    If BRANCHES, a token's branch comes before the splits of its context.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = find_row(first, num_rows, token, ROWS_PAD)
    real = row < num_rows
    cached = tl.load(cached_len + row, mask=real, other=0)
    if PATHS:
        own = tl.sum((tl.load(path + token * DEPTH + tl.arange(0, DEPTH)) >= 0).to(tl.int32), 0)
        used = tl.minimum(tl.cdiv(tl.cdiv(cached + own, KEYS), SPAN), num_splits)
    else:
        own = 0
        if not BRANCHES:
            own = tl.load(first + row + 1, mask=real, other=0) - tl.load(first + row, mask=real, other=0)
        num_tiles = tl.cdiv(cached + own, KEYS) - first_seen_step(cached, WINDOW, KEYS)
        used = tl.cdiv(num_tiles, split_steps(num_tiles, num_splits, exclusive_splits, SPAN, LONGEST))
        if BRANCHES:
            used += 1
    used = tl.where(real, used, 0)
    if PDL:
        tl.extra.cuda.gdc_wait()

    dims = tl.arange(0, DIM)
    num_pairs = (num_tokens * HEADS).to(tl.int64)
    at = token.to(tl.int64) * HEADS + head
    top = float("-inf")
    mass = 0.0
    acc = tl.zeros([DIM], tl.float32)
    for begin in tl.range(0, used, EACH):
        splits = begin + tl.arange(0, EACH)
        there = splits < used
        pairs = splits.to(tl.int64) * num_pairs + at
        parts = tl.load(partials + pairs[:, None] * DIM + dims[None, :], mask=there[:, None], other=0.0)
        tops = tl.load(stats + pairs * 2, mask=there, other=float("-inf"))
        masses = tl.load(stats + pairs * 2 + 1, mask=there, other=0.0)
        new_top = tl.maximum(top, tl.max(tops, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.exp2(top - base)
        shares = tl.exp2(tops - base)
        mass = mass * shrink + tl.sum(shares * masses, 0)
        acc = acc * shrink + tl.sum(shares[:, None] * parts, 0)
        top = new_top
    result = acc / tl.where(mass > 0.0, mass, 1.0)
    tl.store(output + at * DIM + dims, result.to(output.dtype.element_ty))


_LEAST_ROW_LANES = 16
"""Rounds of fewer rows share a kernel, since each number of lanes is another kernel to compile."""


def row_lanes(num_rows: int) -> int:
    """Return ROWS_PAD, the lanes in which a program looks for a row, with one for padding."""
    return max(power_of_two(num_rows + 1), _LEAST_ROW_LANES)


def score_options(rules: ScoreRules, scale: float) -> dict[str, Any]:
    """Return `scale` for the kernels' softmax of base 2, and constants of the rules; None and 0 are compiled away."""
    return {
        "scale": (rules.softcap or scale) * log2(e), "sinks": rules.sinks,
        "WINDOW": rules.window, "CAP_SCALE": scale / rules.softcap if rules.softcap else None,
    }  # fmt: skip


def launch_options(
    q: Tensor, k_cache: Tensor, num_rows: int, page_size: int, pdl: bool, config: TileConfig
) -> dict[str, Any]:
    """Return constants and options of the kernels that loop over key tiles."""
    return {
        "HEADS": q.shape[1], "KV_HEADS": k_cache.shape[1], "DIM": q.shape[2], "PAGE": page_size,
        "ROWS": config.rows, "KEYS": config.keys, "ROWS_PAD": row_lanes(num_rows), "STAGES": config.num_stages,
        "PDL": pdl, "ON_GPU": q.is_cuda,
        "num_warps": config.num_warps, "launch_pdl": pdl,
    }  # fmt: skip


def tile_tokens(config: TileConfig, num_heads: int, kv_heads: int) -> int:
    """Return how many tokens' query heads of a kv head fill a tile. Raises ValueError if not even one token's fit."""
    tokens = config.rows * kv_heads // num_heads
    if not tokens:
        raise ValueError(f"{num_heads // kv_heads} query heads to a kv head do not fit a tile of {config.rows} rows")
    return tokens


def workspace(q: Tensor, num_splits: int) -> tuple[Tensor, Tensor]:
    """Return each split's memory for weighted sums of values, and for top scores and masses, by (token, head) pair."""
    if num_splits == 1:
        return q, q
    pairs = (num_splits, q.shape[0] * q.shape[1])
    partials = torch.empty(*pairs, q.shape[2], dtype=torch.float32, device=q.device)
    return partials, torch.empty(*pairs, 2, dtype=torch.float32, device=q.device)


def launch_combine(
    partials: Tensor, stats: Tensor, out: Tensor, first: Tensor, cached_len: Tensor, path: Tensor | None,
    num_splits: int, exclusive_splits: int, config: TileConfig, num_heads: int, pdl: bool,
    window: int, longest: int = LONG_SPLIT_STEPS, branches: bool = False,
) -> None:  # fmt: skip
    """Launch `combine` over the parts that the splits have stored."""
    num_tokens, num_rows, dim = out.shape[0], cached_len.shape[0], partials.shape[2]
    each = power_of_two(num_splits + branches)
    # In the deterministic mode the order of the sum must not depend on the batch.
    if path is None and each * num_tokens * num_heads > LARGE_SUM:
        each = min(each, max(WARP_FLOATS // dim, 1))
    combine[(num_tokens, num_heads)](
        partials, stats, out, first, cached_len, first if path is None else path,
        num_rows, num_tokens, num_splits, exclusive_splits,
        HEADS=num_heads, DIM=dim, KEYS=config.keys, SPAN=config.span,
        ROWS_PAD=row_lanes(num_rows), EACH=each,
        PATHS=path is not None, DEPTH=1 if path is None else path.shape[1], BRANCHES=branches, LONGEST=longest,
        WINDOW=window, PDL=pdl,
        num_warps=min(max(each * dim // WARP_FLOATS, 1), 4), launch_pdl=pdl,
    )  # fmt: skip

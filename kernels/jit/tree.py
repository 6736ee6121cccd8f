"""Triton kernels of kernels.tree."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.jit.gumbel import load_key, noise_of_tile, philox
from kernels.jit.memory import release_and_wait
from kernels.launch import power_of_two, starts_early
from kernels.sampling_state import ILLEGAL_TOKEN, RoundTokens, SampleBuffers, SamplingTables, WalkOutputs


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_tree(
    token_ids, parents, rows, first, cached_len, table_rows, page_tables, positions, slots, mask, path, int_params,
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
    if int_params is not None:
        unknown = real & (tl.load(token_ids + token, mask=inside, other=0) < 0)
        last = tl.load(int_params + table_row * 8 + 7, mask=unknown, other=0)
        tl.store(token_ids + token, last, mask=unknown)
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
    tokens: RoundTokens,
    page_tables: Tensor,
    page_size: int,
    slots: Tensor,
    mask: Tensor,
    path: Tensor,
    int_params: Tensor | None,
) -> None:
    """Implement kernels.tree.expand_tree."""
    num_tokens, block = tokens.parents.shape[0], 8
    _expand_tree[(triton.cdiv(num_tokens, block),)](
        tokens.token_ids, tokens.parents, tokens.rows, tokens.first, tokens.cached_len, tokens.table_rows, page_tables,
        tokens.positions, slots, mask, path, int_params, num_tokens, page_tables.stride(0),
        PAGE=page_size, WORDS=mask.shape[1], WORDS_PAD=power_of_two(mask.shape[1]),
        DEPTH=path.shape[1], DEPTH_PAD=power_of_two(path.shape[1]), TOKENS=block, num_warps=4,
    )  # fmt: skip


_NONE: tl.constexpr = tl.constexpr(2147483647)
_ILLEGAL: tl.constexpr = tl.constexpr(ILLEGAL_TOKEN)


@triton.jit
def _best_of_rest(logits, vocab_size, position, low, high, choice, TILE: tl.constexpr):
    """Return the token of largest logit + noise in a row, the lowest id among equals; _NONE if all logits are -inf."""
    best = tl.max(tl.full([TILE], float("-inf"), tl.float32), axis=0)
    best_id = tl.max(tl.full([TILE], _NONE, tl.int32), axis=0)
    for tile in range(0, tl.cdiv(vocab_size, TILE)):
        columns = tile * TILE + tl.arange(0, TILE)
        values = tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf"))
        # Noise is at most 22.9, so most tiles of a filtered row cannot win.
        if tl.max(values, axis=0) + 23.0 > best:
            scores = values + noise_of_tile(tile, position, low, high, choice, TILE)
            highest = tl.max(scores, axis=0)
            if highest > best:
                best = highest
                best_id = tl.min(tl.where(scores == highest, columns, _NONE), axis=0)
    return best_id


@triton.jit
def _choose(sampled, children, child_ids, places, logits, total, floats, key, position, vocab_size, TILE: tl.constexpr):
    """Return the child that the acceptance thresholds accept, or a token sampled from all but the children."""
    low, high, choice = load_key(key)
    zero = position ^ position
    word, _, _, _ = philox(zero, position, zero + choice, zero + 1, low, high)
    coin = (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
    values = tl.load(logits + child_ids, mask=children, other=float("-inf"))
    chances = tl.exp(values.to(tl.float64) - total)
    single, accumulated = tl.load(floats + 6).to(tl.float64), tl.load(floats + 7).to(tl.float64)
    passes = (coin < tl.cumsum(chances, axis=0) / accumulated) | (chances >= single)
    place = tl.min(tl.where(children & passes & (chances > 0), places, _NONE), axis=0)
    token = sampled
    if place != _NONE:
        token = tl.sum(tl.where(places == place, child_ids, 0), axis=0)
    elif tl.sum((children & (child_ids == sampled)).to(tl.int32), axis=0) > 0:
        # The walk ends here, so the row of logits is not needed again.
        tl.store(logits + child_ids, float("-inf"), mask=children)
        tl.debug_barrier()
        other = _best_of_rest(logits, vocab_size, position, low, high, choice, TILE)
        token = tl.where(other == _NONE, sampled, other)
    return token


@triton.jit
def _walk(
    token_ids, positions, parents, first, root, table_rows, sampled, bad,
    float_params, int_params, counts, vocab_size, processed, processed_stride, totals,
    num_tokens, num_tokens_stride, tokens, tokens_stride, accepted, accepted_stride, error, error_stride, max_depth,
    LOSSY: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    release_and_wait(PDL)
    row = tl.program_id(0)
    node = tl.load(root + row)
    table_row = tl.load(table_rows + row).to(tl.int64)
    floats, ints = float_params + table_row * 8, int_params + table_row * 8
    is_lossy = (tl.load(floats) > 0) & ((tl.load(floats + 6) < 1) | (tl.load(floats + 7) < 1))
    places = tl.maximum(node, 0) + tl.arange(0, BLOCK)
    inside = places < tl.where(node >= 0, tl.load(first + row + 1), 0)
    ids = tl.load(token_ids + places, mask=inside, other=-1)
    above = tl.load(parents + places, mask=inside, other=-2)
    samples = tl.load(sampled + places, mask=inside, other=-1)
    wrong = tl.load(bad + places, mask=inside, other=0)

    depths = tl.arange(0, DEPTH)
    path_tokens, path = tl.full([DEPTH], -1, tl.int32), tl.full([DEPTH], -1, tl.int32)
    count = node - node
    fails = count
    while (node >= 0) & (count < max_depth) & (fails == 0):
        here = places == node
        fails = tl.sum(tl.where(here, wrong, 0), axis=0)
        token = tl.sum(tl.where(here, samples, 0), axis=0)
        children = inside & (above == node)
        if LOSSY:  # noqa: SIM102  # decided at compile time
            if is_lossy & (fails == 0) & (tl.sum(children.to(tl.int32), axis=0) > 0):
                wide = node.to(tl.int64)
                position = (tl.load(positions + node) + 1).to(tl.uint32, bitcast=True)
                token = _choose(
                    token, children, ids, places, processed + wide * processed_stride, tl.load(totals + node),
                    floats, ints, position, vocab_size, TILE,
                )  # fmt: skip
        # Earlier kernels must not sample such a token. If one does, only its own request fails.
        fails = tl.where((fails == 0) & ((token < 0) | (token >= vocab_size)), _ILLEGAL, fails)
        node = tl.min(tl.where(children & (ids == token), places, _NONE), axis=0)
        node = tl.where(node == _NONE, -1, node)
        path_tokens = tl.where(depths == count, token, path_tokens)
        path = tl.where(depths == count, node, path)
        count += 1
    count = tl.where(fails != 0, count - 1, count)
    committed = depths < count
    wide_row = row.to(tl.int64)
    tl.store(num_tokens + wide_row * num_tokens_stride, count)
    tl.store(error + wide_row * error_stride, fails)
    inside = depths < max_depth
    tl.store(tokens + wide_row * tokens_stride + depths, tl.where(committed, path_tokens, -1), mask=inside)
    tl.store(accepted + wide_row * accepted_stride + depths, tl.where(depths < count - 1, path, -1), mask=inside)
    last = tl.sum(tl.where(depths == count - 1, path_tokens, 0), axis=0)
    tl.store(ints + 7, last, mask=count > 0)
    if (tl.load(ints + 5) & 1) != 0:
        tl.atomic_add(counts + table_row * vocab_size + path_tokens, 1, mask=committed, sem="relaxed")


def walk(
    tokens: RoundTokens,
    tables: SamplingTables,
    buffers: SampleBuffers,
    out: WalkOutputs,
    max_row_tokens: int,
    vocab_size: int,
    lossy: bool,
) -> None:
    """Implement kernels.tree.walk."""
    max_depth = out.tokens.shape[1]
    _walk[(tokens.root.shape[0],)](
        tokens.token_ids, tokens.positions, tokens.parents, tokens.first, tokens.root, tokens.table_rows,
        buffers.sampled, buffers.bad,
        tables.float_params, tables.int_params, tables.counts, vocab_size,
        buffers.processed, buffers.processed.stride(0), buffers.totals,
        out.num_tokens, out.num_tokens.stride(0), out.tokens, out.tokens.stride(0),
        out.accepted, out.accepted.stride(0), out.error, out.error.stride(0), max_depth,
        LOSSY=lossy, BLOCK=max(triton.next_power_of_2(max_row_tokens), 16),
        DEPTH=triton.next_power_of_2(max_depth), TILE=min(2048, max(triton.next_power_of_2(vocab_size), 16)),
        num_warps=8 if lossy else 1, enable_fp_fusion=False, **starts_early(tokens.token_ids),
    )  # fmt: skip

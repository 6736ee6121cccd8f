"""Top-k, top-p and min-p over one row of processed logits, by search instead of by sorting.

Tokens are ordered by logit, the larger first, then by id. A filter keeps a prefix of that order, which is defined by
its border: the logit, as an integer key of the same order, and the id of the last token. A border is found by counting
tokens, or summing their weights, above several thresholds at once. A shortlist of the best tokens replaces the row if
it is certain to hold all tokens that will be kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.jit.gumbel import noise_of_ids, noise_of_tile

_WAYS: tl.constexpr = tl.constexpr(8)
LOWEST_KEY: tl.constexpr = tl.constexpr(-2147483648)
"""A key that no token is below."""
NO_TOKEN: tl.constexpr = tl.constexpr(2147483647)
"""Above all ids, and above all keys except those of NaN."""


@triton.jit
def order_key(values):
    """Map float32 to int32 of the same order; -0.0 counts as 0.0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_key(key):
    """Invert `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_tile(values, ids, listed, start, size, BLOCK: tl.constexpr):
    """Load logits and ids of tokens from `start` on, of a row or, if `listed` is its size and not 0, of a shortlist."""
    offsets = start + tl.arange(0, BLOCK)
    inside = offsets < size
    logits = tl.load(values + offsets, mask=inside, other=float("-inf"))
    token_ids = tl.load(ids + offsets, mask=offsets < listed, other=0)
    return logits, tl.where(offsets < listed, token_ids, offsets), inside


@triton.jit
def _within(keys, token_ids, border_key, border_id):
    return (keys > border_key) | ((keys == border_key) & (token_ids <= border_id))


@triton.jit
def total_weight(values, ids, listed, size, top, border_key, border_id, floor, BLOCK: tl.constexpr):
    """Return the sum of exp(logit - top), float64, over tokens within the border with logit - top >= `floor`."""
    sums = tl.zeros([BLOCK], tl.float64)
    for start in range(0, size, BLOCK):
        logits, token_ids, inside = _load_tile(values, ids, listed, start, size, BLOCK)
        distance = logits.to(tl.float64) - top
        kept = inside & _within(order_key(logits), token_ids, border_key, border_id) & (distance >= floor)
        sums += tl.where(kept, tl.exp(distance), 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _search(
    values, ids, listed, size, top, border_key, border_id, tie_key, need, low, high,
    MASS: tl.constexpr, BY_ID: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the largest threshold in low .. high - 1 above which the tokens within the border reach `need`.

    Tokens are counted or, with MASS, weighted. A token is above a threshold if its key is at least the threshold; with
    BY_ID, if its key is above `tie_key`, or equal to it and its negative id is at least the threshold. `low` must reach
    `need`, `high` must not. Returns the threshold, the sum it reaches (infinite if unknown) and the sum that the next
    one reaches.
    """
    steps = tl.arange(0, _WAYS).to(tl.int64) + 1
    beyond = need - need
    reached = beyond + float("inf")
    while high - low > 1:
        thresholds = low + (high - low) * steps // (_WAYS + 1)
        limits = thresholds.to(tl.int32)[:, None]
        sums = tl.zeros([_WAYS, BLOCK], tl.float64)
        for start in range(0, size, BLOCK):
            logits, token_ids, inside = _load_tile(values, ids, listed, start, size, BLOCK)
            keys = order_key(logits)
            kept = inside & _within(keys, token_ids, border_key, border_id)
            if BY_ID:
                order = tl.where(keys > tie_key, NO_TOKEN, tl.where(keys == tie_key, -token_ids, LOWEST_KEY))
            else:
                order = keys
            if MASS:
                weights = tl.where(kept, tl.exp(logits.to(tl.float64) - top), 0.0)
            else:
                weights = tl.where(kept, 1.0, 0.0).to(tl.float64)
            sums += tl.where(order[None, :] >= limits, weights[None, :], 0.0)
        totals = tl.sum(sums, axis=1)
        enough = totals >= need
        reached = tl.minimum(reached, tl.min(tl.where(enough, totals, float("inf")), axis=0))
        beyond = tl.maximum(beyond, tl.max(tl.where(enough, 0.0, totals), axis=0))
        new_low = tl.max(tl.where(enough, thresholds, low), axis=0)
        high = tl.min(tl.where(enough, high, thresholds), axis=0)
        low = new_low
    return low, reached, beyond


@triton.jit
def _border(
    values, ids, listed, size, top, border_key, border_id, need, vocab_size, low,
    MASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return key and id of the token at which the tokens within the old border, taken in order, reach `need`."""
    high = order_key(top.to(tl.float32)).to(tl.int64) + 1
    zero = high - high
    found, reached, beyond = _search(
        values, ids, listed, size, top, border_key, border_id, border_key, need, low, high, MASS, False, BLOCK
    )  # fmt: skip
    key = found.to(tl.int32)
    # A single token at the border, or a border after all tokens of its key, needs no search among ids.
    tied = reached - beyond > 1.5 * tl.exp(value_of_key(key).to(tl.float64) - top) if MASS else reached > need
    last_id = border_id - border_id + NO_TOKEN
    if tied:
        lowest, _, _ = _search(
            values, ids, listed, size, top, border_key, border_id, key, need, zero - vocab_size, zero + 1,
            MASS, True, BLOCK,
        )  # fmt: skip
        last_id = (-lowest).to(tl.int32)
    # The old border's id counts only at the old border's key, where it may be the tighter one.
    return key, tl.where(key == border_key, tl.minimum(last_id, border_id), last_id)


@triton.jit
def shortlist(
    values, list_values, list_ids, vocab_size, top, wanted, target, floor, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr
):
    """Find how far down from the top filters need to look, and list the tokens above that if they are few enough.

    It is enough to see `wanted` tokens, or the mass `target`, or logits down to top + `floor` (the log of a ratio).
    Returns the lowest key to look at, how many tokens reach it, and the same number if they are listed, otherwise 0.
    """
    steps = tl.arange(0, _WAYS).to(tl.float32)
    nats = tl.exp2(steps * 0.7)
    limits = top.to(tl.float32) - nats
    counts = tl.zeros([_WAYS, BLOCK], tl.int32)
    masses = tl.zeros([_WAYS, BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        logits = tl.load(values + offsets, mask=offsets < vocab_size, other=float("-inf"))
        above = logits[None, :] >= limits[:, None]
        counts += above.to(tl.int32)
        masses += tl.where(above, tl.exp(logits - top.to(tl.float32))[None, :], 0.0)
    count, mass = tl.sum(counts, axis=1), tl.sum(masses, axis=1)
    # The mass is a float32 sum, so require slightly more.
    deep = limits.to(tl.float64) - top <= floor
    enough = (count >= wanted) | (mass.to(tl.float64) >= target * 1.0001) | deep
    limit = tl.max(tl.where(enough, limits, float("-inf")), axis=0)
    length = tl.minimum(tl.min(tl.where(enough, count, NO_TOKEN), axis=0), vocab_size)
    listed = tl.where(length <= CANDIDATES, length, 0)
    if listed > 0:
        written = length - length
        for start in range(0, vocab_size, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            logits = tl.load(values + offsets, mask=offsets < vocab_size, other=float("-inf"))
            # Past the row's end logits are -inf, which the limit may be, too.
            near = (logits >= limit) & (offsets < vocab_size)
            places = written + tl.cumsum(near.to(tl.int32), axis=0) - 1
            tl.store(list_values + places, logits, mask=near)
            tl.store(list_ids + places, offsets, mask=near)
            written += tl.sum(near.to(tl.int32), axis=0)
        # Threads read entries of the list that other threads wrote.
        tl.debug_barrier()
    return order_key(limit), length, listed


@triton.jit
def borders(
    values, ids, listed, size, vocab_size, top, lowest_key, length, target, top_k, top_p, has_k, has_p,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return key and id of the last token that top-k and then top-p keep.

    `values` and `ids` hold `size` tokens of a row or its shortlist. `length` of them reach `lowest_key`, among them all
    that any filter keeps. `target` is the mass that top-p needs if there is no top-k.
    """
    border_key, border_id = lowest_key, length - length + NO_TOKEN
    low = lowest_key.to(tl.int64)
    if has_k & (top_k < length):
        border_key, border_id = _border(
            values, ids, listed, size, top, border_key, border_id, top_k.to(tl.float64), vocab_size, low, False, BLOCK
        )  # fmt: skip
    if has_p:
        total = total_weight(values, ids, listed, size, top, border_key, border_id, float("-inf"), BLOCK)
        # The likeliest token has weight 1 and is always kept.
        need = tl.maximum(tl.where(has_k, total * top_p, target), 1.0)
        # If the total is less, min-p ends above the border of top-p and decides alone.
        if total >= need:
            border_key, border_id = _border(
                values, ids, listed, size, top, border_key, border_id, need, vocab_size, low, True, BLOCK
            )  # fmt: skip
    return border_key, border_id


@triton.jit
def best_within(
    values, ids, listed, size, top, border_key, border_id, floor, position, low, high, choice, BLOCK: tl.constexpr
):
    """Return the token of largest logit + noise within border and `floor`; among equals the lowest id."""
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_ids = tl.full([BLOCK], NO_TOKEN, tl.int32)
    for start in range(0, size, BLOCK):
        logits, token_ids, inside = _load_tile(values, ids, listed, start, size, BLOCK)
        kept = inside & _within(order_key(logits), token_ids, border_key, border_id)
        kept = kept & (logits.to(tl.float64) - top >= floor)
        if listed > 0:
            noise = noise_of_ids(token_ids, position, low, high, choice)
        else:
            noise = noise_of_tile(start // BLOCK, position, low, high, choice, BLOCK)
        scores = tl.where(kept, logits + noise, float("-inf"))
        # Ids ascend from tile to tile, so the first of equal scores stays.
        better = scores > best
        best, best_ids = tl.where(better, scores, best), tl.where(better, token_ids, best_ids)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_ids, NO_TOKEN), axis=0)


@triton.jit
def drop_filtered(values, vocab_size, top, border_key, border_id, floor, BLOCK: tl.constexpr):
    """Overwrite the logits of a row that are not within border and `floor` with -inf."""
    for start in range(0, vocab_size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < vocab_size
        logits = tl.load(values + offsets, mask=inside, other=float("-inf"))
        kept = _within(order_key(logits), offsets, border_key, border_id) & (logits.to(tl.float64) - top >= floor)
        tl.store(values + offsets, float("-inf"), mask=inside & (kept == 0))

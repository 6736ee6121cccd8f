"""Top-k, top-p and min-p over one row of processed logits, by search instead of by sorting.

Tokens stand in one order: larger logits first, equal ones by id. What a filter keeps is a beginning of that order,
so it is known by its border: the last token's logit, as an integer key of the same order, and id. A border is found
by counting tokens, or summing their weights, above several thresholds at once. A shortlist of the best tokens, if it
surely holds all that will be kept, stands in for the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.jit.gumbel import noise_of_ids, noise_of_tile

_WAYS: tl.constexpr = tl.constexpr(8)
LOWEST_KEY: tl.constexpr = tl.constexpr(-2147483648)
"""No token has a lower key."""
NO_TOKEN: tl.constexpr = tl.constexpr(2147483647)
"""Above all ids, and above the keys of all numbers."""


@triton.jit
def order_key(values):
    """float32 to int32 of the same order; -0.0 counts as 0.0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_key(key):
    """The inverse of `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_tile(values, ids, listed, start, size, BLOCK: tl.constexpr):
    """Logits and ids of tokens start .. of a row or, if `listed` is its size and not 0, of a shortlist."""
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
    """Sum of exp(logit - top) over tokens within the border and at least `floor` from the top, float64."""
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
    """The largest threshold in low .. high - 1 above which the tokens within the border reach `need`.

    Tokens are counted, or with MASS weighed; a token is above a threshold if its key is at least that or, BY_ID, if its
    key is above `tie_key`, or equal and its negative id at least the threshold. `low` must reach `need`, `high` not.
    Returns the threshold, what it reaches (infinite if unknown) and what the next one reaches.
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
    """Key and id of the token at which the tokens within the old border, taken in order, reach `need`."""
    high = order_key(top.to(tl.float32)).to(tl.int64) + 1
    zero = high - high
    found, reached, beyond = _search(
        values, ids, listed, size, top, border_key, border_id, border_key, need, low, high, MASS, False, BLOCK
    )  # fmt: skip
    key = found.to(tl.int32)
    # One token alone at the border, or a border behind all of its equals, needs no search among ids.
    tied = reached - beyond > 1.5 * tl.exp(value_of_key(key).to(tl.float64) - top) if MASS else reached > need
    last_id = border_id - border_id + NO_TOKEN
    if tied:
        lowest, _, _ = _search(
            values, ids, listed, size, top, border_key, border_id, key, need, zero - vocab_size, zero + 1,
            MASS, True, BLOCK,
        )  # fmt: skip
        last_id = (-lowest).to(tl.int32)
    # The old border's id counts at the old border's own key alone, where it may be the tighter one.
    return key, tl.where(key == border_key, tl.minimum(last_id, border_id), last_id)


@triton.jit
def shortlist(
    values, list_values, list_ids, vocab_size, top, wanted, target, floor, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr
):
    """How far down from the top filters need to look at all, and a list of the tokens above if they are few enough.

    It is enough to see `wanted` tokens, or the mass `target`, or down by `floor`, which is the log of a ratio.
    Returns the lowest key looked at, how many tokens reach it, and as many if they are listed, else 0.
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
    # This mass is a float32 sum, so it must reach somewhat more.
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
            # Behind the row's end lies -inf, which the limit may be too.
            near = (logits >= limit) & (offsets < vocab_size)
            places = written + tl.cumsum(near.to(tl.int32), axis=0) - 1
            tl.store(list_values + places, logits, mask=near)
            tl.store(list_ids + places, offsets, mask=near)
            written += tl.sum(near.to(tl.int32), axis=0)
        # The list is read by other threads than those that wrote it.
        tl.debug_barrier()
    return order_key(limit), length, listed


@triton.jit
def borders(
    values, ids, listed, size, vocab_size, top, lowest_key, length, target, top_k, top_p, has_k, has_p,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The last token that top-k and then top-p keep: its key and id.

    `values` and `ids` hold a row or its shortlist, `size` tokens, of which `length` reach `lowest_key`, as all do that
    any filter keeps. `target` is the mass that top-p wants where there is no top-k.
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
        # Min-p may end above the border: then it alone decides.
        if total >= need:
            border_key, border_id = _border(
                values, ids, listed, size, top, border_key, border_id, need, vocab_size, low, True, BLOCK
            )  # fmt: skip
    return border_key, border_id


@triton.jit
def best_within(
    values, ids, listed, size, top, border_key, border_id, floor, position, low, high, choice, BLOCK: tl.constexpr
):
    """The token of largest logit + noise within border and `floor`; of equals the lowest id."""
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
        # Ids ascend from tile to tile, so the first of equals stays.
        better = scores > best
        best, best_ids = tl.where(better, scores, best), tl.where(better, token_ids, best_ids)
    return tl.min(tl.where(best == tl.max(best, axis=0), best_ids, NO_TOKEN), axis=0)


@triton.jit
def drop_filtered(values, vocab_size, top, border_key, border_id, floor, BLOCK: tl.constexpr):
    """Write -inf over the logits of a row that are not within the border and `floor`."""
    for start in range(0, vocab_size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        inside = offsets < vocab_size
        logits = tl.load(values + offsets, mask=inside, other=float("-inf"))
        kept = _within(order_key(logits), offsets, border_key, border_id) & (logits.to(tl.float64) - top >= floor)
        tl.store(values + offsets, float("-inf"), mask=inside & (kept == 0))

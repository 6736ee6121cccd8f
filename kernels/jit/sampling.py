"""Triton kernels of kernels.sampling. One launch prepares tiles of rows, a second one takes the best of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import sampling_state as state
from kernels.jit import filters
from kernels.jit.filters import LOWEST_KEY, NO_TOKEN, order_key
from kernels.jit.gumbel import load_key, noise_of_tile
from kernels.jit.memory import release_and_wait
from kernels.launch import starts_early
from kernels.sampling_state import (
    MAX_TOP_LOGPROBS,
    LogprobOutputs,
    RoundTokens,
    SampleBuffers,
    SamplingTables,
    WalkOutputs,
)

_COUNT_BITS: tl.constexpr = tl.constexpr(state.ENDS_ANSWER - 1)
_IN_PROMPT: tl.constexpr = tl.constexpr(state.IN_PROMPT)
_ENDS_ANSWER: tl.constexpr = tl.constexpr(state.ENDS_ANSWER)
_MAX_TOP: tl.constexpr = tl.constexpr(MAX_TOP_LOGPROBS)
# Programs that share the tokens of a row in the launch for log-probabilities.
_PROGRAMS = 8


@triton.jit
def _locate(index, rows, root, table_rows):
    """Return whether a token samples, its root and its row in the tables."""
    row = tl.load(rows + index)
    safe_row = tl.maximum(row, 0)
    first = tl.load(root + safe_row)
    samples = (row >= 0) & (first >= 0) & (index >= first)
    return samples, first, tl.load(table_rows + safe_row).to(tl.int64)


@triton.jit
def _filter_params(floats, ints, vocab_size):
    """Return temperature, top_k, top_p, min_p, whether any of these filters, whether acceptance is lossy."""
    temperature, top_p, min_p = tl.load(floats), tl.load(floats + 1), tl.load(floats + 2)
    top_k = tl.load(ints + 3)
    noisy = temperature > 0
    filtered = noisy & (((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0))
    is_lossy = noisy & ((tl.load(floats + 6) < 1) | (tl.load(floats + 7) < 1))
    return temperature, top_k, top_p, min_p, filtered, is_lossy


@triton.jit
def _penalize(logits, columns, inside, index, first, floats, counts, token_ids, parents):
    """Apply repetition, frequency and presence penalty over the counts and the path from below `first` to `index`."""
    counted = tl.load(counts + columns, mask=inside, other=0)
    times = counted & _COUNT_BITS
    node = index
    while node > first:
        times += (columns == tl.load(token_ids + node)).to(tl.int32)
        # Indices decrease, so that the loop ends whatever the round holds.
        node = tl.minimum(tl.load(parents + node), node - 1)
    presence, frequency, repetition = tl.load(floats + 3), tl.load(floats + 4), tl.load(floats + 5)
    repeated = tl.where(logits < 0, logits * repetition, tl.div_rn(logits, tl.zeros_like(logits) + repetition))
    logits = tl.where((times > 0) | ((counted & _IN_PROMPT) != 0), repeated, logits)
    return tl.where(times > 0, (logits - frequency * times.to(tl.float32)) - presence, logits)


@triton.jit
def _prepare(
    logits, logits_stride, vocab_size, token_ids, positions, parents, rows, root, table_rows,
    float_params, int_params, counts, bias, vocab_mask, mask_stride,
    processed, processed_stride, parts, part_stride, part_ids, part_masses,
    HAS_MASK: tl.constexpr, LOSSY: tl.constexpr, PDL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    release_and_wait(PDL)
    index, tile = tl.program_id(0), tl.program_id(1)
    samples, first, table_row = _locate(index, rows, root, table_rows)
    if samples == 0:
        return
    floats, ints = float_params + table_row * 8, int_params + table_row * 8
    temperature, top_k, top_p, _, filtered, is_lossy = _filter_params(floats, ints, vocab_size)
    flags = tl.load(ints + 5)
    columns = tile * TILE + tl.arange(0, TILE)
    inside = columns < vocab_size
    wide = index.to(tl.int64)
    raw = tl.load(logits + wide * logits_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    unusable = (raw != raw) | (raw == float("inf"))

    values = raw
    table = table_row * vocab_size
    if (flags & 1) != 0:
        values = _penalize(values, columns, inside, index, first, floats, counts + table, token_ids, parents)
    if (flags & 2) != 0:
        values = values + tl.load(bias + table + columns, mask=inside, other=0.0)
    if HAS_MASK:  # noqa: SIM102  # decided at compile time
        if (flags & 4) != 0:
            words = tl.load(vocab_mask + wide * mask_stride + columns // 32, mask=inside, other=0)
            values = tl.where(((words >> (columns % 32)) & 1) != 0, values, float("-inf"))
    if (flags & 8) != 0:  # noqa: SIM102  # saves most requests the loads
        if tl.load(positions + index) + 1 < tl.load(ints + 6):
            counted = tl.load(counts + table + columns, mask=inside, other=0)
            values = tl.where((counted & _ENDS_ANSWER) != 0, float("-inf"), values)
    if temperature > 0:
        values = tl.div_rn(values, tl.zeros_like(values) + tl.maximum(temperature, 1e-6))
    unusable = inside & (unusable | (values != values) | (values == float("inf")))
    values = tl.where(inside & (values == values), values, float("-inf"))

    part = wide * tl.num_programs(1) + tile
    top = tl.max(values, axis=0)
    scores = values
    keep = filtered
    if LOSSY:
        keep = filtered | is_lossy
    if keep:
        tl.store(processed + wide * processed_stride + columns, values, mask=inside)
    if filtered:
        if (top_p < 1) & ((top_k <= 0) | (top_k >= vocab_size)):
            # A tile without allowed tokens must have weight 0, not NaN.
            distance = values.to(tl.float64) - tl.maximum(top, -3.0e38).to(tl.float64)
            tl.store(part_masses + part, tl.sum(tl.exp(distance), axis=0))
    elif temperature > 0:
        low, high, choice = load_key(ints)
        position = (tl.load(positions + index) + 1).to(tl.uint32, bitcast=True)
        scores = values + noise_of_tile(tile, position, low, high, choice, TILE)
    best = tl.max(scores, axis=0)
    tl.store(parts + part, best)
    tl.store(parts + part_stride + part, top)
    tl.store(parts + 2 * part_stride + part, tl.max(unusable.to(tl.float32), axis=0))
    tl.store(part_ids + part, tl.min(tl.where(scores == best, columns, NO_TOKEN), axis=0))


@triton.jit
def _finish(
    vocab_size, positions, rows, root, table_rows, float_params, int_params,
    processed, processed_stride, candidate_ids, parts, part_stride, part_ids, part_masses, num_tiles,
    sampled, bad, totals,
    LOSSY: tl.constexpr, PDL: tl.constexpr, TILES: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    release_and_wait(PDL)
    index = tl.program_id(0)
    samples, _, table_row = _locate(index, rows, root, table_rows)
    if samples == 0:
        tl.store(sampled + index, -1)
        tl.store(bad + index, 0)
        return
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    part = index.to(tl.int64) * num_tiles + tiles
    scores = tl.load(parts + part, mask=inside, other=float("-inf"))
    tops = tl.load(parts + part_stride + part, mask=inside, other=float("-inf"))
    unusable = tl.max(tl.load(parts + 2 * part_stride + part, mask=inside, other=0.0), axis=0)
    best_ids = tl.load(part_ids + part, mask=inside, other=NO_TOKEN)
    top = tl.max(tops, axis=0)
    fails = (unusable > 0) | (top == float("-inf"))
    token = tl.min(tl.where(scores == tl.max(scores, axis=0), best_ids, NO_TOKEN), axis=0)
    floats, ints = float_params + table_row * 8, int_params + table_row * 8
    _, top_k, top_p, min_p, filtered, is_lossy = _filter_params(floats, ints, vocab_size)
    searched = filtered
    if LOSSY:
        searched = filtered | is_lossy
    if searched & (fails == 0):
        has_k, has_p, has_m = (top_k > 0) & (top_k < vocab_size), top_p < 1, min_p > 0
        wide_top = top.to(tl.float64)
        # Avoid the logarithm of 0.
        floor = tl.where(has_m, tl.log(tl.where(has_m, tl.minimum(min_p, 1.0), 1.0).to(tl.float64)), float("-inf"))
        target = wide_top - wide_top + float("inf")
        if has_p & (has_k == 0):
            masses = tl.load(part_masses + part, mask=inside, other=0.0)
            target = top_p.to(tl.float64) * tl.sum(masses * tl.exp(tops.to(tl.float64) - wide_top), axis=0)
        row = processed + index.to(tl.int64) * processed_stride
        ids = candidate_ids + index.to(tl.int64) * CANDIDATES
        # Top-p after top-k needs the mass of all tokens that top-k keeps, even if min-p keeps fewer.
        lowest_key, length, listed = filters.shortlist(
            row, row + vocab_size, ids, vocab_size, wide_top, tl.where(has_k, top_k, NO_TOKEN), target,
            tl.where(has_k & has_p, float("-inf"), floor), CANDIDATES, BLOCK,
        )  # fmt: skip
        values = row + tl.where(listed > 0, vocab_size, 0)
        size = tl.where(listed > 0, listed, vocab_size)
        border_key, border_id = filters.borders(
            values, ids, listed, size, vocab_size, wide_top, lowest_key, length,
            target, top_k, top_p.to(tl.float64), has_k, has_p, BLOCK,
        )  # fmt: skip
        if filtered:
            low, high, choice = load_key(ints)
            position = (tl.load(positions + index) + 1).to(tl.uint32, bitcast=True)
            token = filters.best_within(
                values, ids, listed, size, wide_top, border_key, border_id, floor, position, low, high, choice, BLOCK
            )  # fmt: skip
        if LOSSY:  # noqa: SIM102  # decided at compile time
            if is_lossy:
                total = filters.total_weight(values, ids, listed, size, wide_top, border_key, border_id, floor, BLOCK)
                tl.store(totals + index, wide_top + tl.log(total))
                filters.drop_filtered(row, vocab_size, wide_top, border_key, border_id, floor, BLOCK)
    tl.store(sampled + index, tl.where(fails, -1, token))
    tl.store(bad + index, fails.to(tl.int32))


def sample_rows(
    logits: Tensor,
    vocab_size: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    buffers: SampleBuffers,
    vocab_mask: Tensor | None,
    lossy: bool,
) -> None:
    """Implement kernels.sampling.sample_rows."""
    num_tokens = tokens.token_ids.shape[0]
    tiles = triton.cdiv(vocab_size, state.TILE)
    part_stride, row_stride = buffers.parts.stride(0), buffers.processed.stride(0)
    mask = tokens.rows if vocab_mask is None else vocab_mask
    # Fused multiply-adds would round penalties, and perhaps noise, differently from the reference.
    _prepare[(num_tokens, tiles)](
        logits, logits.stride(0), vocab_size,
        tokens.token_ids, tokens.positions, tokens.parents, tokens.rows, tokens.root, tokens.table_rows,
        tables.float_params, tables.int_params, tables.counts, tables.bias, mask, mask.stride(0),
        buffers.processed, row_stride, buffers.parts, part_stride, buffers.part_ids, buffers.part_masses,
        HAS_MASK=vocab_mask is not None, LOSSY=lossy, TILE=state.TILE,
        num_warps=4, enable_fp_fusion=False, **starts_early(logits),
    )  # fmt: skip
    _finish[(num_tokens,)](
        vocab_size, tokens.positions, tokens.rows, tokens.root, tokens.table_rows,
        tables.float_params, tables.int_params,
        buffers.processed, row_stride, buffers.candidate_ids,
        buffers.parts, part_stride, buffers.part_ids, buffers.part_masses, tiles,
        buffers.sampled, buffers.bad, buffers.totals,
        LOSSY=lossy, TILES=triton.next_power_of_2(tiles),
        CANDIDATES=buffers.candidate_ids.shape[1], BLOCK=min(2048, triton.next_power_of_2(vocab_size)),
        num_warps=16, enable_fp_fusion=False, **starts_early(logits),
    )  # fmt: skip


@triton.jit
def _tile(logits, start, vocab_size, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    return tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32), columns, inside


@triton.jit
def _lower_bound(column_tops, wanted):
    """Return the largest key that at least `wanted` entries, and so as many tokens, reach; few tokens are above it."""
    keys = order_key(column_tops).to(tl.int64)
    low, high = tl.min(keys, axis=0), tl.max(keys, axis=0) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def _sum_and_list(logits, vocab_size, top, bound, wanted, list_values, list_ids, BLOCK: tl.constexpr):
    """List tokens above `bound` and the first `wanted` at it; return the sum of exp(logit - top) and their number."""
    sums = tl.zeros([BLOCK], tl.float64)
    length = wanted - wanted
    ties = length
    for start in range(0, vocab_size, BLOCK):
        values, columns, inside = _tile(logits, start, vocab_size, BLOCK)
        sums += tl.exp(values.to(tl.float64) - top)
        keys = order_key(values)
        tied = inside & (keys == bound)
        # Most tiles hold no candidate, and checking costs less than a running sum.
        if tl.max(tl.where(inside, keys, LOWEST_KEY), axis=0) >= bound:
            rank = ties + tl.cumsum(tied.to(tl.int32), axis=0)
            near = (inside & (keys > bound)) | (tied & (rank <= wanted))
            places = length + tl.cumsum(near.to(tl.int32), axis=0) - 1
            tl.store(list_values + places, values, mask=near)
            tl.store(list_ids + places, columns, mask=near)
            length += tl.sum(near.to(tl.int32), axis=0)
            ties += tl.sum(tied.to(tl.int32), axis=0)
    # Threads read entries of the list that other threads wrote.
    tl.debug_barrier()
    return tl.sum(sums, axis=0), length


@triton.jit
def _store_likeliest(list_values, list_ids, length, wanted, log_total, top_ids, top_logprobs, LIST: tl.constexpr):
    """Write the `wanted` likeliest tokens of a list in order."""
    places = tl.arange(0, LIST)
    inside = places < length
    values = tl.load(list_values + places, mask=inside, other=float("-inf"))
    ids = tl.load(list_ids + places, mask=inside, other=NO_TOKEN)
    keys = tl.where(inside, order_key(values), LOWEST_KEY)
    for place in range(0, wanted):
        best = tl.min(tl.where(keys == tl.max(keys, axis=0), ids, NO_TOKEN), axis=0)
        chosen = ids == best
        value = tl.max(tl.where(chosen, values, float("-inf")), axis=0)
        tl.store(top_ids + place, best)
        tl.store(top_logprobs + place, (value.to(tl.float64) - log_total).to(tl.float32))
        keys = tl.where(chosen, LOWEST_KEY, keys)


@triton.jit
def _logprobs(
    logits, stride, vocab_size, root, table_rows, int_params, num_tokens, num_tokens_stride,
    tokens, tokens_stride, accepted, accepted_stride,
    logprobs, logprobs_stride, top_ids, ids_stride, top_logprobs, top_stride, list_values, list_ids,
    PDL: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    release_and_wait(PDL)
    row, program = tl.program_id(0), tl.program_id(1)
    wide_row = row.to(tl.int64)
    wanted = tl.load(int_params + tl.load(table_rows + row).to(tl.int64) * 8 + 4)
    count = tl.where(wanted >= 0, tl.load(num_tokens + wide_row * num_tokens_stride), 0)
    wanted = tl.minimum(tl.minimum(wanted, _MAX_TOP), vocab_size)
    scratch = (row * tl.num_programs(1) + program).to(tl.int64) * LIST
    slots = tl.arange(0, SLOTS)
    for place in range(program, count, tl.num_programs(1)):
        node = tl.load(root + row)
        if place > 0:
            node = tl.load(accepted + wide_row * accepted_stride + place - 1)
        values = logits + node.to(tl.int64) * stride
        column_tops = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            column_tops = tl.maximum(column_tops, _tile(values, start, vocab_size, BLOCK)[0])
        top = tl.max(column_tops, axis=0).to(tl.float64)
        bound = NO_TOKEN + (wanted - wanted)
        if wanted > 0:
            bound = _lower_bound(column_tops, wanted)
        total, length = _sum_and_list(
            values, vocab_size, top, bound, wanted, list_values + scratch, list_ids + scratch, BLOCK
        )  # fmt: skip
        log_total = top + tl.log(total)
        value = tl.load(values + tl.load(tokens + wide_row * tokens_stride + place)).to(tl.float64)
        tl.store(logprobs + wide_row * logprobs_stride + place, (value - log_total).to(tl.float32))
        listed_ids = top_ids + wide_row * ids_stride + place * _MAX_TOP
        listed_values = top_logprobs + wide_row * top_stride + place * _MAX_TOP
        behind = (slots >= wanted) & (slots < _MAX_TOP)
        tl.store(listed_ids + slots, -1, mask=behind)
        tl.store(listed_values + slots, float("-inf"), mask=behind)
        _store_likeliest(
            list_values + scratch, list_ids + scratch, length, wanted, log_total,
            listed_ids, listed_values, LIST,
        )  # fmt: skip
        # The next token's list must not overwrite this one before all threads have read it.
        tl.debug_barrier()


def logprobs(
    logits: Tensor,
    vocab_size: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    walked: WalkOutputs,
    out: LogprobOutputs,
) -> None:
    """Implement kernels.sampling.logprobs."""
    num_rows = tokens.root.shape[0]
    block = min(2048, max(triton.next_power_of_2(vocab_size), 32))
    # Fewer than MAX_TOP_LOGPROBS columns have a top above the bound; all other tokens of the list tie with the bound.
    most = (MAX_TOP_LOGPROBS - 1) * triton.cdiv(vocab_size, block) + MAX_TOP_LOGPROBS
    length = triton.next_power_of_2(most)
    scratch = (num_rows, _PROGRAMS, length)
    list_values = torch.empty(scratch, dtype=torch.float32, device=logits.device)
    list_ids = torch.empty(scratch, dtype=torch.int32, device=logits.device)
    _logprobs[(num_rows, _PROGRAMS)](
        logits, logits.stride(0), vocab_size, tokens.root, tokens.table_rows, tables.int_params,
        walked.num_tokens, walked.num_tokens.stride(0),
        walked.tokens, walked.tokens.stride(0), walked.accepted, walked.accepted.stride(0),
        out.logprobs, out.logprobs.stride(0), out.top_ids, out.top_ids.stride(0),
        out.top_logprobs, out.top_logprobs.stride(0), list_values, list_ids,
        BLOCK=block, LIST=length, SLOTS=triton.next_power_of_2(MAX_TOP_LOGPROBS), num_warps=16, **starts_early(logits),
    )  # fmt: skip

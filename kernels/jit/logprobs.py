"""See kernels.logprobs. A few programs share a row's committed tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.jit.filters import order_key
from kernels.launch import supports_pdl
from kernels.sampling_state import MAX_TOP_LOGPROBS, LogprobOutputs, RoundTokens, SamplingTables, WalkOutputs

_MOST: tl.constexpr = tl.constexpr(MAX_TOP_LOGPROBS)
_LOWEST_KEY: tl.constexpr = tl.constexpr(-2147483648)
_LARGEST: tl.constexpr = tl.constexpr(2147483647)
_PROGRAMS = 8


@triton.jit
def _tile(logits, start, vocab_size, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    inside = columns < vocab_size
    return tl.load(logits + columns, mask=inside, other=float("-inf")).to(tl.float32), columns, inside


@triton.jit
def _lower_bound(column_tops, wanted):
    """The largest key that at least `wanted` entries reach: so do as many tokens, and those above it are few."""
    keys = order_key(column_tops).to(tl.int64)
    low, high = tl.min(keys, axis=0), tl.max(keys, axis=0) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def _sum_and_list(logits, vocab_size, top, bound, wanted, list_values, list_ids, BLOCK: tl.constexpr):
    """Sum of exp(logit - top); lists tokens above `bound`, and the first `wanted` of those at it; also their number."""
    sums = tl.zeros([BLOCK], tl.float64)
    length = wanted - wanted
    ties = length
    for start in range(0, vocab_size, BLOCK):
        values, columns, inside = _tile(logits, start, vocab_size, BLOCK)
        sums += tl.exp(values.to(tl.float64) - top)
        keys = order_key(values)
        tied = inside & (keys == bound)
        # Most tiles hold no candidate, and a running sum costs more than to ask.
        if tl.max(tl.where(inside, keys, _LOWEST_KEY), axis=0) >= bound:
            rank = ties + tl.cumsum(tied.to(tl.int32), axis=0)
            near = (inside & (keys > bound)) | (tied & (rank <= wanted))
            places = length + tl.cumsum(near.to(tl.int32), axis=0) - 1
            tl.store(list_values + places, values, mask=near)
            tl.store(list_ids + places, columns, mask=near)
            length += tl.sum(near.to(tl.int32), axis=0)
            ties += tl.sum(tied.to(tl.int32), axis=0)
    # The list is read by other threads than those that wrote it.
    tl.debug_barrier()
    return tl.sum(sums, axis=0), length


@triton.jit
def _store_likeliest(list_values, list_ids, length, wanted, log_total, top_ids, top_logprobs, LIST: tl.constexpr):
    """Write the `wanted` likeliest of a list in order."""
    places = tl.arange(0, LIST)
    inside = places < length
    values = tl.load(list_values + places, mask=inside, other=float("-inf"))
    ids = tl.load(list_ids + places, mask=inside, other=_LARGEST)
    keys = tl.where(inside, order_key(values), _LOWEST_KEY)
    for place in range(0, wanted):
        best = tl.min(tl.where(keys == tl.max(keys, axis=0), ids, _LARGEST), axis=0)
        chosen = ids == best
        value = tl.max(tl.where(chosen, values, float("-inf")), axis=0)
        tl.store(top_ids + place, best)
        tl.store(top_logprobs + place, (value.to(tl.float64) - log_total).to(tl.float32))
        keys = tl.where(chosen, _LOWEST_KEY, keys)


@triton.jit
def _logprobs(
    logits, stride, vocab_size, root, table_rows, int_params, num_tokens, num_tokens_stride,
    tokens, tokens_stride, accepted, accepted_stride,
    logprobs, logprobs_stride, top_ids, ids_stride, top_logprobs, top_stride, list_values, list_ids,
    PDL: tl.constexpr, BLOCK: tl.constexpr, LIST: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, program = tl.program_id(0), tl.program_id(1)
    wide_row = row.to(tl.int64)
    wanted = tl.load(int_params + tl.load(table_rows + row).to(tl.int64) * 8 + 4)
    count = tl.where(wanted >= 0, tl.load(num_tokens + wide_row * num_tokens_stride), 0)
    wanted = tl.minimum(tl.minimum(wanted, _MOST), vocab_size)
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
        bound = _LARGEST + (wanted - wanted)
        if wanted > 0:
            bound = _lower_bound(column_tops, wanted)
        total, length = _sum_and_list(
            values, vocab_size, top, bound, wanted, list_values + scratch, list_ids + scratch, BLOCK
        )  # fmt: skip
        log_total = top + tl.log(total)
        value = tl.load(values + tl.load(tokens + wide_row * tokens_stride + place)).to(tl.float64)
        tl.store(logprobs + wide_row * logprobs_stride + place, (value - log_total).to(tl.float32))
        listed_ids = top_ids + wide_row * ids_stride + place * _MOST
        listed_values = top_logprobs + wide_row * top_stride + place * _MOST
        behind = (slots >= wanted) & (slots < _MOST)
        tl.store(listed_ids + slots, -1, mask=behind)
        tl.store(listed_values + slots, float("-inf"), mask=behind)
        _store_likeliest(
            list_values + scratch, list_ids + scratch, length, wanted, log_total,
            listed_ids, listed_values, LIST,
        )  # fmt: skip
        # The next token's list must not overwrite this one before all have read it.
        tl.debug_barrier()


def logprobs(
    logits: Tensor,
    vocab_size: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    walked: WalkOutputs,
    out: LogprobOutputs,
) -> None:
    """As kernels.logprobs.logprobs."""
    num_rows = tokens.root.shape[0]
    block = min(2048, max(triton.next_power_of_2(vocab_size), 32))
    # Fewer than MAX_TOP_LOGPROBS columns have a top above the bound, and all else in the list ties with it.
    most = (MAX_TOP_LOGPROBS - 1) * triton.cdiv(vocab_size, block) + MAX_TOP_LOGPROBS
    length = triton.next_power_of_2(most)
    scratch = (num_rows, _PROGRAMS, length)
    list_values = torch.empty(scratch, dtype=torch.float32, device=logits.device)
    list_ids = torch.empty(scratch, dtype=torch.int32, device=logits.device)
    pdl = supports_pdl(logits)
    options = {"launch_pdl": True} if pdl else {}
    _logprobs[(num_rows, _PROGRAMS)](
        logits, logits.stride(0), vocab_size, tokens.root, tokens.table_rows, tables.int_params,
        walked.num_tokens, walked.num_tokens.stride(0),
        walked.tokens, walked.tokens.stride(0), walked.accepted, walked.accepted.stride(0),
        out.logprobs, out.logprobs.stride(0), out.top_ids, out.top_ids.stride(0),
        out.top_logprobs, out.top_logprobs.stride(0), list_values, list_ids,
        PDL=pdl, BLOCK=block, LIST=length, SLOTS=triton.next_power_of_2(MAX_TOP_LOGPROBS), num_warps=16, **options,
    )  # fmt: skip

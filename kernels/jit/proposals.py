"""Triton kernels of kernels.sampling.propose: one finds the best score of each group, a second one the best tokens.

The k best tokens lie in the k groups with the best tops: for any token outside, these tops are k tokens that are at
least as good. So the first launch, which reads the whole vocabulary, takes one maximum of each group and selects
nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels import sampling_state as state
from kernels.jit.filters import NO_TOKEN, order_key, value_of_key
from kernels.jit.gumbel import load_key, rough_noise_of_words, words_of_ids, words_of_tile
from kernels.jit.memory import release_and_wait
from kernels.launch import power_of_two, starts_early
from kernels.sampling_state import ProposeBuffers, ProposeTables

# Vocabulary tokens of a program of the first launch.
_TILE = 1024
_GROUP: tl.constexpr = tl.constexpr(state.GROUP)
_RANK_BY_NOISE: tl.constexpr = tl.constexpr(state.RANK_BY_NOISE)
_MIN_TEMPERATURE: tl.constexpr = tl.constexpr(state.MIN_TEMPERATURE)
_LOWEST: tl.constexpr = tl.constexpr(-(1 << 63))


@triton.jit
def _token_ids(target_ids, columns, inside, vocab_limit, MAPPED: tl.constexpr):
    """Return target ids of draft tokens, and which of them are legal."""
    ids = columns
    if MAPPED:
        ids = tl.load(target_ids + columns, mask=inside, other=-1)
    return ids, inside & (ids >= 0) & (ids < vocab_limit)


@triton.jit
def _factors(floats, ints):
    """Return a request's factors of logits and noise, and whether there is noise."""
    temperature = tl.load(floats)
    warm = temperature > 0
    noisy = warm & ((tl.load(ints + 3) & _RANK_BY_NOISE) != 0)
    noise_factor = 1.0 / tl.where(noisy, tl.load(floats + 1), 1.0)
    return noise_factor / tl.where(warm, tl.maximum(temperature, _MIN_TEMPERATURE), 1.0), noise_factor, noisy


@triton.jit
def _finite(values):
    """Replace infinite values by 0, so that they can be subtracted from any value."""
    return tl.where(tl.abs(values) == float("inf"), 0.0, values)


@triton.jit
def _order(values, places):
    """Return int64 that sort like float32 `values` without NaN, lower `places` above higher ones for equal values."""
    return (order_key(values).to(tl.int64) << 32) | (places ^ NO_TOKEN).to(tl.int64)


@triton.jit
def _best(keys, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Return values and places of the COUNT largest of `keys` [N] of `_order`, largest first, [PADDED] each."""
    turns = tl.arange(0, PADDED)
    found = tl.full([PADDED], _LOWEST, tl.int64)
    for turn in range(COUNT):
        largest = tl.max(keys, 0)
        found = tl.where(turns == turn, largest, found)
        keys = tl.where(keys == largest, _LOWEST, keys)
    places = (found & NO_TOKEN).to(tl.int32) ^ NO_TOKEN
    # Missing keys count as -inf.
    return tl.where(found == _LOWEST, float("-inf"), value_of_key((found >> 32).to(tl.int32))), places


@triton.jit
def _reduce(
    logits, logits_stride, vocab_size, vocab_limit, target_ids, rows, positions, floats, ints,
    tops, masses, num_groups,
    MAPPED: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (nodes, tiles): top and mass of the tile's groups."""
    release_and_wait(PDL)
    index, tile = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + index)
    if row < 0:
        return
    floats += row.to(tl.int64) * 2
    ints += row.to(tl.int64) * 4
    columns = tile * TILE + tl.arange(0, TILE)
    wide = index.to(tl.int64)
    ids, legal = _token_ids(target_ids, columns, columns < vocab_size, vocab_limit, MAPPED)
    values = tl.load(logits + wide * logits_stride + columns, mask=legal, other=float("-inf")).to(tl.float32)
    factor, noise_factor, noisy = _factors(floats, ints)
    values = values * factor
    if noisy:
        low, high, choice = load_key(ints)
        position = (tl.load(positions + index) + 1).to(tl.uint32, bitcast=True)
        if MAPPED:
            words = words_of_ids(ids, position, low, high, choice)
        else:
            words = words_of_tile(tile, position, low, high, choice, TILE)
        values = values + rough_noise_of_words(words, ON_GPU) * noise_factor

    grouped = tl.reshape(values, [TILE // _GROUP, _GROUP])
    top = tl.max(grouped, 1)
    # NaN and +inf make the mass NaN or infinite, which the second launch checks.
    mass = tl.sum(tl.exp(grouped - _finite(top)[:, None]), 1)
    groups = tile * (TILE // _GROUP) + tl.arange(0, TILE // _GROUP)
    inside = groups < num_groups
    tl.store(tops + wide * num_groups + groups, top, mask=inside)
    tl.store(masses + wide * num_groups + groups, mass, mask=inside)


@triton.jit
def _select(
    logits, logits_stride, vocab_size, vocab_limit, target_ids, rows, positions, floats, ints,
    tops, masses, num_groups, tokens, scores,
    MAPPED: tl.constexpr, PDL: tl.constexpr, ON_GPU: tl.constexpr,
    GROUPS: tl.constexpr, COUNT: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Grid (nodes,): the best tokens of the best groups. GROUPS and PADDED are powers of two."""
    release_and_wait(PDL)
    index = tl.program_id(0)
    wide = index.to(tl.int64)
    turns = tl.arange(0, PADDED)
    outputs = wide * COUNT + turns
    row = tl.load(rows + index)
    if row < 0:
        tl.store(tokens + outputs, -1, mask=turns < COUNT)
        tl.store(scores + outputs, float("-inf"), mask=turns < COUNT)
        return
    floats += row.to(tl.int64) * 2
    ints += row.to(tl.int64) * 4
    groups = tl.arange(0, GROUPS)
    top = tl.load(tops + wide * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
    mass = tl.load(masses + wide * num_groups + groups, mask=groups < num_groups, other=0.0)
    best = tl.max(top, 0)
    total = tl.sum(mass * tl.exp(top - _finite(best)), 0)
    usable = (total > 0.0) & (total < float("inf"))

    _, chosen = _best(_order(top, groups), COUNT, PADDED)
    columns = tl.reshape(chosen[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :], [PADDED * _GROUP])
    inside = tl.reshape(
        tl.broadcast_to(((chosen < num_groups) & (turns < COUNT))[:, None], [PADDED, _GROUP]), [PADDED * _GROUP]
    )
    columns = tl.where(inside, columns, vocab_size)
    ids, legal = _token_ids(target_ids, columns, columns < vocab_size, vocab_limit, MAPPED)
    values = tl.load(logits + wide * logits_stride + columns, mask=legal, other=float("-inf")).to(tl.float32)
    factor, noise_factor, noisy = _factors(floats, ints)
    values = values * factor
    if noisy:
        low, high, choice = load_key(ints)
        position = (tl.load(positions + index) + 1).to(tl.uint32, bitcast=True)
        words = words_of_ids(ids, position, low, high, choice)
        values = values + rough_noise_of_words(words, ON_GPU) * noise_factor
    values, places = _best(_order(values, columns), COUNT, PADDED)
    values = tl.where(usable, values, float("-inf"))
    there = values > float("-inf")
    found, _ = _token_ids(target_ids, places, there, vocab_limit, MAPPED)
    tl.store(tokens + outputs, tl.where(there, found, -1), mask=turns < COUNT)
    score = tl.minimum(values - _finite(best) - tl.log(tl.where(usable, total, 1.0)), 0.0)
    tl.store(scores + outputs, tl.where(there, score, float("-inf")), mask=turns < COUNT)


def propose(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    tables: ProposeTables,
    buffers: ProposeBuffers,
    tokens: Tensor,
    scores: Tensor,
    vocab_limit: int,
    target_ids: Tensor | None,
) -> None:
    """Implement kernels.sampling.propose."""
    (count, size), branching = logits.shape, tokens.shape[1]
    num_groups = triton.cdiv(size, state.GROUP)
    groups = max(power_of_two(num_groups), 2)
    kinds = {"MAPPED": target_ids is not None, "ON_GPU": logits.is_cuda, **starts_early(logits)}
    ids = rows if target_ids is None else target_ids
    inputs = (
        logits, logits.stride(0), size, vocab_limit, ids, rows, positions, tables.floats, tables.ints,
        buffers.tops, buffers.masses, num_groups,
    )  # fmt: skip
    _reduce[(count, triton.cdiv(size, _TILE))](*inputs, **kinds, TILE=_TILE, num_warps=4)
    _select[(count,)](
        *inputs, tokens, scores, **kinds, GROUPS=groups, COUNT=branching, PADDED=max(power_of_two(branching), 2),
        num_warps=8 if groups > 512 else 4,
    )  # fmt: skip

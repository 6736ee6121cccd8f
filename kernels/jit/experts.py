"""Triton kernels of kernels.experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.expert_tiles import Gating, Routes, max_tiles
from kernels.jit.elementwise import gate_mul, gated
from kernels.jit.gemm import multiply
from kernels.jit.memory import release_and_wait
from kernels.jit.quantized import add_words
from kernels.launch import power_of_two, starts_early
from kernels.quant_weight import QuantWeight

_CHUNK = 512
"""Pairs that a program reads at a time."""


@triton.jit
def _choose(
    logits, slots, experts, weights, tile_experts, places, num_places,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, NUM_ACTIVE: tl.constexpr, ACTIVE: tl.constexpr,
    TILE: tl.constexpr, LANES: tl.constexpr, NORMED: tl.constexpr, LONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,). LONE: there is only one token, so each of its experts is a tile of one pair, without `_align`."""
    release_and_wait(PDL)
    LOWEST: tl.constexpr = -3.4028234663852886e38
    token = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    place = tl.arange(0, ACTIVE)
    found = tl.load(logits + token * NUM_EXPERTS + expert, mask=expert < NUM_EXPERTS, other=LOWEST)
    # NaN is not equal to itself.
    found = tl.where(found == found, tl.maximum(found, LOWEST), LOWEST)
    left = tl.where(expert < NUM_EXPERTS, found, float("-inf"))
    highest = tl.max(left, axis=0)
    chosen = tl.zeros([ACTIVE], tl.int32)
    powers = tl.zeros([ACTIVE], tl.float32)
    for k in tl.static_range(NUM_ACTIVE):
        top = tl.max(left, axis=0)
        best = tl.min(tl.where(left == top, expert, EXPERTS), axis=0)
        chosen = tl.where(place == k, best, chosen)
        powers = tl.where(place == k, tl.exp(top - highest), powers)
        left = tl.where(expert == best, float("-inf"), left)
    total = tl.sum(powers, axis=0)
    if not NORMED:
        total = tl.sum(tl.where(expert < NUM_EXPERTS, tl.exp(found - highest), 0.0), axis=0)
    if slots is not None:
        chosen = tl.where(tl.load(slots + token) < 0, -1, chosen)
    tl.store(experts + token * NUM_ACTIVE + place, chosen, mask=place < NUM_ACTIVE)
    tl.store(weights + token * NUM_ACTIVE + place, powers / total, mask=place < NUM_ACTIVE)
    if LONE:
        tl.store(tile_experts + place, chosen, mask=place < NUM_ACTIVE)
        lane = tl.arange(0, LANES)
        pair = tl.where(lane[None, :] == 0, place[:, None], -1)
        real = (place < NUM_ACTIVE)[:, None] & (lane < TILE)[None, :]
        tl.store(places + place[:, None] * TILE + lane[None, :], pair, mask=real)
        used = tl.sum(tl.where((place < NUM_ACTIVE) & (chosen >= 0), TILE, 0), axis=0)
        tl.store(num_places, used)


def route(logits: Tensor, num_active: int, normed: bool, slots: Tensor | None, tile: int) -> Routes:
    """Implement kernels.experts.route."""
    num_tokens, num_experts = logits.shape
    experts = torch.empty(num_tokens, num_active, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, num_active, dtype=torch.float32, device=logits.device)
    routes = _empty_tiles(experts, weights, num_experts, tile)
    _choose[(num_tokens,)](
        logits, slots, routes.experts, routes.weights, routes.tile_experts, routes.places, routes.num_places,
        NUM_EXPERTS=num_experts, EXPERTS=power_of_two(num_experts), NUM_ACTIVE=num_active,
        ACTIVE=power_of_two(num_active), TILE=tile, LANES=power_of_two(tile), NORMED=normed,
        LONE=num_tokens == 1, num_warps=1, **starts_early(logits),
    )  # fmt: skip
    if num_tokens > 1:
        _lay_out(num_experts, routes)
    return routes


def in_tiles(routes: Routes, num_experts: int, tile: int) -> Routes:
    """Implement kernels.experts.in_tiles."""
    found = _empty_tiles(routes.experts, routes.weights, num_experts, tile)
    _lay_out(num_experts, found)
    return found


def _empty_tiles(experts: Tensor, weights: Tensor, num_experts: int, tile: int) -> Routes:
    num_tokens, num_active = experts.shape
    tiles = max_tiles(num_tokens, num_active, num_experts, tile)
    tile_experts, places, num_places = (experts.new_empty(size) for size in (tiles, tiles * tile, 1))
    return Routes(experts, weights, tile_experts, places, num_places, tile)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _align(
    experts, tile_experts, places, num_places, num_pairs, num_tiles,
    NUM_EXPERTS: tl.constexpr, BINS: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr, TILES: tl.constexpr,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (experts,): each program counts the pairs of all experts, then places the pairs of its own."""
    release_and_wait(PDL)
    own = tl.program_id(0)
    bin = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pair = start + tl.arange(0, CHUNK)
        expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1)
        # Padding counts in a bin after all experts.
        counts += tl.histogram(tl.where(expert < 0, NUM_EXPERTS, expert), BINS)
    tiles = tl.where(bin < NUM_EXPERTS, (counts + TILE - 1) // TILE, 0)
    first = tl.sum(tl.where(bin < own, tiles, 0), axis=0)
    count = tl.sum(tl.where(bin == own, counts, 0), axis=0)
    mine = (count + TILE - 1) // TILE
    tile = tl.arange(0, TILES)
    tl.store(tile_experts + tile, own, mask=(tile >= first) & (tile < first + mine))
    if own == NUM_EXPERTS - 1:
        tl.store(tile_experts + tile, -1, mask=(tile >= first + mine) & (tile < num_tiles))
        tl.store(num_places, (first + mine) * TILE)
    if count > 0:
        rest = count + tl.arange(0, LANES)
        tl.store(places + first * TILE + rest, -1, mask=rest < mine * TILE)
        seen = first * TILE
        for start in range(0, num_pairs, CHUNK):
            pair = start + tl.arange(0, CHUNK)
            is_own = tl.load(experts + pair, mask=pair < num_pairs, other=-1) == own
            rank = tl.cumsum(is_own.to(tl.int32), axis=0)
            tl.store(places + seen + rank - 1, pair, mask=is_own)
            seen += tl.sum(is_own.to(tl.int32), axis=0)


def _lay_out(num_experts: int, routes: Routes) -> None:
    """Fill `tile_experts`, `places` and `num_places`."""
    num_pairs, num_tiles = routes.experts.numel(), routes.tile_experts.numel()
    _align[(num_experts,)](
        routes.experts, routes.tile_experts, routes.places, routes.num_places, num_pairs, num_tiles,
        NUM_EXPERTS=num_experts, BINS=power_of_two(num_experts + 1), TILE=routes.tile,
        LANES=power_of_two(routes.tile), TILES=power_of_two(num_tiles), CHUNK=min(power_of_two(num_pairs), _CHUNK),
        num_warps=4, **starts_early(routes.experts),
    )  # fmt: skip


@triton.jit
def _load_weights(start, row, inside, column, size, EVEN: tl.constexpr):
    places = start + row.to(tl.int64)[:, None] * size + column[None, :]
    # Evict weights from L2 first: most are read once a round.
    there = inside[:, None] if EVEN else inside[:, None] & (column[None, :] < size)
    return tl.load(places, mask=there, other=0.0, eviction_policy="evict_first")


@triton.jit
def _load_factors(source, there, column, size, EVEN: tl.constexpr):
    """Load columns of the pairs' rows."""
    wanted = there[:, None] if EVEN else there[:, None] & (column[None, :] < size)
    return tl.load(source + column[None, :], mask=wanted, other=0.0)


@triton.jit
def _expert_linear(
    rows, weight, scales, zeros, bias, tile_experts, places, out, num_out, size, num_scales, num_groups,
    alpha, limit, shift,
    PAIRS_PER_ROW: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, EVEN: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, SWAP: tl.constexpr,
    PDL: tl.constexpr,
    KIND: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of outputs, tiles of pairs)."""
    release_and_wait(PDL)
    tile = tl.program_id(1)
    expert = tl.load(tile_experts + tile)
    if expert < 0:
        return
    pair = tl.load(places + tile * TILE + tl.arange(0, TILE))
    there = pair >= 0
    source = rows + (pair // PAIRS_PER_ROW).to(tl.int64)[:, None] * size
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < num_out
    NUM_ROWS = num_out * 2 if GATED else num_out
    PARTS: tl.constexpr = 1 if KIND == "" else 2 if KIND == "fp8" else 4
    DEPTH: tl.constexpr = BLOCK_K // PARTS
    stored = size // PARTS
    start = weight + expert.to(tl.int64) * NUM_ROWS * stored
    # Results of rows past the last one are never stored, but their scales must be read from valid addresses.
    real = tl.minimum(column, num_out - 1)
    gate_row = real * 2 if INTERLEAVED else real
    up_row = gate_row + 1 if INTERLEAVED else gate_row + num_out
    if KIND != "":
        scales += expert.to(tl.int64) * num_groups * num_scales
        if zeros is not None:
            zeros += expert.to(tl.int64) * num_groups * num_scales
    HEIGHT: tl.constexpr = BLOCK_N if SWAP else TILE
    WIDTH: tl.constexpr = TILE if SWAP else BLOCK_N
    acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
    acc_up = tl.zeros([HEIGHT, WIDTH], tl.float32)
    for first in tl.range(0, size, BLOCK_K, num_stages=STAGES):
        if KIND == "":
            k = first + tl.arange(0, BLOCK_K)
            factors = _load_factors(source, there, k, size, EVEN)
            acc = multiply(acc, factors, _load_weights(start, gate_row, inside, k, size, EVEN), SWAP)
            if GATED:
                acc_up = multiply(acc_up, factors, _load_weights(start, up_row, inside, k, size, EVEN), SWAP)
        else:
            k = first // PARTS + tl.arange(0, DEPTH)
            factors = _load_factors(source, there, first + tl.arange(0, BLOCK_K), size, True)
            words = _load_weights(start, gate_row, inside, k, stored, True)
            acc = add_words(acc, words, factors, scales, zeros, gate_row // SPAN, first, num_scales, KIND, GROUP, ASM)
            if GATED:
                words = _load_weights(start, up_row, inside, k, stored, True)
                acc_up = add_words(
                    acc_up, words, factors, scales, zeros, up_row // SPAN, first, num_scales, KIND, GROUP, ASM
                )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
        acc_up = tl.trans(acc_up)
    if bias is not None:
        from_bias = bias + expert.to(tl.int64) * NUM_ROWS
        acc += tl.load(from_bias + gate_row).to(tl.float32)[None, :]
        if GATED:
            acc_up += tl.load(from_bias + up_row).to(tl.float32)[None, :]
    if GATED:
        acc = gated(acc, acc_up, alpha, limit, shift)
    target = out + pair.to(tl.int64)[:, None] * num_out + column[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=there[:, None] & inside[None, :])


def expert_linear(
    rows: Tensor, weight: Tensor | QuantWeight, routes: Routes, bias: Tensor | None, gating: Gating | None,
    interleaved: bool,
) -> Tensor:  # fmt: skip
    """Implement kernels.experts.expert_linear."""
    num_pairs, size, tile = routes.experts.numel(), rows.shape[1], routes.tile
    quantized = isinstance(weight, QuantWeight)
    block_n, block_k, stages, warps = _cut(tile, gating is not None, rows, weight)
    alpha, limit, shift = gating.for_kernels() if gating else (None, None, None)
    if isinstance(weight, QuantWeight):
        codes, scales, zeros, kind = weight.codes, weight.scales, weight.zeros, weight.kind
        group, span = weight.group, weight.span
    else:
        codes, scales, zeros, kind, group, span = weight, None, None, "", 0, 1
    num_out = codes.shape[1] // (2 if gating else 1)
    out = rows.new_empty(num_pairs, num_out)
    _expert_linear[(triton.cdiv(num_out, block_n), routes.tile_experts.numel())](
        rows, codes, scales, zeros, bias, routes.tile_experts, routes.places, out, num_out, size,
        1 if scales is None else scales.shape[-1], 1 if scales is None else scales.shape[-2],
        alpha, limit, shift,
        PAIRS_PER_ROW=num_pairs // rows.shape[0], TILE=tile, BLOCK_N=block_n, BLOCK_K=block_k, STAGES=stages,
        EVEN=size % block_k == 0, GATED=gating is not None, INTERLEAVED=interleaved,
        SWAP=quantized or tile < 64, KIND=kind, GROUP=group, SPAN=span,
        ASM=rows.is_cuda and rows.dtype == torch.bfloat16, num_warps=warps, **starts_early(rows),
    )  # fmt: skip
    return out


def _cut(tile: int, gated: bool, rows: Tensor, weight: Tensor | QuantWeight) -> tuple[int, int, int, int]:
    """Return BLOCK_N, BLOCK_K, stages and warps."""
    if isinstance(weight, QuantWeight):
        return 64, weight.piece, 3, 8 if tile >= 128 else 4
    if rows.element_size() > 2:
        return 32, 32, 2, 4
    if tile >= 64:
        return (64 if gated else 128), 64, 3, 8 if tile >= 128 else 4
    # On an H100, 1 to 64 tokens of Qwen3-30B-A3B reach 2.4 to 3.1 TB/s; with steps of 64 columns 2.2 to 2.9.
    return 64, 128, 3 if gated else 4, 4


@triton.jit
def _combine(
    pairs, experts, weights, residual, out, size,
    NUM_ACTIVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, pieces of BLOCK columns)."""
    release_and_wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.load(residual + token * size + column, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(NUM_ACTIVE):
        pair = token * NUM_ACTIVE + k
        # Padding pairs are undefined.
        there = inside & (tl.load(experts + pair) >= 0)
        value = tl.load(pairs + pair * size + column, mask=there, other=0.0).to(tl.float32)
        total += value * tl.load(weights + pair)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)


def combine(pairs: Tensor, routes: Routes, residual: Tensor) -> Tensor:
    """Implement kernels.experts.combine."""
    num_tokens, size = residual.shape
    out = torch.empty_like(residual)
    block = min(power_of_two(size), 512)
    _combine[(num_tokens, triton.cdiv(size, block))](
        pairs, routes.experts, routes.weights, residual, out, size,
        NUM_ACTIVE=routes.experts.shape[1], BLOCK=block, num_warps=2, **starts_early(pairs),
    )  # fmt: skip
    return out


def gate(gate_up: Tensor, gating: Gating, interleaved: bool) -> Tensor:
    """Implement kernels.experts.gate."""
    return gate_mul(gate_up, gating=gating, interleaved=interleaved)

"""Triton kernel of kernels.sampling.gumbel, with device functions that sampling and the walk use, too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Compute Philox 4x32-10; all words are uint32, of shapes that broadcast."""
    for _ in tl.static_range(10):
        high0, high1 = tl.umulhi(c0, 0xD2511F53), tl.umulhi(c2, 0xCD9E8D57)
        low0 = tl.mul(c0, 0xD2511F53, sanitize_overflow=False)
        low1 = tl.mul(c2, 0xCD9E8D57, sanitize_overflow=False)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def noise_of_words(words):
    """Convert random words (uint32) to Gumbel variates (float32)."""
    rest = (4294967295.5 - words.to(tl.float64)) * (1.0 / 4294967296.0)
    return (-tl.log(-tl.log(rest))).to(tl.float32)


@triton.jit
def rough_log(values, ON_GPU: tl.constexpr):
    """Return the natural logarithm of normal float32; on a GPU off by up to 2^-22, absolute or relative."""
    if ON_GPU:
        logs = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )
        logs = logs * 0.6931471805599453
    else:
        logs = tl.log(values)
    return logs


@triton.jit
def rough_noise_of_words(words, ON_GPU: tl.constexpr):
    """Approximate noise_of_words without float64: faster, off by at most 1e-5, for guesses only."""
    chance = tl.fma(words.to(tl.float32), 1.0 / 4294967296.0, 0.5 / 4294967296.0)
    # Where the noise is large, the chance u is small and 1 - u would lose its bits: use a series in u for -log(1 - u).
    series = tl.fma(chance, 1.0 / 7.0, 1.0 / 6.0)
    series = tl.fma(chance, series, 1.0 / 5.0)
    series = tl.fma(chance, series, 1.0 / 4.0)
    series = tl.fma(chance, series, 1.0 / 3.0)
    series = tl.fma(chance, series, 1.0 / 2.0)
    series = tl.fma(chance, series, 1.0)
    rest = tl.fma((words ^ 0xFFFFFFFF).to(tl.float32), 1.0 / 4294967296.0, 0.5 / 4294967296.0)
    exponential = tl.where(chance < 0.125, chance * series, -rough_log(rest, ON_GPU))
    return -rough_log(exponential, ON_GPU)


@triton.jit
def words_of_tile(tile, position, low, high, choice, TILE: tl.constexpr):
    """Return random words of tokens tile * TILE .. + TILE - 1: uint32 [TILE]. One counter serves four tokens."""
    group = (tile * (TILE // 4) + tl.arange(0, TILE // 4)).to(tl.uint32)
    # Every word gets the shape of the first, so the state keeps its type through the rounds.
    zero = group ^ group
    w0, w1, w2, w3 = philox(group, zero + position, zero + choice, zero, low, high)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def words_of_ids(token_ids, position, low, high, choice):
    """Return random words of any tokens (int32): uint32 of the same shape."""
    ids = token_ids.to(tl.uint32)
    zero = ids ^ ids
    w0, w1, w2, w3 = philox(ids >> 2, zero + position, zero + choice, zero, low, high)
    word = ids & 3
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))


@triton.jit
def noise_of_tile(tile, position, low, high, choice, TILE: tl.constexpr):
    """Return the noise of tokens tile * TILE .. + TILE - 1: float32 [TILE]."""
    return noise_of_words(words_of_tile(tile, position, low, high, choice, TILE))


@triton.jit
def noise_of_ids(token_ids, position, low, high, choice):
    """Return the noise of any tokens (int32): float32 of the same shape."""
    return noise_of_words(words_of_ids(token_ids, position, low, high, choice))


@triton.jit
def load_key(keys):
    """Load seed (low and high word) and choice index from a pointer to int32, as uint32 scalars."""
    low = tl.load(keys).to(tl.uint32, bitcast=True)
    high = tl.load(keys + 1).to(tl.uint32, bitcast=True)
    return low, high, tl.load(keys + 2).to(tl.uint32, bitcast=True)


@triton.jit
def _gumbel(keys, key_stride, positions, token_ids, id_stride, out, size, LISTED: tl.constexpr, TILE: tl.constexpr):
    row, tile = tl.program_id(0), tl.program_id(1)
    low, high, choice = load_key(keys + row.to(tl.int64) * key_stride)
    position = tl.load(positions + row).to(tl.uint32, bitcast=True)
    columns = tile * TILE + tl.arange(0, TILE)
    inside = columns < size
    if LISTED:
        ids = tl.load(token_ids + row.to(tl.int64) * id_stride + columns, mask=inside, other=0)
        noise = noise_of_ids(ids, position, low, high, choice)
    else:
        noise = noise_of_tile(tile, position, low, high, choice, TILE)
    tl.store(out + row.to(tl.int64) * size + columns, noise, mask=inside)


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int, token_ids: Tensor | None) -> Tensor:
    """Implement kernels.sampling.gumbel."""
    count, size = positions.shape[0], vocab_size if token_ids is None else token_ids.shape[1]
    out = torch.empty(count, size, dtype=torch.float32, device=positions.device)
    listed = positions if token_ids is None else token_ids.contiguous()
    if out.numel():
        grid = (count, triton.cdiv(size, 1024))
        _gumbel[grid](
            keys, keys.stride(0), positions, listed, size, out, size,
            LISTED=token_ids is not None, TILE=1024, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out

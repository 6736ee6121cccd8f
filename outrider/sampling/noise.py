"""The shared noise of drafter-invariant sampling: Gumbel variates that any process can compute from a key.

Verify adds the noise to the processed logits and takes the argmax; a drafter adds the same noise to its own guesses
and so prefers what the noise favours (docs/sampling.md). The generator is Philox 4x32-10 (Salmon et al., SC 2011):

    key      the 64-bit seed as two 32-bit words, low word first
    counter  (token_id // 4, position, choice_index, 0)
    x        word token_id % 4 of the output
    u        (x + 0.5) / 2^32        E = -log1p(-u)        G = -log E

The logarithms are taken in float64 and G is rounded to float32 once. In float32 the largest u would round to 1 and
give -inf; in float64 both u and 1 - u are exact, so E = -log(1 - u) needs no log1p, and G lies in [-3.13, 22.88].
Numpy only: this file is imported where torch is not.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

NOISE_VERSION = 1
"""Version of the noise, on which both sides must agree in the handshake; changes when any value of `gumbel` does."""

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_LANES = 64
# Places of the low and high halves when a uint64 array is viewed as uint32.
_LOW = slice(0 if sys.byteorder == "little" else 1, None, 2)
_HIGH = slice(1 if sys.byteorder == "little" else 0, None, 2)


def gumbel(
    seed: int,
    choice_index: int,
    position: int | NDArray[np.integer],
    token_ids: NDArray[np.integer] | None = None,
    vocab_size: int = 0,
) -> NDArray[np.float32]:
    """Return the noise of the tokens at `position`: float32 [vocab_size], or [K] if `token_ids` [K] are given.

    A subset equals the same entries of the full row bitwise. With `token_ids`, `position` may be an array [K] too, so
    that one call serves many nodes. Values are finite. The seed has 64 unsigned bits; choice index, position and token
    id have 32.
    """
    if token_ids is None:
        words = philox(np.arange(-(-vocab_size // 4), dtype=np.uint64), position, choice_index, 0, seed)
        return gumbel_of_words(words.reshape(-1)[:vocab_size])
    ids = token_ids.astype(np.int64)
    words = philox(ids.view(np.uint64) >> np.uint64(2), position, choice_index, 0, seed)
    return gumbel_of_words(words[np.arange(len(ids)), ids & 3])


def philox(
    counter0: NDArray[np.uint64], counter1: int | NDArray[np.integer], counter2: int, counter3: int, key: int
) -> NDArray[np.uint32]:
    """Return Philox 4x32-10 of N counters, uint32 [N, 4].

    `counter0` is [N], `counter1` [N] or one for all. All counter words must be below 2^32, and the key below 2^64.
    """
    size = len(counter0)
    even, odd = counter0.copy(), np.full(size, counter2, np.uint64)
    # The high half of each product joins the next state at once, the low half one round later. Reading the halves as
    # strided uint32 saves the shifts and masks, which would be half of all work.
    low1, low3 = np.empty(size, np.uint64), np.full(size, counter3, np.uint64)
    low1[:] = counter1
    product0, product1 = np.empty(size, np.uint64), np.empty(size, np.uint64)
    for step in range(_ROUNDS):
        np.multiply(even, _MULTIPLIERS[0], out=product0)
        np.multiply(odd, _MULTIPLIERS[1], out=product1)
        np.bitwise_xor(_half(product1, _HIGH), _half(low1, _LOW), out=_half(even, _LOW))
        np.bitwise_xor(_half(product0, _HIGH), _half(low3, _LOW), out=_half(odd, _LOW))
        even ^= np.uint64(((key & _WORD) + step * _WEYL[0]) & _WORD)
        odd ^= np.uint64(((key >> 32) + step * _WEYL[1]) & _WORD)
        low1, product1 = product1, low1
        low3, product0 = product0, low3
    words = np.empty((size, 4), np.uint32)
    for column, state in enumerate((even, low1, odd, low3)):
        words[:, column] = _half(state, _LOW)
    return words


def gumbel_of_words(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """Return the noise float32 [N] of random words uint32 [N]: finite, and each value depends on its own word alone."""
    size = len(words)
    # If an array is no multiple of its SIMD width, numpy may use other code for its end. Padding keeps every real entry
    # in the SIMD body, so that an entry's value never depends on its place.
    values = np.full(-(-size // _LANES) * _LANES, 0.5)
    np.subtract(2.0**32 - 0.5, words, out=values[:size])
    values *= 2.0**-32
    for _ in range(2):
        np.log(values, out=values)
        np.negative(values, out=values)
    return values[:size].astype(np.float32)


def _half(words: NDArray[np.uint64], half: slice) -> NDArray[np.uint32]:
    return words.view(np.uint32)[half]

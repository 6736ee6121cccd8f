"""How far an n-gram match, and the noise behind a guess, can be trusted: learned from what the target commits."""

from __future__ import annotations

import math
from collections.abc import Sequence

_LENGTH_BUCKET = (0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7)
_PRIOR = (0.2, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92)
"""Chance, by bucket of match length, that the target goes on as some text before did."""
_NUM_LENGTHS = len(_PRIOR)
_NUM_DISTINCT = 3
_NUM_COUNTS = 3

_PRIOR_WEIGHT = 8.0
_MAX_TRIES = 512.0
"""Tries of a cell at which its counts are halved."""
_LOCAL_WEIGHT = 8.0
_MAX_LOCAL_TRIES = 48.0

NUM_SOURCES = 2

_EVIDENCE_DECAY = 0.97
"""Share of the evidence that each committed token leaves."""
_MAX_EVIDENCE = 5.0
_WORD_MASK = 0xFFFFFFFF
_SHARPNESS = 0.5
"""Power of exp(noise): 1 would be exact if a trie's chances were the target's own; 0.5 measured best."""
_MEAN_NOISE_FACTOR = math.gamma(1.0 - _SHARPNESS)


class LocalConfidence:
    """What one request has shown, by bucket of match length: some texts copy, some never do."""

    __slots__ = ("hits", "tries")

    def __init__(self) -> None:
        self.hits = [0.0] * _NUM_LENGTHS
        self.tries = [0.0] * _NUM_LENGTHS


class Confidence:
    """Chances that the next token is among a match's followers, given that no longer match had it.

    A cell is (source, match length, distinct followers, occurrences), each in buckets; it starts from a prior and
    halves its counts now and then, so that it follows the traffic.
    """

    def __init__(self) -> None:
        size = NUM_SOURCES * _NUM_LENGTHS * _NUM_DISTINCT * _NUM_COUNTS
        self._tries = [_PRIOR_WEIGHT] * size
        self._hits = [
            _PRIOR_WEIGHT * _PRIOR[index // (_NUM_DISTINCT * _NUM_COUNTS) % _NUM_LENGTHS] for index in range(size)
        ]

    def cell(self, source: int, length: int, distinct: int, occurrences: int) -> int:
        """Index of the cell of a match."""
        length_bucket = _LENGTH_BUCKET[length] if length < len(_LENGTH_BUCKET) else _NUM_LENGTHS - 1
        distinct_bucket = min(distinct, _NUM_DISTINCT) - 1
        count_bucket = 0 if occurrences == 1 else 1 if occurrences < 4 else 2
        return ((source * _NUM_LENGTHS + length_bucket) * _NUM_DISTINCT + distinct_bucket) * _NUM_COUNTS + count_bucket

    def chance(self, cell: int, local: LocalConfidence) -> float:
        """Chance, above 0 and below 1, that the next token is among the followers."""
        bucket = _bucket_of(cell)
        shared = self._hits[cell] / self._tries[cell]
        return (_LOCAL_WEIGHT * shared + local.hits[bucket]) / (_LOCAL_WEIGHT + local.tries[bucket])

    def learn(self, cell: int, local: LocalConfidence, hit: bool) -> None:
        """Note whether the committed token was among the followers."""
        if self._tries[cell] >= _MAX_TRIES:
            self._tries[cell] /= 2
            self._hits[cell] /= 2
        bucket = _bucket_of(cell)
        if local.tries[bucket] >= _MAX_LOCAL_TRIES:
            local.tries[bucket] /= 2
            local.hits[bucket] /= 2
        self._tries[cell] += 1
        local.tries[bucket] += 1
        if hit:
            self._hits[cell] += 1
            local.hits[bucket] += 1


def _bucket_of(cell: int) -> int:
    return cell // (_NUM_DISTINCT * _NUM_COUNTS) % _NUM_LENGTHS


class NoiseTrust:
    """Weighs a guess's plain chance against its chance given the noise, by how well each foretold the commits."""

    __slots__ = ("_evidence",)

    def __init__(self) -> None:
        self._evidence = 0.0  # natural-log odds that the noise foretells better than the plain chance

    @property
    def weight(self) -> float:
        """Share of the chance given the noise in the blend, 0 to 1."""
        return 1.0 / (1.0 + math.exp(-self._evidence))

    def learn(self, plain: float, noisy: float) -> None:
        """Note the two chances that were given to the token that the target committed."""
        gain = math.log(max(noisy, 1e-3)) - math.log(max(plain, 1e-3))
        self._evidence = max(-_MAX_EVIDENCE, min(_MAX_EVIDENCE, _EVIDENCE_DECAY * self._evidence + gain))


def point_gumbel(seed: int, choice_index: int, position: int, token: int) -> float:
    """One entry of `outrider.sampling.noise.gumbel`, before its rounding to float32.

    A trie names two or three tokens a node: numbers cost 4 us each, arrays 120 us however short.
    """
    word0, word1, word2, word3 = token >> 2, position, choice_index, 0
    key0, key1 = seed & _WORD_MASK, seed >> 32
    for _ in range(10):
        product0, product1 = word0 * 0xD2511F53, word2 * 0xCD9E8D57
        word0, word1 = (product1 >> 32) ^ word1 ^ key0, product1 & _WORD_MASK
        word2, word3 = (product0 >> 32) ^ word3 ^ key1, product0 & _WORD_MASK
        key0, key1 = (key0 + 0x9E3779B9) & _WORD_MASK, (key1 + 0xBB67AE85) & _WORD_MASK
    drawn = (word0, word1, word2, word3)[token & 3]
    return -math.log(-math.log((2.0**32 - 0.5 - drawn) * 2.0**-32))


def chances_given_noise(chances: Sequence[float], noise: Sequence[float]) -> list[float]:
    """Chances of one node's guesses, in all below 1, once their noise is known; what is not guessed keeps its weight.

    A softmax of ranks is the rule for a drafter that knows the target's distribution up to a small error
    (docs/sampling.md). Counts of n-grams do not: under that rule they were trusted too much in both directions.
    """
    weights = [
        chance * math.exp(_SHARPNESS * one) / _MEAN_NOISE_FACTOR for chance, one in zip(chances, noise, strict=True)
    ]
    total = sum(weights) + max(1.0 - sum(chances), 1e-6)
    return [weight / total for weight in weights]

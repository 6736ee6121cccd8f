"""How much the shared noise says about the target's choice.

Where the target is sure (it copies a name, closes a bracket) the noise decides nothing and a match is worth its chance.
Where it wavers, the noise decides among what is likely. Which of the two a request is like shows in its commits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_MEMORY = 0.97
"""Share of the evidence that each committed token leaves."""
_MAX_EVIDENCE = 5.0
_WORD = 0xFFFFFFFF
_SHARPNESS = 0.5
"""Power of the noise's say: 1 if a trie's chances were the target's own; measured best where they are rough."""
_MEAN_SAY = math.gamma(1.0 - _SHARPNESS)


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
        self._evidence = max(-_MAX_EVIDENCE, min(_MAX_EVIDENCE, _MEMORY * self._evidence + gain))


def point_gumbel(seed: int, choice_index: int, position: int, token: int) -> float:
    """One entry of `outrider.sampling.noise.gumbel`, before its rounding to float32.

    A trie names two or three tokens a node: numbers cost 4 us each, arrays 120 us however short.
    """
    word0, word1, word2, word3 = token >> 2, position, choice_index, 0
    key0, key1 = seed & _WORD, seed >> 32
    for _ in range(10):
        product0, product1 = word0 * 0xD2511F53, word2 * 0xCD9E8D57
        word0, word1 = (product1 >> 32) ^ word1 ^ key0, product1 & _WORD
        word2, word3 = (product0 >> 32) ^ word3 ^ key1, product0 & _WORD
        key0, key1 = (key0 + 0x9E3779B9) & _WORD, (key1 + 0xBB67AE85) & _WORD
    drawn = (word0, word1, word2, word3)[token & 3]
    return -math.log(-math.log((2.0**32 - 0.5 - drawn) * 2.0**-32))


def chances_given_noise(chances: Sequence[float], noise: Sequence[float]) -> list[float]:
    """Chances of one node's guesses, in all below 1, once their noise is known; what is not guessed keeps its weight.

    `outrider.sampling.noise.edge_scores` is the rule for a drafter that knows the target's distribution up to a small
    error. Counts of n-grams do not: under that rule they were trusted too much in both directions.
    """
    weights = [chance * math.exp(_SHARPNESS * lot) / _MEAN_SAY for chance, lot in zip(chances, noise, strict=True)]
    total = sum(weights) + max(1.0 - sum(chances), 1e-6)
    return [weight / total for weight in weights]

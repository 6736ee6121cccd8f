"""How far an n-gram match can be trusted, learned from what the target commits."""

from __future__ import annotations

_LENGTH_BUCKET = (0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7)
_PRIOR = (0.2, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.92)
"""Chance, by bucket of match length, that the target goes on as some text before did."""
_NUM_LENGTHS = len(_PRIOR)
_NUM_DISTINCT = 3
_NUM_COUNTS = 3

_PRIOR_WEIGHT = 8.0
_MEMORY = 512.0
_LOCAL_WEIGHT = 8.0
_LOCAL_MEMORY = 48.0

NUM_SOURCES = 2


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
        if self._tries[cell] >= _MEMORY:
            self._tries[cell] /= 2
            self._hits[cell] /= 2
        bucket = _bucket_of(cell)
        if local.tries[bucket] >= _LOCAL_MEMORY:
            local.tries[bucket] /= 2
            local.hits[bucket] /= 2
        self._tries[cell] += 1
        local.tries[bucket] += 1
        if hit:
            self._hits[cell] += 1
            local.hits[bucket] += 1


def _bucket_of(cell: int) -> int:
    return cell // (_NUM_DISTINCT * _NUM_COUNTS) % _NUM_LENGTHS

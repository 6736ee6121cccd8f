"""What the parts of a burst have brought so far."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from draft_service.burst.entries import Ints


@dataclass(slots=True)
class Harvest:
    """The entries that a burst's pool indices stand for. Holds until entries get other numbers."""

    seeds: Ints
    """[N] entry of each seed; -1 for one that is no entry, whose candidates are dropped."""
    _places: Ints = field(default_factory=lambda: np.empty(0, np.intp))
    _brought: list[tuple[int, Ints]] = field(default_factory=list)  # see `bring`

    def places(self, end: int) -> Ints:
        """[end + 1 or more] entry of each pool index below `end`, to be written to; -1 for none. The last is nobody's.

        What was written before is there again.
        """
        held = self._places
        if len(held) <= end:
            places = np.empty(max(end + 1, 2 * len(held)), np.intp)
            places.fill(-1)
            known = held[:-1] if len(held) else self.seeds
            places[: len(known)] = known
            self._places = held = places
        return held

    def add(self, entries: Ints) -> None:
        """Further seeds follow those that there are."""
        first, self.seeds = len(self.seeds), np.concatenate([self.seeds, entries])
        if len(self._places):
            self._places[first : len(self.seeds)] = entries

    def bring(self, first: int, indices: Ints) -> None:
        """A part brought entries `first`, `first` + 1, ..., which have these pool indices."""
        self._places[indices] = np.arange(first, first + len(indices))
        self._brought.append((first, indices))

    def index_of(self, entry: int) -> int:
        """Pool index of an entry, the newest if it is a seed again; -1 for one that is not in the pool."""
        found = (self.seeds == entry).nonzero()[0]
        if len(found):
            return int(found[-1])
        part = bisect_right(self._brought, entry, key=lambda part: part[0]) - 1
        if part < 0:
            return -1
        first, indices = self._brought[part]
        return int(indices[entry - first]) if entry < first + len(indices) else -1

"""What the parts of a burst have brought so far."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from outrider.drafting.model.entries import Ints


@dataclass(slots=True)
class BurstCollector:
    """The entries that a burst's pool indices stand for. Holds until entries get other numbers."""

    seeds: Ints
    """[N] entry of each seed; -1 for one that is no entry, whose candidates are dropped."""
    row: int = -1
    """That of all entries, if there is but one."""
    num_indices: int = 0
    """Pool indices that there may be, if that is known."""
    num_strangers: int = 0
    """Seeds that are no entries and were not run yet."""
    _places: Ints = field(default_factory=lambda: np.empty(0, np.intp))
    _brought: list[tuple[int, int, Ints]] = field(default_factory=list)  # see `bring`

    def __post_init__(self) -> None:
        self.num_strangers = int(np.count_nonzero(self.seeds < 0))

    def places(self, end: int) -> Ints:
        """[end + 1 or more] entry of each pool index below `end`, to be written to; -1 for none. The last is nobody's.

        What was written before is there again.
        """
        held = self._places
        if len(held) <= end:
            places = np.empty(max(end, 2 * len(held), self.num_indices) + 1, np.intp)
            places.fill(-1)
            known = held[:-1] if len(held) else self.seeds
            places[: len(known)] = known
            self._places = held = places
        return held

    def add(self, entries: Ints) -> None:
        """Further seeds follow those that there are."""
        first, self.seeds = len(self.seeds), np.concatenate([self.seeds, entries])
        self.num_strangers += int(np.count_nonzero(entries < 0))
        if len(self._places):
            self._places[first : len(self.seeds)] = entries

    def bring(self, start: int, first: int, kept: Ints) -> None:
        """A part brought entries `start`, `start` + 1, ..., whose pool indices are `first` more than `kept`."""
        self._places[first:][kept] = np.arange(start, start + len(kept))
        self._brought.append((start, first, kept))

    def index_of(self, entry: int) -> int:
        """Pool index of an entry, the newest if it is a seed again; -1 for one that is not in the pool."""
        found = (self.seeds == entry).nonzero()[0]
        if len(found):
            return int(found[-1])
        part = bisect_right(self._brought, entry, key=lambda part: part[0]) - 1
        if part < 0:
            return -1
        start, first, kept = self._brought[part]
        return first + int(kept[entry - start]) if entry < start + len(kept) else -1

"""What the parts of a burst have brought so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from draft_service.burst.entries import Ints


@dataclass(slots=True)
class Harvest:
    """The entries that a burst's pool indices stand for. Holds until entries get other numbers."""

    seeds: Ints
    """[N] entry of each seed; -1 for one that is no entry, whose candidates are dropped."""
    _places: Ints = field(default_factory=lambda: np.empty(0, np.intp))

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

    def index_of(self, entry: int) -> int:
        """Pool index of an entry, the newest if it is a seed again; -1 for one that is not known to be in the pool."""
        held = self._places if len(self._places) else self.seeds
        found = (held[: len(self.seeds)] == entry).nonzero()[0]
        if not len(found):
            found = (held == entry).nonzero()[0]
        return int(found[-1]) if len(found) else -1

"""Which tree slots of each request hold live nodes, and which may be filled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InternalError

Int32s = NDArray[np.int32]


class Lent(NamedTuple):
    """Free slots that a burst may fill. It fills some of them."""

    rows: Int32s
    """[L] ascending groups, one a row."""
    slots: Int32s
    """[L]"""
    counts: list[int]
    """Of each row."""


class TreeSlots:
    """The regions of R rows. A slot is free, lent to the burst that runs, or live.

    Attributes:
        live: bool [R, region].
        num_free: int32 [R].
    """

    def __init__(self, num_rows: int, region: int) -> None:
        self.region = region
        self.live = np.zeros((num_rows, region), np.bool_)
        self.num_free = np.full(num_rows, region, np.int32)
        self._stacks = np.empty((num_rows, region), np.int32)
        self._stacks[:] = np.arange(region - 1, -1, -1)

    def take(self, row: int, count: int) -> list[int]:
        """Free slots for good; they become live when they are filled. Raises InternalError if there are not so many."""
        left = int(self.num_free[row]) - count
        if left < 0:
            raise InternalError(f"row {row} has {left + count} free tree slots, {count} are needed")
        self.num_free[row] = left
        taken: list[int] = self._stacks[row, left : left + count].tolist()
        return taken

    def lend(self, rows: Int32s, counts: Int32s) -> Lent:
        """Free slots for a burst, `counts` of each row at most."""
        counts = np.minimum(counts, self.num_free[rows])
        if len(rows) == 1:
            row, end = rows[0], self.num_free[rows[0]]
            slots = self._stacks[row, end - counts[0] : end].copy()
            self.num_free[row] = end - counts[0]
            return Lent(rows.repeat(len(slots)), slots, [len(slots)])
        lent_rows = rows.repeat(counts)
        ends = counts.cumsum()
        self.num_free[rows] -= counts
        columns = np.arange(len(lent_rows)) - (ends - counts - self.num_free[rows]).repeat(counts)
        return Lent(lent_rows, self._stacks[lent_rows, columns], counts.tolist())

    def settle(self, lent: Lent) -> None:
        """Take back what a burst did not fill; what it filled is marked live by now."""
        unused = ~self.live[lent.rows, lent.slots]
        self._push(lent.rows[unused], lent.slots[unused])

    def free(self, rows: Int32s, slots: Int32s) -> None:
        """Live slots, or taken ones, are free again."""
        self.live[rows, slots] = False
        order = rows.argsort(kind="stable")
        self._push(rows[order], slots[order])

    def reset(self, row: int) -> None:
        """All slots of a row are free."""
        self.live[row] = False
        self.num_free[row] = self.region
        self._stacks[row] = np.arange(self.region - 1, -1, -1)

    def _push(self, rows: Int32s, slots: Int32s) -> None:
        if not len(rows):
            return
        if rows[0] == rows[-1]:
            row, start = rows[0], self.num_free[rows[0]]
            self._stacks[row, start : start + len(slots)] = slots
            self.num_free[row] = start + len(slots)
            return
        counts = np.bincount(rows, minlength=len(self.num_free))
        starts = counts.cumsum() - counts
        self._stacks[rows, np.arange(len(rows)) + (self.num_free - starts)[rows]] = slots
        self.num_free += counts.astype(np.int32)

    def check_integrity(self) -> None:
        """Raise InternalError unless every slot that is not live is free once. Nothing may be lent or taken."""
        for row, count in enumerate(self.num_free.tolist()):
            free = set(self._stacks[row, :count].tolist())
            if len(free) != count or free != set(np.flatnonzero(~self.live[row]).tolist()):
                raise InternalError(f"row {row}: {count} free tree slots do not match {self.live[row].sum()} live ones")

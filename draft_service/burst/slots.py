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
    """[B] ascending."""
    starts: Int32s
    """[B], of each row those from here in `TreeSlots.stacks` on."""
    ends: Int32s
    """[B], one past the last."""


class TreeSlots:
    """The regions of R rows. A slot is free, lent to the burst that runs, or live.

    Attributes:
        live: bool [R, region].
        num_free: int32 [R].
        stacks: int32 [R, region], the free slots of each row, `num_free` of them.
    """

    def __init__(self, num_rows: int, region: int) -> None:
        self.region = region
        self.live = np.zeros((num_rows, region), np.bool_)
        self.num_free = np.full(num_rows, region, np.int32)
        self.stacks = np.empty((num_rows, region), np.int32)
        self.stacks[:] = np.arange(region - 1, -1, -1)
        self._are_lent = False
        self._waiting: list[tuple[Int32s, Int32s]] = []

    def take(self, row: int, count: int) -> list[int]:
        """Free slots for good; they become live when they are filled. Raises InternalError if there are not so many."""
        left = int(self.num_free[row]) - count
        if left < 0:
            raise InternalError(f"row {row} has {left + count} free tree slots, {count} are needed")
        self.num_free[row] = left
        taken: list[int] = self.stacks[row, left : left + count].tolist()
        return taken

    def lend(self, rows: Int32s, counts: Int32s) -> Lent:
        """Free slots for a burst, `counts` of each row at most."""
        ends = self.num_free[rows]
        starts = np.maximum(ends - counts, 0)
        self.num_free[rows] = starts
        self._are_lent = True
        return Lent(rows, starts, ends)

    def settle(self, lent: Lent) -> None:
        """Take back what a burst did not fill; what it filled is marked live by now."""
        rows, starts, ends = lent
        if len(rows) == 1:
            row = rows[0]
            slots = self.stacks[row, starts[0] : ends[0]]
            slots = slots[~self.live[row, slots]]
        else:
            counts = ends - starts
            ends = counts.cumsum()
            columns = np.arange(ends[-1], dtype=np.int32) + (starts - ends + counts).repeat(counts)
            rows = rows.repeat(counts)
            slots = self.stacks[rows, columns]
            unused = ~self.live[rows, slots]
            rows, slots = rows[unused], slots[unused]
        self._push(rows, slots)
        self.forgo()

    def forgo(self) -> None:
        """What was lent does not come back: its rows will be reset. What was freed meanwhile is free."""
        self._are_lent = False
        waiting, self._waiting = self._waiting, []
        for held in waiting:
            self.free(*held)

    def free(self, rows: Int32s, slots: Int32s) -> None:
        """Live slots, or taken ones, are free again; while a burst has slots lent, once it has given them back.

        Where the next free slot would be put lie those that are lent.
        """
        if self._are_lent:
            self._waiting.append((rows, slots))
            return
        self.live[rows, slots] = False
        order = rows.argsort(kind="stable")
        self._push(rows[order], slots[order])

    def reset(self, row: int) -> None:
        """All slots of a row are free."""
        self.live[row] = False
        self.num_free[row] = self.region
        self.stacks[row] = np.arange(self.region - 1, -1, -1)

    def _push(self, rows: Int32s, slots: Int32s) -> None:
        """Slots of rows in ascending groups are free; one row may stand for all."""
        if not len(slots):
            return
        if rows[0] == rows[-1]:
            row, start = rows[0], self.num_free[rows[0]]
            self.stacks[row, start : start + len(slots)] = slots
            self.num_free[row] = start + len(slots)
            return
        counts = np.bincount(rows, minlength=len(self.num_free))
        starts = self.num_free - counts.cumsum() + counts
        self.stacks[rows, np.arange(len(rows)) + starts[rows]] = slots
        self.num_free += counts

    def check_integrity(self) -> None:
        """Raise InternalError unless every slot that is not live is free once. Nothing may be lent or taken."""
        for row, count in enumerate(self.num_free.tolist()):
            free = set(self.stacks[row, :count].tolist())
            if len(free) != count or free != set(np.flatnonzero(~self.live[row]).tolist()):
                raise InternalError(f"row {row}: {count} free tree slots do not match {self.live[row].sum()} live ones")

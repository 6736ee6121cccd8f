"""Which tree slots of each request hold live nodes, and which may be filled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InternalError

Int32s = NDArray[np.int32]


class Lent(NamedTuple):
    """Free slots that a burst may fill from its launch on. It fills some of them."""

    rows: Int32s
    """[B] ascending."""
    starts: Int32s
    """[B], of each row those from here in `TreeSlots.stacks` on, as it was then."""
    ends: Int32s
    """[B], one past the last."""

    @property
    def num_slots(self) -> int:
        """Of all rows."""
        return int((self.ends - self.starts).sum())


class TreeSlots:
    """The regions of R rows. A slot is free, taken, lent to the burst that runs, or live.

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
        self._lent = np.zeros((num_rows, region), np.bool_)  # and not filled, as far as that is known

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
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            self._lent[row, self.stacks[row, start:end]] = True
        return Lent(rows, starts, ends)

    def lend_more(self, rows: Int32s, counts: Int32s) -> list[Int32s]:
        """Further ones for the burst that runs: free by now, or freed by what it is told of at the same time.

        `counts`: of each row so many may be lent at most, with those that are and were not filled.
        """
        ends = self.num_free[rows]
        starts = np.maximum(ends - np.maximum(counts - np.count_nonzero(self._lent[rows], axis=1), 0), 0)
        self.num_free[rows] = starts
        found = []
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            slots = self.stacks[row, start:end].copy()
            if start < end:
                self._lent[row, slots] = True
            found.append(slots)
        return found

    def is_lent(self, rows: Int32s) -> NDArray[np.bool_]:
        """[N] which of these rows have slots that are lent and were not filled, as far as that is known."""
        lent: NDArray[np.bool_] = np.count_nonzero(self._lent[rows], axis=1) > 0
        return lent

    def fill(self, rows: Int32s, slots: Int32s, alive: NDArray[np.bool_]) -> None:
        """A burst filled these slots. Those with nodes that are not `alive` any more are free."""
        self._lent[rows, slots] = False
        if alive.all():
            self.live[rows, slots] = True
            return
        self.live[rows[alive], slots[alive]] = True
        self.free(rows[~alive], slots[~alive])

    def settle(self, lent: Lent) -> None:
        """Take back what a burst did not fill."""
        rows = lent.rows
        places, slots = self._lent[rows, ::-1].nonzero()  # of each row the lowest is the next to be taken
        self._lent[rows] = False
        self._push(rows[places], (self.region - 1 - slots).astype(np.int32))

    def free(self, rows: Int32s, slots: Int32s) -> None:
        """Live slots, or taken ones, are free again.

        A burst that runs may still read them. It is told that it may fill them only when it is told of what freed them.
        """
        self.live[rows, slots] = False
        order = rows.argsort(kind="stable")
        self._push(rows[order], slots[order])

    def reset(self, row: int) -> None:
        """All slots of a row are free."""
        self.live[row] = False
        self._lent[row] = False
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
            if len(free) != count or free != set(np.flatnonzero(~self.live[row]).tolist()) or self._lent[row].any():
                raise InternalError(f"row {row}: {count} free tree slots do not match {self.live[row].sum()} live ones")

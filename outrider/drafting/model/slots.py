"""Which tree slots of each request hold live nodes, and which may be filled."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.errors import InternalError

Int32s = NDArray[np.int32]
Ints = NDArray[np.intp]


class Lent(NamedTuple):
    """Free slots that a burst may fill from its launch on. It fills some of them."""

    rows: Ints
    """[B] ascending."""
    starts: Int32s
    """[B], of each row those from here in `TreeSlots.stacks` on, as it was then."""
    ends: Int32s
    """[B], one past the last."""

    @property
    def num_slots(self) -> int:
        """Of all rows."""
        return int(sum(self.ends.tolist())) - int(sum(self.starts.tolist()))


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
        # Slots that are lent and not filled, as far as that is known: as bytes, which are searched at once, and bools.
        self._lent_bytes = bytearray(num_rows * region)
        self._flat_lent = np.frombuffer(self._lent_bytes, np.bool_)
        self._lent = self._flat_lent.reshape(num_rows, region)
        self._flat_live = self.live.reshape(-1)

    def take(self, row: int, count: int) -> list[int]:
        """Free slots for good; they become live when they are filled. Raises InternalError if there are not so many."""
        left = int(self.num_free[row]) - count
        if left < 0:
            raise InternalError(f"row {row} has {left + count} free tree slots, {count} are needed")
        self.num_free[row] = left
        taken: list[int] = self.stacks[row, left : left + count].tolist()
        return taken

    def lend(self, rows: Ints, counts: Ints) -> Lent:
        """Free slots for a burst, `counts` of each row at most."""
        ends = self.num_free[rows]
        starts = np.maximum(ends - counts, 0).astype(np.int32)
        self.num_free[rows] = starts
        for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
            self._lent[row][self.stacks[row, start:end]] = True
        return Lent(rows, starts, ends)

    def lend_more(self, rows: Ints, counts: Ints) -> list[Int32s]:
        """Further ones for the burst that runs: free by now, or freed by what it is told of at the same time.

        `counts`: of each row so many may be lent at most, with those that are and were not filled.
        """
        found = []
        for row, count in zip(rows.tolist(), counts.tolist(), strict=True):
            first, end = row * self.region, int(self.num_free[row])
            num_lent = self._lent_bytes.count(1, first, first + self.region)
            start = max(end - max(count - num_lent, 0), 0)
            slots = self.stacks[row, start:end].copy()
            if start < end:
                self._lent[row][slots] = True
                self.num_free[row] = start
            found.append(slots)
        return found

    def is_lent(self, row: int) -> bool:
        """Whether a row has slots that are lent and were not filled, as far as that is known."""
        first = row * self.region
        return self._lent_bytes.find(1, first, first + self.region) >= 0

    def fill(self, rows: NDArray[np.integer[Any]] | int, slots: Int32s) -> None:
        """A burst filled these slots, which are live now. One row may stand for all."""
        if isinstance(rows, int):
            self._lent[rows][slots] = False
            self.live[rows][slots] = True
            return
        places = (rows * self.region + slots).astype(np.intp)
        self._flat_lent[places] = False
        self._flat_live[places] = True

    def waste(self, rows: NDArray[np.integer[Any]] | int, slots: Int32s) -> None:
        """A burst filled these slots with nodes that are dead by now. One row may stand for all."""
        self._lent[rows, slots] = False
        if isinstance(rows, int):
            self.free_of(rows, slots)
        else:
            self.free(rows, slots)

    def settle(self, lent: Lent) -> None:
        """Take back what a burst did not fill."""
        rows = lent.rows
        places, slots = self._lent[rows, ::-1].nonzero()  # of each row the lowest is the next to be taken
        self._lent[rows] = False
        self._push(rows[places], self.region - 1 - slots)

    def free(self, rows: NDArray[np.integer[Any]], slots: Int32s) -> None:
        """Live slots, or taken ones, are free again.

        A burst that runs may still read them. It is told that it may fill them only when it is told of what freed them.
        """
        self.live[rows, slots] = False
        order = rows.argsort(kind="stable")
        self._push(rows[order], slots[order])

    def free_of(self, row: int, slots: Int32s | list[int]) -> None:
        """The same for slots of a single row."""
        self.live[row][slots] = False
        self._push_of(row, slots)

    def reset(self, row: int) -> None:
        """All slots of a row are free."""
        self.live[row] = False
        self._lent[row] = False
        self.num_free[row] = self.region
        self.stacks[row] = np.arange(self.region - 1, -1, -1)

    def _push(self, rows: NDArray[np.integer[Any]], slots: NDArray[np.integer[Any]]) -> None:
        """Slots of rows in ascending groups are free."""
        if len(rows) and rows[0] == rows[-1]:
            self._push_of(int(rows[0]), slots)
            return
        counts = np.bincount(rows, minlength=len(self.num_free))
        starts = self.num_free - counts.cumsum() + counts
        self.stacks[rows, np.arange(len(rows)) + starts[rows]] = slots
        self.num_free += counts

    def _push_of(self, row: int, slots: NDArray[np.integer[Any]] | list[int]) -> None:
        start = int(self.num_free[row])
        self.num_free[row] = end = start + len(slots)
        self.stacks[row, start:end] = slots

    def check_integrity(self) -> None:
        """Raise InternalError unless every slot that is not live is free once. Nothing may be lent or taken."""
        for row, count in enumerate(self.num_free.tolist()):
            free = set(self.stacks[row, :count].tolist())
            if len(free) != count or free != set(np.flatnonzero(~self.live[row]).tolist()) or self._lent[row].any():
                raise InternalError(f"row {row}: {count} free tree slots do not match {self.live[row].sum()} live ones")

"""The shapes that draft steps are padded to. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from draft_service.burst.plan import BurstShape
from outrider.buckets import row_buckets, width_buckets

WIDTHS = (8, 16, 32, 64, 128)


class Bucket(NamedTuple):
    """Shape of a captured step."""

    width: int
    """Nodes."""
    rows: int
    branching: int
    """Candidates of a node."""

    @property
    def num_candidates(self) -> int:
        """Entries that a step adds to the pool."""
        return self.width * self.branching

    @property
    def num_words(self) -> int:
        """Words of a step's result: of each node its entry and slot, and tokens and scores of its candidates."""
        return 2 * self.width + 2 * self.num_candidates


class Buckets:
    """The smallest shape that holds a burst is taken."""

    def __init__(self, shape: BurstShape) -> None:
        self.widths = width_buckets(WIDTHS, shape.max_width)
        self.rows = row_buckets(shape.num_rows)
        self._shape = shape

    def fit(self, width: int, num_rows: int) -> Bucket:
        """At least a node for each row, as far as there are such widths. Raises ValueError for a burst too large."""
        if not 1 <= width <= self.widths[-1] or not 0 <= num_rows <= self.rows[-1]:
            raise ValueError(
                f"a burst of width {width} over {num_rows} rows; the runner has {self.widths[-1]} and {self.rows[-1]}"
            )
        rows = self.rows[bisect_left(self.rows, num_rows)]
        found = self.widths[bisect_left(self.widths, min(max(width, rows), self.widths[-1]))]
        return Bucket(found, rows, self.branching(rows))

    def branching(self, num_rows: int) -> int:
        """Candidates of a node in bursts of so many requests."""
        return (num_rows == 1 and self._shape.lone_branching) or self._shape.branching

    def all(self) -> list[Bucket]:
        """Largest first, so that a shared memory pool is sized by the first capture."""
        return sorted({self.fit(width, rows) for width in self.widths for rows in self.rows}, reverse=True)

"""The shapes that draft steps are padded to. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from outrider.buckets import row_buckets, width_buckets

WIDTHS = (8, 16, 32, 64, 128)


class Bucket(NamedTuple):
    """Shape of a captured step."""

    width: int
    """Nodes."""
    rows: int


class Buckets:
    """The smallest shape that holds a burst is taken."""

    def __init__(self, max_width: int, max_rows: int) -> None:
        self.widths = width_buckets(WIDTHS, max_width)
        self.rows = row_buckets(max_rows)

    def fit(self, width: int, num_rows: int) -> Bucket:
        """At least a node for each row, as far as there are such widths. Raises ValueError for a burst too large."""
        if not 1 <= width <= self.widths[-1] or not 0 <= num_rows <= self.rows[-1]:
            raise ValueError(
                f"a burst of width {width} over {num_rows} rows; the runner has {self.widths[-1]} and {self.rows[-1]}"
            )
        rows = self.rows[bisect_left(self.rows, num_rows)]
        return Bucket(self.widths[bisect_left(self.widths, min(max(width, rows), self.widths[-1]))], rows)

    def all(self) -> list[Bucket]:
        """Largest first, so that a shared memory pool is sized by the first capture."""
        return sorted({self.fit(width, rows) for width in self.widths for rows in self.rows}, reverse=True)

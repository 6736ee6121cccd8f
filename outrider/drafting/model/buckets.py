"""The shapes that draft steps are padded to. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from itertools import product
from typing import NamedTuple

from outrider.buckets import row_buckets, width_buckets
from outrider.drafting.model.plan import BurstShape

WIDTHS = (8, 16, 32, 64, 128)
SHORT_WIDTH = 64
"""Nodes of one request that a small model takes at once, behind a context that is short."""


class Bucket(NamedTuple):
    """Shape of a captured step."""

    width: int
    """Nodes."""
    rows: int
    branching: int
    """Candidates of a node."""
    short: bool = False
    """Whether it is for a lone request with a short context."""

    @property
    def sizes(self) -> Bucket:
        """The shape of what it reads and writes."""
        return self._replace(short=False)

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

    def __init__(self, shape: BurstShape, short_context: int = 0) -> None:
        """`short_context`: tokens of a context that is short; with 0 none is."""
        self.widths = width_buckets(WIDTHS, shape.max_width)
        self.rows = row_buckets(shape.num_rows)
        self._shape = shape
        self._short_context = short_context

    def fit(self, width: int, num_rows: int, longest: int | None = None) -> Bucket:
        """At least a node for each row, as far as there are such widths; `longest` tokens of context, or any number.

        Raises ValueError for a burst too large.
        """
        if not 1 <= width <= self.widths[-1] or not 0 <= num_rows <= self.rows[-1]:
            raise ValueError(
                f"a burst of width {width} over {num_rows} rows; the runner has {self.widths[-1]} and {self.rows[-1]}"
            )
        rows = self.rows[bisect_left(self.rows, num_rows)]
        found = self.widths[bisect_left(self.widths, min(max(width, rows), self.widths[-1]))]
        short = longest is not None and 0 < self._short_context >= longest
        return Bucket(found, rows, self.branching(rows), short and rows == 1 and found <= SHORT_WIDTH)

    def branching(self, num_rows: int) -> int:
        """Candidates of a node in bursts of so many requests."""
        return (num_rows == 1 and self._shape.lone_branching) or self._shape.branching

    def sizes(self) -> list[Bucket]:
        """As `all`, but one for shapes that differ in contexts."""
        return sorted({bucket.sizes for bucket in self.all()}, reverse=True)

    def all(self) -> list[Bucket]:
        """Largest first, so that a shared memory pool is sized by the first capture."""
        lengths = (None, 0) if self._short_context else (None,)
        return sorted({self.fit(*each) for each in product(self.widths, self.rows, lengths)}, reverse=True)

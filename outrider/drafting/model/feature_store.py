"""True features of one request that came and were not used yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Join = Callable[[Sequence[Any]], Any]
"""Makes one of parts [N, feature_size] that follow each other; see BurstRunner.join."""

_SMALL = 16
"""Rows of a part that should be joined with others, and how many such parts in a row are."""


class FeatureStore:
    """Parts [N, feature_size] by the position of their first row, in order and without overlap.

    What is needed are the features of the positions just before those tokens that are no context yet. A part may be a
    view of what came for many requests at once; where many small ones wait they are joined, which lets go of the rest.
    """

    def __init__(self, join: Join) -> None:
        self._join = join
        self._parts: list[tuple[int, int, Any]] = []  # start, end, values

    def add(self, start: int, count: int, values: object, since: int) -> None:
        """Keep features of positions `start`, ...; those before position `since`, and those that are here, go."""
        start, end, values = self._cut(start, start + count, values, since)
        if end > start and (not self._parts or self._parts[-1][1] <= start):
            self._parts.append((start, end, values))
            self._join_small()
            return
        kept: list[tuple[int, int, Any]] = []
        for part in self._parts:
            if part[1] <= start or part[0] >= end:
                kept.append(part)
                continue
            if part[0] < start:
                kept.append((part[0], start, part[2][: start - part[0]]))
            if part[1] > end:
                kept.append((end, part[1], part[2][end - part[0] :]))
        if end > start:
            kept.append((start, end, values))
        self._parts = sorted(kept, key=lambda part: part[0])

    def end_from(self, start: int) -> int:
        """One past the last position of an unbroken run of features from `start` on; `start` if there is none."""
        end = start
        for first, past, _ in self._parts:
            if first <= end < past:
                end = past
        return end

    def cut(self, start: int, end: int) -> Iterator[tuple[int, int, object]]:
        """First position, one past the last, and values of the parts that cover `start` to `end`, which are here."""
        for first, past, values in self._parts:
            low, high = max(first, start), min(past, end)
            if low < high:
                yield low, high, values[low - first : high - first]

    def forget(self, position: int) -> None:
        """Drop what lies before a position."""
        while self._parts and self._parts[0][1] <= position:
            del self._parts[0]

    def _join_small(self) -> None:
        """Make one of the last parts, if they are many, small, and follow each other."""
        first = len(self._parts)
        begin = self._parts[-1][1]
        while first and self._parts[first - 1][1] == begin and begin - self._parts[first - 1][0] < _SMALL:
            first -= 1
            begin = self._parts[first][0]
        small = self._parts[first:]
        if len(small) >= _SMALL:
            self._parts[first:] = [(begin, small[-1][1], self._join([values for _, _, values in small]))]

    def _cut(self, start: int, end: int, values: Any, since: int) -> tuple[int, int, Any]:
        if start < since:
            return min(since, end), end, values[since - start :]
        return start, end, values

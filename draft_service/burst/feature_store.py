"""True features of one request that came and were not used yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class FeatureStore:
    """Parts [N, feature_size] by the position of their first row, in order and without overlap.

    What is needed are the features of the positions just before those tokens that are no context yet.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[int, int, Any]] = []  # start, end, values

    def add(self, start: int, count: int, values: object, since: int) -> None:
        """Keep features of positions `start`, ...; those before position `since`, and those that are here, go."""
        start, end, values = self._cut(start, start + count, values, since)
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

    def _cut(self, start: int, end: int, values: Any, since: int) -> tuple[int, int, Any]:
        if start < since:
            return min(since, end), end, values[since - start :]
        return start, end, values

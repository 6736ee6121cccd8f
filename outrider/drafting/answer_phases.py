"""Where the time goes between a commit that a draft applies and its answer, phase by phase. Torch-free."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from time import perf_counter

ANSWER_PHASES = ("features", "launch", "burst", "send")
"""What ends each: features of the request came; a burst was launched that it is part of; what that brought was taken;
its answer was handed over. One that happens again adds to what it took before."""

ANSWER_SECONDS = (
    *(0.00005, 0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.0007, 0.001, 0.0013, 0.0016, 0.002, 0.003, 0.005),
    *(0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0),
)
"""Bounds by which phases are counted."""


class AnswerPhases:
    """Times of the answers of all trees. A phase lasts from the end of the one before it, the first from the commit."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._at: dict[int, float] = {}  # by handle: when the last phase ended, of trees that owe an answer
        self._taken: dict[int, dict[str, float]] = {}  # seconds by phase of those
        self._counts: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def begin(self, handle: int) -> None:
        """A commit to a tree was applied; of several that one answer follows the first counts."""
        if handle not in self._at:
            self._at[handle], self._taken[handle] = self._clock(), {}

    def note(self, handle: int, phase: str) -> None:
        """A phase of a tree's answer ends, if it owes one."""
        before = self._at.get(handle)
        if before is not None:
            self._at[handle] = now = self._clock()
            taken = self._taken[handle]
            taken[phase] = taken.get(phase, 0.0) + now - before

    def end(self, handle: int) -> None:
        """A tree is answered."""
        self.note(handle, "send")
        for phase, seconds in self.forget(handle).items():
            counts = self._counts.setdefault(phase, [0] * (len(ANSWER_SECONDS) + 1))
            counts[bisect_left(ANSWER_SECONDS, seconds)] += 1
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def forget(self, handle: int) -> dict[str, float]:
        """No answer of a tree is to be counted; returns what it took so far."""
        self._at.pop(handle, None)
        return self._taken.pop(handle, {})

    def take(self) -> tuple[dict[str, list[int]], dict[str, float]]:
        """Answers since the last call by phase, counted by ANSWER_SECONDS, and what each phase took in sum."""
        taken = self._counts, self._seconds
        self._counts, self._seconds = {}, {}
        return taken

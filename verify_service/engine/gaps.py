"""What long gaps between two rounds are made of, for whoever looks for their cause."""

from __future__ import annotations

import logging
import resource
import time
from itertools import pairwise

from outrider.logs import get_logger

log = get_logger(__name__)

LONG_SECONDS = 5e-3

Phases = tuple[tuple[str, float], ...]
"""Names and seconds."""


class GapWatch:
    """Notes the phases between the end of a round and the launch of the next. Does nothing unless DEBUG is logged."""

    def __init__(self) -> None:
        self._on = log.isEnabledFor(logging.DEBUG)
        self._marks: list[tuple[str, float]] = []
        self._before = (0.0, 0)

    def begin(self, now: float) -> None:
        """A round has ended at `now`, on the monotonic clock."""
        if self._on:
            self._marks = [("end", now)]
            self._before = _usage()

    def mark(self, name: str) -> None:
        """What is called `name` is over."""
        if self._on:
            self._marks.append((name, time.monotonic()))

    def end(self) -> Phases:
        """The next round is launched; returns what lay between, if anybody wants to know."""
        if not self._on or not self._marks:
            return ()
        self.mark("launch")
        marks, self._marks = self._marks, []
        phases = [(name, at - before) for (_, before), (name, at) in pairwise(marks)]
        cpu, switches = (now - then for now, then in zip(_usage(), self._before, strict=True))
        return (*phases, ("CPU time", cpu), ("taken off the CPU", float(switches)))


def tell_long(gap: float | None, phases: Phases) -> None:
    """Log a long gap. One with little CPU time was not the engine's own work: it was not let run."""
    if phases and gap is not None and gap > LONG_SECONDS:
        parts = ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in phases[:-1])
        log.debug("the device was idle for %.1f ms: %s, %s %d times", gap * 1e3, parts, phases[-1][0], phases[-1][1])


def _usage() -> tuple[float, int]:
    """CPU seconds of this thread, and how often it was taken off the CPU."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_utime + usage.ru_stime, usage.ru_nivcsw

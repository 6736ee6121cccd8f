"""What a training tells while it runs, and at its end."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from outrider.training.trainer import Point

# Lines of one kind come no more often.
EVERY_SECONDS = 5.0


class Report:
    """Lines on a stream: one every few seconds, then a table."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._start = time.monotonic()
        self._last: dict[str, float] = {}

    def line(self, text: str) -> None:
        """Print a line, with the seconds since the start in front."""
        print(f"{time.monotonic() - self._start:7.1f} s  {text}", file=self._stream, flush=True)

    def generated(self, what: str, done: int, total: int) -> None:
        """`done` tokens of `what` are there, of `total` (0: unknown)."""
        if self._due(what):
            share = f" of {total / 1e6:.2f}" if total else ""
            self.line(f"{what}: {done / 1e6:.2f}{share} million tokens")

    def point(self, step: int, total: int, point: Point) -> None:
        """A point of the loss curve."""
        if self._due("training") or step == total:
            rates = " ".join(f"{rate:.2f}" for rate in point.rates)
            self.line(f"step {step} of {total or '?'}: loss {point.loss:.3f}, agreement by depth {rates}")

    def evaluated(self, done: int, total: int) -> None:
        """`done` of `total` answers were evaluated."""
        if self._due("evaluation"):
            self.line(f"evaluation: {done} of {total} answers")

    def table(self, rows: list[tuple[str, str]]) -> None:
        """Names and values, on standard output."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            print(f"{name:<{width}}  {value}", flush=True)

    def _due(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._last.get(what, -EVERY_SECONDS) < EVERY_SECONDS:
            return False
        self._last[what] = now
        return True

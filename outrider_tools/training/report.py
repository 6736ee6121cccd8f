"""What a training or an evaluation tells while it runs, and at its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.cli.terminal import aligned
from outrider_tools.training.trainer import CurvePoint

# Lines of one kind come no more often, where no bar can be drawn.
EVERY_SECONDS = 5.0
# From so many tokens on they are told in millions.
MANY = 100_000


class Report:
    """Bars on a terminal, lines every few seconds elsewhere; tables on standard output. Use it in a `with`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._start = time.monotonic()
        self._last: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars: Progress | None = None
        if self._stream.isatty():
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def line(self, text: str) -> None:
        """Print a line, with the seconds since the start in front."""
        text = f"{time.monotonic() - self._start:7.1f} s  {text}"
        if self._bars is not None:
            # Above the bars.
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def progress(self, what: str, done: float, total: float, note: str) -> None:
        """`done` of `total` (0: unknown) of a piece of work; `note` says the same in words."""
        if self._bars is None:
            if self._due(what) or (total and done >= total):
                self.line(f"{what}: {note}")
            return
        # Started with the first report, so that work which turns out to be done already draws nothing.
        self._bars.start()
        if what not in self._tasks:
            self._tasks[what] = self._bars.add_task(what, total=total or None, note=note)
        self._bars.update(self._tasks[what], completed=done, total=total or None, note=note)

    def generated(self, what: str, done: int, total: int) -> None:
        """`done` tokens of `what` are there, of `total` (0: unknown)."""
        size, unit = (1e6, "million tokens") if total >= MANY else (1, "tokens")
        digits = 2 if size > 1 else 0
        share = f" of {total / size:.{digits}f}" if total else ""
        self.progress(what, done, total, f"{done / size:.{digits}f}{share} {unit}")

    def point(self, step: int, total: int, point: CurvePoint) -> None:
        """A point of the loss curve."""
        rates = " ".join(f"{rate:.2f}" for rate in point.rates)
        note = f"step {step} of {total or '?'}, loss {point.loss:.3f}, agreement by depth {rates}"
        self.progress("training", step, total, note)

    def counted(self, what: str, done: int, total: int) -> None:
        """`done` of `total` answers are behind us."""
        self.progress(what, done, total, f"{done} of {total} answers")

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """Rows of as many columns each, on standard output; the first column is names."""
        print(aligned(rows, right=range(1, len(rows[0])) if len(rows[0]) > 2 else ()))

    def _due(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._last.get(what, -EVERY_SECONDS) < EVERY_SECONDS:
            return False
        self._last[what] = now
        return True

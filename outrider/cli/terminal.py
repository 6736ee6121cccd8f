"""What the commands print with: one console, the services' log lines, and what goes on while they start."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from outrider.cli.answer import printable
from outrider.cli.child import LineSink
from outrider.cli.cluster import Cluster

# Time, level, service and logger of a line of outrider.logs.
LOG_HEAD = re.compile(r"^\S+Z +[A-Z]+ +\S+ +\S+ ")
SERVICE_STYLES = {"draft": "green", "verify": "yellow", "gateway": "cyan"}


def make_console(*, color: bool = True, stderr: bool = False) -> Console:
    """A console that knows NO_COLOR and writes no escape codes into files and pipes."""
    return Console(highlight=False, markup=False, emoji=False, no_color=None if color else True, stderr=stderr)


def log_printer(console: Console) -> LineSink:
    """A sink that prints log lines with their service's name in front."""

    def print_line(name: str, line: str) -> None:
        text = Text.assemble((f"{name:<7} | ", SERVICE_STYLES.get(name, "")), printable(line))
        console.print(text, soft_wrap=True)

    return print_line


class StartDisplay:
    """Shows, where there is a terminal, the newest log line while services start, and nothing afterwards."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting", spinner="line")

    def __call__(self, name: str, line: str) -> None:
        """Take a log line; usable as a cluster's `on_line`."""
        message = LOG_HEAD.sub("", printable(line))
        self._status.update(Text(f"{name}: {message}"[: max(20, self._console.width - 4)]))

    @contextmanager
    def started(self, cluster: Cluster) -> Iterator[Cluster]:
        """Start the cluster with the display on, and end it with the block."""
        self._console.print(f"starting {', '.join(cluster.services)} as processes of their own")
        begin = time.monotonic()
        with self._status:
            cluster.__enter__()
        try:
            self._console.print(f"ready after {time.monotonic() - begin:.1f} s")
            yield cluster
        finally:
            cluster.close()

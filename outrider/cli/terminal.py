"""Terminal output of the commands: log lines, progress while services start, and answers as they stream."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TextIO, cast

from rich.console import Console
from rich.text import Text

from outrider.cli.child import LineSink
from outrider.cli.client import Chunk
from outrider.cli.cluster import Cluster
from outrider.logs import LineWriter
from outrider.protocol.generation import TokenOrigin, Usage

# The head of an outrider.logs line: time, level, service and logger.
LOG_HEAD = re.compile(r"^\S+Z +[A-Z]+ +\S+ +\S+ ")
SERVICE_STYLES = {"draft": "green", "verify": "yellow", "gateway": "cyan"}


def make_console(*, color: bool = True, stderr: bool = False) -> Console:
    """Return a console that honours NO_COLOR and writes no escape codes into files and pipes."""
    return Console(highlight=False, markup=False, emoji=False, no_color=None if color else True, stderr=stderr)


def log_printer(console: Console) -> LineSink:
    """Return a sink that prints log lines with their service's name in front."""

    def print_line(name: str, line: str) -> None:
        text = Text.assemble((f"{name:<7} | ", SERVICE_STYLES.get(name, "")), printable(line))
        print_steadily(console, text)

    return print_line


_printing = threading.Lock()
"""Held while writing: a LineWriter is for one thread at a time, and needs the room that it found in the stream."""


def print_steadily(console: Console, text: Text | str) -> None:
    """Print without blocking or failing, for threads that also look after a service.

    Text that a full disk or a stopped terminal does not accept is dropped. If the reader is gone, the process gets a
    SIGHUP, as when a terminal closes.
    """
    with console.capture() as captured:
        console.print(text, soft_wrap=True, end="")
    if console.quiet:
        return
    try:
        with _printing:
            _writer(cast(TextIO, console.file)).write(captured.get())
    except BrokenPipeError:
        console.quiet = True
        os.kill(os.getpid(), signal.SIGHUP)
    except OSError:
        return


_writer = cache(LineWriter)
"""The writer of a stream: one for each stream, because it remembers what was dropped there."""


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = (), gap: str = "  ") -> str:
    """Lay out rows of cells as lines of columns, those in `right` right-aligned; cells are never cut."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(gap.join(cells).rstrip())
    return "\n".join(lines)


class StartDisplay:
    """On a terminal, shows the newest log line while services start, and nothing afterwards."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting", spinner="line")

    def __call__(self, name: str, line: str) -> None:
        """Show a log line; usable as a cluster's `on_line`."""
        message = LOG_HEAD.sub("", printable(line))
        self._status.update(Text(f"{name}: {message}"[: max(20, self._console.width - 4)]))

    @contextmanager
    def started(self, cluster: Cluster) -> Iterator[Cluster]:
        """Start the cluster with the display on, and close the cluster when the block ends."""
        self._console.print(f"starting {', '.join(cluster.services)} as processes of their own")
        begin = time.monotonic()
        with self._status:
            cluster.__enter__()
        try:
            self._console.print(f"ready after {time.monotonic() - begin:.1f} s")
            yield cluster
        finally:
            cluster.close()


LEGEND = {
    TokenOrigin.ACCEPTED: ("draft token, accepted", "green"),
    TokenOrigin.BONUS: ("bonus token", "yellow"),
    TokenOrigin.PLAIN: ("plain token", ""),
}


class Painter:
    """Cuts streamed text into runs of one origin.

    A character made up of several tokens gets the origin of the first of them.
    """

    def __init__(self) -> None:
        self._tokens: deque[tuple[TokenOrigin, int]] = deque()
        self._origin = TokenOrigin.PLAIN
        self._left = 0

    def feed(self, chunk: Chunk) -> list[tuple[str, TokenOrigin]]:
        """Take a chunk; return its text in runs, in order."""
        self._tokens.extend(chunk.tokens)
        runs: list[tuple[str, TokenOrigin]] = []
        for character in chunk.text:
            while self._left <= 0 and self._tokens:
                self._origin, num_bytes = self._tokens.popleft()
                # A character that reached into this token has used up some of it already.
                self._left += num_bytes
            self._left -= len(character.encode("utf-8"))
            if runs and runs[-1][1] is self._origin:
                runs[-1] = (runs[-1][0] + character, self._origin)
            else:
                runs.append((character, self._origin))
        return runs


def drafters_text(drafters: Mapping[str, Sequence[str]]) -> str:
    """Say which drafters run in which service, in words for a first-time reader."""
    if not drafters:
        return "nothing: each token is computed by itself"
    words = {"NGRAM": "n-grams of prompt and answers (NGRAM)", "EAGLE3": "a trained head (EAGLE3)"}
    parts = [
        f"{' and '.join(words.get(name, name) for name in names)}, in the {service} service"
        for service, names in drafters.items()
    ]
    return "; ".join(parts if "draft" in drafters else [*parts, "there is no draft service"])


@dataclass(frozen=True)
class FinishedAnswer:
    """A finished answer. Times are in seconds, as the client saw them."""

    text: str
    usage: Usage
    seconds_to_first_token: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Rate of the tokens after the first."""
        decoding = self.seconds - self.seconds_to_first_token
        return (self.usage.completion_tokens - 1) / decoding if decoding > 0 else 0.0


async def show_answer(chunks: AsyncIterator[Chunk], console: Console | None) -> FinishedAnswer:
    """Print an answer to `console`, if given, while it streams; return it. Raises what `chunks` raises."""
    painter = Painter()
    parts: list[str] = []
    usage = Usage()
    begin = time.monotonic()
    first = end = 0.0
    try:
        async for chunk in chunks:
            end = time.monotonic() - begin
            first = first or (end if chunk.tokens else 0.0)
            usage = chunk.usage or usage
            parts.append(chunk.text)
            if console is not None:
                for text, origin in painter.feed(chunk):
                    _, style = LEGEND.get(origin, ("", ""))
                    console.print(Text(printable(text), style), end="", soft_wrap=True)
    finally:
        if console is not None:
            console.print()
    return FinishedAnswer("".join(parts), usage, first, end)


def legend() -> Text:
    """Return a line that shows which colour means which origin."""
    text = Text()
    for words, style in LEGEND.values():
        text.append(f" {words} ", style and f"{style} reverse")
        text.append("  ")
    return text


def printable(text: str) -> str:
    """Replace control characters in the text: a model must not control the terminal."""
    return "".join(
        c if c in "\n\t" or not (ord(c) < 32 or 127 <= ord(c) < 160) else "\N{REPLACEMENT CHARACTER}" for c in text
    )

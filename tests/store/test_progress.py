from __future__ import annotations

import io

from outrider.models.progress import ConsoleProgress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_a_stage_takes_a_few_lines() -> None:
    stream = io.StringIO()
    with ConsoleProgress(stream) as progress:
        for done in range(1001):
            progress("converting", done * 1_000_000, 1_000_000_000)
        progress("waiting", 0, 0)
        progress("waiting", 0, 0)
    lines = stream.getvalue().splitlines()
    assert lines == [f"converting: {percent} % of 1000 MB" for percent in (0, 25, 50, 75, 100)] + ["waiting"]


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    with ConsoleProgress(stream) as progress:
        progress("converting", 1_000_000, 4_000_000)
        progress("converting", 4_000_000, 4_000_000)
    assert "converting" in stream.getvalue()
    assert "4.0/4.0 MB" in stream.getvalue()


def test_nothing_to_do_shows_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with ConsoleProgress(stream):
            pass
        assert stream.getvalue() == ""

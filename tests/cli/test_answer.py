from __future__ import annotations

import io
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from outrider.cli.client import Chunk
from outrider.cli.terminal import Painter, drafters_text, make_console, print_steadily, printable, show_answer
from outrider.protocol.generation import TokenOrigin, Usage

ROOT = Path(__file__).resolve().parents[2]
origins = st.sampled_from(list(TokenOrigin))


@given(
    text=st.text(alphabet="aé漢🦊", max_size=30),
    cuts=st.lists(st.integers(1, 6), max_size=60),
    lag=st.integers(0, 8),
    data=st.data(),
)
def test_each_character_has_the_colour_of_the_token_that_holds_its_first_byte(
    text: str, cuts: list[int], lag: int, data: st.DataObject
) -> None:
    owner: list[TokenOrigin] = []
    tokens = []
    while len(owner) < len(text.encode()):
        token = (data.draw(origins), cuts.pop() if cuts else 1)
        tokens.append(token)
        owner += [token[0]] * token[1]
    expected = [owner[len(text[:i].encode())] for i in range(len(text))]
    painter = Painter()
    runs = []
    # Tokens come one by one; text lags behind, and comes in whole characters.
    shown = 0
    for count in range(len(tokens)):
        known = sum(length for _, length in tokens[: count + 1])
        final = max(0, len(text.encode()[:known].decode(errors="ignore")) - lag)
        runs += painter.feed(Chunk(text[shown:final], [tokens[count]]))
        shown = max(shown, final)
    runs += painter.feed(Chunk(text[shown:], []))
    assert "".join(part for part, _ in runs) == text
    assert [origin for part, origin in runs for _ in part] == expected


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31m\x9b\x07\r\tb\nc é") == "a\ufffd[31m\ufffd\ufffd\ufffd\tb\nc é"


def test_a_pipe_gets_no_escape_codes(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console()
    console.print("x", style="green")
    assert capsys.readouterr().out == "x\n"


@pytest.mark.parametrize("flag", [True, False])
def test_no_color_is_obeyed_on_a_terminal(flag: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR" if flag else "UNRELATED", "1")
    make_console(color=flag).print("x", style="green")
    make_console(color=True).print("y", style="green")
    output = terminal.getvalue()
    assert output.splitlines()[0] == "x"
    assert ("\x1b" in output) is not flag


async def test_an_answer_is_measured_and_returned_whole() -> None:
    async def chunks():
        yield Chunk("Hel", [(TokenOrigin.PLAIN, 3)])
        yield Chunk("lo", [(TokenOrigin.ACCEPTED, 1), (TokenOrigin.BONUS, 1)])
        usage = Usage(5, 3, 0, num_rounds=2, num_draft_tokens=4, num_accepted_tokens=2, num_committed_tokens=3)
        yield Chunk("", [], usage)

    answer = await show_answer(chunks(), None)
    assert answer.text == "Hello"
    assert answer.usage.accept_length == 1.5, "an accepted token that ends the answer has no bonus token behind it"
    assert 0 < answer.seconds_to_first_token <= answer.seconds


def test_who_drafts_and_where_is_told_to_somebody_who_sees_the_names_for_the_first_time() -> None:
    head, ngrams = "a trained head (EAGLE3)", "n-grams of prompt and answers (NGRAM)"
    alone = f"{head} and {ngrams}, in the verify service; there is no draft service"
    assert drafters_text({"verify": ("EAGLE3", "NGRAM")}) == alone
    both = f"{head}, in the verify service; {ngrams}, in the draft service"
    assert drafters_text({"verify": ("EAGLE3",), "draft": ("NGRAM",)}) == both
    assert drafters_text({"draft": ("STANDALONE",)}) == "STANDALONE, in the draft service"
    assert drafters_text({}) == "nothing: each token is computed by itself"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_a_line_that_a_full_disk_does_not_take_is_dropped() -> None:
    later = io.StringIO()
    with open("/dev/full", "w") as full:
        console = Console(file=full)
        print_steadily(console, "first")
        console.file = later
        print_steadily(console, "second")
    assert later.getvalue() == "second\n"


def test_lines_that_nobody_reads_are_dropped_and_counted_also_where_there_is_room_for_a_part() -> None:
    reader, writer = os.pipe()
    with open(writer, "w") as full:
        console = Console(file=full)
        for _ in range(100):
            print_steadily(console, Text("." * 6000))
        read = b""
        while select.select([reader], [], [], 0)[0]:
            read += os.read(reader, 65536)
        print_steadily(console, "the last")
    with open(reader, "rb") as left:
        lines = (read + left.read()).decode().splitlines()
    num_whole = lines.count("." * 6000)
    assert 0 < num_whole < 100
    assert lines[-2:] == [f"{100 - num_whole} lines were left out here: nobody read them", "the last"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
def test_an_output_that_takes_no_more_is_no_traceback() -> None:
    command = [sys.executable, "-m", "outrider.cli", "version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    message = "outrider: error: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, message)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")

"""One event is one line, with its request and without secrets."""

from __future__ import annotations

import io
import logging
import os
import re
import select
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import logs
from outrider.logs import (
    LineFormatter,
    LineWriter,
    configure_logging,
    describe_exception,
    get_logger,
    hide_secret,
    redact,
    request_id,
)


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_registered_secrets", set())


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    stream = io.StringIO()
    configure_logging("verify", stream=stream)
    yield stream
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_has_time_level_service_logger_and_text(lines: io.StringIO) -> None:
    get_logger("outrider.rpc").warning("%d pages", 3)
    stamp, rest = lines.getvalue().split(" ", 1)
    assert stamp.endswith("Z")
    assert rest == "WARNING verify outrider.rpc 3 pages\n"


def test_a_line_names_the_request_that_it_belongs_to(lines: io.StringIO) -> None:
    token = request_id.set("r-1")
    get_logger("x").info("inside")
    request_id.reset(token)
    get_logger("x").info("outside")
    inside, outside = lines.getvalue().splitlines()
    assert inside.endswith("x [request r-1] inside")
    assert "[request" not in outside


@settings(max_examples=examples(30))
@given(st.text())
def test_no_text_makes_a_second_line(text: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter("s"))
    handler.emit(logging.makeLogRecord({"name": "n", "msg": "%s", "args": (text,), "levelname": "INFO"}))
    assert len(stream.getvalue().splitlines()) == 1


def test_an_exception_is_part_of_the_line_with_its_cause(lines: io.StringIO) -> None:
    try:
        try:
            raise KeyError("inner\nline")
        except KeyError as error:
            raise ValueError("outer") from error
    except ValueError:
        get_logger("x").exception("it failed")
    [line] = lines.getvalue().splitlines()
    assert "it failed | ValueError: outer at config/test_logs.py:" in line
    assert "caused by KeyError: " in line


def test_an_exception_that_causes_itself_ends() -> None:
    error = ValueError("x")
    error.__cause__ = error
    assert describe_exception(error).count("ValueError") <= 4


@pytest.mark.parametrize(
    "text",
    [
        "authorization: Bearer abc.def-ghi",
        "('authorization', 'Bearer abc.def-ghi')",
        "{'authorization': 'Bearer abc.def-ghi'}",
        "{'Authorization': b'abc.def-ghi'}",
        "bearer abc.def-ghi, next",
        "bearer token-abc.def-ghi",
        "auth_token='abc.def-ghi'",
        "--auth-token=abc.def-ghi",
        "HF_TOKEN=abc.def-ghi",
        "OUTRIDER_AUTH_TOKEN=abc.def-ghi",
        "api_key: abc.def-ghi",
        '{"api-key": "abc.def-ghi"}',
        "key hf_abc.def-ghi".replace("abc.def-ghi", "abcdefghijkl"),
        "key sk-abcdefghijkl",
    ],
)
def test_secrets_are_hidden(text: str) -> None:
    hidden = redact(text)
    assert "***" in hidden
    assert "abc" not in hidden
    assert "ghi" not in hidden


@pytest.mark.parametrize(
    "text",
    [
        "token ids outside the vocabulary",
        "bonus_token=5",
        "token: 5",
        "3 tokens: 1, 2",
        "tokenizer: x",
        "invalid_api_key: missing or wrong",
        "write the bearer token into it; missing or wrong bearer token",
    ],
)
def test_tokens_of_text_are_not_secrets(text: str) -> None:
    assert redact(text) == text


def test_a_registered_secret_is_hidden_wherever_it_turns_up(lines: io.StringIO) -> None:
    hide_secret("pa55phrase")
    get_logger("x").info("connected to %s", "http://user:pa55phrase@host")
    try:
        raise ValueError("pa55phrase")
    except ValueError:
        get_logger("x").exception("bad")
    assert "pa55phrase" not in lines.getvalue()
    assert lines.getvalue().count("***") == 2


def test_noisy_libraries_are_heard_only_when_something_is_wrong(lines: io.StringIO) -> None:
    logging.getLogger("uvicorn.access").info("GET /")
    logging.getLogger("grpc._cython").info("noise")
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    logging.getLogger("uvicorn.error").error("trouble")
    [line] = lines.getvalue().splitlines()
    assert line.endswith("uvicorn.error trouble")


def test_messages_that_cannot_be_read_cost_no_lines_of_the_library(lines: io.StringIO) -> None:
    logging.getLogger("grpc._common").error("Exception deserializing message!")
    assert not lines.getvalue()


def test_warnings_become_lines() -> None:
    script = "import warnings; from outrider.logs import configure_logging; configure_logging('s'); warnings.warn('w')"
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stderr.count("\n") == 1
    assert "UserWarning: w" in done.stderr


def test_logs_import_neither_torch_nor_grpc() -> None:
    script = "import sys, outrider.logs; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_log_that_nobody_reads_stops_nobody_and_tells_later_what_it_lacks() -> None:
    script = """
        from outrider.logs import configure_logging, get_logger
        configure_logging("verify")
        for number in range(2000):
            get_logger("x").info("line %d %s", number, "y" * 1500)
        print("done", flush=True)
        input()
        get_logger("x").info("the last")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "done\n", "the pipe of the log is full, and nobody has read it"
        first = [process.stderr.readline() for _ in range(5)]
        process.stdin.write("\n")
        process.stdin.close()
        rest = process.stderr.read().splitlines()
    assert all(f" x line {number} yyy" in line for number, line in enumerate(first))
    kept = [line for line in rest if " x line " in line]
    (notice,) = [line for line in rest if "lines were left out here: nobody read them" in line]
    num_left_out = int(notice.split(" lines were left out")[0].split()[-1])
    num_whole = sum(line.endswith("y" * 1500) for line in kept)
    assert len(first) + num_whole + num_left_out == 2000 and rest[-2:] == [notice, rest[-1]]
    assert rest[-1].endswith("x the last")


def test_a_terminal_with_room_for_a_part_of_a_line_stops_nobody() -> None:
    master, slave = os.openpty()
    script = """
        from outrider.logs import configure_logging, get_logger
        configure_logging("verify")
        for number in range(3000):
            get_logger("x").info("line %d %s", number, "y" * (number % 100))
        print("done", flush=True)
        input()
        get_logger("x").info("the last")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=slave
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        read = b""
        while select.select([master], [], [], 0)[0]:
            read += os.read(master, 65536)
        process.stdin.write(b"\n")
        process.stdin.close()
        while not read.endswith(b"the last\r\n"):
            read += os.read(master, 65536)
    lines = read.decode().splitlines()
    num_whole = sum(bool(re.search(r" x line \d+ y*$", line)) for line in lines)
    assert 0 < num_whole < 3000 and " lines were left out here" in lines[-2]
    os.close(master)
    os.close(slave)


def test_a_line_is_written_at_once_so_that_no_other_process_writes_into_it() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with theirs, ours, open(ours.fileno(), "w", closefd=False) as stream:
        line = "y" * (select.PIPE_BUF - 1)
        LineWriter(stream).write(line)
        assert theirs.recv(2 * len(line)) == f"{line}\n".encode()

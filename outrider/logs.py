"""Logging of all services: one line per event on stderr, with the request it belongs to and without secrets.

    2026-01-31T12:00:00.123Z INFO    verify outrider.rpc.server [request 4f1c] serving on 127.0.0.1:50052

Line breaks inside a message are escaped, so a client cannot forge a line. Imports neither torch nor grpc.
"""

from __future__ import annotations

import io
import logging
import os
import re
import select
import sys
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from typing import TextIO

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")

request_id: ContextVar[str] = ContextVar("outrider_request_id", default="")
"""Id of the request that the current task works for; empty outside of requests."""

_MAX_LINE = 8192
_WRITE_BYTES: int = getattr(select, "PIPE_BUF", 512)
"""Bytes per write: a pipe that is ready takes this many without blocking, and does not mix them with other writers'."""
_READER_SECONDS = 0.1
"""How long a line may wait for the reader of the log. After one line has waited in vain, the next ones do not wait."""
_MAX_FRAMES = 12
_MAX_CAUSES = 4

# Keeps the scheme or key and replaces what follows. A bare "token" is not a key but an ordinary word here, also in
# "bearer token".
_SECRET = re.compile(
    r"""(?ix)
    ( \b bearer \s+ (?! tokens? (?: [\s;,.] | $ ) )
    | (?<! [a-z0-9] ) (?<! invalid_ )
      (?: authorization | api[_-]?key | (?: auth | access | api | hf ) [_-]? token | password | secret )
      ['"]? \s* [=:] \s* (?: b? ['"] )? (?: bearer \s+ )?
    )
    [^\s'",;)}\]]+
    """
)
_KNOWN_SHAPES = re.compile(r"\b(?:sk-|hf_)[A-Za-z0-9_-]{8,}")
_registered_secrets: set[str] = set()


def hide_secret(secret: str) -> None:
    """Replace this exact text in every later line, wherever it appears."""
    if secret:
        _registered_secrets.add(secret)


def redact(text: str) -> str:
    """Return `text` with bearer tokens, keys and registered secrets replaced by ***."""
    # Longest first: replacing a secret that is part of another one would leave the rest of the longer one.
    for secret in sorted(_registered_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return _KNOWN_SHAPES.sub("***", _SECRET.sub(r"\1***", text))


class LineFormatter(logging.Formatter):
    """Formats a record, its exception included, as one redacted line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its line break."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        current = request_id.get()
        request = f" [request {current}]" if current else ""
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text = f"{text} | {describe_exception(record.exc_info[1])}"
        text = escape_controls(redact(text))
        if len(text) > _MAX_LINE:
            text = f"{text[:_MAX_LINE]}... ({len(text) - _MAX_LINE} more characters)"
        stamp = f"{seconds}.{int(record.msecs):03d}Z"
        return f"{stamp} {record.levelname:<7} {self.service} {record.name}{request} {text}"


class LineWriter:
    """Writes lines, and leaves out those that nobody reads: a stopped terminal or pager must not stop a service.

    Only one thread may use a writer at a time.
    """

    def __init__(self, stream: TextIO, format_notice: Callable[[str], str] = str) -> None:
        """`format_notice` formats a message of the writer itself as a line, without the line break."""
        self._stream = stream
        self._format_notice = format_notice
        self._terminal = _open_terminal(stream)
        self._num_left_out = 0
        self._is_cut = False
        """Whether the last line was written without its end."""

    def write(self, line: str) -> None:
        """Write a line, after one that says how many lines before it were left out, if any. Raises OSError."""
        text = f"{line}\n"
        if self._num_left_out:
            notice = self._format_notice(f"{self._num_left_out} lines were left out here: nobody read them")
            text = f"{chr(10) * self._is_cut}{notice}\n{text}"
        self._stream.flush()
        try:
            number = self._stream.fileno() if self._terminal is None else self._terminal
        except (OSError, ValueError):  # not a stream of the operating system
            self._stream.write(text)
            self._stream.flush()
            return
        left = text.encode(self._stream.encoding, "backslashreplace")
        size = len(left)
        while left:
            try:
                if not _is_writable(number, 0.0 if self._num_left_out else _READER_SECONDS):
                    raise BlockingIOError
                left = left[os.write(number, left[:_WRITE_BYTES]) :]
            except BlockingIOError:
                self._num_left_out, self._is_cut = self._num_left_out + 1, self._is_cut or len(left) < size
                return
        self._num_left_out, self._is_cut = 0, False


def _open_terminal(stream: TextIO) -> int | None:
    """Open the stream's terminal again, for the process's life, so that no write to it blocks; return the descriptor.

    The system calls a terminal writable once it has room for part of a line, and a write to the stream would then
    wait for the rest. Returns None if the stream has no terminal or it cannot be opened.
    """
    try:
        return os.open(os.ttyname(stream.fileno()), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except (OSError, ValueError, AttributeError):  # not a terminal, another user's, or a system without terminals
        return None


def _is_writable(number: int, seconds: float) -> bool:
    """Whether a file descriptor accepts bytes within `seconds`."""
    try:
        return bool(select.select([], [number], [], seconds)[1])
    except (OSError, ValueError):  # on Windows
        return True


class LineHandler(logging.Handler):
    """Logs through a LineWriter."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._writer = LineWriter(stream, self._format_notice)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        try:
            self._writer.write(self.format(record))
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)

    def _format_notice(self, text: str) -> str:
        return self.format(logging.LogRecord(__name__, logging.WARNING, "", 0, text, None, None))


def describe_exception(error: BaseException) -> str:
    """Return type, message and innermost frames of `error` and its causes as one line, innermost frame first."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None and len(parts) < _MAX_CAUSES:
        frames = [
            f"{os.path.join(*frame.filename.split(os.sep)[-2:])}:{frame.lineno} {frame.name}"
            for frame in reversed(traceback.extract_tb(current.__traceback__))
        ]
        where = " < ".join(frames[:_MAX_FRAMES])
        message = str(current)
        parts.append(f"{type(current).__name__}{f': {message}' if message else ''}{f' at {where}' if where else ''}")
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
    return " | caused by ".join(parts)


def escape_controls(text: str) -> str:
    """Return `text` with line breaks and other control characters written as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def mend_streams() -> None:
    """Replace a closed stdin by an empty file and closed outputs by one that drops all.

    Open outputs write `?` for characters that their encoding lacks.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # This usually takes the stream's own number, which the next socket would otherwise get, here or in a child.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the process's life)
            os.set_inheritable(getattr(sys, name).fileno(), True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def configure_logging(service: str, level: str = "INFO", *, stream: TextIO | None = None) -> None:
    """Send all logging of this process to `stream` (stderr by default) in our format, replacing earlier set-ups.

    `service` appears in every line; `level` is one of LEVELS.
    """
    handler = LineHandler(stream if stream is not None else sys.stderr, LineFormatter(service))
    root = logging.getLogger()
    for old in list(root.handlers):
        # Other subclasses are somebody's own (a test's capture, a file) and stay.
        if type(old) in (logging.StreamHandler, LineHandler):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.captureWarnings(True)
    quiet = logging.DEBUG if level == "DEBUG" else logging.WARNING
    for name in ("asyncio", "grpc", "httpx", "httpcore", "uvicorn.access", "huggingface_hub", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(quiet)
    # It prints a traceback for each message that it cannot parse, however many a peer sends; our receivers report them.
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)
    # uvicorn brings handlers of its own, which would print each line again in another format.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # It warns about everything that is not HTTP or asks for another protocol, so any client could fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if level == "DEBUG" else logging.ERROR)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; call it with `__name__`."""
    return logging.getLogger(name)


class ThrottledWarnings:
    """Logs a kind of warning at most once in `seconds`, and says how many were left out."""

    def __init__(self, log: logging.Logger, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._seconds = seconds
        self._clock = clock
        self._logged_at = float("-inf")
        self._num_left_out = 0

    def warn(self, message: str, *arguments: object) -> None:
        """Log a warning, or only count it if the last one is too recent."""
        now = self._clock()
        if now - self._logged_at < self._seconds:
            self._num_left_out += 1
            return
        if self._num_left_out:
            message, arguments = message + " (and %d like it before)", (*arguments, self._num_left_out)
        self._log.warning(message, *arguments)
        self._logged_at, self._num_left_out = now, 0

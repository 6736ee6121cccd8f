"""Logging of every service: one line per event on stderr, with the request it belongs to and without secrets.

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
"""Written at once: as much as a pipe that can be written to takes without a wait, and between no bytes of others."""
_READER_SECONDS = 0.1
"""How long a line may wait for whoever reads the log; the lines behind one that did wait in vain do not."""
_MAX_FRAMES = 12
_MAX_CAUSES = 4

# The scheme or key stays, what follows it goes. A bare "token" is a word of the trade here, not a key, also in "bearer
# token".
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
    """Have this exact text replaced in every later line, wherever it turns up."""
    if secret:
        _registered_secrets.add(secret)


def redact(text: str) -> str:
    """Return `text` with bearer tokens, keys and registered secrets replaced by ***."""
    # Longest first: a secret that is part of another one must not leave the other's rest behind.
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

    For one thread at a time.
    """

    def __init__(self, stream: TextIO, tell: Callable[[str], str] = str) -> None:
        """`tell`: a line, without its end, that says something of the writer's own."""
        self._stream = stream
        self._tell = tell
        self._terminal = _open_terminal(stream)
        self._num_left_out = 0
        self._is_cut = False
        """Whether the last line that was written lacks its end."""

    def write(self, line: str) -> None:
        """Write a line, behind one that tells how many before it were left out, if there were any. Raises OSError."""
        text = f"{line}\n"
        if self._num_left_out:
            told = self._tell(f"{self._num_left_out} lines were left out here: nobody read them")
            text = f"{chr(10) * self._is_cut}{told}\n{text}"
        self._stream.flush()
        try:
            number = self._stream.fileno() if self._terminal is None else self._terminal
        except (OSError, ValueError):  # no stream of the system's
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
    """The stream's terminal, opened once more for the process's life, so that no write to it waits: where there is room
    for a part of a line the system says that it can be written to, and a write to the stream would wait for the rest.
    """
    try:
        return os.open(os.ttyname(stream.fileno()), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except (OSError, ValueError, AttributeError):  # no terminal, another user's, or no system that has any
        return None


def _is_writable(number: int, seconds: float) -> bool:
    """Whether a stream of the system's takes bytes within so many seconds."""
    try:
        return bool(select.select([], [number], [], seconds)[1])
    except (OSError, ValueError):  # on Windows
        return True


class LineHandler(logging.Handler):
    """Has a LineWriter write what is logged."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._writer = LineWriter(stream, self._tell)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line."""
        try:
            self._writer.write(self.format(record))
        except RecursionError:
            raise
        except Exception:
            self.handleError(record)

    def _tell(self, text: str) -> str:
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
    """Give a closed input an empty file and closed outputs one that drops all; `?` is for what an encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # At its own number, as a rule: else the next socket would get that, here or in a child.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  (for the process's life)
            os.set_inheritable(getattr(sys, name).fileno(), True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def configure_logging(service: str, level: str = "INFO", *, stream: TextIO | None = None) -> None:
    """Send all logging of this process to `stream` (stderr by default) in our form; replaces earlier set-ups.

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
    # It prints a traceback for each message that cannot be read, however many a peer sends; who reads them says so.
    logging.getLogger("grpc._common").setLevel(logging.CRITICAL)
    # uvicorn brings handlers of its own, which would print a second line in another form.
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    # It warns of what any client sends that is no HTTP, or asks to be another protocol: who likes could fill the log.
    logging.getLogger("uvicorn.error").setLevel(logging.DEBUG if level == "DEBUG" else logging.ERROR)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module; call it with `__name__`."""
    return logging.getLogger(name)


class ThrottledWarnings:
    """Logs a kind of warning no more often than every so many seconds, and says how many were left out."""

    def __init__(self, log: logging.Logger, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._seconds = seconds
        self._clock = clock
        self._logged_at = float("-inf")
        self._num_left_out = 0

    def warn(self, message: str, *arguments: object) -> None:
        """Log a warning, or count it."""
        now = self._clock()
        if now - self._logged_at < self._seconds:
            self._num_left_out += 1
            return
        if self._num_left_out:
            message, arguments = message + " (and %d like it before)", (*arguments, self._num_left_out)
        self._log.warning(message, *arguments)
        self._logged_at, self._num_left_out = now, 0

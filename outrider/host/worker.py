"""The engine's side of an engine process: its sockets, start and end, cores, and when it collects Python's garbage."""

from __future__ import annotations

import gc
import os
import re
import select
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from outrider.errors import EXIT_CONFIG, EXIT_FAILURE, EXIT_OK, ConfigError, InternalError
from outrider.host.frames import MAX_FRAME_BYTES, FrameReader, Ready, Refused, Start, pack
from outrider.logs import configure_logging, get_logger

_MIN_YOUNG_OBJECTS = 2000
"""New objects since the last collection that make another one worthwhile."""
_OVERDUE_OBJECTS = 10 * _MIN_YOUNG_OBJECTS
_YOUNG_PER_MIDDLE = 32
"""Collections of the young generation for each one of the middle generation."""
_YOUNG_PER_FULL = 4096
"""Collections of the young generation for each full one, which takes a few milliseconds for the some hundred thousand
objects of a service that never idles."""


def disable_automatic_collection() -> None:
    """Leave all collections to `GarbageCollector` from now on. Objects that live now are never examined again."""
    gc.collect()
    gc.freeze()
    gc.disable()


class GarbageCollector:
    """Collects garbage at chosen times after `disable_automatic_collection`; before that Python does it alone."""

    def __init__(self, *, looks_at_all: bool = True) -> None:
        """`looks_at_all`: whether to collect all generations now and then even while there is work."""
        self._looks_at_all = looks_at_all
        self._num_collections = 0

    @property
    def overdue(self) -> bool:
        """Whether there are so many new objects that the next collection should not wait for spare time."""
        return not gc.isenabled() and gc.get_count()[0] >= _OVERDUE_OBJECTS

    def collect_young(self) -> None:
        """Collect the young objects if there are many, in about 0.1 ms. Call it while a round runs."""
        if gc.isenabled() or gc.get_count()[0] < _MIN_YOUNG_OBJECTS:
            return
        self._num_collections += 1
        if self._looks_at_all and self._num_collections % _YOUNG_PER_FULL == 0:
            gc.collect()
        else:
            gc.collect(0 if self._num_collections % _YOUNG_PER_MIDDLE else 1)

    def collect_all(self) -> None:
        """Collect all generations if there are many new objects. Call it when nobody waits."""
        if not gc.isenabled() and gc.get_count()[0] >= _MIN_YOUNG_OBJECTS:
            gc.collect()

    def collect_and_freeze(self) -> None:
        """Collect all generations, and never examine the remaining objects again.

        Call it when no object lives that may end in a cycle, such as a request. A service that keeps much, such as
        tries of texts, would examine all of it each time, which takes seconds for millions of objects.
        """
        if not gc.isenabled() and (self._num_collections or gc.get_count()[0] >= _MIN_YOUNG_OBJECTS):
            gc.collect()
            gc.freeze()
            self._num_collections = 0


log = get_logger(__name__)

MAX_BACKLOG_BYTES = 4 << 20
"""Most bytes that may wait for a door that does not read; above that the engine blocks."""

_BUFFER_BYTES = 1 << 18

FrameT = TypeVar("FrameT")


class Pipe(Generic[FrameT]):
    """The engine's end of a socket that carries frames to and from the door.

    Sending never blocks while the door reads; bytes that the kernel does not take at once are sent by a later call.
    When the door is gone, `closed` is set and frames to send are lost.
    """

    max_frame_bytes = MAX_FRAME_BYTES
    max_reads = 4
    """Most buffers to read in one go, so that a door that keeps sending does not hold up the engine."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[FrameT]) -> None:
        """`decoder`: for the frames that the other end sends."""
        sock.setblocking(False)
        self.closed = False
        self._socket = sock
        self._descriptor = sock.fileno()
        self._decode = decoder.decode
        self._reader = FrameReader(self.max_frame_bytes)
        self._buffer = bytearray(_BUFFER_BYTES)
        self._backlog = bytearray()

    @property
    def backlog(self) -> int:
        """Bytes that wait for the kernel to take them."""
        return len(self._backlog)

    def fileno(self) -> int:
        """Return the socket's descriptor, for waiting on several; also after the pipe was closed."""
        return self._descriptor

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame, after all earlier ones."""
        self._backlog += pack(frame)
        self.flush()
        if len(self._backlog) > MAX_BACKLOG_BYTES:
            self.drain(None, MAX_BACKLOG_BYTES)

    def flush(self) -> None:
        """Send as much of earlier frames as the kernel takes without blocking."""
        while self._backlog and not self.closed:
            try:
                del self._backlog[: self._socket.send(self._backlog)]
            except BlockingIOError:
                return
            except OSError:
                self.closed = True

    def drain(self, timeout: float | None, max_left: int = 0) -> None:
        """Wait until at most `max_left` bytes are left to send; give up after `timeout` seconds without progress."""
        self.flush()
        while len(self._backlog) > max_left and not self.closed:
            if not _wait([], [self], timeout):
                return
            self.flush()

    def receive(self) -> list[FrameT]:
        """Return frames that have arrived, without waiting; if there are very many, only the first ones.

        Raises InternalError or msgspec's errors for bytes that are no frame.
        """
        frames: list[FrameT] = []
        for _ in range(self.max_reads):
            if self.closed:
                break
            try:
                count = self._socket.recv_into(self._buffer)
            except BlockingIOError:
                break
            except OSError:
                count = 0
            self.closed = count == 0
            frames += map(self._decode, self._reader.feed(memoryview(self._buffer)[:count]))
            if count < len(self._buffer):
                break
        return frames

    def receive_from(self, who: str) -> list[FrameT]:
        """Receive as `receive` does, but if the bytes are no frame, close the pipe and log that `who` sent them."""
        try:
            return self.receive()
        except (InternalError, msgspec.MsgspecError) as error:
            log.error("%s sent an invalid message: %s", who, error)
            self.closed = True
            return []


def wait_for_any(pipes: Sequence[Pipe[Any]], timeout: float | None, others: Sequence[Any] = ()) -> None:
    """Wait up to `timeout` seconds (None: for ever) until bytes arrive or unsent ones of the pipes can be sent.

    No pipe may be closed. `others`: further objects with a `fileno` to read from.
    """
    _wait([*pipes, *others], [pipe for pipe in pipes if pipe.backlog], timeout)
    for pipe in pipes:
        pipe.flush()


def _wait(reading: Sequence[Any], writing: Sequence[Any], timeout: float | None) -> bool:
    """Wait until one of these can be read or written; return whether there is one."""
    try:
        return any(select.select(reading, writing, [], timeout))
    except ValueError:
        # `select` takes no descriptor above 1023. `poll` does, but waits for whole milliseconds, which are long here.
        asked = dict.fromkeys(reading, select.POLLIN)
        poll = select.poll()
        for one in {*reading, *writing}:
            poll.register(one, asked.get(one, 0) | (select.POLLOUT if one in writing else 0))
        return bool(poll.poll(None if timeout is None else timeout * 1e3))


FLUSH_SECONDS = 2.0
"""Longest wait for the door to read the last frames."""
_CORE_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")

ServedT = TypeVar("ServedT")


@dataclass(frozen=True, slots=True)
class BuiltEngine(Generic[ServedT]):
    """An engine that was built but does not run yet."""

    served: ServedT
    """The engine's description in `Ready`."""
    run: Callable[[], bool]
    """Serves the door; returns whether the door sent Stop. Else the door closed the socket or the engine failed."""


def run_worker(
    service: str,
    arguments: Sequence[str],
    decoders: Sequence[msgspec.msgpack.Decoder[Any]],
    build: Callable[..., BuiltEngine[Any]],
) -> int:
    """Serve the door at the other end of inherited sockets; return the exit code.

    `arguments`: the sockets' descriptors, first the one that brings `Start`. `decoders`: for the frames on each socket.
    `build` gets the options and a pipe for each socket.
    """
    with ExitStack() as stack:
        pipes = []
        for argument, decoder in zip(arguments, decoders, strict=True):
            os.set_inheritable(int(argument), False)  # child processes must not get the socket
            sock = stack.enter_context(socket.socket(fileno=int(argument)))
            pipes.append(Pipe[Any](sock, decoder))
        start = await_start(pipes[0])
        if start is None:
            return EXIT_FAILURE
        configure_logging(service, start.options.log_level)
        return run_engine(pipes[0], lambda: build(start.options, *pipes))


def await_start(pipe: Pipe[Any]) -> Start[Any] | None:
    """Wait for the door's first frame and return it; None if the door hangs up. Raises InternalError unless Start."""
    while not pipe.closed:
        for frame in pipe.receive():
            if not isinstance(frame, Start):
                raise InternalError("the door's first frame is not Start")
            return frame
        wait_for_any([pipe], None)
    return None


def run_engine(pipe: Pipe[Any], build: Callable[[], BuiltEngine[Any]]) -> int:
    """Build an engine, send the door `Ready` or `Refused`, and run the engine to its end; return the exit code."""
    try:
        built = build()
    except ConfigError as error:
        pipe.send(Refused(error.message))
        pipe.drain(FLUSH_SECONDS)
        return EXIT_CONFIG
    except Exception:
        log.exception("the engine could not be built")
        return EXIT_FAILURE
    pipe.send(Ready(built.served))
    stopped = built.run()
    pipe.drain(FLUSH_SECONDS)
    return EXIT_OK if stopped else EXIT_FAILURE


def pin_to_cores(text: str) -> None:
    """Pin the calling thread, and threads that it starts later, to these cores; do nothing if `text` is empty.

    `text` is a list as for `taskset -c`: "4", "0,8-11". Raises ConfigError, naming --engine-cpus.
    """
    if wanted := check_cores(text):
        os.sched_setaffinity(0, wanted)
        log.info("the engine runs on cores %s alone", format_cores(wanted))


def check_cores(text: str) -> set[int]:
    """Return the cores that --engine-cpus names, none if it is empty. Raises ConfigError for unavailable cores."""
    if not text.strip():
        return set()
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("--engine-cpus: this system does not let a process choose its cores; leave it empty")
    wanted, allowed = parse_cores(text), os.sched_getaffinity(0)
    if missing := sorted(wanted - allowed):
        raise ConfigError(
            f"--engine-cpus: {text!r} names core {missing[0]}; this process may run on {format_cores(allowed)}, "
            "choose of those"
        )
    return wanted


def parse_cores(text: str) -> set[int]:
    """Parse a list of cores as for `taskset -c`. Raises ConfigError."""
    cores: set[int] = set()
    for part in text.split(","):
        found = _CORE_RANGE.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise ConfigError(f"--engine-cpus: {text!r} is no list of cores; write it like 4 or 0,8-11")
        cores.update(range(first, last + 1))
    return cores


def format_cores(cores: set[int]) -> str:
    """Format cores as a short list with ranges: "0,8-11"."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1][1:] = [core]
        else:
            parts.append([core])
    return ",".join("-".join(map(str, part)) for part in parts)

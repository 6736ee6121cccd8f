"""The engine's end of its socket to the door: no thread, no event loop, and no waiting unless asked for."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from outrider.errors import InternalError
from outrider.host.frames import MAX_FRAME_BYTES, FrameReader, pack
from outrider.logs import get_logger

log = get_logger(__name__)

MAX_BACKLOG_BYTES = 4 << 20
"""Bytes that may wait for a door that does not read; with more, the engine waits, too."""

_BUFFER_BYTES = 1 << 18

_MAX_READS = 4
"""Buffers that are read in one go: a door that goes on sending must not hold up what the engine does."""

FrameT = TypeVar("FrameT")


class Pipe(Generic[FrameT]):
    """Frames to and from the door.

    Sending never blocks while the door reads; what the kernel does not take at once leaves with a later call. When
    the door is gone, `closed` is set and what is sent is lost.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[FrameT],
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_reads: int = _MAX_READS,
    ) -> None:
        """`decoder`: of the frames that the other end sends. `max_reads`: buffers that are read in one go."""
        sock.setblocking(False)
        self.closed = False
        self._socket = sock
        self._descriptor = sock.fileno()
        self._decode = decoder.decode
        self._reader = FrameReader(max_frame_bytes)
        self._max_reads = max_reads
        self._buffer = bytearray(_BUFFER_BYTES)
        self._backlog = bytearray()

    @property
    def backlog(self) -> int:
        """Bytes that wait for the kernel to take them."""
        return len(self._backlog)

    def fileno(self) -> int:
        """The socket's descriptor, for who waits for several; also of one that is closed by now."""
        return self._descriptor

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame, after all earlier ones."""
        self._backlog += pack(frame)
        self.flush()
        if len(self._backlog) > MAX_BACKLOG_BYTES:
            self.drain(None, MAX_BACKLOG_BYTES)

    def flush(self) -> None:
        """Hand the kernel what it takes of earlier frames."""
        while self._backlog and not self.closed:
            try:
                del self._backlog[: self._socket.send(self._backlog)]
            except BlockingIOError:
                return
            except OSError:
                self.closed = True

    def drain(self, timeout: float | None, max_left: int = 0) -> None:
        """Wait until at most `max_left` bytes are left to send, at most `timeout` seconds for each step forward."""
        self.flush()
        while len(self._backlog) > max_left and not self.closed:
            if not _wait([], [self], timeout):
                return
            self.flush()

    def receive(self) -> list[FrameT]:
        """Frames that have come, without waiting: all, or of very many the first.

        Raises InternalError or msgspec's errors for what is none.
        """
        frames: list[FrameT] = []
        for _ in range(self._max_reads):
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
        """The same, but an end that sends what is no frame is closed, with a word in the log: `who` it was."""
        try:
            return self.receive()
        except (InternalError, msgspec.MsgspecError) as error:
            log.error("what %s sends makes no sense: %s", who, error)
            self.closed = True
            return []

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds, None for ever, until something comes or an unsent rest can go."""
        if not self.closed:
            wait_for_any([self], timeout)


def wait_for_any(pipes: Sequence[Pipe[Any]], timeout: float | None, others: Sequence[Any] = ()) -> None:
    """Wait up to `timeout` seconds, None for ever, until something comes or an unsent rest of the pipes can go.

    None of the pipes is closed. `others`: what else something may come from, each with a descriptor.
    """
    _wait([*pipes, *others], [pipe for pipe in pipes if pipe.backlog], timeout)
    for pipe in pipes:
        pipe.flush()


def _wait(reading: Sequence[Any], writing: Sequence[Any], timeout: float | None) -> bool:
    """Wait for one that can be read or written; whether there is any."""
    try:
        return any(select.select(reading, writing, [], timeout))
    except ValueError:
        # `select` takes no descriptor above 1023, and `poll` waits for whole milliseconds, which are long here.
        asked = dict.fromkeys(reading, select.POLLIN)
        poll = select.poll()
        for one in {*reading, *writing}:
            poll.register(one, asked.get(one, 0) | (select.POLLOUT if one in writing else 0))
        return bool(poll.poll(None if timeout is None else timeout * 1e3))

"""A line: a socket between the engines of a verify and a draft service of one host, for what their stream would carry.

The stream stays. It brings the hellos, of which the draft's names the socket, and its end is the session's; but what is
said in between takes a tenth of the time on a line, past two event loops, protobuf and HTTP/2. An end that is lost, or
that makes no sense, ends the session, which is then dialled anew. Both ends must belong to the same user: each asks
the kernel before it says or hears a word. Torch-free.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from outrider.host import host_id
from outrider.logs import get_logger
from outrider.process.frames import pack
from outrider.process.parts import DraftPart, VerifyPart
from outrider.process.pipe import Pipe
from outrider.rpc.transport import MAX_UNIX_PATH_BYTES

log = get_logger(__name__)

MAX_LINE_FRAME_BYTES = 32 << 20
"""An Open of a million tokens fits."""
MAX_UNSENT_BYTES = 4 << 20
"""Bytes that may wait for an end that does not read; with more the line is lost."""
_BACKLOG = 16
_CREDENTIALS = struct.Struct("3i")

FrameT = TypeVar("FrameT")


class LineUp(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """verify -> draft, first: which session this is."""

    token: str
    """Of the draft's hello."""


class VerifyBatch(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """verify -> draft: messages, in order."""

    messages: list[VerifyPart]


class DraftBatch(msgspec.Struct, frozen=True, array_like=True):
    """draft -> verify: messages, in order."""

    messages: list[DraftPart]


to_draft: msgspec.msgpack.Decoder[LineUp | VerifyBatch] = msgspec.msgpack.Decoder(LineUp | VerifyBatch)
to_verify: msgspec.msgpack.Decoder[DraftBatch] = msgspec.msgpack.Decoder(DraftBatch)


class Line(Pipe[FrameT]):
    """One end. It never waits for the other: what does not read loses the line."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[FrameT]) -> None:
        super().__init__(sock, decoder, max_frame_bytes=MAX_LINE_FRAME_BYTES, most_reads=1)
        self._own = sock

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame, after all earlier ones; lost, with the line, if too much waits."""
        if self.closed:
            return
        self._backlog += pack(frame)
        self.flush()
        if len(self._backlog) > MAX_UNSENT_BYTES:
            self.close()

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        self._backlog.clear()
        self._own.close()


class Listener:
    """The draft's end before anybody has called: a socket in a folder that no other user may enter."""

    def __init__(self) -> None:
        """Raises OSError where there can be none."""
        self.host = host_id()
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-")
        path = Path(self._folder.name) / "line"
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise OSError(f"{path} is too long for a socket")
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(self.path)
        self._socket.listen(_BACKLOG)

    def fileno(self) -> int:
        """The socket's descriptor, for who waits for several."""
        return self._socket.fileno()

    def accept(self) -> list[Line[LineUp | VerifyBatch]]:
        """Who has called; others than this user are sent away."""
        found: list[Line[LineUp | VerifyBatch]] = []
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return found
            if _is_same_user(sock):
                found.append(Line(sock, to_draft))
            else:
                sock.close()

    def close(self) -> None:
        """Take no more calls."""
        self._socket.close()
        self._folder.cleanup()


def listen() -> Listener | None:
    """A listener; None where lines cannot be had."""
    if not hasattr(socket, "SO_PEERCRED") or not host_id():
        return None
    try:
        return Listener()
    except OSError as error:
        log.warning("no line to verify services on this host: %s", error)
        return None


def dial(host: str, path: str, token: str) -> Line[DraftBatch] | None:
    """A line to the draft that has named this socket; None where it cannot be reached, or is not this user's."""
    if not token or host != host_id() or len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        return None
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    with suppress(OSError, ValueError):
        sock.connect(path)
        if _is_same_user(sock):
            line = Line(sock, to_verify)
            line.send(LineUp(token))
            return line
    sock.close()
    return None


def _is_same_user(sock: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())

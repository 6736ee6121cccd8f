"""A line: a socket between the engines of a verify and a draft service of one host, for what their stream would carry.

The gRPC stream stays: it brings the hellos, of which the draft's names the socket, and its end is the session's. The
messages in between take the line, past two event loops, protobuf and HTTP/2, and so does what is said of features that
lie in a ring: an answer may wait for them. A line that is lost, or that brings what
is no frame, ends the session, which is then dialled anew. Both ends must belong to the same user: each asks the kernel
before it sends or reads anything. Torch-free.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from outrider.host.frames import decoder, pack
from outrider.host.worker import Pipe
from outrider.logs import get_logger
from outrider.protocol.speculation import DraftMessage, Features, VerifyMessage
from outrider.rpc.transport import MAX_UNIX_PATH_BYTES

log = get_logger(__name__)

MAX_LINE_FRAME_BYTES = 32 << 20
"""An Open of a million tokens fits."""
MAX_UNSENT_BYTES = 8 << 20
"""Bytes that may wait for an end that does not read; more only wait while it does."""
MAX_STALL_SECONDS = 2.0
"""How long more bytes than that may wait without one being read; then the line is lost."""
_MAX_PENDING_CALLS = 16
"""Calls that the kernel holds until they are accepted."""
_CREDENTIALS = struct.Struct("3i")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

FrameT = TypeVar("FrameT")


def host_id() -> str:
    """Names this host and this start of it, also in containers; empty where the system does not tell.

    The kernel draws it at random when it boots.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class LineHello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """verify -> draft, first: which session this is."""

    token: str
    """Of the draft's hello."""


class VerifyBatch(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """verify -> draft: messages, in order."""

    messages: list[VerifyMessage]


class FeatureBatch(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """verify -> draft: features that lie in a ring, in order."""

    features: list[Features]


class DraftBatch(msgspec.Struct, frozen=True, array_like=True):
    """draft -> verify: messages, in order."""

    messages: list[DraftMessage]
    released: int = 0
    """Number of the last features of a `FeatureBatch` that the draft is done with; 0 if that is not new."""


OnLine = LineHello | VerifyBatch | FeatureBatch
"""What verify says on a line."""


def packing(kinds: Sequence[object]) -> str:
    """Names how messages of these types are packed: other fields, or values of their enumerations, give another name.

    At times other words in what describes the types do, too.
    """
    told = msgspec.inspect.multi_type_info(kinds), msgspec.json.schema_components(kinds)
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


@cache
def line_host() -> str:
    """Whose lines an engine can take part in: those of this host, since its start, and of releases that pack alike.

    Empty where the system does not name the host.
    """
    host = host_id()
    return f"{host}/{packing((OnLine, DraftBatch))}" if host else ""


to_draft: msgspec.msgpack.Decoder[OnLine] = decoder(OnLine)
to_verify: msgspec.msgpack.Decoder[DraftBatch] = decoder(DraftBatch)


class Line(Pipe[FrameT]):
    """One end. It never waits for the other: what does not read loses the line."""

    max_frame_bytes = MAX_LINE_FRAME_BYTES
    max_reads = 1

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[FrameT]) -> None:
        super().__init__(sock, decoder)
        self._read_at = 0.0
        """When the other end was last seen to read, or to have little to read."""

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame, after all earlier ones; lost, with the line, if too much waits for too long.

        Many prompts of one batch go as several frames.
        """
        packed = pack(frame)
        if len(packed) > MAX_LINE_FRAME_BYTES and isinstance(frame, VerifyBatch) and len(frame.messages) > 1:
            middle = len(frame.messages) // 2
            self.send(VerifyBatch(frame.messages[:middle]))
            self.send(VerifyBatch(frame.messages[middle:]))
        elif not self.closed:
            self._backlog += packed
            self.flush()

    def flush(self) -> None:
        """See Pipe."""
        before = len(self._backlog)
        super().flush()
        left = len(self._backlog)
        if left < before or left <= MAX_UNSENT_BYTES:
            self._read_at = time.monotonic()
        elif time.monotonic() - self._read_at > MAX_STALL_SECONDS:
            self.close()

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        self._backlog.clear()
        self._socket.close()


class Listener:
    """The draft's end before anybody has called.

    The socket's name is in no file system and lasts as long as the process, but containers do not see each other's; so
    it may lie in a folder that they share.
    """

    def __init__(self, folder: str = "") -> None:
        """Raises OSError where there can be none."""
        self.host = line_host()
        name = f"outrider-{secrets.token_hex(8)}"
        self.path = str(Path(folder) / name) if folder else f"@{name}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        if folder:
            _remove_dead(Path(folder))
        # By another name until it listens: one that does not is a dead process's to a draft that starts meanwhile.
        begun = str(Path(folder) / f".{name}") if folder else self.path
        self._socket.bind(_kernel_name(begun))
        self._socket.listen(_MAX_PENDING_CALLS)
        if folder:
            os.rename(begun, self.path)

    def fileno(self) -> int:
        """The socket's descriptor, for who waits for several."""
        return self._socket.fileno()

    def accept(self) -> list[Line[OnLine]]:
        """Who has called; others than this user are sent away."""
        found: list[Line[OnLine]] = []
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
        if not self.path.startswith("@"):
            Path(self.path).unlink(missing_ok=True)


def listen(where: str) -> Listener | None:
    """A listener as the option --local-line wants it; None where there is to be none, or can be none."""
    if where == "off" or not hasattr(socket, "SO_PEERCRED") or not host_id():
        return None
    folder = "" if where == "auto" else where
    try:
        return Listener(folder)
    except OSError as error:
        log.warning("verify engines of this host cannot speak to this engine directly: %s", error)
        return None


def dial(host: str, path: str, token: str) -> Line[DraftBatch] | None:
    """A line to the draft that has named this socket; None where it cannot be reached, or is not this user's, or is of
    a release that packs messages otherwise: the stream, whose messages are protobuf, serves both."""
    if not token or not host or host != line_host() or not hasattr(socket, "SO_PEERCRED"):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    with suppress(OSError):
        sock.connect(_kernel_name(path))
        if _is_same_user(sock):
            line = Line(sock, to_verify)
            line.send(LineHello(token))
            return line
    sock.close()
    return None


def _is_same_user(sock: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.getuid())


def _kernel_name(path: str) -> str:
    """Raises OSError for what the kernel would cut or refuse."""
    if not path or "\0" in path or len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        raise OSError(f"{path!r} is no name of a socket")
    return "\0" + path[1:] if path.startswith("@") else path


def _remove_dead(folder: Path) -> None:
    """Remove sockets of processes that ended without doing so."""
    for path in folder.glob("outrider-*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue

"""A line: a socket between the engines of a verify and a draft service on one host, in place of their stream.

The gRPC stream stays open: it carries the hellos (the draft's names the socket), and its end is the session's. The
messages in between take the line, which bypasses two event loops, protobuf and HTTP/2. So do notices of features in a
ring, because an answer may wait for them. A line that breaks, or carries bytes that are no frame, ends the session,
which is then dialled again. Both ends must belong to the same user: each asks the kernel before it sends or reads
anything. Torch-free.
"""

from __future__ import annotations

import errno
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
"""Longest frame; an Open of a million tokens fits."""
MAX_UNSENT_BYTES = 8 << 20
"""Bytes that may wait for an end that does not read; more may wait only while the end reads."""
MAX_STALL_SECONDS = 2.0
"""Longest time that more than MAX_UNSENT_BYTES may wait without one being read; then the line is closed."""
_MAX_PENDING_CALLS = 16
"""Calls that the kernel holds until they are accepted."""
_CREDENTIALS = struct.Struct("3i")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

FrameT = TypeVar("FrameT")


def host_id() -> str:
    """Return an id of this host since its boot, also in containers; empty if the system has none.

    The kernel draws it at random at boot.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class LineHello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """verify -> draft, first: names the session."""

    token: str
    """The token of the line in the draft's hello."""


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
    """Sequence number of the last features from a `FeatureBatch` that the draft has released; 0 if unchanged."""


OnLine = LineHello | VerifyBatch | FeatureBatch
"""Messages from verify on a line."""


def packing_digest(kinds: Sequence[object]) -> str:
    """Return a digest of how messages of these types are packed; it changes with fields and values of enumerations.

    It may also change with the types' descriptions alone.
    """
    description = msgspec.inspect.multi_type_info(kinds), msgspec.json.schema_components(kinds)
    return hashlib.sha256(repr(description).encode()).hexdigest()[:16]


@cache
def line_host() -> str:
    """Return a name of this host since its boot and of how this release packs; engines need equal ones for a line.

    Empty if the system does not name the host.
    """
    host = host_id()
    return f"{host}/{packing_digest((OnLine, DraftBatch))}" if host else ""


to_draft: msgspec.msgpack.Decoder[OnLine] = decoder(OnLine)
to_verify: msgspec.msgpack.Decoder[DraftBatch] = decoder(DraftBatch)


class Line(Pipe[FrameT]):
    """One end of a line. Sending never blocks: if the other end does not read, the line is closed."""

    max_frame_bytes = MAX_LINE_FRAME_BYTES
    max_reads = 1

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[FrameT]) -> None:
        super().__init__(sock, decoder)
        self._read_at = 0.0
        """When the other end last read something or had at most MAX_UNSENT_BYTES to read."""

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame after all earlier ones; if too much waits for too long, the line is closed and frames are lost.

        A VerifyBatch that is too long for one frame goes as several.
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
        """Send as `Pipe.flush` does; close the line if the other end has stalled for too long."""
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
    """The draft engine's listening socket.

    By default the socket's name is in no file system and lasts as long as the process. Containers cannot see each
    other's names, so the socket can also lie in a folder that they share.
    """

    def __init__(self, folder: str = "") -> None:
        """Bind and listen. Raises OSError if that fails."""
        self.host = line_host()
        name = f"outrider-{secrets.token_hex(8)}"
        self.path = str(Path(folder) / name) if folder else f"@{name}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._spare = socket.socket(socket.AF_UNIX)
        """A descriptor to give up when none is left."""
        if folder:
            _remove_dead(Path(folder))
        # Under another name until it listens: a draft starting meanwhile would take it for a dead process's socket.
        begun = str(Path(folder) / f".{name}") if folder else self.path
        self._socket.bind(_kernel_name(begun))
        self._socket.listen(_MAX_PENDING_CALLS)
        if folder:
            os.rename(begun, self.path)

    def fileno(self) -> int:
        """Return the socket's descriptor, for waiting on several."""
        return self._socket.fileno()

    def accept(self) -> list[Line[OnLine]]:
        """Return lines to the callers that wait; close connections of other users."""
        found: list[Line[OnLine]] = []
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                return found
            if _is_same_user(sock):
                found.append(Line(sock, to_draft))
            else:
                sock.close()

    def _turn_away(self) -> None:
        """Close a caller's connection without a descriptor for it: while it waits, polls would return at once."""
        self._spare.close()
        with suppress(OSError):
            self._socket.accept()[0].close()
            log.warning("a verify engine of this host cannot connect directly: no file descriptor is left (ulimit -n)")
            self._spare = socket.socket(socket.AF_UNIX)

    def close(self) -> None:
        """Take no more calls."""
        self._socket.close()
        self._spare.close()
        if not self.path.startswith("@"):
            Path(self.path).unlink(missing_ok=True)


def listen(where: str) -> Listener | None:
    """Return a listener as --local-line asks for; None if the option is off or the system does not allow one."""
    if where == "off" or not hasattr(socket, "SO_PEERCRED") or not host_id():
        return None
    folder = "" if where == "auto" else where
    try:
        return Listener(folder)
    except OSError as error:
        log.warning("verify engines of this host cannot connect to this engine directly: %s", error)
        return None


def dial(host: str, path: str, token: str) -> Line[DraftBatch] | None:
    """Open a line to the draft that has named this socket; None if it cannot be reached, is another user's, or packs
    messages differently (another release): the stream, whose messages are protobuf, works without a line."""
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
    """Return a socket's name as the kernel takes it. Raises OSError for a name that the kernel would cut or refuse."""
    if not path or "\0" in path or len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
        raise OSError(f"{path!r} is no name of a socket")
    return "\0" + path[1:] if path.startswith("@") else path


def _remove_dead(folder: Path) -> None:
    """Remove sockets that processes have left behind."""
    for path in folder.glob("outrider-*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue

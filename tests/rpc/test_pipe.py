"""The engine's end of its socket to the door."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Iterator

import msgspec
import pytest

from outrider.host.frames import decoder, pack
from outrider.host.worker import MAX_BACKLOG_BYTES, Pipe, wait_for_any


class Note(msgspec.Struct, tag=1):
    text: str


@pytest.fixture
def ends() -> Iterator[tuple[Pipe[Note], socket.socket]]:
    """A pipe whose descriptor is beyond what `select` takes, and the door's end of it."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    ours, theirs = socket.socketpair()
    high = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 1024))
    with ours, theirs, high:
        yield Pipe(high, decoder(Note)), theirs
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_many_open_files_hold_up_nothing(ends: tuple[Pipe[Note], socket.socket]) -> None:
    pipe, door = ends
    wait_for_any([pipe], 0.0)
    door.sendall(pack(Note("come")))
    wait_for_any([], None, others=[pipe])
    wait_for_any([pipe], None)
    assert pipe.receive() == [Note("come")]
    pipe.send(Note("x" * (MAX_BACKLOG_BYTES // 2)))
    pipe.drain(0.0)
    assert pipe.backlog and not pipe.closed
    door.close()
    pipe.drain(None)
    assert pipe.closed

"""The engine's end of the socket: what leaves when, what a slow or lost door does to it, and how a start ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from outrider.config.verify import VerifyOptions
from outrider.errors import ConfigError, InternalError
from outrider.host.frames import FeaturePieces, FrameReader, FromVerify, Refused, SessionLost, Start, Stop, pack
from outrider.host.line import DraftBatch, FeatureBatch, Listener, VerifyBatch
from outrider.host.worker import MAX_BACKLOG_BYTES, Pipe, await_start, run_engine
from outrider.protocol.generation import GenerationUpdate
from outrider.protocol.speculation import Close, Features, Grow, LineOffer, ProjectionPart
from outrider.tree.handshake import Terms
from verify_service.engine.engine import VerifyEngine, VerifyInbox
from verify_service.engine.postprocessor import Observer
from verify_service.engine.worker import SNAPSHOT_SECONDS, DraftServiceConnection, SocketInbox, VerifyReporter, connect
from verify_service.frames import (
    Cancel,
    DraftUp,
    EngineUpdates,
    FromDoor,
    FromEngine,
    ProjectionFrame,
    RoundFigures,
    TargetProfile,
    from_door,
    from_engine,
)


@dataclass
class Wire:
    """The engine's pipe and the door's bare socket."""

    pipe: Pipe[FromDoor]
    door: socket.socket
    reader: FrameReader

    def read(self) -> list[FromEngine]:
        """The frames of one read."""
        return [from_engine.decode(body) for body in self.reader.feed(self.door.recv(1 << 20))]


@pytest.fixture
def wire() -> Iterator[Wire]:
    ours, theirs = socket.socketpair()
    ours.settimeout(20)
    with ours, theirs:
        yield Wire(Pipe(theirs, from_door), ours, FrameReader())


def test_the_first_frame_brings_the_options(wire: Wire) -> None:
    options = VerifyOptions(threads=3)
    wire.door.sendall(pack(Start(options)))
    assert await_start(wire.pipe) == Start(options)


def test_a_door_that_is_gone_before_its_first_frame_ends_the_start(wire: Wire) -> None:
    wire.door.close()
    assert await_start(wire.pipe) is None


def test_another_first_frame_is_refused(wire: Wire) -> None:
    wire.door.sendall(pack(Stop()))
    with pytest.raises(InternalError, match="first frame"):
        await_start(wire.pipe)


def test_options_that_cannot_be_met_are_told_and_the_process_ends_with_2(wire: Wire) -> None:
    def build(options: VerifyOptions, inbox: VerifyInbox, observer: Observer) -> tuple[VerifyEngine, TargetProfile]:
        raise ConfigError("--model: no such folder; use a folder")

    assert run_engine(wire.pipe, lambda: connect(VerifyOptions(), wire.pipe, build)) == 2
    assert wire.read() == [Refused("--model: no such folder; use a folder")]


def test_a_build_that_fails_otherwise_says_nothing_and_ends_with_1(wire: Wire) -> None:
    def build(options: VerifyOptions, inbox: VerifyInbox, observer: Observer) -> tuple[VerifyEngine, TargetProfile]:
        raise RuntimeError("out of order")

    assert run_engine(wire.pipe, lambda: connect(VerifyOptions(), wire.pipe, build)) == 1
    wire.door.setblocking(False)
    with pytest.raises(BlockingIOError):
        wire.read()


def test_all_of_a_round_leaves_as_one_frame_when_it_is_flushed(wire: Wire) -> None:
    reporter = VerifyReporter(wire.pipe)
    for number in (1, 2, 3):
        reporter.update(number, GenerationUpdate(token_ids=[number]))
    reporter.ended(4)
    reporter.read(9, 16)
    reporter.read(9, 32)
    reporter.round([], [], RoundFigures(0.5, 0.1, gap=0.001, gpu=0.4))
    wire.door.setblocking(False)
    with pytest.raises(BlockingIOError):
        wire.read()
    reporter.flush()
    (frame,) = wire.read()
    assert isinstance(frame, EngineUpdates)
    assert [(number, update.token_ids) for number, update in frame.updates] == [(1, [1]), (2, [2]), (3, [3])]
    assert frame.ended == [4] and frame.read == {9: 48}
    (report,) = frame.rounds
    assert report.figures._replace(answers=()) == RoundFigures(0.5, 0.1, gap=0.001, gpu=0.4)
    reporter.flush()
    with pytest.raises(BlockingIOError):
        wire.read()


def test_drafts_are_told_at_once(wire: Wire) -> None:
    port = DraftServiceConnection(7, "far:1", wire.pipe)
    port.send([Close(3), Close(4)])
    port.reset()
    received, reset = wire.read()
    assert (
        isinstance(received, FromVerify)
        and received.session == 7
        and [part.request for part in received.messages] == [3, 4]
    )
    assert reset == SessionLost(7)


def test_state_leaves_now_and_then_and_whenever_the_engine_falls_idle(wire: Wire) -> None:
    now = 100.0
    reporter = VerifyReporter(wire.pipe, clock=lambda: now)
    scheduler = SimpleNamespace(running=[], waiting=[], num_preemptions=0, num_displaced=0)
    engine = SimpleNamespace(
        scheduler=scheduler,
        memory=SimpleNamespace(num_pages=8, num_used=0),
        drafts=SimpleNamespace(dropped={}, declined={}, replicas={}),
        budget=SimpleNamespace(cost=SimpleNamespace(table=lambda: {1: 0.5})),
        features=SimpleNamespace(num_pending=3, num_waiting=1),
    )
    reporter.watch(engine)  # type: ignore[arg-type]

    def num_running() -> int | None:
        """Running requests in the snapshot that leaves now, if one does."""
        wire.door.setblocking(False)
        reporter.flush()
        try:
            (frame,) = wire.read()
        except BlockingIOError:
            return None
        assert isinstance(frame, EngineUpdates) and frame.snapshot is not None and frame.snapshot.cost == {1: 0.5}
        return frame.snapshot.num_running

    assert num_running() == 0
    scheduler.running = ["a"]
    assert num_running() == 1, "no longer idle"
    scheduler.running = ["a", "b"]
    assert num_running() is None
    now += SNAPSHOT_SECONDS
    assert num_running() == 2
    now += SNAPSHOT_SECONDS
    assert num_running() is None, "nothing changed"
    scheduler.running = []
    assert num_running() == 0, "idle again"


def test_a_door_that_does_not_read_costs_no_frame_and_no_wait(wire: Wire) -> None:
    port = DraftServiceConnection(7, "far:1", wire.pipe)
    count = 20_000
    for number in range(count):
        port.send([Close(number)])
    seen: list[int] = []
    while len(seen) < count:
        wire.pipe.flush()
        for frame in wire.read():
            assert isinstance(frame, FromVerify)
            seen += [part.request for part in frame.messages]
    assert seen == list(range(count))


def test_what_waits_for_a_door_that_does_not_read_is_bounded(wire: Wire) -> None:
    text = "x" * (MAX_BACKLOG_BYTES // 4)
    backlogs: list[int] = []

    def send() -> None:
        for _ in range(8):
            wire.pipe.send(Refused(text))
            backlogs.append(len(wire.pipe._backlog))
        wire.pipe.drain(20)

    sender = threading.Thread(target=send)
    sender.start()
    got: list[FromEngine] = []
    while len(got) < 8:
        got += wire.read()
    sender.join()
    assert got == [Refused(text)] * 8
    assert max(backlogs) <= MAX_BACKLOG_BYTES


def test_a_door_that_is_gone_takes_what_is_sent_with_it(wire: Wire) -> None:
    wire.door.close()
    wire.pipe.send(Refused("x"))
    wire.pipe.drain(20)
    assert wire.pipe.closed and wire.pipe.receive() == []


def test_a_door_that_goes_on_sending_does_not_hold_the_engine_up(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = bytes(pack(ProjectionFrame(1, ProjectionPart(50, "float32", 0, bytes(1000)))))
    waiting = bytearray(frame * 20_000)

    def recv_into(buffer: bytearray) -> int:
        count = min(len(buffer), len(waiting))
        buffer[:count] = waiting[:count]
        del waiting[:count]
        return count

    monkeypatch.setattr(wire.pipe, "_socket", SimpleNamespace(recv_into=recv_into))
    counts = []
    while waiting:
        counts.append(len(wire.pipe.receive()))
    assert sum(counts) == 20_000 and max(counts) * len(frame) < 2 << 20


def serving_inbox(wire: Wire) -> SocketInbox:
    """The inbox of an engine that does nothing."""
    inbox = SocketInbox(wire.pipe)
    inbox.serve(SimpleNamespace(drafts=None, stop=lambda: None), VerifyReporter(wire.pipe))  # type: ignore[arg-type]
    return inbox


def test_the_inbox_waits_for_the_door_or_for_what_was_posted(wire: Wire) -> None:
    inbox = serving_inbox(wire)
    assert inbox.take(None) == [] and inbox.take(0.0) == []
    inbox.post(lambda: None)
    assert len(inbox.take(20)) == 1
    wire.door.sendall(pack(Cancel(1)))
    assert inbox.take(20) == [], "nobody to cancel for"
    wire.door.sendall(pack(Stop()))
    inbox.take(20)
    assert inbox.stopped
    assert inbox.take(20) == [], "a stopped inbox waits for nothing"


@pytest.mark.parametrize("in_ring", [True, False])
def test_features_in_a_ring_and_their_releases_take_the_line(wire: Wire, in_ring: bool) -> None:
    inbox, listener = SocketInbox(wire.pipe), Listener()
    connected: list[DraftServiceConnection] = []
    released: list[tuple[DraftServiceConnection, int]] = []
    engine = SimpleNamespace(
        draft_connected=lambda connection, terms: connected.append(connection),
        drafts=SimpleNamespace(receive=lambda connection, messages, arrived_at: None),
        features=SimpleNamespace(released=lambda connection, through: released.append((connection, through))),
    )
    inbox.serve(engine, VerifyReporter(wire.pipe))  # type: ignore[arg-type]
    offer = LineOffer(listener.host, listener.path, "token")
    wire.door.sendall(pack(DraftUp(7, "near:1", Terms(line=offer))))
    inbox.take(20)
    (connection,), (line,) = connected, listener.accept()
    sent = Features(1, 0, 2, True, memoryview(b"" if in_ring else bytes(8)), "float32", 5)
    sent = replace(sent, ring_offset=256 if in_ring else None)
    connection.send([Close(9)])
    connection.send_features([sent])
    received = line.receive()[1:]
    if in_ring:
        assert received == [VerifyBatch([Close(9)]), FeatureBatch([replace(sent, data=b"")])]
        line.send(DraftBatch([Grow(3, 1, 5, 5, 1)], 5))
        for action in inbox.take(20):
            action()
        assert released == [(connection, 5)]
    else:
        assert received == [VerifyBatch([Close(9)])] and isinstance(wire.read()[0], FeaturePieces)
    line.close()
    listener.close()
    connection.line.close()  # type: ignore[union-attr]


def test_a_door_that_hangs_up_stops_the_engine(wire: Wire) -> None:
    stops: list[str] = []
    inbox = SocketInbox(wire.pipe)
    engine = SimpleNamespace(drafts=None, stop=lambda: stops.append("stop"))
    inbox.serve(engine, VerifyReporter(wire.pipe))  # type: ignore[arg-type]
    wire.door.close()
    assert inbox.take(20) == [] and stops and not inbox.stopped, "nobody asked for it"

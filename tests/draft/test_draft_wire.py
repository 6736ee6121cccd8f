"""What crosses between the draft's door and its engine, in which order it is done, and what nonsense does."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from draft_engine_thread import engine_thread
from draft_fakes import GREEDY, SignallingDrafter, commit_message, open_message

from draft_service.door.metrics import DraftMetrics
from draft_service.door.remote import RemoteDraftEngine, VerifySession
from draft_service.engine.inbox import DraftInbox
from draft_service.frames import (
    GROWTH_SECONDS,
    DraftEngineState,
    DrafterProfile,
    FeaturesFromDoor,
    FeatureStreamDown,
    FeatureStreamUp,
    FromDoor,
    SessionUp,
    features_from_door,
    from_door,
    from_engine,
)
from outrider.config.draft import DraftOptions
from outrider.host.frames import FeaturePieces, FrameReader, FromVerify, Ready, SessionDown, Start, Stop, pack
from outrider.host.worker import Pipe
from outrider.protocol.speculation import Decline, DeclineReason, FeatureRing, Features, FeaturesBegin, Grow, Hello
from outrider.tree.author import Outcome

TARGET = SessionUp(0, 100, "hash", None)


def crossed(frame: FromDoor) -> FromDoor:
    (body,) = FrameReader().feed(bytes(pack(frame)))
    return from_door.decode(body)


@dataclass
class Wire:
    """The engine's inbox and the door's bare sockets."""

    inbox: DraftInbox
    door: socket.socket
    features: socket.socket

    def all(self) -> list[FromDoor | FeaturesFromDoor]:
        return list(iter(self.inbox.next, None))


@pytest.fixture
def wire() -> Iterator[Wire]:
    (ours, theirs), (our_features, their_features) = socket.socketpair(), socket.socketpair()
    with ours, theirs, our_features, their_features:
        inbox = DraftInbox(Pipe(theirs, from_door), Pipe(their_features, features_from_door))
        yield Wire(inbox, ours, our_features)


def test_options_and_profiles_arrive_as_they_left() -> None:
    options = DraftOptions(speculative_algorithm=("EAGLE3", "NGRAM"), min_path_probability=0.1, threads=3)
    assert crossed(Start(options)) == Start(options)
    hello = Hello(1, 2, "a+b", "hash", 5, 64, (2, 7), 100, ("a", "b"))
    profile = DrafterProfile(hello, frozenset({1}), True, ("nodes",))
    (body,) = FrameReader().feed(bytes(pack(Ready(profile))))
    assert from_engine.decode(body) == Ready(profile)


def test_features_are_not_copied_out_of_their_frame_and_know_their_stream() -> None:
    sent = [
        Features(3, 5, 2, True, memoryview(bytes(range(16))), "float16", 9, projected=True),
        Features(4, 0, 1, False, memoryview(b""), "float16", 10, 64),
    ]
    (body,) = FrameReader().feed(bytes(pack(FeaturePieces(1, sent))))
    frame = features_from_door.decode(body)
    assert isinstance(frame, FeaturePieces)
    assert isinstance(frame.features[0].data, memoryview) and frame.features[0].data.obj is body
    assert frame.features == sent


def test_commits_are_handled_before_features_that_came_first(wire: Wire) -> None:
    wire.features.sendall(pack(FeatureStreamDown(1)) + pack(FeatureStreamDown(2)))
    wire.door.sendall(pack(FromVerify(1, [])))
    assert wire.inbox.next() == FromVerify(1, [])
    wire.door.sendall(pack(FromVerify(2, [])))
    assert wire.all() == [FromVerify(2, []), FeatureStreamDown(1), FeatureStreamDown(2)]
    assert not wire.inbox.waiting()


def test_the_end_of_a_session_is_known_before_its_turn(wire: Wire) -> None:
    wire.door.sendall(pack(FromVerify(7, [])) + pack(SessionDown(7)))
    assert wire.inbox.next() == FromVerify(7, []) and wire.inbox.ended == {7}


@pytest.mark.parametrize("which", ["door", "features"])
@pytest.mark.parametrize("how", ["gone", "nonsense", "absurd"])
def test_a_door_that_is_gone_or_makes_no_sense_is_a_stop_that_nobody_asked_for(
    wire: Wire, which: str, how: str
) -> None:
    end: socket.socket = getattr(wire, which)
    if how == "gone":
        end.close()
    else:
        end.sendall(b"\xff" * 4 if how == "absurd" else b"\x01\x00\x00\x00\xc1")
    assert wire.inbox.waiting()
    assert wire.all() == [Stop()] and not wire.inbox.stopped
    wire.inbox.wait(None)  # there is nothing to wait for any more


def test_a_stop_that_was_asked_for_is_told_apart(wire: Wire) -> None:
    wire.door.sendall(pack(Stop()))
    assert wire.all() == [Stop()] and wire.inbox.stopped


class Listening(VerifySession):
    """Keeps what it is sent, turn by turn."""

    def __init__(self) -> None:
        super().__init__(1024)
        self.turns: asyncio.Queue[list[object]] = asyncio.Queue()

    def send(self, messages: object) -> None:
        self.turns.put_nowait(list(messages))  # type: ignore[call-overload]

    async def next(self) -> list[object]:
        return await asyncio.wait_for(self.turns.get(), 20)


async def test_an_engine_answers_each_session_and_forgets_those_that_end() -> None:
    drafter = SignallingDrafter()
    async with engine_thread(drafter, DraftOptions()) as thread:
        remote, first, second = thread.remote, Listening(), Listening()
        remote.attach(first, TARGET)
        remote.attach(second, TARGET)
        remote.submit(first, [open_message([1, 2])])
        remote.submit(second, [open_message([5]), commit_message(9, [1])])
        (grow,) = (one for one in await first.next() if isinstance(one, Grow))
        assert grow.acked_len == 2
        received = await second.next()
        assert any(isinstance(one, Decline) for one in received)
        assert (await remote.ask()).num_requests == 2
        remote.detach(first)
        assert (await remote.ask()).num_requests == 1
        remote.detach(second)
        state = await remote.ask()
        assert (state.num_requests, state.num_nodes) == (0, 0) and drafter.empty.is_set()
    assert thread.exit_codes == [0]


async def test_a_flood_waits_until_the_engine_reads() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        _, remote = await asyncio.get_running_loop().create_unix_connection(RemoteDraftEngine, sock=ours)
        session = VerifySession(1024)
        remote.attach(session, TARGET)
        num_sent = 0
        waiting = asyncio.create_task(remote.writable())
        await asyncio.sleep(0)
        while waiting.done():
            remote.submit(session, [commit_message(1, [1] * 10_000)])
            num_sent += 1
            waiting = asyncio.create_task(remote.writable())
            await asyncio.sleep(0)
        assert num_sent < 1000, "it is bounded"
        reading = asyncio.create_task(asyncio.to_thread(lambda: list(iter(lambda: theirs.recv(1 << 20), b""))))
        await asyncio.wait_for(waiting, 20)
        remote.close()
        await reading


async def test_another_target_is_forgotten_for_before_its_sessions_come() -> None:
    calls: list[str] = []

    class Forgetting(SignallingDrafter):
        def forget_target(self) -> None:
            calls.append("forget")

        def open(self, request: object) -> None:
            calls.append("open")
            super().open(request)  # type: ignore[arg-type]

    async with engine_thread(Forgetting(), DraftOptions()) as thread:
        for target in (TARGET, TARGET, SessionUp(0, 100, "another", None)):
            session = Listening()
            thread.remote.attach(session, target)
            thread.remote.submit(session, [open_message([1])])
            await session.next()
            thread.remote.detach(session)
    assert calls == ["forget", "open", "open", "forget", "open"]


async def test_a_door_that_hangs_up_ends_the_engine_with_1() -> None:
    async with engine_thread(SignallingDrafter(), DraftOptions()) as thread:
        thread.remote.close()
        await asyncio.wait_for(thread.features.lost(), 20)
    assert thread.exit_codes == [1]


async def test_an_engine_that_says_nonsense_is_as_good_as_gone() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    errors: list[str] = []
    loop.set_exception_handler(lambda loop, context: errors.append(context["message"]))
    with theirs:
        _, remote = await loop.create_unix_connection(RemoteDraftEngine, sock=ours)
        theirs.sendall(pack(Ready(DrafterProfile(Hello(1, 2, "ngram")))))
        await remote.ready
        drained = asyncio.create_task(remote.drain())
        await asyncio.sleep(0)
        theirs.sendall(b"\x01\x00\x00\x00\xc1")
        await asyncio.wait_for(remote.lost(), 20)
    await asyncio.wait_for(drained, 20)
    assert not remote.alive and errors


def test_counts_become_metrics_and_add_up() -> None:
    metrics = DraftMetrics(("ngram",))
    slices = [1, *[0] * (len(GROWTH_SECONDS) - 1), 2]
    late = {"late_features": 3}
    state = DraftEngineState(
        grown={0: 5}, commits={Outcome.HIT: 2}, declines={DeclineReason.GAP: 1}, dropped=late, slices=slices
    )
    metrics.take(state)
    metrics.take(state)
    metrics.take(DraftEngineState())

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"outrider_draft_{name}", labels)

    assert value("nodes_grown_total", source="ngram") == 10
    assert value("commits_total", outcome="hit") == 4
    assert value("declines_total", reason="gap") == 2
    assert value("messages_dropped_total", reason="late_features") == 6
    assert value("growth_seconds_count") == 6
    assert value("growth_seconds_bucket", le="0.0001") == 2
    assert value("growth_seconds_bucket", le="+Inf") == 6


def test_all_frames_of_the_door_cross() -> None:
    for frame in (SessionUp(3, 100, "hash", frozenset({1}), "token"), SessionDown(3), Stop()):
        assert crossed(frame) == frame
    opened = open_message([1, 2, 3])
    assert opened.sampling == GREEDY
    ring = FeatureRing("here", "cuda:0", bytes(64), 1 << 24, bytes(32))
    up = FeatureStreamUp(2, FeaturesBegin("", (2, 7), 64, "float16", ring))
    (body,) = FrameReader().feed(bytes(pack(up)))
    assert features_from_door.decode(body) == up

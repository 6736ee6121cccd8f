"""A dialer outlives whatever its draft does, and dials again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from outrider.rpc.codec import MAX_EVENTS_AT_ONCE, encode_draft
from outrider.rpc.feature_codec import (
    decode_begin,
    decode_features,
    encode_accept,
    encode_projection,
    encode_released,
)
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.handshake import Terms
from outrider.tree.messages import (
    PROTOCOL_VERSION,
    Commit,
    DraftMessage,
    FeatureRing,
    Features,
    FeaturesAccept,
    FeaturesBegin,
    FeaturesReleased,
    Grow,
    Hello,
)
from outrider.tree.projection import Projection, ProjectionPart, name_projection
from outrider.v1 import draft_pb2
from verify_service import session
from verify_service.session import DraftDialer, DraftSession

HELLO = Hello(PROTOCOL_VERSION, NOISE_VERSION, vocab_size=61, hidden_size=8, num_layers=3, tokenizer_hash="cafe")
THEIRS = Hello(PROTOCOL_VERSION, NOISE_VERSION)
BEGIN = FeaturesBegin("", (4, 1), 16, "float32")
Context = grpc.aio.ServicerContext[bytes, bytes]
Behave = Callable[[Context, int], Awaitable[None]]


class Events:
    """Notes what sessions tell."""

    def __init__(self) -> None:
        self.sessions: list[DraftSession] = []
        self.terms: list[Terms] = []
        self.windows: list[int] = []
        self.opened: list[bool] = []
        self.parts: list[ProjectionPart] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()
        self.releases: list[int] = []
        self.num_ended = 0
        self.resets = False
        self.batches: list[list[DraftMessage]] = []
        self.changed = asyncio.Event()

    def draft_connected(self, port: DraftSession, terms: Terms) -> None:
        self.sessions.append(port)
        self.terms.append(terms)
        self.changed.set()

    def draft_disconnected(self, port: DraftSession) -> None:
        self.num_ended += 1
        self.changed.set()

    def draft_received(self, port: DraftSession, messages: list[DraftMessage]) -> None:
        self.batches.append(messages)
        if self.resets:
            port.reset()
        self.changed.set()

    async def features_projection(self, port: DraftSession, part: ProjectionPart) -> None:
        self.parts.append(part)
        self.changed.set()
        await self.may_go_on.wait()

    def features_opened(self, port: DraftSession, window: int, uses_ring: bool) -> None:
        self.windows.append(window)
        self.opened.append(uses_ring)
        self.changed.set()

    def features_released(self, port: DraftSession, through: int) -> None:
        self.releases.append(through)
        self.changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def dialled(
    folder: Path,
    behave: Behave,
    features: Behave | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[Events]:
    """A dialer and a draft service that answers call number n in bytes, as `behave(context, n)` has it.

    `features`: the same for calls of the features stream.
    """
    count = num_features = 0

    async def speculate(requests: object, context: Context) -> None:
        nonlocal count
        count += 1
        await behave(context, count)

    async def stream_features(requests: object, context: Context) -> None:
        nonlocal num_features
        num_features += 1
        if features is not None:
            await features(context, num_features)

    server = grpc.aio.server()
    methods = {"Speculate": speculate, "Features": stream_features}
    handlers = {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
    handler = grpc.method_handlers_generic_handler("outrider.v1.DraftService", handlers)
    server.add_generic_rpc_handlers((handler,))
    address = f"unix:{folder}/d"
    server.add_insecure_port(address)
    await server.start()
    events = Events()
    task = asyncio.create_task(DraftDialer(address, HELLO, events, sleep).run())
    try:
        yield events
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(session, "REFUSED_SECONDS", 0.01)


async def greet(context: Context) -> None:
    await context.read()
    await context.write(encode_draft([THEIRS]).SerializeToString())


async def stay(context: Context) -> None:
    while await context.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("first", ["cancels", "garbles", "ends"])
async def test_a_handshake_that_goes_wrong_is_tried_again(tmp_path: Path, first: str) -> None:
    async def behave(context: Context, number: int) -> None:
        if number == 1 and first == "cancels":
            await context.abort(grpc.StatusCode.CANCELLED, "going away")
        if number == 1 and first == "garbles":
            await context.write(b"\xff\xff\xff")
        if number > 1:
            await greet(context)
            await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)


async def test_bytes_that_are_no_message_are_dropped_and_the_session_goes_on(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        await context.write(b"\xff\xff\xff")
        await context.write(encode_draft([Grow(5, 1, 1, 1, 1)]).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.batches) == 1)
        (grow,) = events.batches[0]
        assert isinstance(grow, Grow) and grow.request == 5
        assert len(events.sessions) == 1


async def test_a_session_that_cannot_write_ends_at_once_and_is_dialled_again(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].send([Commit(1, 2, np.zeros(1, np.int32), 1, 2**32, None, 8)])
        await events.until(lambda: events.num_ended == 1 and len(events.sessions) == 2)


async def test_a_session_that_is_reset_is_dialled_again(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].reset()
        await events.until(lambda: len(events.sessions) == 2)


async def test_a_batch_of_very_many_events_is_taken_in_parts(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        batch = draft_pb2.DraftServiceSpeculateResponse(events=[encode_draft([Grow(5, 1, 1, 1, 1)]).events[0]] * 1000)
        await context.write(batch.SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: sum(map(len, events.batches)) == 1000)
        assert max(map(len, events.batches)) <= MAX_EVENTS_AT_ONCE


async def test_what_is_left_of_a_batch_that_ended_its_session_is_not_taken(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        batch = draft_pb2.DraftServiceSpeculateResponse(events=[encode_draft([Grow(5, 1, 1, 1, 1)]).events[0]] * 1000)
        await context.write(batch.SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        events.resets = True
        await events.until(lambda: events.num_ended == 3)
        assert len(events.batches) <= events.num_ended + 1


async def greet_with_layers(context: Context) -> None:
    await context.read()
    theirs = replace(THEIRS, hidden_size=8, feature_layers=(4, 1), features_token="secret", max_positions=50)
    await context.write(encode_draft([theirs]).SerializeToString())


async def test_what_a_draft_takes_is_told_and_features_travel(tmp_path: Path) -> None:
    received: list[draft_pb2.DraftServiceFeaturesRequest] = []

    async def behave(context: Context, number: int) -> None:
        await greet_with_layers(context)
        await stay(context)

    async def features(context: Context, number: int) -> None:
        for _ in range(3):
            received.append(draft_pb2.DraftServiceFeaturesRequest.FromString(await context.read()))
            if len(received) == 1:
                await context.write(encode_accept(FeaturesAccept(window=77)).SerializeToString())
        await context.write(encode_released(FeaturesReleased(2)).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        assert events.terms[0].feature_layers == (4, 1) and events.terms[0].max_positions == 50
        session = events.sessions[0]
        session.begin_features(BEGIN)
        session.send_features([Features(3, start, 1, start == 6, bytes(64), "float32", start - 4) for start in (5, 6)])
        await events.until(lambda: events.releases == [2])
    begin = decode_begin(received[0])
    assert (begin.token, begin.layers, begin.width, begin.dtype) == ("secret", (4, 1), 16, "float32")
    assert [decode_features(message, begin, 0).final for message in received[1:]] == [False, True]
    assert events.windows == [77]


@pytest.mark.parametrize("how", ["refuses", "ends", "garbles", "accepts twice", "wants a ring", "releases too much"])
async def test_a_features_stream_that_goes_wrong_ends_the_session_which_is_dialled_again(
    tmp_path: Path, how: str
) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet_with_layers(context)
        await stay(context)

    async def features(context: Context, number: int) -> None:
        await context.read()
        if number == 1 and how == "refuses":
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such stream")
        await context.write(encode_accept(FeaturesAccept(number == 1 and how == "wants a ring")).SerializeToString())
        if number == 1 and how == "garbles":
            await context.write(b"\xff\xff\xff")
        if number == 1 and how == "accepts twice":
            await context.write(encode_accept(FeaturesAccept()).SerializeToString())
        if number == 1 and how == "releases too much":
            await context.read()
            await context.write(encode_released(FeaturesReleased(2)).SerializeToString())
        if number == 1 and how == "ends":
            return
        await stay(context)

    async with dialled(tmp_path, behave, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].begin_features(BEGIN)
        if how == "releases too much":
            await events.until(lambda: len(events.windows) == 1)
            events.sessions[0].send_features([Features(3, 5, 1, False, bytes(64), "float32", 1)])
        await events.until(lambda: len(events.sessions) == 2)
        assert not events.releases
        num_opened = len(events.windows)
        events.sessions[1].begin_features(BEGIN)
        await events.until(lambda: len(events.windows) == num_opened + 1)
        assert len(events.sessions) == 2


MATRIX = bytes(number % 250 for number in range(6 * 16 * 4))
PROJECTION = Projection((4, 1), 6, "float32", MATRIX, name_projection((4, 1), 6, "float32", MATRIX))
PROJECTED = replace(BEGIN, width=6, projected=True, wants_projection=True)


async def greet_with_projection(context: Context, number: int) -> None:
    await context.read()
    theirs = replace(THEIRS, hidden_size=8, feature_layers=(4, 1), features_token="secret")
    theirs = replace(theirs, projection_columns=6, projection_hash=PROJECTION.name)
    await context.write(encode_draft([theirs]).SerializeToString())
    await stay(context)


async def test_a_projection_that_is_wanted_arrives_before_the_stream_is_open(tmp_path: Path) -> None:
    received: list[bytes] = []

    async def features(context: Context, number: int) -> None:
        received.append(await context.read())
        await context.write(encode_accept(FeaturesAccept(projects=True)).SerializeToString())
        for offset in range(0, len(MATRIX), 100):
            part = ProjectionPart(6, "float32", offset, MATRIX[offset : offset + 100])
            await context.write(encode_projection(part).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, greet_with_projection, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        assert (events.terms[0].projection_columns, events.terms[0].projection_hash) == (6, PROJECTION.name)
        events.may_go_on.clear()
        events.sessions[0].begin_features(PROJECTED)
        await events.until(lambda: len(events.parts) == 1)
        assert not events.opened, "whoever takes the parts says when the next may come"
        events.may_go_on.set()
        await events.until(lambda: events.opened == [False])
    assert b"".join(part.data for part in events.parts) == MATRIX and len(events.parts) == 4
    begin = decode_begin(draft_pb2.DraftServiceFeaturesRequest.FromString(received[0]))
    assert begin == replace(PROJECTED, token="secret")


@pytest.mark.parametrize("how", ["keeps it", "another", "too long", "gap", "not asked"])
async def test_a_projection_that_is_not_the_one_offered_ends_the_session(tmp_path: Path, how: str) -> None:
    async def features(context: Context, number: int) -> None:
        await context.read()
        await context.write(encode_accept(FeaturesAccept(projects=how != "keeps it")).SerializeToString())
        data = {"another": b"\xff" + MATRIX[1:], "too long": MATRIX + b"x"}.get(how, MATRIX)
        part = ProjectionPart(6, "float32", 4 if how == "gap" else 0, data)
        await context.write(encode_projection(part).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, greet_with_projection, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        begin = replace(PROJECTED, wants_projection=how != "not asked")
        events.sessions[0].begin_features(begin)
        await events.until(lambda: len(events.sessions) == 2)
        assert not events.opened


async def test_a_ring_that_was_offered_may_be_taken(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet_with_layers(context)
        await stay(context)

    received: list[bytes] = []

    async def features(context: Context, number: int) -> None:
        received.append(await context.read())
        await context.write(encode_accept(FeaturesAccept(uses_ring=True)).SerializeToString())
        received.append(await context.read())
        await context.write(encode_released(FeaturesReleased(1)).SerializeToString())
        await stay(context)

    ring = FeatureRing("here", "gpu", bytes(64), 4096, bytes(32))
    async with dialled(tmp_path, behave, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].begin_features(replace(BEGIN, ring=ring))
        events.sessions[0].send_features([Features(3, 0, 2, True, b"", "float32", 1, ring_offset=640)])
        await events.until(lambda: events.releases == [1])
    assert events.opened == [True]
    begin = decode_begin(draft_pb2.DraftServiceFeaturesRequest.FromString(received[0]))
    assert begin.ring == ring
    sent = decode_features(draft_pb2.DraftServiceFeaturesRequest.FromString(received[1]), begin, ring.num_bytes)
    assert (sent.ring_offset, sent.count, sent.data) == (640, 2, b"")


async def test_a_draft_that_does_not_fit_is_refused_and_asked_again_later(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await context.read()
        theirs = THEIRS if number > 1 else replace(THEIRS, tokenizer_hash="beef")
        await context.write(encode_draft([theirs]).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)
        assert events.num_ended == 0


@pytest.mark.parametrize("how", ["ends", "cancels"])
async def test_a_draft_whose_features_stream_fails_at_once_is_dialled_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(session, "RETRY_SECONDS", 0.5)
    monkeypatch.setattr(session, "REFUSED_SECONDS", 30.0)
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def behave(context: Context, number: int) -> None:
        await greet_with_layers(context)
        await stay(context)

    async def features(context: Context, number: int) -> None:
        await context.read()
        if how == "cancels":
            await context.abort(grpc.StatusCode.CANCELLED, "going away")

    async with dialled(tmp_path, behave, features, sleep) as events:
        for count in range(1, 10):
            await events.until(lambda count=count: len(events.sessions) == count)  # type: ignore[misc]
            events.sessions[-1].begin_features(BEGIN)
        await events.until(lambda: len(events.sessions) == 10)
        events.sessions[-1].reset()
        await events.until(lambda: len(events.sessions) == 11)
    assert pauses[:10] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 0.5], "a session that ends otherwise is back soon"


async def test_nonsense_is_logged_once_in_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing = draft_pb2.DraftServiceSpeculateResponse(events=[draft_pb2.DraftEvent()])

    async def behave(context: Context, number: int) -> None:
        await greet(context)
        for _ in range(50):
            await context.write(b"\xff\xff\xff")
            await context.write(nothing.SerializeToString())
        await context.write(encode_draft([Grow(5, 1, 1, 1, 1)]).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        for count in (1, 2):
            await events.until(lambda count=count: len(events.batches) == count)  # type: ignore[misc]
            events.sessions[-1].reset()
            await events.until(lambda count=count: len(events.sessions) == count + 1)  # type: ignore[misc]
    assert sum("dropped" in record.getMessage() for record in caplog.records) == 1

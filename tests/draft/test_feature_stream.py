"""The features stream over gRPC: what arrives, what is refused, and what nonsense does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import pytest
from draft_door import HELLO, Door, Stream
from draft_fakes import ScriptedDrafter, SignallingDrafter, open_message
from msgspec.structs import replace

from outrider.drafting.base import Needs
from outrider.errors import OutriderError
from outrider.protocol.speculation import (
    MAX_FEATURE_BYTES,
    Close,
    FeatureRing,
    Features,
    FeaturesAccept,
    FeaturesBegin,
    FeaturesReleased,
    Grow,
    Hello,
    ProjectionPart,
)
from outrider.protocol.speculation_codec import decode_response, encode_begin, encode_features
from outrider.rpc.status import error_from_rpc
from outrider.tree.handshake import Projection, ProjectionReader, name_projection
from outrider.v1 import draft_pb2, draft_pb2_grpc

Serve = Callable[..., Awaitable[Door]]
TARGET = replace(HELLO, hidden_size=4, num_layers=6)
WIDTH = 8
ROW = WIDTH * 4


class NotingDrafter(SignallingDrafter):
    """Keeps the features that it is given; request handles count from 1."""

    needs = Needs(hidden_size=4, feature_layers=(2, 7))

    def __init__(self) -> None:
        super().__init__()
        self.features: list[tuple[int, Features]] = []

    def take_features(self, request: int, features: Features) -> None:
        self.features.append((request, features))


class FeaturesEnd:
    """Verify's end of a features stream."""

    def __init__(self, door: Door) -> None:
        self.call = draft_pb2_grpc.DraftServiceStub(door.channel).Features()

    async def begin(self, token: str, **changes: object) -> FeaturesAccept:
        begin = FeaturesBegin(token, (2, 7), WIDTH, "float32")
        await self.call.write(encode_begin(replace(begin, **changes)))  # type: ignore[arg-type]
        accept = await self.receive()
        assert isinstance(accept, FeaturesAccept)
        return accept

    async def send(self, start: int, sequence: int, count: int = 1, request: int = 1, **changes: object) -> None:
        data = bytes([sequence % 256]) * (min(count, 999) * ROW)
        message = Features(request, start, count, True, data, "float32", sequence)
        await self.call.write(encode_features([replace(message, **changes)]))  # type: ignore[arg-type]

    async def receive(self) -> FeaturesAccept | FeaturesReleased | ProjectionPart:
        message = await self.call.read()
        assert isinstance(message, draft_pb2.DraftServiceFeaturesResponse), "the stream has ended"
        return decode_response(message)

    async def released(self, through: int) -> None:
        """Return when everything up to a message is released."""
        while True:
            response = await self.receive()
            assert isinstance(response, FeaturesReleased) and response.through <= through
            if response.through == through:
                return

    async def ended(self) -> tuple[grpc.StatusCode, OutriderError]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return caught.value.code(), error_from_rpc(caught.value)


async def greet(door: Door) -> tuple[Stream, str]:
    """A session with the token of its features."""
    stream = door.stream()
    await stream.send(TARGET)
    hello = await stream.receive()
    assert isinstance(hello, Hello)
    assert hello.feature_layers == (2, 7) and hello.hidden_size == 4
    return stream, hello.features_token


async def opened(stream: Stream, *requests: int) -> None:
    """Open requests and wait until the draft knows them."""
    await stream.send(*[open_message([1, 2, 3], request=request) for request in requests])
    waiting = set(requests)
    while waiting:
        message = await stream.receive()
        if isinstance(message, Grow):
            waiting.discard(message.request)


async def test_features_reach_the_drafter_in_order_and_are_released(serve: Serve) -> None:
    drafter = NotingDrafter()
    door = await serve(drafter)
    stream, token = await greet(door)
    await opened(stream, 5, 9)
    end = FeaturesEnd(door)
    assert await end.begin(token) == FeaturesAccept(takes_batches=True)
    for sequence, (request, start, count) in enumerate([(5, 0, 2), (9, 0, 1), (5, 2, 300), (9, 1, 7)], 1):
        await end.send(start, sequence, count, request)
    await end.released(4)
    seen = [(handle, part.request, part.start, part.count, part.data[0]) for handle, part in drafter.features]
    assert seen == [(1, 5, 0, 2, 1), (2, 9, 0, 1, 2), (1, 5, 2, 300, 3), (2, 9, 1, 7, 4)]
    assert all(len(part.data) == part.count * ROW and part.dtype == "float32" for _, part in drafter.features)


async def test_a_drafter_without_features_gives_no_token_and_takes_no_stream(serve: Serve) -> None:
    door = await serve(ScriptedDrafter())
    stream = door.stream()
    hello = await stream.hello()
    assert isinstance(hello, Hello) and hello.features_token == ""
    end = FeaturesEnd(door)
    await end.call.write(encode_begin(FeaturesBegin("", (2, 7), WIDTH, "float32")))
    code, _ = await end.ended()
    assert code is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"token": "guessed"}, "token"),
        ({"layers": (2, 6)}, "layers"),
        ({"width": 9}, "width"),
        ({"width": 2**31}, "width"),
        ({"layers": ()}, "layers"),
        ({"layers": tuple(range(5000))}, "layers"),
        ({"dtype": "int4"}, "dtype"),
        ({"dtype": "x" * 100_000}, "dtype"),
    ],
)
async def test_a_beginning_that_does_not_fit_is_refused_and_the_session_goes_on(
    serve: Serve, changes: dict[str, object], word: str
) -> None:
    door = await serve(NotingDrafter())
    stream, token = await greet(door)
    wrong = FeaturesEnd(door)
    begin = replace(FeaturesBegin(token, (2, 7), WIDTH, "float32"), **changes)  # type: ignore[arg-type]
    await wrong.call.write(encode_begin(begin))
    code, error = await wrong.ended()
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert word in error.message and len(error.message) < 400
    await FeaturesEnd(door).begin(token)
    await opened(stream, 1)


async def test_a_token_serves_one_stream(serve: Serve) -> None:
    door = await serve(NotingDrafter())
    _, token = await greet(door)
    await FeaturesEnd(door).begin(token)
    second = FeaturesEnd(door)
    await second.call.write(encode_begin(FeaturesBegin(token, (2, 7), WIDTH, "float32")))
    code, error = await second.ended()
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "token" in error.message


@pytest.mark.parametrize("first", ["features", "nothing"])
async def test_a_stream_that_does_not_begin_with_a_begin_is_refused(serve: Serve, first: str) -> None:
    door = await serve(NotingDrafter())
    end = FeaturesEnd(door)
    if first == "features":
        await end.send(0, 1)
    else:
        await end.call.done_writing()
    code, _ = await end.ended()
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "changes",
    [
        {"data": b""},
        {"data": bytes(ROW - 1)},
        {"data": bytes(ROW + 1)},
        {"count": 0, "data": b""},
        {"count": 2**32 - 1, "data": bytes(ROW)},
        {"start": 2**32 - 1},
        {"count": MAX_FEATURE_BYTES // ROW + 1, "data": bytes(MAX_FEATURE_BYTES + ROW)},
        {"data": b"", "ring_offset": 0},
        {"ring_offset": 2**64 - 1},
    ],
)
async def test_nonsense_is_dropped_and_counted_and_what_follows_is_taken(
    serve: Serve, changes: dict[str, object]
) -> None:
    drafter = NotingDrafter()
    door = await serve(drafter)
    stream, token = await greet(door)
    await opened(stream, 1)
    end = FeaturesEnd(door)
    await end.begin(token)
    await end.send(0, 1)
    await end.send(**{"start": 1, "sequence": 2} | changes)  # type: ignore[arg-type]
    await end.send(1, 3)
    await end.released(3)
    assert [part.sequence for _, part in drafter.features] == [1, 3]
    assert await door.count("messages_dropped_total", reason="malformed") == 1


async def test_bytes_that_are_no_message_or_number_backwards_are_dropped(serve: Serve) -> None:
    drafter = NotingDrafter()
    door = await serve(drafter)
    stream, token = await greet(door)
    await opened(stream, 1)
    call = door.channel.stream_stream(
        "/outrider.v1.DraftService/Features",
        request_serializer=bytes,
        response_deserializer=draft_pb2.DraftServiceFeaturesResponse.FromString,
    )()
    await call.write(encode_begin(FeaturesBegin(token, (2, 7), WIDTH, "float32")).SerializeToString())
    await call.read()
    await call.write(b"\xff\xff\xff")
    for sequence in (4, 4, 3, 0, 5):
        message = Features(1, sequence, 1, True, bytes(ROW), "float32", sequence)
        await call.write(encode_features([message]).SerializeToString())
    while (await call.read()).released.through < 5:
        pass
    assert [part.sequence for _, part in drafter.features] == [4, 5]
    assert await door.count("messages_dropped_total", reason="malformed") == 4
    call.cancel()


async def test_features_of_requests_that_are_not_open_are_dropped_and_nobody_is_declined(serve: Serve) -> None:
    drafter = NotingDrafter()
    door = await serve(drafter)
    stream, token = await greet(door)
    await opened(stream, 1, 2)
    await stream.send(Close(1))
    await opened(stream, 3)
    end = FeaturesEnd(door)
    await end.begin(token)
    for sequence, request in enumerate((1, 2, 77, 2**64 - 1, 3), 1):
        await end.send(0, sequence, request=request)
    await end.released(5)
    assert [part.request for _, part in drafter.features] == [2, 3]
    await stream.send(open_message([4], request=4))
    assert isinstance(await stream.receive(), Grow)


async def test_a_drafter_that_fails_at_features_gives_up_that_request_alone(serve: Serve) -> None:
    class Failing(NotingDrafter):
        def take_features(self, request: int, features: Features) -> None:
            super().take_features(request, features)
            if features.request == 1:
                raise RuntimeError("no")

    drafter = Failing()
    door = await serve(drafter)
    stream, token = await greet(door)
    await opened(stream, 1, 2)
    end = FeaturesEnd(door)
    await end.begin(token)
    await end.send(0, 1, request=1)
    await end.send(0, 2, request=2)
    await end.released(2)
    assert [part.request for _, part in drafter.features] == [1, 2]
    assert (await door.info()).num_requests == 1


async def test_the_end_of_the_session_ends_its_features_and_no_other_s(serve: Serve) -> None:
    door = await serve(NotingDrafter())
    stream, token = await greet(door)
    other, other_token = await greet(door)
    assert token != other_token
    end, other_end = FeaturesEnd(door), FeaturesEnd(door)
    await end.begin(token)
    await other_end.begin(other_token)
    stream.call.cancel()
    async with asyncio.timeout(20):
        assert await end.call.read() is grpc.aio.EOF
    await opened(other, 1)
    await other_end.send(0, 1)
    await other_end.released(1)


async def test_a_ring_is_declined_where_there_is_no_device(serve: Serve) -> None:
    door = await serve(NotingDrafter())
    _, token = await greet(door)
    ring = FeatureRing("elsewhere", "ab", bytes(64), 1 << 20)
    assert (await FeaturesEnd(door).begin(token, ring=ring)).uses_ring is False


MATRIX = bytes(number % 250 for number in range(4 * WIDTH * 4))
PROJECTION = Projection((2, 7), 4, "float32", MATRIX, name_projection((2, 7), 4, "float32", MATRIX))


class OfferingDrafter(NotingDrafter):
    """Has a projection that verify may take over."""

    needs = Needs(hidden_size=4, feature_layers=(2, 7), projection=PROJECTION)


async def test_a_projection_is_offered_given_and_its_products_are_told_apart(serve: Serve) -> None:
    drafter = OfferingDrafter()
    door = await serve(drafter)
    stream = door.stream()
    await stream.send(TARGET)
    hello = await stream.receive()
    assert isinstance(hello, Hello)
    assert (hello.projection_columns, hello.projection_hash) == (4, PROJECTION.name)
    await opened(stream, 1)
    end = FeaturesEnd(door)
    accept = await end.begin(hello.features_token, width=4, projected=True, wants_projection=True)
    assert accept.projects
    reader, data, whole = ProjectionReader((2, 7), 4, 4, PROJECTION.name), b"", False
    while not whole:
        part = await end.receive()
        assert isinstance(part, ProjectionPart)
        whole, data = reader.take(part), data + part.data
    assert data == MATRIX
    await end.send(0, 1, 3, data=bytes(3 * 16))
    await end.released(1)
    ((_, features),) = drafter.features
    assert features.projected and len(features.data) == 3 * 16


async def test_a_projection_that_verify_has_already_is_not_sent(serve: Serve) -> None:
    drafter = OfferingDrafter()
    door = await serve(drafter)
    stream, token = await greet(door)
    await opened(stream, 1)
    end = FeaturesEnd(door)
    assert (await end.begin(token, width=4, projected=True)).projects is False
    await end.send(0, 1, data=bytes(16))
    await end.released(1)
    assert drafter.features[0][1].projected


async def test_what_is_offered_need_not_be_taken(serve: Serve) -> None:
    drafter = OfferingDrafter()
    door = await serve(drafter)
    stream, token = await greet(door)
    await opened(stream, 1)
    end = FeaturesEnd(door)
    assert await end.begin(token) == FeaturesAccept(takes_batches=True)
    await end.send(0, 1)
    await end.released(1)
    assert not drafter.features[0][1].projected


@pytest.mark.parametrize(
    ("changes", "offers", "word"),
    [
        ({"projected": True, "width": 4}, False, "projected"),
        ({"projected": True}, True, "width"),
        ({"wants_projection": True}, True, "wants_projection"),
        ({"width": 4}, True, "width"),
    ],
)
async def test_products_that_the_drafter_does_not_take_are_refused(
    serve: Serve, changes: dict[str, object], offers: bool, word: str
) -> None:
    door = await serve(OfferingDrafter() if offers else NotingDrafter())
    _, token = await greet(door)
    end = FeaturesEnd(door)
    begin = replace(FeaturesBegin(token, (2, 7), WIDTH, "float32"), **changes)  # type: ignore[arg-type]
    await end.call.write(encode_begin(begin))
    code, error = await end.ended()
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert word in error.message

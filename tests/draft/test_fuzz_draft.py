"""Whatever comes on the speculation and the features stream: an honest end, and the next session is served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest
from draft_door import HELLO, Door
from draft_fakes import VOCAB, SignallingDrafter, open_message
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from proto_fuzz import check, fuzz, messages, wire

from outrider.config.draft import DraftOptions
from outrider.drafting.base import Drafter, Needs
from outrider.drafting.ngram.drafter import NgramDrafter
from outrider.protocol.speculation import Features, Grow, Hello
from outrider.protocol.speculation_codec import encode_verify
from outrider.v1 import draft_pb2

pytestmark = pytest.mark.usefixtures("nothing_fails")

Serve = Callable[..., Awaitable[Door]]
ToVerify = draft_pb2.DraftServiceSpeculateRequest
SPECULATE = "/outrider.v1.DraftService/Speculate"
FEATURES = "/outrider.v1.DraftService/Features"
INFO = "/outrider.v1.DraftService/GetInfo"
TARGET = replace(HELLO, hidden_size=4, num_layers=6)


class FeatureTaker(SignallingDrafter):
    """Takes features and forgets them."""

    needs = Needs(hidden_size=4, feature_layers=(2, 7))

    def take_features(self, request: int, features: Features) -> None:
        return


def ngram() -> Drafter:
    return NgramDrafter(DraftOptions())


async def converse(door: Door, method: str, sent: list[bytes]) -> grpc.StatusCode:
    """Send all messages, and read to the end. Who is refused in the middle cannot send the rest."""
    call = door.channel.stream_stream(method)(iter(sent))
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return check(error.code(), error.details() or "")
    return check(await call.code(), await call.details() or "")


async def still_serves(door: Door) -> None:
    stream = door.stream()
    await stream.send(TARGET)
    assert isinstance(await stream.receive(), Hello)
    await stream.send(open_message([1, 2, 1, 2, 1, 2], request=5))
    while not isinstance(message := await stream.receive(), Grow):
        pass
    assert message.request == 5
    stream.call.cancel()


hello = st.just(encode_verify([TARGET]).SerializeToString())
requests = st.integers(0, 2)


def _about(event: Any, request: int, length: int) -> Any:
    """An event that names a request that may be open, with numbers that may fit it."""
    kind = event.WhichOneof("event")
    if kind not in (None, "hello"):
        getattr(event, kind).request = request
    if kind == "open":
        event.open.token_ids = b"".join((n % VOCAB).to_bytes(4, "little") for n in range(length))
        event.open.prompt_len = max(1, length - 1)
    if kind == "commit" and length % 2:
        event.commit.length_before = length
    return event


events = st.builds(_about, messages(draft_pb2.VerifyEvent), requests, st.integers(1, 8))
batches = st.lists(events, max_size=6).map(lambda some: ToVerify(events=some).SerializeToString())
conversation = st.tuples(st.lists(hello, max_size=1), st.lists(batches | wire(ToVerify), max_size=6)).map(
    lambda parts: parts[0] + parts[1]
)


@pytest.mark.parametrize("make", [ngram, SignallingDrafter])
async def test_any_conversation_leaves_the_next_session_served(serve: Serve, make: Callable[[], Drafter]) -> None:
    door = await serve(make())

    @fuzz
    @given(st.lists(conversation, min_size=1, max_size=3))
    async def attack(conversations: list[list[bytes]]) -> None:
        await asyncio.gather(*(converse(door, SPECULATE, sent) for sent in conversations))

    await run_async(attack)
    await still_serves(door)
    assert (await door.info()).num_sessions <= 1
    await door.settle()


async def run_async(attack: Any) -> None:
    """Run a property whose examples are coroutines on this loop, from a thread."""
    loop = asyncio.get_running_loop()
    inner = attack.hypothesis.inner_test

    def example(*args: Any, **kwargs: Any) -> None:
        asyncio.run_coroutine_threadsafe(inner(*args, **kwargs), loop).result(60)

    attack.hypothesis.inner_test = example
    await asyncio.to_thread(attack)


begins = st.builds(
    lambda event, fits, token: _begin(event, fits, token), messages(draft_pb2.DraftServiceFeaturesRequest),
    st.booleans(), st.booleans(),
)  # fmt: skip


def _begin(message: Any, fits: bool, real_token: bool) -> tuple[Any, bool]:
    if fits:
        message.begin.layers[:] = [2, 7]
        message.begin.width = 8
        message.begin.dtype = "float32"
        message.begin.projected = message.begin.wants_projection = False
    return message, real_token


@pytest.mark.parametrize("num_messages", [5])
async def test_any_features_stream_leaves_the_next_session_served(serve: Serve, num_messages: int) -> None:
    door = await serve(FeatureTaker())
    sent = st.lists(wire(draft_pb2.DraftServiceFeaturesRequest), max_size=num_messages)

    @fuzz
    @given(begins | st.none(), sent)
    async def attack(begin: tuple[Any, bool] | None, sent: list[bytes]) -> None:
        stream = door.stream()
        await stream.send(TARGET)
        theirs = await stream.receive()
        assert isinstance(theirs, Hello)
        first = []
        if begin is not None:
            message, real_token = begin
            if real_token:
                message.begin.token = theirs.features_token
            first = [message.SerializeToString()]
        await converse(door, FEATURES, first + sent)
        stream.call.cancel()

    await run_async(attack)
    await still_serves(door)


async def test_any_bytes_for_information(serve: Serve) -> None:
    door = await serve()

    @fuzz
    @given(wire(draft_pb2.DraftServiceGetInfoRequest))
    async def attack(data: bytes) -> None:
        try:
            await door.channel.unary_unary(INFO)(data)
        except grpc.aio.AioRpcError as error:
            check(error.code(), error.details() or "")

    await run_async(attack)

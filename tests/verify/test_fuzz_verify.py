"""Whatever comes to verify's door, and whatever a draft answers: honest statuses, and not one token changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from dialled_draft import Context, dialled, greet, offer_layers, stay
from engine_thread import EngineThread, engine_thread
from harness import make_engine
from hypothesis import given, settings
from hypothesis import strategies as st
from proto_fuzz import EXAMPLES, check, fuzz, messages, outcome, wire

from outrider.models.decoder import CausalLM
from outrider.protocol.generation import VerifyInfo, VerifyLoad
from outrider.protocol.speculation import FeaturesBegin
from outrider.rpc.channel import open_channel
from outrider.rpc.server import GrpcServer
from outrider.v1 import draft_pb2, verify_pb2, verify_pb2_grpc
from verify_service.door.admission import Admission
from verify_service.door.servicer import VerifyServicer

pytestmark = pytest.mark.usefixtures("nothing_fails")

Request = verify_pb2.VerifyServiceGenerateRequest
VOCAB = 61
SERVICE = "/outrider.v1.VerifyService/"


class Door:
    """A verify service on the tiny model."""

    def __init__(self, engine: EngineThread, channel: grpc.aio.Channel) -> None:
        self.engine = engine
        self.channel = channel
        self.stub = verify_pb2_grpc.VerifyServiceStub(channel)

    async def greedy(self, max_tokens: int = 6) -> list[int]:
        request = Request(
            prompt_token_ids=[1, 2, 3], sampling={"temperature": 0}, max_tokens=max_tokens, ignore_eos=True
        )
        return [token async for message in self.stub.Generate(request) for token in message.token_ids]


@asynccontextmanager
async def open_door(model: CausalLM, folder: Path) -> AsyncIterator[Door]:
    async with engine_thread(make_engine(model)) as engine:
        info, load = VerifyInfo("m", "", "", VOCAB, 200, "float32", (60,), "0"), VerifyLoad
        servicer = VerifyServicer(engine.remote, Admission(VOCAB, 200, (60,), True), info, load)
        server = GrpcServer(address=f"unix:{folder}/v", service_names=["outrider.v1.VerifyService"], for_peers=True)
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server.grpc)
        async with open_channel(await server.start()) as channel:
            yield Door(engine, channel)
        await server.stop(0)


@pytest.fixture
async def door(model: CausalLM, tmp_path: Path) -> AsyncIterator[Door]:
    async with open_door(model, tmp_path) as opened:
        yield opened


valid = st.fixed_dictionaries(
    {
        "prompt_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
        "max_tokens": st.integers(1, 300),
    }
)


@fuzz
@given(messages(Request), st.none() | valid)
async def test_any_values_of_a_request(door: Door, request_: Any, base: dict[str, Any] | None) -> None:
    if base is not None:  # most are refused for their prompt alone
        request_.ClearField("prompt_token_ids")
        request_.MergeFrom(Request(**base))
    await outcome(door.stub.Generate(request_))
    assert len(await door.greedy()) == 6


@fuzz
@given(wire(Request), st.sampled_from(("Generate", "GetInfo", "GetLoad")))
async def test_any_bytes_for_any_method(door: Door, data: bytes, method: str) -> None:
    if method == "Generate":
        await outcome(door.channel.unary_stream(SERVICE + method)(data))
        return
    try:
        await door.channel.unary_unary(SERVICE + method)(data)
    except grpc.aio.AioRpcError as error:
        check(error.code(), error.details() or "")


Response = draft_pb2.DraftServiceSpeculateResponse


@fuzz
@given(st.lists(wire(Response), max_size=5))
async def test_any_bytes_of_a_draft_leave_its_dialer_at_work(tmp_path_factory: Any, sent: list[bytes]) -> None:
    async def behave(context: Context, call: int) -> None:
        if call == 1:
            await greet(context)
            for data in sent:
                await context.write(data)
            return
        await greet(context)
        await stay(context)

    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0)

    async with dialled(tmp_path_factory.mktemp("d"), behave, sleep=at_once) as events:
        await events.until(lambda: len(events.sessions) == 2)


@fuzz
@given(st.lists(wire(draft_pb2.DraftServiceFeaturesResponse), max_size=4))
async def test_any_bytes_on_the_features_stream_leave_its_dialer_at_work(
    tmp_path_factory: Any, sent: list[bytes]
) -> None:
    async def features(context: Context, call: int) -> None:
        await context.read()
        for data in sent:
            await context.write(data)

    async def at_once(seconds: float) -> None:
        await asyncio.sleep(0)

    async with dialled(tmp_path_factory.mktemp("f"), offer_layers, features, sleep=at_once) as events:
        await events.until(lambda: bool(events.sessions))
        events.sessions[0].begin_features(FeaturesBegin("", (4, 1), 16, "float32"))
        await events.until(lambda: len(events.sessions) >= 2)


grows = st.lists(messages(draft_pb2.DraftEvent), max_size=6)


@settings(fuzz, max_examples=EXAMPLES // 4)  # each waits for an idle engine to look up
@given(st.lists(grows, max_size=4), st.integers(1, 3))
async def test_any_events_of_a_draft_change_no_token(
    door: Door, tmp_path_factory: Any, batches: list[list[Any]], ahead: int
) -> None:
    """They name the request that there is, or one near it, so that the engine looks at them."""
    remote = door.engine.remote
    plain = await door.greedy(max_tokens=12)
    number = next(remote._numbers) + ahead

    async def behave(context: Context, call: int) -> None:
        await greet(context)
        for events in batches:
            for event in events:
                kind = event.WhichOneof("event")
                if kind in ("grow", "decline"):
                    getattr(event, kind).request = number
            await context.write(Response(events=events).SerializeToString())
        await stay(context)

    async with dialled(tmp_path_factory.mktemp("e"), behave, events=remote):
        await remote.until(lambda: bool(remote._sessions))
        assert await door.greedy(max_tokens=12) == plain
    assert remote.alive and not remote._sessions

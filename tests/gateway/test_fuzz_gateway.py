"""Whatever bytes and values come to the gRPC door: an honest status, and the next one is served."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from gateway_world import World
from hypothesis import given
from proto_fuzz import check, fuzz, messages, outcome, wire

from outrider.v1 import gateway_pb2

pytestmark = pytest.mark.usefixtures("nothing_fails")

Request = gateway_pb2.GatewayServiceGenerateRequest
GENERATE = "/outrider.v1.GatewayService/Generate"
LIST = "/outrider.v1.GatewayService/ListModels"


async def still_serves(world: World) -> None:
    answer = [message async for message in world.stub.Generate(Request(prompt="x"))]
    assert "".join(message.text for message in answer) == "ok"


async def channel_of(world: World) -> Any:
    from outrider.rpc.channel import open_channel

    return await world.stack.enter_async_context(open_channel(world.address))


@fuzz
@given(messages(Request))
async def test_any_values_of_a_request(world: World, request_: Any) -> None:
    world.verify.set_answer("ok")
    await outcome(world.stub.Generate(request_), most=60)
    await still_serves(world)


@fuzz
@given(wire(Request))
async def test_any_bytes_for_a_request(world: World, data: bytes) -> None:
    world.verify.set_answer("ok")
    channel = await channel_of(world)
    await outcome(channel.unary_stream(GENERATE)(data), most=60)
    await still_serves(world)


@fuzz
@given(wire(gateway_pb2.GatewayServiceListModelsRequest))
async def test_any_bytes_for_the_list_of_models(world: World, data: bytes) -> None:
    channel = await channel_of(world)
    try:
        await channel.unary_unary(LIST)(data)
    except grpc.aio.AioRpcError as error:
        check(error.code(), error.details() or "")

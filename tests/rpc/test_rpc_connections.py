"""Connections to a gRPC door are counted, and none that says nothing stays."""

from __future__ import annotations

import asyncio
import struct
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_http2 import ACK, DATA, END_HEADERS, GOAWAY, HEADERS, HTTP2, PING, SETTINGS, call_head, field, frame
from raw_server import raw_server

from outrider.rpc import transport
from outrider.rpc.channel import open_channel
from outrider.rpc.server import GrpcServer
from outrider.v1 import verify_pb2, verify_pb2_grpc


async def check(channel: grpc.aio.Channel, *, wait: bool = False) -> grpc.StatusCode:
    call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=wait)
    return await call.code()


async def test_a_connection_that_never_speaks_http2_is_closed() -> None:
    server = GrpcServer(address="127.0.0.1:0", service_names=[], handshake_seconds=0.2)
    host, port = (await server.start()).split(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(10):
            await reader.read()  # to the end: the other side closes
        writer.close()
    finally:
        await server.stop(0)


async def test_over_the_limit_new_connections_are_closed_and_places_come_back() -> None:
    server = GrpcServer(address="127.0.0.1:0", service_names=[], max_connections=2)
    address = await server.start()
    try:
        async with AsyncExitStack() as stack:
            for _ in range(2):
                channel = await stack.enter_async_context(open_channel(address))
                assert await check(channel) is grpc.StatusCode.OK
            async with open_channel(address) as third:
                assert await check(third) is grpc.StatusCode.UNAVAILABLE
        async with open_channel(address) as later:
            assert await check(later, wait=True) is grpc.StatusCode.OK
    finally:
        await server.stop(0)


@pytest.mark.parametrize("path", [b"/outrider.v1.VerifyService/GetLoad", b"/outrider.v1.VerifyService/Generate"])
async def test_a_message_that_does_not_end_is_refused_and_its_connection_serves_on(start: Any, path: bytes) -> None:
    running = await start(message_seconds=0.3, address="127.0.0.1:0")
    reader, writer = await asyncio.open_connection(*running.address.split(":"))
    # A message of 1000 bytes, of which one byte comes.
    begun = frame(HEADERS, END_HEADERS, 1, call_head(path)) + frame(DATA, 0, 1, struct.pack("!BI", 0, 1000) + b"x")
    writer.write(HTTP2 + frame(SETTINGS, 0, 0, b"") + begun)
    seen = b""
    async with asyncio.timeout(10):
        while b"grpc-status" not in seen:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags = head[3], head[4]
            assert kind != GOAWAY
            seen += payload if kind == HEADERS else b""
            if kind == SETTINGS and not flags & ACK:
                writer.write(frame(SETTINGS, ACK, 0, b""))
    assert b"did not arrive within 0.3 s" in seen
    writer.write(frame(PING, 0, 0, b"are you?"))
    async with asyncio.timeout(10):
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == PING and head[4] & ACK and payload == b"are you?":
                break
    writer.close()
    assert not running.verify.entered.is_set()


async def test_a_server_that_falls_silent_in_mid_stream_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "KEEPALIVE_SECONDS", 1)
    monkeypatch.setattr(transport, "KEEPALIVE_TIMEOUT_SECONDS", 1)
    message = verify_pb2.VerifyServiceGenerateResponse(token_ids=[1]).SerializeToString()
    head = field(b":status", b"200") + field(b"content-type", b"application/grpc")
    answer = frame(HEADERS, END_HEADERS, 1, head) + frame(DATA, 0, 1, struct.pack("!BI", 0, len(message)) + message)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One message, to which clients answer with a ping, and not a byte more."""
        await reader.readexactly(len(HTTP2))
        writer.write(frame(SETTINGS, 0, 0, b""))
        while (frame_head := await reader.readexactly(9))[3] != HEADERS:
            await reader.readexactly(int.from_bytes(frame_head[:3], "big"))
        writer.write(answer)
        await reader.read()

    async with raw_server(serve) as address, open_channel(address) as channel:
        call = verify_pb2_grpc.VerifyServiceStub(channel).Generate(verify_pb2.VerifyServiceGenerateRequest())
        assert (await call.read()).token_ids == [1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_without_a_message_is_the_caller_s_mistake(start: Any) -> None:
    running = await start()
    call = running.channel.stream_stream("/outrider.v1.VerifyService/GetLoad")()
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT and "without a message" in await call.details()

"""Connections to a gRPC door are counted, and none that says nothing stays."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.channel import open_channel
from outrider.rpc.server import GrpcServer


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

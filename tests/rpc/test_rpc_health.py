"""Health says NOT_SERVING until told otherwise, and tells every watcher each change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.rpc.channel import open_channel
from outrider.rpc.server import GrpcServer

NAME = "outrider.v1.VerifyService"
Check = health_pb2.HealthCheckRequest
Status = health_pb2.HealthCheckResponse


async def test_a_started_server_does_not_serve_yet(tmp_path: Path) -> None:
    server = GrpcServer(address=f"unix:{tmp_path}/s", service_names=[NAME])
    async with open_channel(await server.start()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for serving, status in ((None, Status.NOT_SERVING), (True, Status.SERVING), (False, Status.NOT_SERVING)):
            if serving is not None:
                server.set_serving(serving)
            for name in ("", NAME):
                assert (await stub.Check(Check(service=name))).status == status
    await server.stop(0)


async def test_a_service_that_is_not_here_is_not_found(start: Any) -> None:
    stub = health_pb2_grpc.HealthStub((await start()).channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(Check(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert (await stub.Watch(Check(service="nobody")).read()).status == Status.SERVICE_UNKNOWN


async def test_watchers_see_each_change_even_after_another_one_left(start: Any) -> None:
    running = await start()
    stub = health_pb2_grpc.HealthStub(running.channel)
    leaving, staying = stub.Watch(Check(service=NAME)), stub.Watch(Check(service=NAME))
    assert (await leaving.read()).status == Status.SERVING
    assert (await staying.read()).status == Status.SERVING
    leaving.cancel()
    running.server.set_serving(False)
    assert (await staying.read()).status == Status.NOT_SERVING
    running.server.set_serving(True)
    assert (await staying.read()).status == Status.SERVING


async def test_a_watcher_learns_of_the_stop_and_does_not_delay_it(start: Any) -> None:
    running = await start()
    watch = health_pb2_grpc.HealthStub(running.channel).Watch(Check())
    assert (await watch.read()).status == Status.SERVING
    await running.server.stop(grace=3600)
    assert (await watch.read()).status == Status.NOT_SERVING
    assert await watch.read() is grpc.aio.EOF


async def test_a_name_of_any_length_is_not_found(tmp_path: Path) -> None:
    server = GrpcServer(address=f"unix:{tmp_path}/s", service_names=[NAME])
    async with open_channel(await server.start()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(Check(service="x" * 100_000))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await server.stop(0)

"""A small service on a real server behind a unix socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from outrider import logs
from outrider.rpc.channel import open_channel
from outrider.rpc.server import GrpcServer
from outrider.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

VERIFY = "outrider.v1.VerifyService"
SPECULATE = "/outrider.v1.DraftService/Speculate"


class Verify(verify_pb2_grpc.VerifyServiceServicer):
    """Does what the test says; keeps what it saw."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.request_ids: list[str] = []
        self.metadata: list[dict[str, Any]] = []
        self.peers: set[str] = set()
        self.entered = asyncio.Event()
        self.release = asyncio.Event()
        self.freed = asyncio.Event()
        self.flood = False

    async def GetLoad(self, request: Any, context: Any) -> Any:
        self.request_ids.append(logs.request_id.get())
        self.metadata.append(dict(context.invocation_metadata()))
        self.peers.add(context.peer())
        if self.error is not None:
            raise self.error
        return verify_pb2.VerifyServiceGetLoadResponse(num_running=7)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield verify_pb2.VerifyServiceGenerateResponse(token_ids=[1])
            self.entered.set()
            while self.flood:
                yield verify_pb2.VerifyServiceGenerateResponse(token_ids=range(1000))
            await self.release.wait()
            if self.error is not None:
                raise self.error
            yield verify_pb2.VerifyServiceGenerateResponse(token_ids=[2])
        finally:
            self.freed.set()


class Draft(draft_pb2_grpc.DraftServiceServicer):
    """Echoes the number of events of each message as that many empty events."""

    async def Speculate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for request in request_iterator:
            yield draft_pb2.DraftServiceSpeculateResponse(events=[draft_pb2.DraftEvent() for _ in request.events])


class Running:
    """A started server, its servicers and a channel to it."""

    def __init__(self, server: GrpcServer, address: str, verify: Verify, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.address = address
        self.verify = verify
        self.channel = channel
        self.stub = verify_pb2_grpc.VerifyServiceStub(channel)
        self.draft_stub = draft_pb2_grpc.DraftServiceStub(channel)


@asynccontextmanager
async def run_server(address: str, *, client_token: str = "", **options: Any) -> AsyncIterator[Running]:
    verify = Verify()
    server = GrpcServer(address=address, service_names=[VERIFY], **options)
    verify_pb2_grpc.add_VerifyServiceServicer_to_server(verify, server.grpc)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(Draft(), server.grpc)
    bound = await server.start()
    server.set_serving(True)
    try:
        async with open_channel(bound, auth_token=client_token) as channel:
            yield Running(server, bound, verify, channel)
    finally:
        await server.stop(0)

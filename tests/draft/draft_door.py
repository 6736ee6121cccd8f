"""A draft service's door on a unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
from draft_engine_thread import EngineThread, engine_thread
from draft_fakes import VOCAB

from draft_service.door.metrics import DraftMetrics
from draft_service.door.servicer import DraftServicer
from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter
from outrider.drafting.model.features import MemoryMapper
from outrider.protocol.speculation import PROTOCOL_VERSION, DraftMessage, Hello, VerifyMessage
from outrider.protocol.speculation_codec import decode_draft, encode_verify
from outrider.rpc.channel import open_channel
from outrider.rpc.server import GrpcServer
from outrider.sampling.noise import NOISE_VERSION
from outrider.v1 import draft_pb2, draft_pb2_grpc

HELLO = Hello(PROTOCOL_VERSION, NOISE_VERSION, model="target", vocab_size=VOCAB)


class Stream:
    """Verify's end of a speculation stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = draft_pb2_grpc.DraftServiceStub(channel).Speculate()
        self._received: list[DraftMessage] = []

    async def send(self, *messages: VerifyMessage) -> None:
        await self.send_raw(encode_verify(messages))

    async def send_raw(self, batch: draft_pb2.DraftServiceSpeculateRequest) -> None:
        await self.call.write(batch)

    async def receive(self) -> DraftMessage:
        while not self._received:
            batch = await self.call.read()
            if not isinstance(batch, draft_pb2.DraftServiceSpeculateResponse):
                raise EOFError("the stream has ended")
            self._received = decode_draft(batch)
        return self._received.pop(0)

    async def ended(self) -> grpc.StatusCode:
        """How the stream ended. gRPC does not tell before all that came has been read."""
        with suppress(EOFError, grpc.aio.AioRpcError):
            while True:
                await self.receive()
        code: grpc.StatusCode = await self.call.code()
        return code

    async def hello(self) -> DraftMessage:
        await self.send(HELLO)
        return await self.receive()


class Door:
    """A running service."""

    def __init__(self, address: str, drafter: AnyDrafter, thread: EngineThread, metrics: DraftMetrics) -> None:
        self.drafter = drafter
        self.thread = thread
        self.engine = thread.remote
        self.metrics = metrics
        self.channel = open_channel(address)

    def stream(self) -> Stream:
        return Stream(self.channel)

    async def info(self) -> draft_pb2.DraftServiceGetInfoResponse:
        stub = draft_pb2_grpc.DraftServiceStub(self.channel)
        return await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())

    async def settle(self) -> None:
        """Wait until the engine has done all that it was asked for before, features aside."""
        await self.engine.ask()

    async def count(self, name: str, **labels: str) -> float:
        await self.settle()
        return self.metrics.registry.get_sample_value(f"outrider_draft_{name}", labels) or 0.0


@asynccontextmanager
async def serve_door(
    path: Path,
    drafter: AnyDrafter,
    options: DraftOptions,
    mapper: MemoryMapper | None = None,
) -> AsyncIterator[Door]:
    async with engine_thread(drafter, options, mapper) as thread:
        profile = await thread.remote.ready
        metrics = DraftMetrics(profile.hello.sources)
        thread.remote.on_state = metrics.take
        server = GrpcServer(
            address=f"unix:{path}",
            service_names=["outrider.v1.DraftService"],
            allow_unknown_fields=["/outrider.v1.DraftService/Speculate", "/outrider.v1.DraftService/Features"],
        )
        servicer = DraftServicer(thread.remote, thread.features, profile, options, metrics)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server.grpc)
        door = Door(await server.start(), drafter, thread, metrics)
        try:
            yield door
        finally:
            await door.channel.close()
            await server.stop(grace=0)

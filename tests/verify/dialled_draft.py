"""A dialer, and a draft service that behaves as a test has it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from msgspec.structs import replace

from outrider.protocol.speculation import (
    PROTOCOL_VERSION,
    DraftMessage,
    FeaturesBegin,
    Hello,
    ProjectionPart,
)
from outrider.protocol.speculation_codec import encode_draft
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.handshake import Terms
from verify_service.door.dialer import DraftDialer
from verify_service.door.session import DraftSession
from verify_service.frames import FeatureStreamAccepted, FeatureStreamReleased, ProjectionFrame

HELLO = Hello(PROTOCOL_VERSION, NOISE_VERSION, vocab_size=61, hidden_size=8, num_layers=3, token_ids_hash="cafe")
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

    def send(self, frame: FeatureStreamAccepted | FeatureStreamReleased | ProjectionFrame) -> None:
        match frame:
            case FeatureStreamAccepted():
                self.windows.append(frame.window)
                self.opened.append(frame.uses_ring)
            case FeatureStreamReleased():
                self.releases.append(frame.through)
            case ProjectionFrame():
                self.parts.append(frame.part)
        self.changed.set()

    async def writable(self) -> None:
        await self.may_go_on.wait()

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
    events: Any = None,
) -> AsyncIterator[Events]:
    """A dialer and a draft service that answers call number n in bytes, as `behave(context, n)` has it.

    `features`: the same for calls of the features stream. `events` are told instead of what is yielded.
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
    notes = Events()
    task = asyncio.create_task(DraftDialer(address, HELLO, events or notes, sleep).run())
    try:
        yield notes
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)


async def greet(context: Context) -> None:
    await context.read()
    await context.write(encode_draft([THEIRS]).SerializeToString())


async def stay(context: Context) -> None:
    while await context.read() is not grpc.aio.EOF:
        pass


async def offer_layers(context: Context, number: int) -> None:
    """A session of a draft that takes features, and goes on."""
    await context.read()
    theirs = replace(THEIRS, hidden_size=8, feature_layers=(4, 1), features_token="secret", max_positions=50)
    await context.write(encode_draft([theirs]).SerializeToString())
    await stay(context)

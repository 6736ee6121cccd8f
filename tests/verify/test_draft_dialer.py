"""A dialer outlives whatever its draft does, and dials again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from outrider.rpc.codec import MAX_EVENTS_AT_ONCE, encode_draft
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.messages import PROTOCOL_VERSION, Commit, DraftMessage, Grow, Hello
from outrider.v1 import draft_pb2
from verify_service import session
from verify_service.session import DraftDialer, DraftSession

HELLO = Hello(PROTOCOL_VERSION, NOISE_VERSION)
Context = grpc.aio.ServicerContext[bytes, bytes]
Behave = Callable[[Context, int], Awaitable[None]]


class Events:
    """Notes what sessions tell."""

    def __init__(self) -> None:
        self.sessions: list[DraftSession] = []
        self.num_ended = 0
        self.batches: list[list[DraftMessage]] = []
        self.changed = asyncio.Event()

    def draft_connected(self, port: DraftSession) -> None:
        self.sessions.append(port)
        self.changed.set()

    def draft_disconnected(self, port: DraftSession) -> None:
        self.num_ended += 1
        self.changed.set()

    def draft_received(self, port: DraftSession, messages: list[DraftMessage]) -> None:
        self.batches.append(messages)
        self.changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def dialled(folder: Path, behave: Behave) -> AsyncIterator[Events]:
    """A dialer and a draft service that answers call number n in bytes, as `behave(context, n)` has it."""
    count = 0

    async def speculate(requests: object, context: Context) -> None:
        nonlocal count
        count += 1
        await behave(context, count)

    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(
        "outrider.v1.DraftService", {"Speculate": grpc.stream_stream_rpc_method_handler(speculate)}
    )
    server.add_generic_rpc_handlers((handler,))
    address = f"unix:{folder}/d"
    server.add_insecure_port(address)
    await server.start()
    events = Events()
    task = asyncio.create_task(DraftDialer(address, HELLO, events).run())
    try:
        yield events
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop(0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(session, "REFUSED_SECONDS", 0.01)


async def greet(context: Context) -> None:
    await context.read()
    await context.write(encode_draft([HELLO]).SerializeToString())


async def stay(context: Context) -> None:
    while await context.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("first", ["cancels", "garbles", "ends"])
async def test_a_handshake_that_goes_wrong_is_tried_again(tmp_path: Path, first: str) -> None:
    async def behave(context: Context, number: int) -> None:
        if number == 1 and first == "cancels":
            await context.abort(grpc.StatusCode.CANCELLED, "going away")
        if number == 1 and first == "garbles":
            await context.write(b"\xff\xff\xff")
        if number > 1:
            await greet(context)
            await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)


async def test_bytes_that_are_no_message_are_dropped_and_the_session_goes_on(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        await context.write(b"\xff\xff\xff")
        await context.write(encode_draft([Grow(5, 1, 1, 1, 1)]).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.batches) == 1)
        (grow,) = events.batches[0]
        assert isinstance(grow, Grow) and grow.request == 5
        assert len(events.sessions) == 1


async def test_a_session_that_cannot_write_ends_at_once_and_is_dialled_again(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].send([Commit(1, 2, np.zeros(1, np.int32), 1, 2**32, None, 8)])
        await events.until(lambda: events.num_ended == 1 and len(events.sessions) == 2)


async def test_a_session_that_is_reset_is_dialled_again(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].reset()
        await events.until(lambda: len(events.sessions) == 2)


async def test_a_batch_of_very_many_events_is_taken_in_parts(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        batch = draft_pb2.DraftServiceSpeculateResponse(events=[encode_draft([Grow(5, 1, 1, 1, 1)]).events[0]] * 1000)
        await context.write(batch.SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: sum(map(len, events.batches)) == 1000)
        assert max(map(len, events.batches)) <= MAX_EVENTS_AT_ONCE

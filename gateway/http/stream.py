"""Server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive, Send

from outrider.logs import get_logger

_logger = get_logger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, and what lies between keeps the connection."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: bytes) -> bytes:
    """One event; `data` is JSON without line breaks."""
    return b"data: " + data + b"\n\n"


class ClientStalled(Exception):
    """The client has not read its stream for too long."""


class EventStream:
    """An answer in events. It begins with the first one, so that an earlier failure still gets its own status."""

    def __init__(self, send: Send, *, stall_seconds: float) -> None:
        """`stall_seconds`: how long the client may leave its stream unread."""
        self._send = send
        self._stall_seconds = stall_seconds
        self.begun = False

    async def write(self, data: bytes) -> None:
        """Sends whole events. Raises ClientStalled."""
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if data:
            await self._body(data, more=True)

    async def end(self, data: bytes = b"") -> None:
        """Sends the last events and ends the answer. Raises ClientStalled."""
        await self.write(b"")
        await self._body(data, more=False)

    async def _body(self, data: bytes, *, more: bool) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientStalled from None


async def send_json(send: Send, body: bytes) -> None:
    """Sends a whole answer."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end, or cancels it as soon as the client has gone. The request's body must have been read."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
        else:
            _logger.info("the client went away; its answers are cancelled")
    except ClientStalled:
        _logger.info("the client stopped reading; its answers are cancelled")
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_pauses(items: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """The items, and None whenever none has come for so long. Closing it closes them."""
    pending: asyncio.Task[T] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(items))
            done, _ = await asyncio.wait((pending,), timeout=seconds)
            if not done:
                yield None
                continue
            try:
                item = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield item
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await items.aclose()


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)

"""HTTP answers: JSON bodies, errors in OpenAI's shape, server-sent events; and clients that go away."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncGenerator, Coroutine, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.responses import Response
from starlette.types import Receive, Send

from outrider.errors import ContextLengthError, InternalError, OutriderError
from outrider.logs import get_logger

_logger = get_logger(__name__)

T = TypeVar("T")

DOOR = "rest"
"""Name of the REST door in metrics."""
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment in an event stream: clients skip it, and because of it proxies keep the connection open."""
IN_EVENTS = "in_events"
"""Key in the state of a request's scope: whether the answer is a stream of events, which may hold comments."""
PART_BYTES = 1 << 16
"""Size of the parts in which a whole answer is sent."""
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Body(BaseModel):
    """Base of everything that is sent."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)


def json_bytes(body: BaseModel) -> bytes:
    """Return a body as JSON, without unset fields."""
    return body.model_dump_json(exclude_unset=True).encode()


class ErrorDetail(Body):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Body):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class HttpError(OutriderError):
    """A request that is wrong as HTTP, whatever its body says."""

    error_type = "invalid_request_error"

    def __init__(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, code=code)
        self.http_status = status
        self.headers = dict(headers or {})


def error_detail(error: OutriderError) -> ErrorDetail:
    """Return what a client is told about an error."""
    # LangChain looks for this code in the text of OpenAI's exception, which holds only the message.
    message = f"{error.message} ({error.code})" if isinstance(error, ContextLengthError) else error.message
    field = getattr(error, "field", "")
    return ErrorDetail(message=message, type=error.error_type, param=field or None, code=error.code)


def error_json(error: OutriderError) -> bytes:
    """Return the body of an error, as JSON."""
    return json_bytes(ErrorBody(error=error_detail(error)))


def error_response(error: OutriderError) -> Response:
    """Return the whole answer to a request that failed before its answer began."""
    headers = dict(getattr(error, "headers", {}))
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after)))
    if error.code == "draining":  # another connection may lead to another gateway
        headers["connection"] = "close"
    return Response(error_json(error), error.http_status, headers, "application/json")


def internal_error(error: Exception, what: str, logger: logging.Logger) -> InternalError:
    """Log a fault of the server under a new id, and return the error for the client, which has only this id."""
    error_id = secrets.token_hex(4)
    logger.error("%s failed, error id %s", what, error_id, exc_info=error)
    return InternalError(f"internal error, id {error_id}")


async def send_json(send: Send, body: bytes) -> None:
    """Send a whole answer in parts of PART_BYTES; return once the client has read all but about one of them."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for at in range(0, max(len(body), 1), PART_BYTES):
        part = body[at : at + PART_BYTES]
        await send({"type": "http.response.body", "body": part, "more_body": at + PART_BYTES < len(body)})


def event(data: bytes) -> bytes:
    """Return one event; `data` is JSON without line breaks."""
    return b"data: " + data + b"\n\n"


class ClientStalled(Exception):
    """The client has not read its stream for too long."""


class EventStream:
    """An answer in events. Its head goes with the first one, so that an earlier failure still gets its own status."""

    def __init__(self, send: Send, *, stall_seconds: float) -> None:
        """`stall_seconds`: how long the client may leave its stream unread."""
        self._send = send
        self._stall_seconds = stall_seconds
        self.begun = False

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send whole events; without `more` they are the last. Raises ClientStalled."""
        if more and not data:
            return
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        try:
            async with asyncio.timeout(self._stall_seconds):
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except TimeoutError:
            raise ClientStalled from None


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return what `work` returns; if the client goes away or stops reading, cancel `work` and return None. The body of
    the request must have been read."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return await task
        _logger.info("the client went away; its answers are cancelled")
    except ClientStalled:
        _logger.info("the client stopped reading; its answers are cancelled")
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    return None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def with_pauses(items: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T | None, None]:
    """Yield the items, and None whenever none has come for `seconds`. Closing this generator closes `items`."""
    pending: asyncio.Future[T] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(anext(items))
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

"""Request bodies: strict JSON, with limits on size, on time, and on memory over all requests."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from gateway.core.gate import Turns
from gateway.core.json_size import MAX_CONTAINERS, json_excess
from gateway.core.request import MAX_PROMPT_TOKENS
from gateway.http.responses import HttpError
from outrider.errors import InvalidRequestError, OverloadedError

T = TypeVar("T")

_LARGE_BYTES = 1 << 16
"""Bodies over this size are parsed and checked one at a time, outside the event loop."""
_DISCARD_FACTOR = 8
"""A body of up to this many times the limit is read to its end, so that the client gets to read the error."""
_MAX_BODIES = 32
"""This many bodies of the greatest length may be in memory at once."""
_UNCOUNTED_BYTES = 1 << 16
"""The first bytes of each body are not counted, so that large bodies never shut out a client with a small one."""
_MAX_VALUES = MAX_PROMPT_TOKENS + MAX_CONTAINERS
"""Most entries of all lists and objects of a body together."""


class BodyReader:
    """Reads the bodies of all routes. Used from one event loop."""

    def __init__(self, *, max_bytes: int, seconds: float) -> None:
        """`max_bytes` is the limit of one body, `seconds` the time that a client has to send it."""
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._num_counted: Counter[Request] = Counter()
        """Bytes of each body in memory, without the first `_UNCOUNTED_BYTES`."""
        self._one_large = Turns()

    @asynccontextmanager
    async def open(self, request: Request, check: Callable[[dict[str, Any]], T]) -> AsyncIterator[T]:
        """Yield what `check`, which may run in a thread, makes of the body. The body counts towards the memory of all
        bodies until the block ends.

        Raises HttpError for a request that is wrong as HTTP, InvalidRequestError for bad JSON, OverloadedError if the
        bodies of all requests take too much memory.
        """
        _check_headers(request.headers)
        try:
            yield await self._checked(await self._receive(request), check)
        finally:
            self._count(request, 0)

    async def _checked(self, data: bytes, check: Callable[[dict[str, Any]], T]) -> T:
        if len(data) <= _LARGE_BYTES:
            return check(_parse_object(data))
        # One at a time: libraries may hold the interpreter's lock for a while; the event loop gets its turn in between.
        async with self._one_large:
            return await asyncio.to_thread(lambda: check(_parse_object(data)))

    async def _receive(self, request: Request) -> bytes:
        self._check_length(request.headers)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._read_parts(request)
        except TimeoutError:
            headers = {"connection": "close"}
            raise HttpError(
                408, f"the body did not arrive within {self._seconds:g} s; send it faster", "request_timeout", headers
            ) from None
        except ClientDisconnect:
            raise HttpError(400, "the client closed the connection", "client_closed") from None

    def _check_length(self, headers: Mapping[str, str]) -> None:
        """Raise HttpError for a declared length over the limit, if the error can be sent before the body is read."""
        length = headers.get("content-length", "0")
        asks_first = headers.get("expect", "").lower() == "100-continue"
        if length.isdecimal() and int(length) > self._max_bytes * (1 if asks_first else _DISCARD_FACTOR):
            # A client that did not ask first is already sending: closing the connection would lose the answer.
            raise self._too_large({"connection": "close"} if asks_first else None)

    def _too_large(self, headers: dict[str, str] | None = None) -> HttpError:
        message = f"the body is over the limit of {self._max_bytes} bytes; send less"
        return HttpError(413, message, "request_too_large", headers)

    async def _read_parts(self, request: Request) -> bytes:
        parts: list[bytes] = []
        length, limit = 0, self._max_bytes
        async for part in request.stream():
            length += len(part)
            if length <= limit:
                self._count(request, length)
                parts.append(part)
            elif length > limit * _DISCARD_FACTOR:
                break
            else:
                parts.clear()
                self._count(request, 0)
        if length > limit:
            raise self._too_large()
        return b"".join(parts)

    def _count(self, request: Request, length: int) -> None:
        """Count the bytes that the body of a request takes now. Raises OverloadedError."""
        num_bytes = max(0, length - _UNCOUNTED_BYTES)
        change = num_bytes - self._num_counted[request]
        most = self._max_bytes * _MAX_BODIES
        if change > 0 and self._num_counted.total() + change > most:
            raise OverloadedError(
                f"bodies of requests in progress would exceed the limit of {most} bytes; try again later"
            )
        self._num_counted[request] = num_bytes
        if not num_bytes:
            del self._num_counted[request]


def _parse_object(data: bytes) -> dict[str, Any]:
    data = data.removeprefix(BOM_UTF8)  # RFC 8259, 8.1: some clients send one
    if len(data) > _LARGE_BYTES and (excess := json_excess(data, _MAX_VALUES)):
        number, limit, what = excess
        raise InvalidRequestError(
            "", f"the body holds {number} {what}, over the limit of {limit}", f"send at most {limit}"
        )
    try:
        body = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(
            "", f"the body is not valid JSON: {error}", "send one JSON object", code="invalid_json"
        ) from None
    if not isinstance(body, dict):
        raise InvalidRequestError("", "the body is not an object", "send one JSON object", code="invalid_json")
    return body


def _check_headers(headers: Mapping[str, str]) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        received = repr(kind[:80]) if kind else "missing"
        raise HttpError(415, f"content-type is {received}; send application/json", "unsupported_content_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "content-encoding is not supported; send plain JSON", "unsupported_content_encoding")

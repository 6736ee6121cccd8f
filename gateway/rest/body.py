"""Request bodies: bounded in size and time, and strict JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from gateway.rest.errors import HttpError
from outrider.errors import InvalidRequestError

_DISCARD_FACTOR = 8
"""A body up to this many times over the limit is read to its end, so that the client gets to read the answer."""


async def read_json(request: Request, *, max_bytes: int, seconds: float) -> dict[str, Any]:
    """The body as an object. Raises HttpError for what HTTP forbids, InvalidRequestError for bad JSON."""
    _check_headers(request.headers)
    try:
        async with asyncio.timeout(seconds):
            data = await _read(request, max_bytes)
    except TimeoutError:
        headers = {"connection": "close"}
        raise HttpError(
            408, f"the body did not arrive within {seconds:g} s; send it faster", "request_timeout", headers
        ) from None
    except ClientDisconnect:
        raise HttpError(400, "the client closed the connection", "client_closed") from None
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
        said = repr(kind[:80]) if kind else "missing"
        raise HttpError(415, f"content-type is {said}; send application/json", "unsupported_content_type")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "content-encoding is not supported; send plain JSON", "unsupported_content_encoding")


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    length = 0
    async for part in request.stream():
        length += len(part)
        if length <= max_bytes:
            parts.append(part)
        elif length > max_bytes * _DISCARD_FACTOR:
            break
        else:
            parts.clear()
    if length > max_bytes:
        raise HttpError(413, f"the body is over the limit of {max_bytes} bytes; send less", "request_too_large")
    return b"".join(parts)

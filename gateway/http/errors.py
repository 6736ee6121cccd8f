"""Errors in OpenAI's nested shape, and those that only HTTP knows."""

from __future__ import annotations

import math
from collections.abc import Mapping

from starlette.responses import Response

from gateway.openai.responses import ErrorBody, ErrorDetail
from outrider.errors import ContextLengthError, OutriderError


class HttpError(OutriderError):
    """A request that is wrong as HTTP, whatever its body says."""

    grpc_status = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"

    def __init__(self, status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message, code=code)
        self.http_status = status
        self.headers = dict(headers or {})


def error_body(error: OutriderError) -> ErrorBody:
    """What a client is told."""
    field = getattr(error, "field", "")
    return ErrorBody(
        error=ErrorDetail(message=_message(error), type=error.error_type, param=field or None, code=error.code)
    )


def _message(error: OutriderError) -> str:
    # LangChain looks for this code in the text of OpenAI's exception, which is made of the message alone.
    return f"{error.message} ({error.code})" if isinstance(error, ContextLengthError) else error.message


def error_response(error: OutriderError) -> Response:
    """The whole answer to a request that failed before its answer began."""
    headers = dict(getattr(error, "headers", {}))
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after)))
    return Response(error_body(error).json_bytes(), error.http_status, headers, "application/json")

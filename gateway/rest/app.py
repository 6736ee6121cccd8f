"""The REST door as one ASGI application: routes, bearer token, request ids, and errors in OpenAI's shape."""

from __future__ import annotations

import hmac
import json
import secrets
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from gateway.admission import ServedModel
from gateway.metrics import CONTENT_TYPE
from gateway.rest.errors import HttpError, error_response
from gateway.rest.generation import DOOR, ChatRoute, CompletionRoute
from gateway.rest.openapi import openapi
from gateway.rest.responses import Body, ModelBody, ModelList, Status
from gateway.service import Gateway
from outrider import logs
from outrider.config.gateway import GatewayOptions
from outrider.errors import InternalError, NotFoundError, OutriderError
from outrider.rpc.interceptors import clean_request_id

_logger = logs.get_logger(__name__)

_OPEN_PATHS = frozenset({"/health", "/ready"})


class RestApp:
    """Everything that HTTP clients reach."""

    def __init__(self, gateway: Gateway, options: GatewayOptions, *, api_key: str = "") -> None:
        """With `api_key` every path but /health and /ready needs that bearer token."""
        self._gateway = gateway
        self._api_key = api_key.encode()
        self._openapi = json.dumps(openapi(authenticated=bool(api_key))).encode()
        self._router = Router(
            [
                Route("/v1/chat/completions", ChatRoute(gateway, options), methods=["POST"]),
                Route("/v1/completions", CompletionRoute(gateway, options), methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/openapi.json", self._document),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection's request."""
        if scope["type"] != "http":
            return  # uvicorn is told to send nothing else
        headers = Headers(scope=scope)
        request_id = clean_request_id(headers.get("x-request-id"))
        logs.request_id.set(request_id)
        begun = False

        async def send_tagged(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        scope["app"] = self  # makes the router raise what it does not know
        try:
            self._authorize(scope["path"], headers)
            await self._router(scope, receive, send_tagged)
        except Exception as error:
            if begun:
                raise
            await error_response(_told(error, scope))(scope, receive, send_tagged)

    def _authorize(self, path: str, headers: Headers) -> None:
        if not self._api_key or path in _OPEN_PATHS:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Both sides are always compared, in a time that does not depend on where they differ.
        matches = hmac.compare_digest(token.strip().encode(), self._api_key)
        if not matches or scheme.lower() != "bearer":
            error = HttpError(
                401,
                "missing or wrong API key; send the header 'authorization: Bearer KEY'",
                "invalid_api_key",
                {"www-authenticate": "Bearer"},
            )
            self._gateway.count_error(DOOR, error)
            raise error

    async def _models(self, request: Request) -> Response:
        return _json(ModelList(object="list", data=[_model_body(self._gateway.model)]))

    async def _model(self, request: Request) -> Response:
        model = self._gateway.model
        name = request.path_params["model"]
        if name != model.name:
            raise NotFoundError("model", f"model: {name[:80]!r} is not served here; use {model.name!r}")
        return _json(_model_body(model))

    async def _health(self, request: Request) -> Response:
        return _json(Status(status="ok"))

    async def _ready(self, request: Request) -> Response:
        ready = self._gateway.ready
        return _json(Status(status="ready" if ready else "not ready"), 200 if ready else 503)

    async def _metrics(self, request: Request) -> Response:
        return Response(await self._gateway.render_metrics(), headers={"content-type": CONTENT_TYPE})

    async def _document(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")


def _json(body: Body, status: int = 200) -> Response:
    return Response(body.json_bytes(), status, media_type="application/json")


def _model_body(model: ServedModel) -> ModelBody:
    return ModelBody(
        id=model.name, object="model", created=model.created, owned_by="outrider", max_model_len=model.context_length
    )


def _told(error: Exception, scope: Scope) -> OutriderError:
    """What the client is told; the rest goes to the log."""
    place = f"{scope['method']} {scope['path'][:200]}"
    if isinstance(error, HTTPException):
        error = _unknown(error, place)
    if isinstance(error, OutriderError) and error.http_status != InternalError.http_status:
        _logger.info("%s refused: %s: %s", place, error.code, error.message)
        return error
    error_id = secrets.token_hex(4)
    _logger.error("%s failed, error id %s", place, error_id, exc_info=error)
    return InternalError(f"internal error, id {error_id}")


def _unknown(error: HTTPException, place: str) -> HttpError:
    headers: dict[str, Any] = dict(error.headers or {})
    if error.status_code == 405:
        allowed = headers.get("Allow", "another method")
        return HttpError(405, f"{place}: this path takes {allowed}", "method_not_allowed", headers)
    return HttpError(404, f"{place}: there is no such path; see /openapi.json", "path_not_found", headers)

"""The REST door as one ASGI application: routes, bearer token, request ids, and errors in OpenAI's shape."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.core.service import Gateway
from gateway.http.body import BodyReader
from gateway.http.errors import HttpError, error_response
from gateway.http.hosts import HostRule
from gateway.http.info import InfoRoutes
from gateway.http.openapi import openapi
from gateway.http.page import Page
from gateway.http.text import DetokenizeRoute, TokenizeRoute
from gateway.openai.generation import DOOR, ChatRoute, CompletionRoute
from gateway.sglang.routes import GenerateRoute
from outrider import logs
from outrider.config.gateway import GatewayOptions
from outrider.errors import InternalError, OutriderError
from outrider.rpc.call import name_client
from outrider.rpc.interceptors import clean_request_id, matching_token

_logger = logs.get_logger(__name__)

_OPEN_PATHS = frozenset({"/health", "/ready"})


class RestApp:
    """Everything that HTTP clients reach."""

    def __init__(self, gateway: Gateway, options: GatewayOptions, *, api_keys: Mapping[str, str] | None = None) -> None:
        """With `api_keys`, each with its tenant, all paths but /health, /ready and the page's need one of them."""
        self._gateway = gateway
        self._api_keys = {key.encode(): tenant for key, tenant in (api_keys or {}).items()}
        self._openapi = json.dumps(openapi(authenticated=bool(api_keys))).encode()
        guarded = bool(api_keys or options.tls_cert)
        self._hosts = HostRule(options.rest_address, options.allowed_hosts, guarded=guarded)
        bodies = BodyReader(max_bytes=options.max_body_bytes, seconds=options.body_seconds)
        self.routes = [
            Route("/v1/chat/completions", ChatRoute(gateway, options, bodies), methods=["POST"]),
            Route("/v1/completions", CompletionRoute(gateway, options, bodies), methods=["POST"]),
            Route("/tokenize", TokenizeRoute(gateway, bodies, DOOR), methods=["POST"]),
            Route("/detokenize", DetokenizeRoute(gateway, bodies, DOOR), methods=["POST"]),
            Route("/generate", GenerateRoute(gateway, options, bodies), methods=["POST"]),
            *InfoRoutes(gateway, DOOR).routes(),
            Route("/openapi.json", self._document),
        ]
        page = None if options.no_page else Page(needs_key=bool(api_keys))
        self._open_paths = _OPEN_PATHS | (page.paths if page else frozenset())
        self._router = Router([*self.routes, *(page.routes() if page else ())], redirect_slashes=False)
        self._entry: ASGIApp = self._serve
        if options.cors_origins:
            self._entry = CORSMiddleware(
                self._serve,
                allow_origins=options.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one connection's request."""
        if scope["type"] == "http":  # uvicorn is told to send nothing else
            await self._entry(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            if scope["path"] not in _OPEN_PATHS:
                self._check_host(headers)
            self._authorize(scope["path"], headers)
            await self._router(scope, receive, send_tagged)
        except Exception as error:
            if begun:
                raise
            if scope["method"] == "OPTIONS" and isinstance(error, HTTPException) and error.status_code == 405:
                allowed = (error.headers or {}).get("Allow", "")
                await Response(status_code=204, headers={"allow": f"{allowed}, OPTIONS"})(scope, receive, send_tagged)
                return
            await error_response(_told(error, scope))(scope, receive, send_tagged)

    def _check_host(self, headers: Headers) -> None:
        try:
            self._hosts.check(headers)
        except HttpError as error:
            self._gateway.count_error(DOOR, error)
            raise

    def _authorize(self, path: str, headers: Headers) -> None:
        if not self._api_keys or path in self._open_paths:
            return
        key = matching_token(headers.get("authorization", "").encode(), self._api_keys)
        # A door with one key knows nothing of its clients by it.
        if key is None or len(self._api_keys) == 1:
            name_client("", "")
        else:
            name_client(key.decode(), "", self._api_keys[key])
        if key is None:
            error = HttpError(
                401,
                "missing or wrong API key; send the header 'authorization: Bearer KEY'",
                "invalid_api_key",
                {"www-authenticate": "Bearer"},
            )
            self._gateway.count_error(DOOR, error)
            raise error

    async def _document(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")


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

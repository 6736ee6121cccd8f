"""The REST door: routes, host names, bearer token, request ids, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from gateway.http.info import InfoRoutes, TokenizerRoute, prepare_detokenize, prepare_tokenize
from gateway.http.openapi import documents
from gateway.http.page import PAGE_HEADERS, Page
from gateway.http.responses import DOOR, HttpError, error_response, internal_error
from gateway.openai.chat import ChatBuilder, ChatCompletionRequest
from gateway.openai.completions import CompletionBuilder, CompletionRequest
from gateway.openai.generation import GenerationRoute
from gateway.openai.responses import ResponsesBuilder
from gateway.openai.responses_request import ResponsesRequest
from gateway.sglang import GenerateBody, GenerateBuilder
from outrider import logs
from outrider.config.gateway import GatewayOptions
from outrider.errors import InternalError, OutriderError
from outrider.rpc.call import clean_request_id, name_client
from outrider.rpc.credentials import NO_TOKENS, TokenSource, matching_token
from outrider.rpc.transport import is_local

_logger = logs.get_logger(__name__)

_OPEN_PATHS = frozenset({"/health", "/ping", "/ready"})
_REFUSAL_LOG_SECONDS = 10.0


class RestApp:
    """The REST door as one ASGI application."""

    def __init__(self, gateway: Gateway, options: GatewayOptions, *, api_keys: TokenSource = NO_TOKENS) -> None:
        """With `api_keys`, all paths but pages and `_OPEN_PATHS` need one."""
        self._gateway = gateway
        self._api_keys = api_keys
        self._refusal_warnings = logs.ThrottledWarnings(_logger, _REFUSAL_LOG_SECONDS)
        """Throttled warnings about refused requests: anybody can send those, and must not fill the log."""
        guarded = bool(api_keys or options.tls_cert)
        self._hosts = HostRule(options.rest_address, options.allowed_hosts, guarded=guarded)
        bodies = BodyReader(max_bytes=options.max_body_bytes, seconds=options.body_seconds)
        generates = partial(GenerationRoute, gateway, options, bodies)
        self.routes = [
            Route("/v1/chat/completions", generates(ChatCompletionRequest, ChatBuilder), methods=["POST"]),
            Route("/v1/completions", generates(CompletionRequest, CompletionBuilder), methods=["POST"]),
            Route("/v1/responses", generates(ResponsesRequest, ResponsesBuilder), methods=["POST"]),
            Route("/tokenize", TokenizerRoute(gateway, options, bodies, prepare_tokenize), methods=["POST"]),
            Route("/detokenize", TokenizerRoute(gateway, options, bodies, prepare_detokenize), methods=["POST"]),
            Route("/generate", generates(GenerateBody, GenerateBuilder), methods=["POST"]),
            *InfoRoutes(gateway).routes(),
            Route("/openapi.json", self._document),
            Route("/docs", self._docs),
        ]
        page = None if options.no_page else Page(gateway, bodies, needs_key=bool(api_keys))
        self._open_paths = _OPEN_PATHS | {"/docs"} | (page.paths if page else frozenset())
        self._router = Router([*self.routes, *(page.routes() if page else ())], redirect_slashes=False)
        self._app: ASGIApp = self._serve
        if options.cors_origins:
            self._app = CORSMiddleware(
                self._serve,
                allow_origins=options.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = clean_request_id(headers.get("x-request-id"))
        logs.request_id.set(request_id)
        begun = let_in = False

        async def send_tagged(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        # vLLM and SGLang redirect such paths, which not every client follows with its body.
        scope["path"] = scope["path"].rstrip("/") or "/"
        scope["app"] = self  # makes the router raise for paths and methods that it does not know
        try:
            with self._gateway.counted(DOOR):
                _check_framing(headers)
                if scope["path"] not in _OPEN_PATHS:
                    self._hosts.check(headers)
                let_in = self._authorize(scope["path"], headers)
            await self._router(scope, receive, send_tagged)
        except Exception as error:
            if begun:
                raise
            if scope["method"] == "OPTIONS" and (allowed := _allowed(error, scope["path"])):
                await Response(status_code=204, headers={"allow": f"{allowed}, OPTIONS"})(scope, receive, send_tagged)
                return
            log = _logger.info if let_in else self._refusal_warnings.warn
            await error_response(_client_error(error, scope, log))(scope, receive, send_tagged)

    def _authorize(self, path: str, headers: Headers) -> bool:
        """Check the API key, and name the client and tenant that it stands for. Raises HttpError without one.

        Return False if there are keys and the path needs none, so that anyone may be the client.
        """
        keys = self._api_keys.current()
        if not keys or path in self._open_paths:
            return not keys
        key = matching_token(headers.get("authorization", "").encode(), keys)
        # A single key does not tell clients apart.
        if key is None or len(keys) == 1:
            name_client("", "")
        else:
            name_client(key.decode(), "", keys[key])
        if key is None:
            raise HttpError(
                401,
                "missing or wrong API key; send the header 'authorization: Bearer KEY'",
                "invalid_api_key",
                {"www-authenticate": "Bearer"},
            )
        return True

    async def _docs(self, request: Request) -> Response:
        _, page = await asyncio.to_thread(documents, authenticated=bool(self._api_keys))
        return Response(page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def _document(self, request: Request) -> Response:
        document, _ = await asyncio.to_thread(documents, authenticated=bool(self._api_keys))
        return Response(document, media_type="application/json")


def _check_framing(headers: Headers) -> None:
    """Refuse a request whose end a proxy may see elsewhere, and close (RFC 9112, 6.1). Raises HttpError."""
    if "content-length" in headers and "transfer-encoding" in headers:
        problem = "content-length and transfer-encoding are both set; send one of them"
        raise HttpError(400, problem, "invalid_http", {"connection": "close"})


def _allowed(error: Exception, path: str) -> str:
    """Return the methods that OPTIONS lists for a path, empty if unknown; for `*` all of the door (RFC 9110, 9.3.7)."""
    if not isinstance(error, HTTPException):
        return ""
    return "GET, HEAD, POST" if path == "*" else (error.headers or {}).get("Allow", "")


def _client_error(error: Exception, scope: Scope, log: Callable[..., None]) -> OutriderError:
    """Return the error for the client, and log it: with `log` if it is no fault of ours."""
    place = f"{scope['method'][:20]} {scope['path'][:200]}"
    if isinstance(error, HTTPException):
        headers: dict[str, Any] = dict(error.headers or {})
        if error.status_code == 405:
            text = f"{place}: this path takes {headers.get('Allow', 'another method')}"
            error = HttpError(405, text, "method_not_allowed", headers)
        else:
            error = HttpError(404, f"{place}: there is no such path; see /openapi.json", "path_not_found", headers)
    if isinstance(error, OutriderError) and error.http_status != InternalError.http_status:
        log("%s refused: %s: %s", place, error.code, error.message)
        return error
    return internal_error(error, place, _logger)


class HostRule:
    """Which Host headers the REST door lets in.

    Any site can have its name resolve to 127.0.0.1. Its pages can then read whatever they like from a door on loopback,
    because the browser takes the door for the site itself (DNS rebinding). The Host header of such requests holds the
    site's name. Plain addresses are never resolved, so they are always let in.
    """

    def __init__(self, address: str, allowed: Sequence[str] = (), *, guarded: bool = False) -> None:
        """`address` is what the door is bound to. `guarded`: the door has keys or TLS, which keep such pages out."""
        self._any = "*" in allowed or (not allowed and (guarded or not is_local(address)))
        names = {"localhost", address.rpartition(":")[0].lower(), *(name.lower() for name in allowed)}
        self._names = {name for name in names if not name.startswith("*")}
        self._endings = (".localhost", *(name[1:] for name in names if name.startswith("*.")))

    def check(self, headers: Mapping[str, str]) -> None:
        """Raise HttpError for a name that is not let in. Browsers always send one."""
        host = headers.get("host", "")
        if self._any or not host:
            return
        name = _name(host)
        if name in self._names or name.endswith(self._endings) or _is_address(name):
            return
        raise HttpError(
            421,
            f"the host {host[:80]!r} is not allowed; use localhost, or add the host to the gateway's --allowed-hosts",
            "host_not_allowed",
        )

    def guard(self, app: ASGIApp) -> ASGIApp:
        """Return `app` behind this rule."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                self.check(Headers(scope=scope))
            except HttpError as error:
                await error_response(error)(scope, receive, send)
            else:
                await app(scope, receive, send)

        return guarded


def _name(host: str) -> str:
    """Return the name in a Host header, in lower case, without the port and a final dot."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

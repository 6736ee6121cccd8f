"""The one boundary that every call passes: request id, token, strict decoding, and exceptions turned into statuses."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, NoReturn

import grpc

from outrider import logs
from outrider.errors import DeadlineError, InternalError, InvalidRequestError, OutriderError
from outrider.rpc.call import CLIENT_KEY, USER_KEY, clean_client, client, name_client
from outrider.rpc.decoding import strict
from outrider.rpc.status import status_from_error

REQUEST_ID_KEY = "x-request-id"
AUTHORIZATION_KEY = "authorization"

_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_OWN_PREFIX = "/outrider."
_NOT_IN_ID = re.compile(r"[^A-Za-z0-9._:-]")
_MAX_ID = 64

_logger = logs.get_logger(__name__)


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler. A request of one message is read here, and refused if it is not there in time.

    In a request stream each message is decoded when it is read, so `InvalidRequestError` is raised from the handler's
    own `async for` or `context.read()`; a handler that reads in a task of its own lets it through to its caller.
    """

    def __init__(
        self,
        *,
        auth_tokens: Mapping[str, str] = MappingProxyType({}),
        allow_unknown_fields: Collection[str] = (),
        for_peers: bool = False,
        message_seconds: float = 30.0,
    ) -> None:
        """`auth_tokens`: each with its tenant's name. Callers `for_peers` may say on whose behalf they call."""
        self._message_seconds = message_seconds
        self._auth_tokens = {token.encode(): tenant for token, tenant in auth_tokens.items()}
        self._allow_unknown_fields = frozenset(allow_unknown_fields)
        self._for_peers = for_peers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler that the call would have got, wrapped; None (an unknown method) stays None."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        token = self._token(metadata)
        authorized = token is not None or not self._auth_tokens or method.startswith(_HEALTH_PREFIX)
        call = _Call(method, clean_request_id(metadata.get(REQUEST_ID_KEY)), authorized, self._message_seconds)
        if self._for_peers:
            call.client = clean_client(metadata.get(CLIENT_KEY))
        else:
            # A door with one token knows nothing of its clients by it.
            if token is not None and len(self._auth_tokens) > 1:
                call.token, call.tenant = token.decode(), self._auth_tokens[token]
            call.user = str(metadata.get(USER_KEY, ""))
        lenient = method in self._allow_unknown_fields or not method.startswith(_OWN_PREFIX)
        return _wrap(handler, call, lenient)

    def _token(self, metadata: dict[str, Any]) -> bytes | None:
        given = metadata.get(AUTHORIZATION_KEY, "")
        data = given if isinstance(given, bytes) else given.encode()
        return matching_token(data, self._auth_tokens)


def matching_token(authorization: bytes, tokens: Collection[bytes]) -> bytes | None:
    """Which of `tokens` "Bearer TOKEN" carries; None for any other text.

    All are always compared, each in a time that does not depend on where the two differ.
    """
    scheme, _, given = authorization.partition(b" ")
    given = given.strip()
    found = [token for token in tokens if hmac.compare_digest(given, token)]
    return found[0] if found and scheme.lower() == b"bearer" else None


def clean_request_id(given: str | bytes | None) -> str:
    """Return a client's request id with only harmless characters, at most 64; a fresh one if nothing is left."""
    text = given.decode("ascii", "replace") if isinstance(given, bytes) else given or ""
    return _NOT_IN_ID.sub("", text)[:_MAX_ID] or uuid.uuid4().hex


class _Call:
    """One call at the boundary."""

    def __init__(self, method: str, request_id: str, authorized: bool, message_seconds: float) -> None:
        self.method = method
        self.request_id = request_id
        self.authorized = authorized
        self._message_seconds = message_seconds
        self.client: str | None = None
        """As a peer has said it; None where token and user tell."""
        self.token = ""
        self.tenant = ""
        self.user = ""

    async def enter(self, context: Any) -> None:
        """Begin the call in its own task; refuse it if it must not run."""
        logs.request_id.set(self.request_id)
        if self.client is None:
            name_client(self.token, self.user, self.tenant)
        else:
            client.set(self.client)
        if not self.authorized:
            _logger.warning("%s refused: missing or wrong bearer token", self.method)
            await context.abort(
                grpc.StatusCode.UNAUTHENTICATED,
                "missing or wrong bearer token; send the metadata 'authorization: Bearer TOKEN'",
            )

    async def read(self, context: Any) -> Any:
        """The message of a call that has one. grpc itself would wait for it as long as its sender likes."""
        try:
            async with asyncio.timeout(self._message_seconds):
                message = await context.read()
        except TimeoutError:
            text = f"the message did not arrive within {self._message_seconds:g} s; send it faster"
            raise DeadlineError(text, code="request_timeout") from None
        if message is grpc.aio.EOF:
            raise InvalidRequestError("", "the call ended without a message", "send one")
        return message

    async def fail(self, error: Exception, context: Any) -> NoReturn:
        """End the call with the status that belongs to `error`."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        # A read or write failed in the core: the peer is gone, or this server is stopping. Nobody is left to tell.
        if isinstance(error, grpc.aio.InternalError):
            raise asyncio.CancelledError from error
        if context.done() or context.cancelled():
            _logger.info("%s: after its end: %s", self.method, logs.describe_exception(error))
            raise error
        if isinstance(error, OutriderError) and error.grpc_status != InternalError.grpc_status:
            _logger.info("%s refused: %s: %s", self.method, error.code, error.message)
            told = error
        else:
            error_id = secrets.token_hex(4)
            _logger.error("%s failed, error id %s", self.method, error_id, exc_info=error)
            told = InternalError(f"internal error, id {error_id}")
            if isinstance(error, OutriderError):
                told = InternalError(f"{error.message} (id {error_id})", code=error.code)
        code, message, metadata = status_from_error(told, self.request_id)
        await context.abort(code, message, metadata)
        raise AssertionError("unreachable: abort always raises")


def _wrap(handler: Any, call: _Call, lenient: bool) -> grpc.RpcMethodHandler[Any, Any]:
    """The same handler with the boundary around it, with as many answers."""
    if not call.authorized:
        # As a stream, whatever it is: `enter` refuses it before anything that it sends is read.
        return grpc.stream_stream_rpc_method_handler(_streaming(handler, call, streams=True))
    decode = handler.request_deserializer
    if decode is not None:
        decode = strict(decode, allow_unknown=lenient)
    codecs = {"request_deserializer": decode, "response_serializer": handler.response_serializer}
    # Where one message is sent, it is a stream of one: only so can it be read with a time limit.
    streams = handler.request_streaming
    if handler.response_streaming:
        behaviour = handler.stream_stream if streams else handler.unary_stream
        return grpc.stream_stream_rpc_method_handler(_streaming(behaviour, call, streams), **codecs)
    behaviour = handler.stream_unary if streams else handler.unary_unary
    return grpc.stream_unary_rpc_method_handler(_unary(behaviour, call, streams), **codecs)


def _unary(behaviour: Any, call: _Call, streams: bool) -> Callable[[Any, Any], Awaitable[Any]]:
    async def respond(requests: Any, context: Any) -> Any:
        try:
            await call.enter(context)
            return await behaviour(requests if streams else await call.read(context), context)
        except Exception as error:
            await call.fail(error, context)

    return respond


def _streaming(behaviour: Any, call: _Call, streams: bool) -> Callable[[Any, Any], Awaitable[None]]:
    # Written with context.write, not as a generator: when the call is cancelled during a write, the handler's own
    # generator is closed at once, so its `finally` frees what the call held instead of waiting for the collector.
    async def respond(requests: Any, context: Any) -> None:
        try:
            await call.enter(context)
            result = behaviour(requests if streams else await call.read(context), context)
            if not hasattr(result, "__aiter__"):
                await result
                return
            async with aclosing(result) as responses:
                async for response in responses:
                    await context.write(response)
        except Exception as error:
            await call.fail(error, context)

    return respond

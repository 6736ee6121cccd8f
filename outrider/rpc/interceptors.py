"""The boundary that every call passes: request id, token, strict decoding, and exceptions turned into statuses."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from outrider import logs
from outrider.errors import DeadlineError, InternalError, InvalidRequestError, OutriderError, UnauthenticatedError
from outrider.rpc.call import (
    AUTHORIZATION_KEY,
    CLIENT_KEY,
    REQUEST_ID_KEY,
    USER_KEY,
    clean_client,
    clean_request_id,
    client,
    name_client,
)
from outrider.rpc.credentials import NO_TOKENS, Tokens, TokenSource, matching_token
from outrider.rpc.status import status_from_error
from outrider.rpc.transport import DEFAULT_MAX_MESSAGE_BYTES

_HEALTH_PREFIX = "/grpc.health.v1.Health/"
_OWN_PREFIX = "/outrider."

_Deserializer = Callable[[bytes], Any]
_LENGTH_DELIMITED = 2
_FIXED_SIZES = {1: 8, 5: 4}
_MAX_PARTS = 4096
"""Most messages or fields of a request examined to find the wrong one, since decoding runs in the event loop."""
_MAX_UNKNOWN_BYTES = 65536
_REFUSAL_LOG_SECONDS = 10.0
_UNAUTHENTICATED = UnauthenticatedError(
    "", "missing or wrong bearer token", "send the metadata 'authorization: Bearer TOKEN'"
)

_logger = logs.get_logger(__name__)


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler. A request of one message is read here, and refused if it does not arrive in time.

    In a request stream each message is decoded when it is read, so `InvalidRequestError` is raised from the handler's
    own `async for` or `context.read()`; a handler that reads in a separate task must pass the error on to its caller.
    """

    def __init__(
        self,
        *,
        auth_tokens: TokenSource = NO_TOKENS,
        allow_unknown_fields: Collection[str] = (),
        for_peers: bool = False,
        message_seconds: float = 30.0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        on_refused: Callable[[OutriderError], None] | None = None,
    ) -> None:
        """With `for_peers`, callers may say on whose behalf they call.

        `on_refused` is called for calls that are refused before a handler gets them.
        """
        self.message_seconds = message_seconds
        self.max_message_bytes = max_message_bytes
        self.on_refused = on_refused
        self.refusal_warnings = logs.ThrottledWarnings(_logger, _REFUSAL_LOG_SECONDS)
        """Warnings of calls without a valid token, throttled: a caller with a wrong token retries forever."""
        self._auth_tokens = auth_tokens
        self._allow_unknown_fields = frozenset(allow_unknown_fields)
        self._for_peers = for_peers

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of the call with the boundary around it; None (an unknown method) stays None."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        tokens = self._auth_tokens.current()
        token = _sent_token(metadata, tokens)
        authorized = token is not None or not tokens or method.startswith(_HEALTH_PREFIX)
        call = _BoundaryCall(self, method, clean_request_id(metadata.get(REQUEST_ID_KEY)), authorized)
        if self._for_peers:
            call.client = clean_client(metadata.get(CLIENT_KEY))
        else:
            # A single token does not tell clients apart.
            if token is not None and len(tokens) > 1:
                call.token, call.tenant = token.decode(), tokens[token]
            call.user = str(metadata.get(USER_KEY, ""))
        lenient = method in self._allow_unknown_fields or not method.startswith(_OWN_PREFIX)
        return _wrap(handler, call, lenient)


def _sent_token(metadata: dict[str, Any], tokens: Tokens) -> bytes | None:
    given = metadata.get(AUTHORIZATION_KEY, "")
    return matching_token(given if isinstance(given, bytes) else given.encode(), tokens)


@dataclass(slots=True)
class _BoundaryCall:
    """One call at the boundary."""

    boundary: BoundaryInterceptor
    method: str
    request_id: str
    authorized: bool
    client: str | None = None
    """The client that a peer names; None if token and user determine it."""
    token: str = ""
    tenant: str = ""
    user: str = ""

    async def enter(self, context: Any) -> None:
        """Set the call's context in its own task; abort the call if it is not authorized."""
        logs.request_id.set(self.request_id)
        if self.client is None:
            name_client(self.token, self.user, self.tenant)
        else:
            client.set(self.client)
        if not self.authorized:
            self.boundary.refusal_warnings.warn("%s refused: missing or wrong bearer token", self.method)
            self._count(_UNAUTHENTICATED)
            await context.abort(*status_from_error(_UNAUTHENTICATED, self.request_id))

    async def read(self, context: Any) -> Any:
        """Read the message of a call that has one, within a time limit, which grpc itself does not have."""
        try:
            return await self._read(context)
        except OutriderError as error:
            self._count(error)
            raise

    async def _read(self, context: Any) -> Any:
        seconds, most = self.boundary.message_seconds, self.boundary.max_message_bytes
        try:
            async with asyncio.timeout(seconds):
                message = await context.read()
        except TimeoutError:
            text = f"the message did not arrive within {seconds:g} s; send it faster"
            raise DeadlineError(text, code="request_timeout") from None
        if message is grpc.aio.EOF:
            # If the message was too large, grpc reports that to the sender, but not here.
            text = f"the call ended without a message of at most {most} bytes"
            raise InvalidRequestError("", text, "send one", code="no_message")
        return message

    def _count(self, error: OutriderError) -> None:
        if self.boundary.on_refused is not None:
            self.boundary.on_refused(error)

    async def fail(self, error: Exception, context: Any) -> NoReturn:
        """End the call with the status that belongs to `error`."""
        if isinstance(error, grpc.aio.AbortError):
            raise error
        # A read or write failed in the core: the peer is gone, or this server is stopping. No status can be sent.
        if isinstance(error, grpc.aio.InternalError):
            raise asyncio.CancelledError from error
        if context.done() or context.cancelled():
            _logger.info("%s failed after its end: %s", self.method, logs.describe_exception(error))
            raise error
        if isinstance(error, OutriderError) and error.grpc_status != InternalError.grpc_status:
            _logger.info("%s refused: %s: %s", self.method, error.code, error.message)
            public_error = error
        else:
            error_id = secrets.token_hex(4)
            _logger.error("%s failed, error id %s", self.method, error_id, exc_info=error)
            public_error = InternalError(f"internal error, id {error_id}")
            if isinstance(error, OutriderError):
                public_error = InternalError(f"{error.message} (id {error_id})", code=error.code)
        code, message, metadata = status_from_error(public_error, self.request_id)
        try:
            await context.abort(code, message, metadata)
        except grpc.aio.InternalError as lost:  # the peer is gone, but the context was not marked yet
            raise asyncio.CancelledError from lost
        raise AssertionError("unreachable: abort always raises")


def _wrap(handler: Any, call: _BoundaryCall, lenient: bool) -> grpc.RpcMethodHandler[Any, Any]:
    """Wrap the handler with the boundary, as a stream handler with as many answers as before.

    On the wire a single message is a stream of one, either way, and only a stream can be read with a time limit.
    """
    decode = handler.request_deserializer
    if not call.authorized:
        decode = None  # `enter` refuses the call before any of its messages is read
    elif decode is not None:
        decode = strict(decode, allow_unknown=lenient)
    return grpc.stream_stream_rpc_method_handler(
        _responder(handler, call), request_deserializer=decode, response_serializer=handler.response_serializer
    )


def _responder(handler: Any, call: _BoundaryCall) -> Callable[[Any, Any], Awaitable[None]]:
    behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream

    # Written with context.write, not as a generator: when the call is cancelled during a write, the handler's own
    # generator is closed at once, so its `finally` frees what the call held instead of waiting for the collector.
    async def respond(requests: Any, context: Any) -> None:
        try:
            await call.enter(context)
            result = behaviour(requests if handler.request_streaming else await call.read(context), context)
            if hasattr(result, "__aiter__"):
                async with aclosing(result) as responses:
                    async for response in responses:
                        await context.write(response)
                return
            response = await result
            if not handler.response_streaming:
                await context.write(response)
        except Exception as error:
            await call.fail(error, context)

    return respond


def strict(deserialize: _Deserializer, *, allow_unknown: bool) -> _Deserializer:
    """Wrap a request deserializer: malformed bytes and, unless allowed, unknown fields raise InvalidRequestError."""
    message_type = getattr(deserialize, "__self__", None)
    descriptor = getattr(message_type, "DESCRIPTOR", None)

    def decode(data: bytes) -> Any:
        try:
            message = deserialize(data)
        except DecodeError as error:
            raise _malformed(descriptor, data) from error
        if not allow_unknown and isinstance(message, Message):
            check_known(message)
        return message

    return decode


def check_known(message: Message) -> None:
    """Raise InvalidRequestError if `message`, or one inside it, carries a field that its type does not have."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    num_unknown = message.ByteSize() - known.ByteSize()
    if not num_unknown:
        return
    fix = "remove it, or use a server that knows it"
    # The rest finds the field's name, which would take too long with millions of parts or unknown fields.
    found = None if num_unknown > _MAX_UNKNOWN_BYTES else _first_unknown(message)
    if found is None:
        name = message.DESCRIPTOR.full_name
        raise InvalidRequestError("", f"{num_unknown} bytes are no fields of {name}", fix, code="unknown_field")
    path, number, owner = found
    raise InvalidRequestError(
        f"{path}{number}", f"{owner.DESCRIPTOR.full_name} has no field number {number}", fix, code="unknown_field"
    )


def _first_unknown(message: Message) -> tuple[str, int, Message] | None:
    """Return path, number and message of the first unknown field among the first _MAX_PARTS messages."""
    for path, part in islice(_all_parts(message, ""), _MAX_PARTS):
        unknown: Any = UnknownFieldSet(part)  # the published types do not say that it can be iterated
        for field in unknown:
            return path, field.field_number, part
    return None


def _all_parts(message: Message, path: str) -> Iterator[tuple[str, Message]]:
    """Yield `message` and all messages inside it, each with its path."""
    yield path, message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for name, part in _parts(field, value):
                yield from _all_parts(part, f"{path}{name}.")


def _parts(field: FieldDescriptor, value: Any) -> Iterator[tuple[str, Message]]:
    """Yield the messages in a field's value, each with its name."""
    if isinstance(value, Message):
        yield field.name, value
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        for key in value:
            if isinstance(value[key], Message):
                yield f"{field.name}[{key}]", value[key]
    else:
        for index, part in enumerate(value):
            yield f"{field.name}[{index}]", part


def _malformed(descriptor: Descriptor | None, data: bytes) -> InvalidRequestError:
    name, path = "the request", None
    if descriptor is not None:
        name = descriptor.full_name
        path = next(filter(None, islice(_texts(descriptor, data, ""), _MAX_PARTS)), None)
    if path is not None:
        return InvalidRequestError(path, "is not valid UTF-8", "encode the text as UTF-8", code="invalid_utf8")
    return InvalidRequestError(
        "", f"the bytes are not a valid {name}", "send a whole message of that type", code="malformed_message"
    )


def _texts(descriptor: Descriptor, data: bytes, prefix: str) -> Iterator[str]:
    """Yield for each field in `data` its name if it is a string that is not UTF-8, else ""; stop at malformed bytes."""
    try:
        Empty.FromString(data)  # all fields are unknown to Empty, so this checks only that the bytes are well-formed
    except DecodeError:
        return
    for number, wire_type, value in _split(data):
        yield ""
        field = descriptor.fields_by_number.get(number)
        if field is None or wire_type != _LENGTH_DELIMITED:
            continue
        if field.type == FieldDescriptor.TYPE_STRING:
            try:
                value.decode("utf-8")
            except UnicodeDecodeError:
                yield prefix + field.name
        elif field.message_type is not None:
            yield from _texts(field.message_type, value, f"{prefix}{field.name}.")


def _split(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield each field's number, wire type and value (empty if not length-delimited), up to the first group."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        size = _FIXED_SIZES.get(wire_type, 0)
        if wire_type == 0:
            _, at = _varint(data, at)
        elif wire_type == _LENGTH_DELIMITED:
            size, at = _varint(data, at)
        elif not size:
            return
        yield number, wire_type, data[at : at + size] if wire_type == _LENGTH_DELIMITED else b""
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at `at` and the offset behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7

"""Convert OutriderError to a gRPC status with google.rpc details, and back.

The details are ErrorInfo always (reason = the error's code, domain = "outrider"), BadRequest for invalid requests, and
RetryInfo if trying later helps.
"""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from outrider.errors import (
    ContextLengthError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    OverloadedError,
    UnavailableError,
)

DOMAIN = "outrider"
DETAILS_KEY = "grpc-status-details-bin"

# Peers refuse more than 8 KB of metadata, which can hold the message up to four times, percent-encoded or in base64.
_MAX_TEXT_BYTES = 640
_MAX_WORD_BYTES = 128

_NO_GRPC = (
    "the server there does not speak gRPC, so it is probably a REST or metrics port; give the gRPC port, which is a "
    "gateway's --address, 50051 by default"
)

Metadata = tuple[tuple[str, str | bytes], ...]


def status_from_error(error: OutriderError, request_id: str = "") -> tuple[grpc.StatusCode, str, Metadata]:
    """Return status code, message and trailing metadata of an error, ready for `context.abort`."""
    code = grpc.StatusCode[error.grpc_status]
    info = error_details_pb2.ErrorInfo(reason=_clip(error.code, _MAX_WORD_BYTES), domain=DOMAIN)
    if request_id:
        info.metadata["request_id"] = _clip(request_id, _MAX_WORD_BYTES)
    status = status_pb2.Status(code=code.value[0], message=_clip(error.message, _MAX_TEXT_BYTES))
    field = getattr(error, "field", "")
    if isinstance(error, InvalidRequestError):
        info.metadata["fix"] = _clip(error.fix, _MAX_TEXT_BYTES)
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_clip(field, _MAX_WORD_BYTES), description=_clip(error.problem, _MAX_TEXT_BYTES)
        )
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    elif field:
        info.metadata["field"] = _clip(field, _MAX_WORD_BYTES)
    retry_after = getattr(error, "retry_after", None)
    if retry_after is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(retry_after * 1e9))
        status.details.add().Pack(retry)
    status.details.add().Pack(info)
    return code, status.message, ((DETAILS_KEY, status.SerializeToString()),)


def error_from_rpc(
    error: grpc.aio.AioRpcError, peer: str = "the service", *, names_addresses: bool = True
) -> OutriderError:
    """Convert a failed call's error for its caller, to raise or to report; `peer` names the called side in messages.

    `names_addresses`: whether messages may quote gRPC's details of connections, which can name addresses and sockets.

    An error that an Outrider service raised comes back as the same class with field, code and retry_after. Other errors
    are converted by status: a peer that is down, gone in mid-call or too slow is an UnavailableError (code
    "peer_timeout" for a deadline, "peer_cancelled" if the peer's side ended the call), a full one an OverloadedError.
    A call that this side cancelled never gets here: grpc.aio raises asyncio.CancelledError for it.
    """
    status = _decode_status(error)
    info = _detail(status, error_details_pb2.ErrorInfo)
    # Refused credentials are a fault of this side's setup, not of the request: `_from_status` says so.
    is_unauthenticated = error.code() is grpc.StatusCode.UNAUTHENTICATED
    if status is not None and info is not None and info.domain == DOMAIN and not is_unauthenticated:
        return _from_details(error.code(), status, info)
    return _from_status(error.code(), details_of(error), peer, names_addresses)


def details_of(error: grpc.aio.AioRpcError) -> str:
    """Return gRPC's details of a failed call; explain them if the other end speaks HTTP/1 or TLS."""
    text = error.details() or ""
    if "Expected SETTINGS frame" in text or "missing selected ALPN" in text:
        return _NO_GRPC
    is_shut = text.startswith("failed to connect") and text.endswith("Socket closed")
    return f"{text}; perhaps it requires TLS or a client certificate" if is_shut else text


def _from_details(code: grpc.StatusCode, status: status_pb2.Status, info: error_details_pb2.ErrorInfo) -> OutriderError:
    word = info.reason
    retry = _detail(status, error_details_pb2.RetryInfo)
    retry_after = retry.retry_delay.ToNanoseconds() / 1e9 if retry is not None else 1.0
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        bad = _detail(status, error_details_pb2.BadRequest)
        violation = bad.field_violations[0] if bad is not None and bad.field_violations else None
        kind = ContextLengthError if word == ContextLengthError.code else InvalidRequestError
        if violation is None:
            return kind("", status.message, code=word)
        return kind(violation.field, violation.description, info.metadata.get("fix", ""), code=word)
    if code is grpc.StatusCode.NOT_FOUND:
        return NotFoundError(info.metadata.get("field", ""), status.message, code=word)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return OverloadedError(status.message, retry_after=retry_after, code=word)
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(status.message, retry_after=retry_after, code=word)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(status.message, code=word)
    return InternalError(status.message, code=word)


def _from_status(code: grpc.StatusCode, details: str, peer: str, names_addresses: bool) -> OutriderError:
    """Convert a status that no Outrider service wrote."""
    kind = grpc.StatusCode
    is_too_large = code is kind.RESOURCE_EXHAUSTED and "message larger than max" in details
    suffix = f": {_clip(details, _MAX_TEXT_BYTES)}" if details and (names_addresses or is_too_large) else ""
    if is_too_large:
        # The side that complains shows which message it was: a request sent or received, or an answer.
        if details.startswith(("SERVER: Received", "CLIENT: Sent")):
            return InvalidRequestError(
                "", f"the request is larger than {peer} takes{suffix}", "send less", code="request_too_large"
            )
        return InternalError(f"the answer of {peer} is larger than allowed{suffix}")
    if code is kind.UNAVAILABLE or _is_lost_connection(code, details):
        return UnavailableError(f"{peer} cannot be reached{suffix}")
    if code is kind.DEADLINE_EXCEEDED:
        return UnavailableError(f"{peer} did not answer in time", code="peer_timeout")
    if code is kind.CANCELLED:
        return UnavailableError(f"{peer} ended the call{suffix}", code="peer_cancelled")
    if code is kind.RESOURCE_EXHAUSTED:
        return OverloadedError(f"{peer} is overloaded{suffix}")
    if code in (kind.INVALID_ARGUMENT, kind.OUT_OF_RANGE):
        return InvalidRequestError("", details or f"{peer} refused the request")
    if code is kind.NOT_FOUND:
        return NotFoundError("", details or f"{peer} does not have it")
    if code in (kind.UNAUTHENTICATED, kind.PERMISSION_DENIED):
        return InternalError(f"{peer} refused the credentials{suffix}", code="peer_refused_credentials")
    if code is kind.UNIMPLEMENTED:
        return InternalError(f"{peer} does not know this call; run the same release on both sides{suffix}")
    return InternalError(f"{peer} failed: {code.name}{suffix}")


def _is_lost_connection(code: grpc.StatusCode, details: str) -> bool:
    """Whether this status means that the peer is gone: a stream that ends late shows it as INTERNAL or UNKNOWN."""
    if code is grpc.StatusCode.INTERNAL:
        # grpc.aio raises the second for a write that the end of the stream overtook.
        return "RST_STREAM" in details or details == "Internal error from Core"
    return code is grpc.StatusCode.UNKNOWN and "Stream removed" in details


def _decode_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                return None
            return status if status.code == error.code().value[0] else None
    return None


def _detail(status: status_pb2.Status | None, kind):  # type: ignore[no-untyped-def]
    for detail in status.details if status is not None else ():
        if detail.Is(kind.DESCRIPTOR):
            found = kind()
            detail.Unpack(found)
            return found
    return None


def _clip(text: str, max_bytes: int) -> str:
    """Return `text` as valid UTF-8 of at most `max_bytes` bytes, cut between characters."""
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode("utf-8")
    return data[: max_bytes - 3].decode("utf-8", "ignore") + "..."

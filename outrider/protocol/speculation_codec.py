"""Conversion between the messages of verify and draft services and protobuf, with checks of limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from outrider.errors import InvalidRequestError
from outrider.protocol.codec import StructCodec
from outrider.protocol.generation_codec import SAMPLING, decode_sampling, encode_grammar
from outrider.protocol.speculation import (
    FEATURE_ITEM_BYTES,
    MAX_FEATURE_BYTES,
    MAX_FEATURE_PIECES,
    Close,
    Commit,
    Decline,
    DeclineReason,
    DraftMessage,
    FeatureRing,
    Features,
    FeaturesAccept,
    FeaturesBegin,
    FeaturesReleased,
    FeaturesResponse,
    Grow,
    Hello,
    LineOffer,
    Open,
    Pause,
    ProjectionPart,
    Resume,
    VerifyMessage,
)
from outrider.sampling.params import SamplingParams
from outrider.tree.handshake import MAX_FEATURE_LAYERS
from outrider.v1 import draft_pb2

MAX_NODES_PER_MESSAGE = 4096
"""A `Grow` with more nodes than this is malformed."""

MAX_LINE_FIELD = 256
"""Most characters in a field of a `Line`."""

MAX_EVENTS_AT_ONCE = 256
"""Most events to decode in one go: a message may hold millions, and other streams wait meanwhile."""

_MAX_POSITIONS = 1 << 31

Batch = TypeVar("Batch", draft_pb2.DraftServiceSpeculateRequest, draft_pb2.DraftServiceSpeculateResponse)


def _decode_target_sampling(opened: draft_pb2.Open) -> SamplingParams:
    try:
        return decode_sampling(opened)
    except InvalidRequestError:
        # Without a grammar that this version does not know, guesses are only worse.
        opened.ClearField("grammar")
        return decode_sampling(opened)


def _check_hello(message: draft_pb2.Hello) -> None:
    for field in ("host", "path", "token"):
        if len(getattr(message.line, field)) > MAX_LINE_FIELD:
            raise InvalidRequestError(f"hello.line.{field}", f"is longer than {MAX_LINE_FIELD} characters")


def _check_open(message: draft_pb2.Open) -> None:
    count = len(message.token_ids) // 4
    if not 1 <= message.prompt_len <= count:
        raise InvalidRequestError("open.prompt_len", f"{message.prompt_len} is not within 1 to {count} tokens")


def _check_commit(message: draft_pb2.Commit) -> None:
    if not message.token_ids:
        raise InvalidRequestError("commit.token_ids", "is empty", "commit at least one token")


def _check_grow(message: draft_pb2.Grow) -> None:
    count = max(len(message.token_ids), len(message.parents), len(message.scores)) // 4
    count = max(count, len(message.sources))
    if count > MAX_NODES_PER_MESSAGE:
        raise InvalidRequestError("grow.token_ids", f"{count} nodes, at most {MAX_NODES_PER_MESSAGE}")


_CHECKS: dict[str, Callable[[Any], None]] = {
    "hello": _check_hello,
    "open": _check_open,
    "commit": _check_commit,
    "grow": _check_grow,
}
"""Checks before a message is decoded, by the field that holds it; each raises InvalidRequestError."""

_REASONS = {reason.value: reason for reason in DeclineReason}

_CODECS: dict[str, StructCodec[Any, Any]] = {
    "hello": StructCodec(Hello, draft_pb2.Hello, nested={"line": StructCodec(LineOffer, draft_pb2.Line)}),
    "open": StructCodec(
        Open,
        draft_pb2.Open,
        packed={"token_ids": "i"},
        encoders={
            "sampling": lambda opened: SAMPLING.encode(opened.sampling),
            "choice_index": lambda opened: opened.sampling.choice_index,
            "grammar": lambda opened: encode_grammar(opened.sampling.grammar),
        },
        decoders={"sampling": _decode_target_sampling},
    ),
    "commit": StructCodec(Commit, draft_pb2.Commit, packed={"token_ids": "i"}),
    "pause": StructCodec(Pause, draft_pb2.Pause),
    "resume": StructCodec(Resume, draft_pb2.Resume),
    "close": StructCodec(Close, draft_pb2.Close),
    "grow": StructCodec(Grow, draft_pb2.Grow, packed={"parents": "I", "token_ids": "i", "scores": "f"}),
    "decline": StructCodec(
        Decline,
        draft_pb2.Decline,
        encoders={"reason": lambda decline: decline.reason.value},
        decoders={"reason": lambda message: _REASONS.get(message.reason, DeclineReason.UNSPECIFIED)},
    ),
    "accept": StructCodec(FeaturesAccept, draft_pb2.FeaturesAccept),
    "released": StructCodec(FeaturesReleased, draft_pb2.FeaturesReleased),
    "projection": StructCodec(ProjectionPart, draft_pb2.FeatureProjection),
}
"""Codecs of the structs that are alternatives in a message, by the field that holds them there."""
_FIELDS = {codec.struct: field for field, codec in _CODECS.items()}


def encode_verify(messages: Iterable[VerifyMessage]) -> draft_pb2.DraftServiceSpeculateRequest:
    """Encode messages from verify to draft, in order."""
    events = [draft_pb2.VerifyEvent(**_encode_event(message)) for message in messages]
    return draft_pb2.DraftServiceSpeculateRequest(events=events)


def encode_draft(messages: Iterable[DraftMessage]) -> draft_pb2.DraftServiceSpeculateResponse:
    """Encode messages from draft to verify, in order."""
    events = [draft_pb2.DraftEvent(**_encode_event(message)) for message in messages]
    return draft_pb2.DraftServiceSpeculateResponse(events=events)


def decode_verify(batch: draft_pb2.DraftServiceSpeculateRequest) -> list[VerifyMessage]:
    """Decode messages from verify to draft. Raises InvalidRequestError for a malformed array or an unknown event."""
    return [_decode_event(event) for event in batch.events]


def decode_draft(batch: draft_pb2.DraftServiceSpeculateResponse) -> list[DraftMessage]:
    """Decode messages from draft to verify. Raises InvalidRequestError for a malformed array or an unknown event."""
    return [_decode_event(event) for event in batch.events]


def in_parts(batch: Batch) -> Iterator[Batch]:
    """Split a batch into messages of at most `MAX_EVENTS_AT_ONCE` events; nearly all batches are one such message."""
    if len(batch.events) <= MAX_EVENTS_AT_ONCE:
        yield batch
        return
    for start in range(0, len(batch.events), MAX_EVENTS_AT_ONCE):
        yield type(batch)(events=batch.events[start : start + MAX_EVENTS_AT_ONCE])


def _encode_event(message: VerifyMessage | DraftMessage | FeaturesResponse) -> dict[str, Any]:
    field = _FIELDS[type(message)]
    return {field: _CODECS[field].encode(message)}


def _decode_event(event: draft_pb2.VerifyEvent | draft_pb2.DraftEvent | draft_pb2.DraftServiceFeaturesResponse) -> Any:
    kind = event.WhichOneof("event")
    if kind is None:
        raise InvalidRequestError("event", "is empty or not known to this version")
    message = getattr(event, kind)
    if kind in _CHECKS:
        _CHECKS[kind](message)
    return _CODECS[kind].decode(message)


_RING = StructCodec(FeatureRing, draft_pb2.FeatureRing)
_BEGIN = StructCodec(FeaturesBegin, draft_pb2.FeaturesBegin, nested={"ring": _RING})
_FEATURES = StructCodec(
    Features,
    draft_pb2.Features,
    encoders={"data": lambda features: bytes(features.data)},
    decoders={"data": lambda message: memoryview(message.data), "dtype": lambda message: ""},
    local=("projected", "rows"),
)


def encode_begin(begin: FeaturesBegin) -> draft_pb2.DraftServiceFeaturesRequest:
    """Encode verify's first message on the features stream."""
    return draft_pb2.DraftServiceFeaturesRequest(begin=_BEGIN.encode(begin))


def encode_features(batch: Sequence[Features]) -> draft_pb2.DraftServiceFeaturesRequest:
    """Encode features; several (within MAX_FEATURE_PIECES, MAX_FEATURE_BYTES) only for a draft that takes batches."""
    pieces = [_FEATURES.encode(features) for features in batch]
    if len(pieces) == 1:
        return draft_pb2.DraftServiceFeaturesRequest(features=pieces[0])
    return draft_pb2.DraftServiceFeaturesRequest(batch=draft_pb2.FeaturesBatch(features=pieces))


def encode_response(response: FeaturesResponse) -> draft_pb2.DraftServiceFeaturesResponse:
    """Encode a draft's message on the features stream."""
    return draft_pb2.DraftServiceFeaturesResponse(**_encode_event(response))


def decode_response(message: draft_pb2.DraftServiceFeaturesResponse) -> FeaturesResponse:
    """Decode a draft's message on the features stream. Raises InvalidRequestError for one that is not known here."""
    response: FeaturesResponse = _decode_event(message)
    return response


def decode_begin(message: draft_pb2.DraftServiceFeaturesRequest) -> FeaturesBegin:
    """Decode verify's first message on the features stream. Raises InvalidRequestError if it is malformed."""
    if message.WhichOneof("event") != "begin":
        raise InvalidRequestError("event", "is no begin", "begin the stream with one")
    begin = message.begin
    if begin.dtype not in FEATURE_ITEM_BYTES:
        known = ", ".join(FEATURE_ITEM_BYTES)
        raise InvalidRequestError("begin.dtype", f"{begin.dtype[:32]!r} is not known", f"use one of {known}")
    if not 1 <= len(begin.layers) <= MAX_FEATURE_LAYERS:
        raise InvalidRequestError("begin.layers", f"{len(begin.layers)} layers, from 1 to {MAX_FEATURE_LAYERS}")
    row_bytes = begin.width * FEATURE_ITEM_BYTES[begin.dtype]
    if not 1 <= row_bytes <= MAX_FEATURE_BYTES:
        raise InvalidRequestError("begin.width", f"{begin.width} values do not fit {MAX_FEATURE_BYTES} bytes")
    if begin.wants_projection and not begin.projected:
        raise InvalidRequestError("begin.wants_projection", "is set for features that are not projected")
    return _BEGIN.decode(begin)


def decode_pieces(
    message: draft_pb2.DraftServiceFeaturesRequest, begin: FeaturesBegin, ring_bytes: int
) -> list[tuple[int, Features | None]]:
    """Decode one message's features, alone or in a batch: return sequence numbers and features, None for invalid ones.

    `begin` is the stream's, `ring_bytes` is 0 if it has no ring. If a message is invalid as a whole, return only its
    last sequence number; 0 if there is none.
    """
    kind = message.WhichOneof("event")
    given = [message.features] if kind == "features" else message.batch.features if kind == "batch" else []
    if not 1 <= len(given) <= MAX_FEATURE_PIECES:
        return [(given[-1].sequence if given else 0, None)]
    pieces: list[tuple[int, Features | None]] = []
    for piece in given:
        try:
            pieces.append((piece.sequence, _decode_features(piece, begin, ring_bytes)))
        except InvalidRequestError:
            pieces.append((piece.sequence, None))
    if sum(piece.count for _, piece in pieces if piece is not None) * begin.row_bytes > MAX_FEATURE_BYTES:
        return [(given[-1].sequence, None)]
    return pieces


def _decode_features(message: draft_pb2.Features, begin: FeaturesBegin, ring_bytes: int) -> Features:
    """Decode features of a stream that began with `begin`. Raises InvalidRequestError if sizes do not match."""
    features = replace(_FEATURES.decode(message), dtype=begin.dtype, projected=begin.projected)
    if not features.count or features.start + features.count > _MAX_POSITIONS:
        raise InvalidRequestError("features.count", f"{features.count} positions from {features.start} on are absurd")
    size, offset = features.count * begin.row_bytes, features.ring_offset
    if size > MAX_FEATURE_BYTES:
        raise InvalidRequestError("features.count", f"{size} bytes, at most {MAX_FEATURE_BYTES}")
    if offset is None and len(features.data) != size:
        raise InvalidRequestError(
            "features.data", f"{len(features.data)} bytes are not {features.count} x {begin.width} values"
        )
    if offset is not None and (features.data or offset + size > ring_bytes):
        raise InvalidRequestError("features.ring_offset", f"{offset} and {size} bytes do not lie in {ring_bytes}")
    return features

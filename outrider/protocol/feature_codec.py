"""Between the messages of the features stream and protobuf."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import InvalidRequestError
from outrider.protocol.messages import (
    FEATURE_ITEM_BYTES,
    MAX_FEATURE_BYTES,
    MAX_FEATURE_PIECES,
    FeatureRing,
    Features,
    FeaturesAccept,
    FeaturesBegin,
    FeaturesReleased,
)
from outrider.tree.handshake import MAX_FEATURE_LAYERS
from outrider.tree.projection import ProjectionPart
from outrider.v1 import draft_pb2

_MAX_POSITIONS = 1 << 31


def encode_begin(begin: FeaturesBegin) -> draft_pb2.DraftServiceFeaturesRequest:
    """The first message of verify."""
    ring = None
    if begin.ring is not None:
        given = begin.ring
        ring = draft_pb2.FeatureRing(
            host=given.host,
            device=given.device,
            handle=given.handle,
            num_bytes=given.num_bytes,
            magic=given.magic,
        )
    message = draft_pb2.FeaturesBegin(
        token=begin.token,
        layers=begin.layers,
        width=begin.width,
        dtype=begin.dtype,
        ring=ring,
        projected=begin.projected,
        wants_projection=begin.wants_projection,
    )
    return draft_pb2.DraftServiceFeaturesRequest(begin=message)


def encode_features(features: Features) -> draft_pb2.DraftServiceFeaturesRequest:
    """Features; their dtype is the stream's."""
    return draft_pb2.DraftServiceFeaturesRequest(features=_encode(features))


def encode_batch(batch: Sequence[Features]) -> draft_pb2.DraftServiceFeaturesRequest:
    """Several in one message; within MAX_FEATURE_PIECES and MAX_FEATURE_BYTES, for a draft that takes them so."""
    pieces = draft_pb2.FeaturesBatch(features=[_encode(features) for features in batch])
    return draft_pb2.DraftServiceFeaturesRequest(batch=pieces)


def _encode(features: Features) -> draft_pb2.Features:
    return draft_pb2.Features(
        request=features.request,
        start=features.start,
        count=features.count,
        final=features.final,
        sequence=features.sequence,
        data=bytes(features.data),
        ring_offset=features.ring_offset,
    )


def encode_accept(accept: FeaturesAccept) -> draft_pb2.DraftServiceFeaturesResponse:
    """The first message of the draft."""
    message = draft_pb2.FeaturesAccept(
        uses_ring=accept.uses_ring,
        window=accept.window,
        projects=accept.projects,
        takes_batches=accept.takes_batches,
    )
    return draft_pb2.DraftServiceFeaturesResponse(accept=message)


def encode_released(released: FeaturesReleased) -> draft_pb2.DraftServiceFeaturesResponse:
    """A release."""
    return draft_pb2.DraftServiceFeaturesResponse(released=draft_pb2.FeaturesReleased(through=released.through))


def encode_projection(part: ProjectionPart) -> draft_pb2.DraftServiceFeaturesResponse:
    """A part of a projection."""
    message = draft_pb2.FeatureProjection(
        num_columns=part.num_columns, dtype=part.dtype, offset=part.offset, data=part.data
    )
    return draft_pb2.DraftServiceFeaturesResponse(projection=message)


def decode_begin(message: draft_pb2.DraftServiceFeaturesRequest) -> FeaturesBegin:
    """Raises InvalidRequestError for what is no beginning of a features stream."""
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
    ring = None
    if begin.HasField("ring"):
        given = begin.ring
        ring = FeatureRing(given.host, given.device, given.handle, given.num_bytes, given.magic)
    if begin.wants_projection and not begin.projected:
        raise InvalidRequestError("begin.wants_projection", "is set for features that are not projected")
    return FeaturesBegin(
        begin.token, tuple(begin.layers), begin.width, begin.dtype, ring, begin.projected, begin.wants_projection
    )


def decode_features(message: draft_pb2.DraftServiceFeaturesRequest, begin: FeaturesBegin, ring_bytes: int) -> Features:
    """Features of a stream that began with `begin`; `ring_bytes` 0 when it has no ring.

    Raises InvalidRequestError where sizes do not fit each other.
    """
    if message.WhichOneof("event") != "features":
        raise InvalidRequestError("event", "is no features, or not known to this version")
    return _decode(message.features, begin, ring_bytes)


def decode_pieces(
    message: draft_pb2.DraftServiceFeaturesRequest, begin: FeaturesBegin, ring_bytes: int
) -> list[tuple[int, Features | None]]:
    """Numbers and features of what is in one message, alone or in a batch; None for what makes no sense.

    Of a message that makes no sense as a whole only the last number is told; 0 where there is none.
    """
    kind = message.WhichOneof("event")
    given = [message.features] if kind == "features" else message.batch.features if kind == "batch" else []
    if not 1 <= len(given) <= MAX_FEATURE_PIECES:
        return [(given[-1].sequence if given else 0, None)]
    pieces = [(piece.sequence, _decode_or_none(piece, begin, ring_bytes)) for piece in given]
    row_bytes = begin.width * FEATURE_ITEM_BYTES[begin.dtype]
    if sum(piece.count for _, piece in pieces if piece is not None) * row_bytes > MAX_FEATURE_BYTES:
        return [(given[-1].sequence, None)]
    return pieces


def _decode_or_none(part: draft_pb2.Features, begin: FeaturesBegin, ring_bytes: int) -> Features | None:
    try:
        return _decode(part, begin, ring_bytes)
    except InvalidRequestError:
        return None


def _decode(part: draft_pb2.Features, begin: FeaturesBegin, ring_bytes: int) -> Features:
    if not part.count or part.start + part.count > _MAX_POSITIONS:
        raise InvalidRequestError("features.count", f"{part.count} positions from {part.start} on are absurd")
    size = part.count * begin.width * FEATURE_ITEM_BYTES[begin.dtype]
    offset = part.ring_offset if part.HasField("ring_offset") else None
    if size > MAX_FEATURE_BYTES:
        raise InvalidRequestError("features.count", f"{size} bytes, at most {MAX_FEATURE_BYTES}")
    if offset is None and len(part.data) != size:
        raise InvalidRequestError(
            "features.data", f"{len(part.data)} bytes are not {part.count} x {begin.width} values"
        )
    if offset is not None and (part.data or offset + size > ring_bytes):
        raise InvalidRequestError("features.ring_offset", f"{offset} and {size} bytes do not lie in {ring_bytes}")
    return Features(
        part.request,
        part.start,
        part.count,
        part.final,
        part.data,
        begin.dtype,
        part.sequence,
        ring_offset=offset,
        projected=begin.projected,
    )


def decode_response(
    message: draft_pb2.DraftServiceFeaturesResponse,
) -> FeaturesAccept | FeaturesReleased | ProjectionPart:
    """What a draft says on the stream. Raises InvalidRequestError for what this version does not know."""
    kind = message.WhichOneof("event")
    if kind == "accept":
        accept = message.accept
        return FeaturesAccept(accept.uses_ring, accept.window, accept.projects, accept.takes_batches)
    if kind == "released":
        return FeaturesReleased(message.released.through)
    if kind == "projection":
        part = message.projection
        return ProjectionPart(part.num_columns, part.dtype, part.offset, part.data)
    raise InvalidRequestError("event", "is empty or not known to this version")

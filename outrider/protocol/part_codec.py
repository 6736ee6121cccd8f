"""Between messages of the streams of verify and draft, and parts of frames. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from outrider.host.frames import array_of, bytes_of
from outrider.protocol.messages import (
    Close,
    Commit,
    Decline,
    DeclineReason,
    DraftMessage,
    FeatureRing,
    Features,
    Grow,
    Hello,
    Open,
    Pause,
    Resume,
    VerifyMessage,
)
from outrider.protocol.parts import (
    ClosePart,
    CommitPart,
    DeclinePart,
    DraftPart,
    FeaturesPart,
    GrowPart,
    OpenPart,
    PausePart,
    ResumePart,
    RingFrame,
    UnexpectedPart,
    VerifyPart,
)


def pack_drafts(messages: Sequence[DraftMessage]) -> list[DraftPart]:
    """What a draft sent, in order."""
    return [_pack_draft(message) for message in messages]


def unpack_drafts(parts: Sequence[DraftPart]) -> list[DraftMessage]:
    """What a draft sent, in order. Arrays cannot be written to."""
    return [_unpack_draft(part) for part in parts]


def pack_verify(messages: Sequence[VerifyMessage]) -> list[VerifyPart]:
    """Messages for a draft, in order. Raises TypeError for a Hello, which only the door sends."""
    return [_pack_verify(message) for message in messages]


def unpack_verify(parts: Sequence[VerifyPart]) -> list[VerifyMessage]:
    """Messages for a draft, in order. Arrays cannot be written to."""
    return [_unpack_verify(part) for part in parts]


def pack_features(messages: Sequence[Features]) -> list[FeaturesPart]:
    """Features for a draft, in order; their dtype is known at the other end."""
    return [
        FeaturesPart(
            *(part.request, part.start, part.count, part.final, part.sequence),
            data=cast(memoryview, part.data),
            ring_offset=part.ring_offset,
        )
        for part in messages
    ]


def unpack_features(parts: Sequence[FeaturesPart], dtype: str, *, projected: bool = False) -> list[Features]:
    """Features for a draft, in order; `dtype` and `projected` are the stream's."""
    return [
        Features(
            *(part.request, part.start, part.count, part.final, part.data, dtype, part.sequence),
            ring_offset=part.ring_offset,
            projected=projected,
        )
        for part in parts
    ]


def pack_ring(ring: FeatureRing | None) -> RingFrame | None:
    """A ring that verify offers, if it does."""
    return None if ring is None else RingFrame(ring.host, ring.device, ring.handle, ring.num_bytes, ring.magic)


def unpack_ring(frame: RingFrame | None) -> FeatureRing | None:
    """A ring that verify offers, if it does."""
    return None if frame is None else FeatureRing(frame.host, frame.device, frame.handle, frame.num_bytes, frame.magic)


def _pack_draft(message: DraftMessage) -> DraftPart:
    match message:
        case Grow():
            return GrowPart(
                message.request,
                message.epoch,
                message.base_len,
                message.acked_len,
                message.first_id,
                bytes_of(message.parents, np.uint32),
                bytes_of(message.token_ids, np.int32),
                bytes_of(message.scores, np.float32),
                bytes_of(message.sources, np.uint8),
            )
        case Decline():
            return DeclinePart(message.request, message.reason.value, message.retryable, message.detail)
        case Hello():
            return UnexpectedPart()


def _unpack_draft(part: DraftPart) -> DraftMessage:
    match part:
        case GrowPart():
            return Grow(
                part.request,
                part.epoch,
                part.base_len,
                part.acked_len,
                part.first_id,
                array_of(part.parents, np.uint32),
                array_of(part.token_ids, np.int32),
                array_of(part.scores, np.float32),
                array_of(part.sources, np.uint8),
            )
        case DeclinePart():
            return Decline(part.request, DeclineReason(part.reason), part.retryable, part.detail)
        case UnexpectedPart():
            return Hello(0, 0)


def _pack_verify(message: VerifyMessage) -> VerifyPart:
    match message:
        case Commit():
            return CommitPart(
                message.request,
                message.length_before,
                bytes_of(message.token_ids, np.int32),
                message.epoch,
                message.received_through,
                message.resolved_root,
                message.credit,
            )
        case Open():
            tokens = bytes_of(message.token_ids, np.int32)
            return OpenPart(
                message.request, tokens, message.prompt_len, message.sampling, message.credit, message.tenant
            )
        case Pause():
            return PausePart(message.request)
        case Resume():
            return ResumePart(message.request, message.credit)
        case Close():
            return ClosePart(message.request)
        case Hello():
            raise TypeError("a session's hello is the door's")


def _unpack_verify(part: VerifyPart) -> VerifyMessage:
    match part:
        case CommitPart():
            return Commit(
                part.request,
                part.length_before,
                array_of(part.token_ids, np.int32),
                part.epoch,
                part.received_through,
                part.resolved_root,
                part.credit,
            )
        case OpenPart():
            tokens = array_of(part.token_ids, np.int32)
            return Open(part.request, tokens, part.prompt_len, part.sampling, part.credit, part.tenant)
        case PausePart():
            return Pause(part.request)
        case ResumePart():
            return Resume(part.request, part.credit)
        case ClosePart():
            return Close(part.request)

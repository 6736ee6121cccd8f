"""Messages of the streams between verify and draft as parts of frames, for the processes of both. Torch-free."""

from __future__ import annotations

import msgspec

from outrider.sampling.params import SamplingParams


class OpenPart(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An Open of the speculation stream."""

    request: int
    token_ids: bytes
    """int32."""
    prompt_len: int
    sampling: SamplingParams
    credit: int
    tenant: str


class CommitPart(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A Commit of the speculation stream."""

    request: int
    length_before: int
    token_ids: bytes
    """int32."""
    epoch: int
    received_through: int
    resolved_root: int | None
    credit: int


class PausePart(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A Pause of the speculation stream."""

    request: int


class ResumePart(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A Resume of the speculation stream."""

    request: int
    credit: int


class ClosePart(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A Close of the speculation stream."""

    request: int


class GrowPart(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A Grow of the speculation stream."""

    request: int
    epoch: int
    base_len: int
    acked_len: int
    first_id: int
    parents: bytes
    """uint32."""
    token_ids: bytes
    """int32."""
    scores: bytes
    """float32."""
    sources: bytes
    """uint8."""


class DeclinePart(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A Decline of the speculation stream."""

    request: int
    reason: int
    retryable: bool
    detail: str


class UnexpectedPart(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Something else, which a draft should not have sent; the engine counts it."""


class FeaturesPart(msgspec.Struct, frozen=True, array_like=True):
    """Features of the features stream; their dtype is the stream's."""

    request: int
    start: int
    count: int
    final: bool
    sequence: int
    data: memoryview
    """Of the frame that brought it, uncopied; bytes, too, where it is packed."""
    ring_offset: int | None = None


class RingFrame(msgspec.Struct, frozen=True, array_like=True):
    """Memory that a draft on this host may map, as outrider.protocol.messages.FeatureRing has it."""

    host: str
    device: str
    handle: bytes
    num_bytes: int
    magic: bytes


class LineFrame(msgspec.Struct, frozen=True, array_like=True):
    """Where a draft's engine may be spoken to, as outrider.protocol.messages.LineOffer has it."""

    host: str
    path: str
    token: str


VerifyPart = OpenPart | CommitPart | PausePart | ResumePart | ClosePart
DraftPart = GrowPart | DeclinePart | UnexpectedPart

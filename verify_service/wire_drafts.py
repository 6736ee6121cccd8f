"""Frames between door and engine: sessions with drafts, and what their streams carry. Torch-free."""

from __future__ import annotations

import msgspec

from outrider.sampling.params import SamplingParams


class DraftUp(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """door -> engine: a session with a draft service began, under a number that is never used again."""

    session: int
    address: str
    max_positions: int = 0
    """Longest sequence that the draft serves; 0 for any."""
    feature_layers: list[int] = []
    """Layers of the target whose hidden states it takes."""
    projection_columns: int = 0
    """Of the matrix that it offers; 0 for none."""
    projection_hash: str = ""
    """Names this matrix."""
    sources: list[str] = []
    """Names of its drafters; a node's source is an index into them."""
    features_optional: bool = False
    """Whether it serves requests without their features, too."""


class DraftDown(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """door -> engine: the session is over."""

    session: int


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


class DraftSaid(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """door -> engine: what a draft sent, and when it came, in seconds of the machine's monotonic clock."""

    session: int
    arrived_at: float
    weight: int
    """Comes back in `Told.read` when the engine has taken it."""
    messages: list[GrowPart | DeclinePart | UnexpectedPart]


class OpenPart(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """An Open of the speculation stream."""

    request: int
    token_ids: bytes
    """int32."""
    prompt_len: int
    sampling: SamplingParams
    credit: int


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


class DraftTold(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """engine -> door: messages for a draft, in order."""

    session: int
    messages: list[OpenPart | CommitPart | PausePart | ResumePart | ClosePart]


class DraftReset(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """engine -> door: end this session; it is dialled again."""

    session: int


class FeaturesUp(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """door -> engine: the features stream of a session is open."""

    session: int
    window: int
    """Bytes that the draft allows to be under way; 0 for any number."""
    uses_ring: bool = False


class FeaturesDone(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """door -> engine: a draft has released features."""

    session: int
    through: int


class ProjectionFrame(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """door -> engine: the next bytes of the projection that a session has offered; `FeaturesUp` follows the last."""

    session: int
    dtype: str
    data: bytes


class RingFrame(msgspec.Struct, frozen=True, array_like=True):
    """Memory that a draft on this host may map, as outrider.tree.messages.FeatureRing has it."""

    host: str
    device: str
    handle: bytes
    num_bytes: int
    magic: bytes


class FeaturesOpen(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """engine -> door: open the features stream of a session; `FeaturesUp` answers."""

    session: int
    layers: list[int]
    width: int
    dtype: str
    ring: RingFrame | None = None
    projected: bool = False
    wants_projection: bool = False


class FeaturesPart(msgspec.Struct, frozen=True, array_like=True):
    """Features of the features stream; their dtype is the stream's."""

    request: int
    start: int
    count: int
    final: bool
    sequence: int
    data: bytes
    """Or a memoryview where it is packed."""
    ring_offset: int | None = None


class FeaturesTold(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """engine -> door: features for a draft, in order."""

    session: int
    features: list[FeaturesPart]

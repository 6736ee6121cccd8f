"""The messages of the speculation stream as the inside sees them; the codec in `outrider.rpc` maps them to protobuf.

Arrays are numpy, one-dimensional. All messages but `Hello` name a request by the number that verify gave it in
this session. See docs/protocol.md for the rules that join them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from outrider.sampling.params import SamplingParams

PROTOCOL_VERSION = 1

Int32s = NDArray[np.int32]
UInt32s = NDArray[np.uint32]
Float32s = NDArray[np.float32]
UInt8s = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class LineOffer:
    """A socket of the draft's engine (outrider.host.line)."""

    host: str
    """Names the host and its start."""
    path: str
    token: str
    """Names the session there."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First message both ways. Zero or empty fields mean "as the other side has it"."""

    protocol_version: int
    noise_version: int
    model: str = ""
    tokenizer_hash: str = ""
    vocab_size: int = 0
    hidden_size: int = 0
    feature_layers: tuple[int, ...] = ()
    max_positions: int = 0
    sources: tuple[str, ...] = ()
    num_layers: int = 0
    """Of the target; verify's hello only."""
    features_token: str = ""
    """Names the session to the features stream; the draft's hello only."""
    projection_columns: int = 0
    """Of the matrix that the drafter offers (outrider.tree.projection); the draft's hello only, 0 for none."""
    projection_hash: str = ""
    """Names this matrix."""
    features_optional: bool = False
    """Whether requests are served without features, too, by drafters that take none; the draft's hello only."""
    line: LineOffer | None = None
    """Where the draft's engine may be spoken to by an engine of its host; the draft's hello only."""


@dataclass(frozen=True, slots=True)
class Open:
    """verify -> draft: a request with all its committed tokens. Idempotent."""

    request: int
    token_ids: Int32s
    prompt_len: int
    sampling: SamplingParams
    credit: int
    tenant: str = ""
    """Whose text this is: what a draft learns from it serves requests of the same tenant alone."""


@dataclass(frozen=True, slots=True)
class Commit:
    """verify -> draft: newly committed tokens, and what verify has seen of the tree."""

    request: int
    length_before: int
    token_ids: Int32s
    epoch: int
    received_through: int
    resolved_root: int | None
    credit: int


@dataclass(frozen=True, slots=True)
class Pause:
    """verify -> draft: grow no more for now."""

    request: int


@dataclass(frozen=True, slots=True)
class Resume:
    """verify -> draft: grow again."""

    request: int
    credit: int


@dataclass(frozen=True, slots=True)
class Close:
    """verify -> draft: the request ended."""

    request: int


@dataclass(frozen=True, slots=True)
class Grow:
    """draft -> verify: nodes first_id, first_id + 1, ...; without nodes it acknowledges commits."""

    request: int
    epoch: int
    base_len: int
    acked_len: int
    first_id: int
    parents: UInt32s = field(default_factory=lambda: np.empty(0, np.uint32))
    token_ids: Int32s = field(default_factory=lambda: np.empty(0, np.int32))
    scores: Float32s = field(default_factory=lambda: np.empty(0, np.float32))
    sources: UInt8s = field(default_factory=lambda: np.empty(0, np.uint8))


class DeclineReason(Enum):
    """Why a draft does not serve a request; numbers as in draft.proto."""

    UNSPECIFIED = 0
    GAP = 1
    UNKNOWN_REQUEST = 2
    OVERLOADED = 3
    TOO_LONG = 4
    INVALID = 5
    DRAINING = 6


@dataclass(frozen=True, slots=True)
class Decline:
    """draft -> verify: this request is not served."""

    request: int
    reason: DeclineReason
    retryable: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FeatureRing:
    """Device memory of verify that a draft on the same host may map."""

    host: str
    device: str
    handle: bytes
    num_bytes: int
    magic: bytes = b""
    """What its first and its last bytes are; MAGIC_BYTES of them."""


@dataclass(frozen=True, slots=True)
class FeaturesBegin:
    """verify -> draft, first on the features stream: whose features these are, and how they look."""

    token: str
    layers: tuple[int, ...]
    width: int
    """Values of a position: one layer behind the other, or if projected the columns of the product."""
    dtype: str
    """"bfloat16", "float16" or "float32"."""
    ring: FeatureRing | None = None
    projected: bool = False
    """Whether features were multiplied with the matrix that the draft offers."""
    wants_projection: bool = False
    """Whether the draft shall send that matrix."""


@dataclass(frozen=True, slots=True)
class FeaturesAccept:
    """draft -> verify, first on the features stream."""

    uses_ring: bool = False
    window: int = 0
    """Bytes that may be sent and not released; 0 leaves it to verify."""
    projects: bool = False
    """Whether the matrix follows that verify wants."""
    takes_batches: bool = False
    """Whether features of several requests may come in one message."""


@dataclass(frozen=True, slots=True)
class Features:
    """verify -> draft: the target's true features of committed positions start, ..., start + count - 1.

    `data` holds [count, width] values of `dtype`, row by row, or nothing when they lie in the ring.
    """

    request: int
    start: int
    count: int
    final: bool
    """Whether verify has computed no features of the request behind these."""
    data: bytes | memoryview
    dtype: str
    sequence: int = 0
    """Counts the messages of the stream from 1 on."""
    ring_offset: int | None = None
    projected: bool = False
    """Whether they were multiplied with the drafter's matrix."""
    rows: object | None = None
    """What the draft read from the ring, bytes or a tensor of bytes, where `data` is empty; or which part these are of
    that, or of all data of one message."""


@dataclass(frozen=True, slots=True)
class FeaturesReleased:
    """draft -> verify: message `through` of the features stream and all before it are done with."""

    through: int


FEATURE_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Formats of features, and the bytes of a value."""

MAX_FEATURE_BYTES = 1 << 18
"""Features that one message may carry, and what a part of a projection may have."""

MAX_FEATURE_PIECES = 256
"""Features of different requests, or of different positions, that may come in one message, within those bytes."""

MAGIC_BYTES = 32
"""At either end of a ring: what a draft reads first."""

VerifyMessage = Hello | Open | Commit | Pause | Resume | Close
DraftMessage = Hello | Grow | Decline

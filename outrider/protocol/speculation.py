"""Messages between verify and draft services, on the speculation stream and on the features stream.

The same structs cross gRPC (`outrider.protocol.speculation_codec` maps them to protobuf), the sockets between a door
and its engine, and the lines between engines of one host (both msgpack, `outrider.host.frames`). Arrays are plain
lists: mirror and author work on lists, and for messages of eight nodes lists are faster than numpy arrays. All messages
but `Hello` name a request by the number that verify gave it in this session. docs/protocol.md has the protocol's rules.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from outrider.sampling.params import SamplingParams

PROTOCOL_VERSION = 1

FEATURE_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Number formats of features, and the bytes of a value."""

MAX_FEATURE_BYTES = 1 << 18
"""Most bytes of features in one message, and of a part of a projection."""

MAX_FEATURE_PIECES = 256
"""Most `Features` in one message, of different requests or positions, within MAX_FEATURE_BYTES."""

MAGIC_BYTES = 32
"""Bytes of the magic at either end of a ring, which a draft reads first."""


class LineOffer(msgspec.Struct, frozen=True, array_like=True):
    """A socket of the draft's engine (outrider.host.line)."""

    host: str
    """Names the host since its boot, and how messages on the line are packed."""
    path: str
    token: str = ""
    """Names the session on the line; empty before there is a session."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First message in both directions. Zero or empty fields mean "as the other side has it"."""

    protocol_version: int = 0
    noise_version: int = 0
    model: str = ""
    token_ids_hash: str = ""
    vocab_size: int = 0
    """Token ids must be below this."""
    hidden_size: int = 0
    """Hidden size of the target."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states the drafter takes, in order; empty for none."""
    max_positions: int = 0
    """Longest sequence that the draft serves; 0 for any. The target's may be longer."""
    sources: tuple[str, ...] = ()
    """Names of the draft's drafters, for clients; a node's source is an index into them."""
    num_layers: int = 0
    """Number of layers of the target; verify's hello only."""
    features_token: str = ""
    """Names the session to the features stream; the draft's hello only."""
    projection_columns: int = 0
    """Columns of the matrix that the drafter offers (outrider.tree.handshake); the draft's hello only, 0 for none."""
    projection_hash: str = ""
    """Hash that names the offered matrix."""
    features_optional: bool = False
    """Whether drafters that take no features serve requests without them, too; the draft's hello only."""
    line: LineOffer | None = None
    """Socket on which an engine of the same host can reach the draft's engine; the draft's hello only."""
    drafts_on_demand: bool = False
    """Whether the draft grows only one tree after each commit, as on a CPU; the draft's hello only."""


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """verify -> draft: a request with all its committed tokens. Idempotent."""

    request: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    credit: int
    tenant: str = ""
    """Owner of the text: what a draft learns from it serves only requests of the same tenant."""


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """verify -> draft: newly committed tokens, and how much of the tree verify has received."""

    request: int
    length_before: int
    token_ids: list[int]
    epoch: int
    received_through: int
    resolved_root: int | None
    credit: int


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """verify -> draft: stop growing for now."""

    request: int


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """verify -> draft: grow again."""

    request: int
    credit: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """verify -> draft: the request ended."""

    request: int


class Grow(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """draft -> verify: nodes first_id, first_id + 1, ...; a message without nodes acknowledges commits."""

    request: int
    epoch: int
    base_len: int
    acked_len: int
    first_id: int
    parents: list[int] = []
    token_ids: list[int] = []
    scores: list[float] = []
    sources: bytes = b""
    """One byte for each node."""


class DeclineReason(Enum):
    """Why a draft does not serve a request; numbers as in draft.proto."""

    UNSPECIFIED = 0
    GAP = 1
    UNKNOWN_REQUEST = 2
    OVERLOADED = 3
    TOO_LONG = 4
    INVALID = 5
    DRAINING = 6


class Decline(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """draft -> verify: the draft does not serve this request."""

    request: int
    reason: DeclineReason
    retryable: bool
    detail: str = ""


class FeatureRing(msgspec.Struct, frozen=True, array_like=True):
    """Device memory of verify that a draft on the same host may map."""

    host: str
    device: str
    handle: bytes
    num_bytes: int
    magic: bytes = b""
    """The ring's first and also its last MAGIC_BYTES bytes."""


class FeaturesBegin(msgspec.Struct, frozen=True, array_like=True):
    """verify -> draft, first on the features stream: the session of the features, and their format."""

    token: str
    layers: tuple[int, ...]
    width: int
    """Values of a position: those of all layers in order, or if projected the columns of the product."""
    dtype: str
    """"bfloat16", "float16" or "float32"."""
    ring: FeatureRing | None = None
    projected: bool = False
    """Whether verify multiplies features with the matrix that the draft offers."""
    wants_projection: bool = False
    """Whether verify asks for that matrix."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one position."""
        return self.width * FEATURE_ITEM_BYTES[self.dtype]


class FeaturesAccept(msgspec.Struct, frozen=True, array_like=True):
    """draft -> verify, first on the features stream."""

    uses_ring: bool = False
    window: int = 0
    """Most bytes that verify may send before they are released; 0 leaves it to verify."""
    projects: bool = False
    """Whether the draft will send the matrix that verify asked for."""
    takes_batches: bool = False
    """Whether one message may hold features of several requests."""


class Features(msgspec.Struct, frozen=True, array_like=True):
    """verify -> draft: the target's true features of committed positions start, ..., start + count - 1."""

    request: int
    start: int
    count: int
    final: bool
    """Whether verify has computed no later features of the request."""
    data: memoryview
    """Values [count, width] of `dtype`, row by row, as they lie in the frame that brought them; empty if in a ring."""
    dtype: str
    """As in the stream's `FeaturesBegin`; like `projected`, this is not sent over gRPC."""
    sequence: int = 0
    """Number within the stream, from 1."""
    ring_offset: int | None = None
    projected: bool = False
    """Whether the features were multiplied with the drafter's matrix."""
    rows: Any = None
    """If `data` is empty, what the draft has read from the ring, as bytes or a tensor of bytes; or the part of that,
    or of all data of one message, that holds these features. Never sent."""


class FeaturesReleased(msgspec.Struct, frozen=True, array_like=True):
    """draft -> verify: the draft no longer needs features `through` of the stream, nor any before them."""

    through: int


class ProjectionPart(msgspec.Struct, frozen=True, array_like=True):
    """draft -> verify: bytes of the projection matrix from `offset` on."""

    num_columns: int
    dtype: str
    offset: int
    data: bytes


VerifyMessage = Hello | Open | Commit | Pause | Resume | Close
DraftMessage = Hello | Grow | Decline
FeaturesResponse = FeaturesAccept | FeaturesReleased | ProjectionPart

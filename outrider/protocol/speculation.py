"""Messages between verify and draft services, of the speculation stream and of the features stream.

The same structs cross gRPC (`outrider.protocol.speculation_codec` maps them to protobuf), the sockets between a door
and its engine, and the lines between engines of one host (both msgpack, `outrider.host.frames`). Arrays are plain
lists: mirror and author work on lists, and for messages of eight nodes lists are faster than numpy's arrays. All
messages but `Hello` name a request by the number that verify gave it in this session. docs/protocol.md has the rules
that join them.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

from outrider.sampling.params import SamplingParams

PROTOCOL_VERSION = 1

FEATURE_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Formats of features, and the bytes of a value."""

MAX_FEATURE_BYTES = 1 << 18
"""Features that one message may carry, and what a part of a projection may have."""

MAX_FEATURE_PIECES = 256
"""Features of different requests, or of different positions, that may come in one message, within those bytes."""

MAGIC_BYTES = 32
"""At either end of a ring: what a draft reads first."""


class LineOffer(msgspec.Struct, frozen=True, array_like=True):
    """A socket of the draft's engine (outrider.host.line)."""

    host: str
    """Names the host, its start, and how messages on the line are packed."""
    path: str
    token: str = ""
    """Names the session there; empty before there is one."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First message both ways. Zero or empty fields mean "as the other side has it"."""

    protocol_version: int = 0
    noise_version: int = 0
    model: str = ""
    tokenizer_hash: str = ""
    vocab_size: int = 0
    """Token ids at or past this are illegal."""
    hidden_size: int = 0
    """Of the target."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states the drafter takes, in order; empty for none."""
    max_positions: int = 0
    """Longest sequence that the draft serves; 0 for any. The target's may be longer."""
    sources: tuple[str, ...] = ()
    """Names of the draft's drafters, as far as they are told to clients; a node's source is an index into them."""
    num_layers: int = 0
    """Of the target; verify's hello only."""
    features_token: str = ""
    """Names the session to the features stream; the draft's hello only."""
    projection_columns: int = 0
    """Of the matrix that the drafter offers (outrider.tree.handshake); the draft's hello only, 0 for none."""
    projection_hash: str = ""
    """Names this matrix."""
    features_optional: bool = False
    """Whether requests are served without features, too, by drafters that take none; the draft's hello only."""
    line: LineOffer | None = None
    """Where the draft's engine may be spoken to by an engine of its host; the draft's hello only."""
    drafts_on_demand: bool = False
    """Whether one tree is grown after each commit and no more, as on a CPU; the draft's hello only."""


class Open(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """verify -> draft: a request with all its committed tokens. Idempotent."""

    request: int
    token_ids: list[int]
    prompt_len: int
    sampling: SamplingParams
    credit: int
    tenant: str = ""
    """Whose text this is: what a draft learns from it serves requests of the same tenant alone."""


class Commit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """verify -> draft: newly committed tokens, and what verify has seen of the tree."""

    request: int
    length_before: int
    token_ids: list[int]
    epoch: int
    received_through: int
    resolved_root: int | None
    credit: int


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """verify -> draft: grow no more for now."""

    request: int


class Resume(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """verify -> draft: grow again."""

    request: int
    credit: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """verify -> draft: the request ended."""

    request: int


class Grow(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """draft -> verify: nodes first_id, first_id + 1, ...; without nodes it acknowledges commits."""

    request: int
    epoch: int
    base_len: int
    acked_len: int
    first_id: int
    parents: list[int] = []
    token_ids: list[int] = []
    scores: list[float] = []
    sources: bytes = b""
    """A byte a node."""


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
    """draft -> verify: this request is not served."""

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
    """What its first and its last bytes are; MAGIC_BYTES of them."""


class FeaturesBegin(msgspec.Struct, frozen=True, array_like=True):
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

    @property
    def row_bytes(self) -> int:
        """Of one position."""
        return self.width * FEATURE_ITEM_BYTES[self.dtype]


class FeaturesAccept(msgspec.Struct, frozen=True, array_like=True):
    """draft -> verify, first on the features stream."""

    uses_ring: bool = False
    window: int = 0
    """Bytes that may be sent and not released; 0 leaves it to verify."""
    projects: bool = False
    """Whether the matrix follows that verify wants."""
    takes_batches: bool = False
    """Whether features of several requests may come in one message."""


class Features(msgspec.Struct, frozen=True, array_like=True):
    """verify -> draft: the target's true features of committed positions start, ..., start + count - 1."""

    request: int
    start: int
    count: int
    final: bool
    """Whether verify has computed no features of the request behind these."""
    data: memoryview
    """Values [count, width] of `dtype`, row by row, as they lie in the frame that brought them; empty in a ring."""
    dtype: str
    """As the stream's beginning has it; does not cross gRPC, as `projected` does not."""
    sequence: int = 0
    """Counts the messages of the stream from 1 on."""
    ring_offset: int | None = None
    projected: bool = False
    """Whether they were multiplied with the drafter's matrix."""
    rows: Any = None
    """What the draft read from the ring, bytes or a tensor of bytes, where `data` is empty; or which part these are of
    that, or of all data of one message. Does not travel."""


class FeaturesReleased(msgspec.Struct, frozen=True, array_like=True):
    """draft -> verify: message `through` of the features stream and all before it are done with."""

    through: int


class ProjectionPart(msgspec.Struct, frozen=True, array_like=True):
    """draft -> verify: bytes of a projection from `offset` on."""

    num_columns: int
    dtype: str
    offset: int
    data: bytes


VerifyMessage = Hello | Open | Commit | Pause | Resume | Close
DraftMessage = Hello | Grow | Decline
FeaturesResponse = FeaturesAccept | FeaturesReleased | ProjectionPart

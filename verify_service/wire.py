"""Frames between the door and the engine process.

A frame is four bytes of length, little-endian, and one message of msgpack. `FromDoor` goes to the engine, `FromEngine`
to the door; arrays travel as the bytes of their numbers. Both ends are the same release on the same machine, so nothing
here has a version. Torch-free.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from outrider.config.verify import VerifyOptions
from outrider.errors import InternalError
from outrider.sampling.params import SamplingParams

MAX_FRAME_BYTES = 1 << 30
"""A longer frame is no frame: one end has lost its place."""

_LENGTH = struct.Struct("<I")


class Start(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """door -> engine, first: load a model and serve it."""

    options: VerifyOptions


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """door -> engine: a request, under a number that the door never uses again."""

    number: int
    request_id: str
    tokens: bytes
    """int32."""
    sampling: SamplingParams
    max_tokens: int
    stop_ids: list[int]
    speculate: bool


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """door -> engine: the request shall end without another word but `Told.ended`."""

    number: int


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


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """door -> engine: end after the round in progress."""


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


FromDoor = (
    Start | Submit | Cancel | DraftUp | DraftDown | DraftSaid | Stop | FeaturesUp | FeaturesDone | ProjectionFrame
)


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """engine -> door, first: the model is loaded and warm."""

    model_path: str
    tokenizer_hash: str
    """SHA-256 of tokenizer.json, hex."""
    vocab_size: int
    context_length: int
    dtype: str
    eos_token_ids: list[int]
    max_running: int
    max_waiting: int
    hidden_size: int = 0
    num_layers: int = 0


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """engine -> door, instead of Ready: the options, the model or the machine do not allow a start."""

    message: str


class ErrorPart(msgspec.Struct, frozen=True, array_like=True):
    """An error for a client: the class's name, what it is made from, and what else it knows."""

    kind: str
    arguments: list[str]
    code: str
    retry_after: float | None


class UpdatePart(msgspec.Struct, frozen=True, array_like=True):
    """An update of the request `number`; enumerations as their numbers, 0 for no finish."""

    number: int
    token_ids: list[int]
    origins: bytes
    logprobs: list[tuple[float, list[tuple[int, float]]]]
    num_draft_tokens: int
    num_accepted_tokens: int
    num_cached_prompt_tokens: int
    finish: int
    error: ErrorPart | None


class RoundReport(msgspec.Struct, frozen=True, array_like=True):
    """One round in figures; times in seconds."""

    num_nodes: int
    """Tree nodes verified."""
    num_prefilled: int
    committed: list[int]
    """Tokens of each request that committed some."""
    accepted: list[int]
    """Draft tokens of each request that had some accepted."""
    num_failed: int
    seconds: float
    held: float
    gap: float | None = None
    """Host time between the end of the round before and the launch of this one; None after a pause."""
    gpu: float | None = None
    """Device time; None where nothing measures it."""
    ready: int | None = None
    """Tree nodes that it would have had without any hold; None if no draft serves its requests."""
    answers: Sequence[float] = ()
    """Times of the drafts' answers to commits since the round before."""


class PeerPart(msgspec.Struct, frozen=True, array_like=True):
    """A connected draft service; `typical` is its usual time of an answer in seconds."""

    address: str
    good: bool
    typical: float


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state at one moment; counters since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    num_preemptions: int = 0
    dropped: dict[str, int] = {}
    """Draft tokens that brought nothing, by reason."""
    declined: dict[str, int] = {}
    """Requests that drafts declined, by reason."""
    peers: list[PeerPart] = []
    cost: dict[int, float] = {}
    """Seconds of a round by its tokens."""


class Told(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """engine -> door: all that gathered since the last one; nearly always one round's."""

    updates: list[UpdatePart]
    ended: list[int]
    """Cancelled requests that have left the engine."""
    rounds: list[RoundReport]
    read: dict[int, int]
    """Weight of the messages taken, by draft session."""
    snapshot: Snapshot | None


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


FromEngine = Ready | Refused | Told | DraftTold | DraftReset | FeaturesOpen | FeaturesTold

from_door: msgspec.msgpack.Decoder[FromDoor] = msgspec.msgpack.Decoder(FromDoor)
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def pack(frame: FromDoor | FromEngine) -> bytearray:
    """The frame as bytes, length first.

    Raises TypeError for what does not travel, InternalError for a frame that the other end would not take.
    """
    data = bytearray(_LENGTH.size)
    _encoder.encode_into(frame, data, _LENGTH.size)
    if len(data) - _LENGTH.size > MAX_FRAME_BYTES:
        raise InternalError(f"a frame of {len(data) - _LENGTH.size} bytes is too long to send")
    _LENGTH.pack_into(data, 0, len(data) - _LENGTH.size)
    return data


class FrameReader:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The bodies of the frames that are complete now. Raises InternalError for an absurd length."""
        self._data += data
        bodies, start = [], 0
        while len(self._data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            if length > MAX_FRAME_BYTES:
                raise InternalError(f"a frame of {length} bytes; the stream is broken")
            end = start + _LENGTH.size + length
            if len(self._data) < end:
                break
            bodies.append(bytes(self._data[start + _LENGTH.size : end]))
            start = end
        del self._data[:start]
        return bodies

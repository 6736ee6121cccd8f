"""Frames between the door and the engine process: `FromDoor` goes to the engine, `FromEngine` to the door. Torch-free.

How they are cut and packed, and the frames of every engine's start and end, are in `outrider.host.frames`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from outrider.config.verify import VerifyOptions
from outrider.host.frames import (
    FeaturePieces,
    FromVerify,
    Ready,
    Refused,
    SessionDown,
    SessionLost,
    Start,
    Stop,
    decoder,
)
from outrider.protocol.generation import GenerationRequest, GenerationUpdate, VerifyInfo
from outrider.protocol.speculation import PROTOCOL_VERSION, DraftMessage, FeaturesBegin, Hello, ProjectionPart
from outrider.sampling.noise import NOISE_VERSION
from outrider.tree.handshake import Terms

ENGINE_FAILED = "the verify engine failed; the service restarts"
ENGINE_STOPPED = "the verify service stopped before the answer was complete"
"""What unfinished requests are told, by the engine or, if its process died, by the door. UNAVAILABLE, as for a service
that is gone: what has no token yet is tried elsewhere."""


class TargetProfile(msgspec.Struct, frozen=True, array_like=True):
    """The model that an engine serves, and its limits."""

    info: VerifyInfo
    max_running: int
    max_waiting: int
    hidden_size: int = 0
    num_layers: int = 0
    device: str = ""
    token_ids_hash: str = ""
    """See outrider.models.store_folder.hash_token_ids."""
    drafters: tuple[str, ...] = ()
    """What drafts with verify, after what could not be used was left out."""

    def hello(self) -> Hello:
        """What a draft is told of it."""
        info = self.info
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            noise_version=NOISE_VERSION,
            model=info.model,
            tokenizer_hash=self.token_ids_hash,
            vocab_size=info.vocab_size,
            max_positions=info.context_length,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
        )


class RoundFigures(NamedTuple):
    """How a round went; times in seconds."""

    seconds: float
    held: float
    """How long it was held for drafts before."""
    gap: float | None = None
    """How long the device had nothing to do before it, holding aside; None after a pause."""
    gpu: float | None = None
    """How long the device worked on it; None where nobody measures."""
    ready: int | None = None
    """Nodes that it would have taken without any hold; None if no draft serves its requests."""
    answers: Sequence[float] = ()
    """How long each of the drafts' answers took since the round before."""
    drafting: float | None = None
    """How long the device drafted behind the round before; None where it did not."""
    resting: bool = False
    """Whether the drafts that serve its requests were left out, since rounds are faster so."""


class RoundReport(msgspec.Struct, frozen=True, array_like=True):
    """One round in figures."""

    num_nodes: int
    """Tree nodes verified."""
    num_prefilled: int
    committed: list[int]
    """Tokens of each request that committed some."""
    accepted: list[int]
    """Draft tokens of each request that had some accepted."""
    num_failed: int
    figures: RoundFigures
    num_grown: int = 0
    """Nodes of these that grew inside rounds."""
    num_grown_accepted: int = 0


class DraftStatus(msgspec.Struct, frozen=True, array_like=True):
    """A connected draft service."""

    address: str
    healthy: bool
    """Whether it answers in time."""
    answer_seconds: float
    """Usual time of an answer to a commit."""


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
    drafts: list[DraftStatus] = []
    cost: dict[int, float] = {}
    """Seconds of a round by its tokens."""
    graphs_pending: int = 0
    """Graphs of rounds that are still to be captured before a draft gets features."""
    drafts_waiting: int = 0
    """Connected drafts that will get features and cannot yet."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """door -> engine: a request that was let in, under a number that the door never uses again."""

    number: int
    request: GenerationRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """door -> engine: the request shall end without another word but `EngineUpdates.ended`."""

    number: int


class DraftUp(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """door -> engine: a session with a draft service began, under a number that is never used again."""

    session: int
    address: str
    terms: Terms


class FromDraft(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """door -> engine: what a draft sent, and when it came, in seconds of the machine's monotonic clock."""

    session: int
    arrived_at: float
    weight: int
    """Comes back in `EngineUpdates.read` when the engine has taken it."""
    messages: list[DraftMessage]


class FeatureStreamAccepted(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """door -> engine: the features stream of a session is open."""

    session: int
    window: int
    """Bytes that the draft allows to be under way; 0 for any number."""
    uses_ring: bool = False


class FeatureStreamReleased(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """door -> engine: a draft has released features."""

    session: int
    through: int


class ProjectionFrame(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """door -> engine: next bytes of the projection that a session offers; `FeatureStreamAccepted` follows the last."""

    session: int
    part: ProjectionPart


class EngineUpdates(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """engine -> door: all that gathered since the last one; nearly always one round's."""

    updates: list[tuple[int, GenerationUpdate]]
    """By the request's number."""
    ended: list[int]
    """Cancelled requests that have left the engine."""
    rounds: list[RoundReport]
    read: dict[int, int]
    """Weight of the messages taken, by draft session."""
    snapshot: Snapshot | None


class OpenFeatureStream(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """engine -> door: open the features stream of a session; `FeatureStreamAccepted` answers."""

    session: int
    begin: FeaturesBegin
    """Without the session's token, which the door knows."""


FromDoor = (
    Start[VerifyOptions]
    | Stop
    | Submit
    | Cancel
    | DraftUp
    | SessionDown
    | FromDraft
    | FeatureStreamAccepted
    | FeatureStreamReleased
    | ProjectionFrame
)
FromEngine = EngineUpdates | FromVerify | SessionLost | OpenFeatureStream | FeaturePieces

from_door: msgspec.msgpack.Decoder[FromDoor] = decoder(FromDoor)
from_engine: msgspec.msgpack.Decoder[Ready[TargetProfile] | Refused | FromEngine] = decoder(
    Ready[TargetProfile] | Refused | FromEngine
)

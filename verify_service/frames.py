"""Frames between the door and the engine process: `FromDoor` goes to the engine, `FromEngine` to the door. Torch-free.

`outrider.host.frames` has their framing and encoding, and the frames that start and stop any engine.
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

SERVICE_ENDS = "the service exits to be restarted"
ENGINE_FAILED = f"the verify engine failed; {SERVICE_ENDS}"
ENGINE_STOPPED = "the verify service stopped before the answer was complete"
"""Messages to unfinished requests, from the engine or, if its process died, from the door. Their status is UNAVAILABLE,
as for a service that is gone, so that requests without a token yet are tried elsewhere."""


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
    """Drafters that run in this service; unusable ones are left out."""

    def hello(self) -> Hello:
        """Return the hello that describes the model to a draft."""
        info = self.info
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            noise_version=NOISE_VERSION,
            model=info.model,
            token_ids_hash=self.token_ids_hash,
            vocab_size=info.vocab_size,
            max_positions=info.context_length,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
        )


class RoundFigures(NamedTuple):
    """Measurements of a round; times in seconds."""

    seconds: float
    held: float
    """How long the round was held for drafts before its launch."""
    gap: float | None = None
    """How long the device was idle before the round, holds aside; None after a pause."""
    gpu: float | None = None
    """How long the device worked on the round; None if that is not measured."""
    ready: int | None = None
    """Nodes that the round would have taken without a hold; None if no draft serves its requests."""
    answers: Sequence[float] = ()
    """How long each draft answer took that came since the round before."""
    drafting: float | None = None
    """How long the device drafted behind the round before; None if it did not."""
    resting: bool = False
    """Whether the round left out the drafts that serve its requests, because plain rounds are faster."""


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
    """How many of `num_nodes` grew inside rounds."""
    num_grown_accepted: int = 0


class DraftStatus(msgspec.Struct, frozen=True, array_like=True):
    """A connected draft service."""

    address: str
    healthy: bool
    """Whether the draft answers in time."""
    answer_seconds: float
    """Typical time of an answer to a commit."""


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state at one moment; counters since its start."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    num_preemptions: int = 0
    """Preemptions for lack of pages."""
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
    """Connected drafts that are to get features but do not get any yet."""
    num_displaced: int = 0
    """Preemptions for requests of other API keys."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """door -> engine: an admitted request, under a number that the door never reuses."""

    number: int
    request: GenerationRequest


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """door -> engine: end the request; `EngineUpdates.ended` is the only answer."""

    number: int


class DraftUp(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """door -> engine: a session with a draft service began, under a number that is never reused."""

    session: int
    address: str
    terms: Terms


class FromDraft(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """door -> engine: messages of a draft, and when they arrived, in seconds of the machine's monotonic clock."""

    session: int
    arrived_at: float
    weight: int
    """Returned in `EngineUpdates.read` when the engine has taken the messages."""
    messages: list[DraftMessage]


class FeatureStreamAccepted(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """door -> engine: the features stream of a session is open."""

    session: int
    window: int
    """Bytes that the draft allows in flight; 0 for any number."""
    uses_ring: bool = False


class FeatureStreamReleased(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """door -> engine: a draft has released all features up to message `through`."""

    session: int
    through: int


class ProjectionFrame(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """door -> engine: the next bytes of a session's projection; `FeatureStreamAccepted` follows the last ones."""

    session: int
    part: ProjectionPart


class EngineUpdates(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """engine -> door: everything gathered since the last such frame, nearly always from one round."""

    updates: list[tuple[int, GenerationUpdate]]
    """Updates with the numbers of their requests."""
    ended: list[int]
    """Cancelled requests that have left the engine."""
    rounds: list[RoundReport]
    read: dict[int, int]
    """Weight of the messages that the engine has taken, by draft session."""
    snapshot: Snapshot | None


class OpenFeatureStream(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """engine -> door: open the features stream of a session; `FeatureStreamAccepted` answers."""

    session: int
    begin: FeaturesBegin
    """The stream's first message, without the session's token, which the door knows."""


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

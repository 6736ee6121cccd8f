"""Frames between the door and the engine process of a draft service. Torch-free.

Frames travel on two sockets, so that no commit waits behind features: `FromDoor` and `FromEngine` on one,
`FeaturesFromDoor` and `FeaturesFromEngine` on the other. `outrider.host.frames` defines their framing and packing.
"""

from __future__ import annotations

import msgspec

from outrider.config.draft import DraftOptions
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
from outrider.protocol.speculation import DeclineReason, DraftMessage, FeaturesBegin, Hello, ProjectionPart
from outrider.tree.author import Outcome

GROWTH_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0),
)
"""Histogram bounds for the time of a slice of growth."""


class DrafterProfile(msgspec.Struct, frozen=True, array_like=True):
    """The drafter's description for the door."""

    hello: Hello
    """The Hello sent in every session, without the session's tokens."""
    any_target_drafters: frozenset[int] = frozenset()
    """Numbers of the drafters that work with any target, such as n-grams, if there are several drafters."""
    maps_memory: bool = False
    """Whether the engine can map verify's memory and read features there."""
    gauges: tuple[str, ...] = ()
    """Names of the sizes that the drafter reports."""


class SessionUp(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """door -> engine: a session with a verify service began, under a number that is never used again.

    All sessions that are open at the same time have the same vocabulary and tokenizer.
    """

    session: int
    vocab_size: int
    token_ids_hash: str
    """Hash of the target's token ids, as in Hello; empty if verify does not say."""
    parts: frozenset[int] | None
    """Numbers of the drafters that guess for this session; None for all."""
    line_token: str = ""
    """Token by which the verify engine names the session on a line; empty if no line was offered."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """door -> engine: open no more requests."""


class AskState(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """door -> engine: report the state now."""

    number: int
    """Returned in `DraftEngineState.reply_to`."""


class ToVerify(msgspec.Struct, frozen=True, array_like=True):
    """Messages for the verify service of a session, in order."""

    session: int
    messages: list[DraftMessage]


class TurnUpdates(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """engine -> door: the answers of one turn of the engine."""

    messages: list[ToVerify]


class DraftEngineState(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """engine -> door: what is open now, and the counts since the last report."""

    reply_to: int = 0
    """Number of the `AskState` that this answers; 0 if the engine sent it unasked."""
    num_requests: int = 0
    num_nodes: int = 0
    gauges: dict[str, int] = {}
    """Sizes of the drafter by name."""
    grown: dict[int, int] = {}
    """Nodes by source number."""
    commits: dict[Outcome, int] = {}
    declines: dict[DeclineReason, int] = {}
    dropped: dict[str, int] = {}
    """Dropped messages by reason."""
    bursts: dict[str, float] = {}
    """Figures of bursts by name."""
    slices: list[int] = []
    """Number of growth slices in each interval of GROWTH_SECONDS; the last entry counts those above all bounds."""
    slice_seconds: float = 0.0
    """Total time of these slices."""
    phases: dict[str, list[int]] = {}
    """By phase, answers to commits in each interval of ANSWER_SECONDS; the last entry counts those above all bounds."""
    phase_seconds: dict[str, float] = {}
    """Total time of each phase."""


class FeatureStreamUp(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """door -> engine: the features stream of a session began; a session has at most one."""

    session: int
    begin: FeaturesBegin
    """If it names a ring to map, the engine answers with `FeatureStreamReady`."""


class FeatureStreamDown(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """door -> engine: the features stream of a session has ended; unmap its ring."""

    session: int


class AskProjection(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """door -> engine: send the part of the drafter's projection at `offset`; `ProjectionAnswer` is the answer."""

    session: int
    offset: int


class FeatureStreamReady(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """engine -> door: the engine has mapped the ring that a stream named, or has failed to."""

    session: int
    uses_ring: bool


class FeaturesTaken(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """engine -> door: the engine is done with the next `FeaturePieces` of the session."""

    session: int


class RingBroken(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """engine -> door: the ring of the session's features cannot be read any more."""

    session: int


class ProjectionAnswer(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """engine -> door: bytes of the drafter's projection."""

    session: int
    part: ProjectionPart
    total: int
    """Size of the whole projection in bytes."""


FromDoor = Start[DraftOptions] | Stop | SessionUp | SessionDown | FromVerify | Drain | AskState
FromEngine = TurnUpdates | DraftEngineState | SessionLost
FeaturesFromDoor = FeatureStreamUp | FeatureStreamDown | FeaturePieces | AskProjection
FeaturesFromEngine = FeatureStreamReady | FeaturesTaken | RingBroken | ProjectionAnswer

from_door: msgspec.msgpack.Decoder[FromDoor] = decoder(FromDoor)
from_engine: msgspec.msgpack.Decoder[Ready[DrafterProfile] | Refused | FromEngine] = decoder(
    Ready[DrafterProfile] | Refused | FromEngine
)
features_from_door: msgspec.msgpack.Decoder[FeaturesFromDoor] = decoder(FeaturesFromDoor)
features_from_engine: msgspec.msgpack.Decoder[FeaturesFromEngine] = decoder(FeaturesFromEngine)

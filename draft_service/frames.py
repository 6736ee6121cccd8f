"""Frames between the door and the engine process of a draft service. Torch-free.

They take two sockets, so that no commit waits behind features: `FromDoor` and `FromEngine` are on one of them,
`FeaturesFromDoor` and `FeaturesFromEngine` on the other. How they are cut and packed is in `outrider.host.frames`.
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
"""Bounds by which slices of growth are counted."""


class DrafterProfile(msgspec.Struct, frozen=True, array_like=True):
    """What the door is told of the drafter."""

    hello: Hello
    """Hello of every session, without the session's tokens."""
    any_target_drafters: frozenset[int] = frozenset()
    """Those of several drafters that take any target as it is, such as n-grams, by their numbers."""
    maps_memory: bool = False
    """Whether features may lie in memory of verify's."""
    gauges: tuple[str, ...] = ()
    """Names of the sizes that it tells."""


class SessionUp(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """door -> engine: a session with a verify service began, under a number that is never used again.

    All sessions that are open at a time have the same target.
    """

    session: int
    vocab_size: int
    tokenizer_hash: str
    """SHA-256 of the target's tokenizer.json, hexadecimal; empty if verify does not say."""
    parts: frozenset[int] | None
    """Numbers of the drafters that guess for it; None for all."""
    line_token: str = ""
    """By which its verify engine names it where it calls directly; empty if it was not told how."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """door -> engine: open no more requests."""


class AskState(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """door -> engine: tell the state now."""

    number: int
    """Comes back in `DraftEngineState.reply_to`."""


class ToVerify(msgspec.Struct, frozen=True, array_like=True):
    """Messages for the verify service of a session, in order."""

    session: int
    messages: list[DraftMessage]


class TurnUpdates(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """engine -> door: what a turn of the engine brought."""

    messages: list[ToVerify]


class DraftEngineState(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """engine -> door: what is open now, and what was counted since the last time."""

    reply_to: int = 0
    """Number of the `AskState` that it answers; 0 if it came by itself."""
    num_requests: int = 0
    num_nodes: int = 0
    gauges: dict[str, int] = {}
    """Sizes of the drafter by name."""
    grown: dict[int, int] = {}
    """Nodes by number of their source."""
    commits: dict[Outcome, int] = {}
    declines: dict[DeclineReason, int] = {}
    dropped: dict[str, int] = {}
    """Messages by reason."""
    bursts: dict[str, float] = {}
    """Figures of bursts by name."""
    slices: list[int] = []
    """Slices of growth, by GROWTH_SECONDS; the last ones were longer than all of them."""
    slice_seconds: float = 0.0
    """What they took together."""
    phases: dict[str, list[int]] = {}
    """Answers to commits by phase and by ANSWER_SECONDS; the last ones took longer than all of them."""
    phase_seconds: dict[str, float] = {}
    """What each phase took in sum."""


class FeatureStreamUp(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """door -> engine: the features stream of a session began; there is one at most."""

    session: int
    begin: FeaturesBegin
    """Where it has a ring to map, `FeatureStreamReady` answers."""


class FeatureStreamDown(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """door -> engine: it has ended; its ring is to be unmapped."""

    session: int


class AskProjection(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """door -> engine: the next bytes of the drafter's projection; `ProjectionAnswer` answers."""

    session: int
    offset: int


class FeatureStreamReady(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """engine -> door: features may come."""

    session: int
    uses_ring: bool


class FeaturesTaken(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """engine -> door: the next `FeaturePieces` of the session are done with."""

    session: int


class RingBroken(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """engine -> door: the ring of the session's features cannot be read any more."""

    session: int


class ProjectionAnswer(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """engine -> door: bytes of the drafter's projection."""

    session: int
    part: ProjectionPart
    total: int
    """Bytes of all of it."""


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

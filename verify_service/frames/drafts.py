"""Frames between door and engine: sessions with drafts, and what their streams carry. Torch-free."""

from __future__ import annotations

import msgspec

from outrider.protocol.speculation import DraftMessage, Features, FeaturesBegin, ProjectionPart, VerifyMessage
from outrider.tree.handshake import Terms


class DraftUp(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """door -> engine: a session with a draft service began, under a number that is never used again."""

    session: int
    address: str
    terms: Terms


class DraftDown(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """door -> engine: the session is over."""

    session: int


class FromDraft(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """door -> engine: what a draft sent, and when it came, in seconds of the machine's monotonic clock."""

    session: int
    arrived_at: float
    weight: int
    """Comes back in `EngineUpdates.read` when the engine has taken it."""
    messages: list[DraftMessage]


class ToDraft(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """engine -> door: messages for a draft, in order."""

    session: int
    messages: list[VerifyMessage]


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
    part: ProjectionPart


class FeaturesOpen(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """engine -> door: open the features stream of a session; `FeaturesUp` answers."""

    session: int
    begin: FeaturesBegin
    """Without the session's token, which the door knows."""


class FeaturesToDraft(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """engine -> door: features for a draft, in order."""

    session: int
    features: list[Features]

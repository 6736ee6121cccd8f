"""Connections of verify's engine to drafts, each for one session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from outrider.host.frames import FeaturePieces, FromVerify, SessionLost
from outrider.host.line import DraftBatch, FeatureBatch, Line, VerifyBatch
from outrider.host.worker import Pipe
from outrider.protocol.speculation import Features, FeaturesBegin, VerifyMessage
from outrider.tree.handshake import Terms
from outrider.tree.handshake import Projection
from verify_service.frames import FromDoor, OpenFeatureStream


class DraftConnection(Protocol):
    """A session with a draft."""

    @property
    def address(self) -> str:
        """Where the draft is."""

    @property
    def has_room(self) -> bool:
        """Whether features should be sent now."""

    def send(self, messages: list[VerifyMessage]) -> None:
        """Send messages at once, in order: a round may be held for their answer."""

    def begin_features(self, begin: FeaturesBegin) -> None:
        """Open the features stream, under the session's own token; `FeatureSender.opened` hears when it is."""

    def send_features(self, messages: list[Features]) -> None:
        """Send features, in order. Their bytes are good during the call alone."""

    def reset(self) -> None:
        """End the session, from which nothing is heard, and begin anew."""


@dataclass(eq=False, slots=True)
class DraftServiceConnection:
    """A session with a draft service, see DraftConnection.

    Its streams are in the door; where the draft's engine is on this host, a line is here. No method blocks while the
    door reads.
    """

    session: int
    address: str
    pipe: Pipe[FromDoor]
    terms: Terms = field(default_factory=Terms)
    line: Line[DraftBatch] | None = None
    """Takes what the speculation stream would carry, and what the features stream would of features in a ring."""
    is_busy: bool = False
    """Whether something has come on the line that was not dealt with: until then it is not read."""
    projection_dtype: str = ""
    projection: bytearray = field(default_factory=bytearray)
    """As much of it as has come."""

    def send(self, messages: list[VerifyMessage]) -> None:
        """See DraftConnection."""
        if self.line is not None:
            self.line.send(VerifyBatch(messages))
        else:
            self.pipe.send(FromVerify(self.session, messages))

    @property
    def has_room(self) -> bool:
        """See DraftConnection."""
        # What is told of rounds should find little before it.
        self.pipe.flush()
        return not self.pipe.backlog

    def begin_features(self, begin: FeaturesBegin) -> None:
        """See DraftConnection."""
        self.pipe.send(OpenFeatureStream(self.session, begin))

    def send_features(self, messages: list[Features]) -> None:
        """See DraftConnection."""
        if self.line is not None and messages[0].ring_offset is not None:
            self.line.send(FeatureBatch(messages))
        else:
            self.pipe.send(FeaturePieces(self.session, messages))

    def reset(self) -> None:
        """See DraftConnection: the door dials it anew, and reports it down, and up again."""
        self.pipe.send(SessionLost(self.session))

    def take_projection(self) -> Projection | None:
        """The projection, all of which is here, if one was asked for."""
        if not self.projection:
            return None
        matrix, self.projection = self.projection, bytearray()
        terms = self.terms
        return Projection(
            terms.feature_layers, terms.projection_columns, self.projection_dtype, matrix, terms.projection_hash
        )

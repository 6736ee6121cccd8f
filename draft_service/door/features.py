"""Features streams as the door has them: what is held for the engine, handed to it, and released."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from draft_service.frames import (
    AskProjection,
    FeaturesFromEngine,
    FeaturesTaken,
    FeatureStreamDown,
    FeatureStreamReady,
    FeatureStreamUp,
    ProjectionAnswer,
    RingBroken,
    features_from_engine,
)
from outrider.errors import InternalError
from outrider.host.frames import FeaturePieces
from outrider.host.process import FrameConnection
from outrider.protocol.speculation import Features, FeaturesBegin, ProjectionPart


class RemoteFeatures(FrameConnection[FeaturesFromEngine]):
    """The door's end of the socket that features take."""

    def __init__(self) -> None:
        super().__init__(features_from_engine)
        self._streams: dict[int, FeatureStream] = {}

    async def open(self, session: int, begin: FeaturesBegin) -> FeatureStream:
        """Begin a features stream of the session of this number; returns once the engine has mapped its ring, or not.

        A beginning without a ring waits for nothing.
        """
        stream = self._streams[session] = FeatureStream(self, session)
        self.send(FeatureStreamUp(session, begin))
        if begin.ring is not None:
            try:
                stream.uses_ring = await stream.ready
            except asyncio.CancelledError:
                stream.close()
                raise
        return stream

    def forget(self, session: int) -> None:
        """The stream of a session has ended."""
        if self._streams.pop(session, None) is not None:
            self.send(FeatureStreamDown(session))

    def receive(self, frame: FeaturesFromEngine) -> None:
        """See FrameConnection."""
        # A stream that ended meanwhile is not there any more.
        if (stream := self._streams.get(frame.session)) is not None:
            stream.receive(frame)


class FeatureStream:
    """One features stream on its way to the engine, which takes its messages in their order."""

    def __init__(self, remote: RemoteFeatures, session: int) -> None:
        self.uses_ring = False
        self.broken = False
        """Whether its ring cannot be read any more."""
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the engine has mapped the ring."""
        self._remote = remote
        self._session = session
        self._part: asyncio.Future[tuple[ProjectionPart, bool]] | None = None
        self._handed_over: deque[int] = deque()
        """Last sequence number of each message that the engine has not taken."""
        self._newest = 0
        self._released = 0
        self._has_release = asyncio.Event()

    async def submit(self, pieces: Sequence[tuple[int, Features | None]]) -> int:
        """Hand over what came in one message, by sequence numbers; returns how many were dropped.

        That is once most of it has left: no stream is read faster than the engine works. Dropped is what is malformed
        (None), and pieces whose number does not rise.
        """
        before, features = self._newest, []
        for sequence, piece in pieces:
            if sequence > self._newest:
                self._newest = sequence
                features += [] if piece is None else [piece]
        if self._newest > before:
            self._handed_over.append(self._newest)
            self._remote.send(FeaturePieces(self._session, features))
            await self._remote.writable()
        return len(pieces) - len(features)

    async def next_release(self) -> int:
        """Wait until the engine takes more; returns the number of the last features that it is done with.

        Raises InternalError once the ring cannot be read any more.
        """
        await self._has_release.wait()
        if self.broken:
            raise InternalError("the ring of features cannot be read any more")
        self._has_release.clear()
        return self._released

    async def projection_part(self, offset: int) -> tuple[ProjectionPart, bool]:
        """The bytes of the drafter's projection from `offset` on, and whether they are the last."""
        self._part = asyncio.get_running_loop().create_future()
        self._remote.send(AskProjection(self._session, offset))
        return await self._part

    def close(self) -> None:
        """It has ended."""
        self._remote.forget(self._session)

    def receive(self, frame: FeaturesFromEngine) -> None:
        """Handle a frame of the engine."""
        match frame:
            case FeaturesTaken():
                self._released = self._handed_over.popleft()
                self._has_release.set()
            case RingBroken():
                self.broken = True
                self._has_release.set()
            case FeatureStreamReady():
                if not self.ready.done():
                    self.ready.set_result(frame.uses_ring)
            case ProjectionAnswer():
                if self._part is not None and not self._part.done():
                    part = frame.part
                    self._part.set_result((part, part.offset + len(part.data) >= frame.total))

"""Features streams as the door has them: what is held for the engine, handed to it, and released."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Sequence

from draft_service.frames import (
    AskMatrix,
    FeaturesFromEngine,
    MatrixPart,
    Pieces,
    StreamDown,
    StreamReady,
    StreamUp,
    Taken,
    features_from_engine,
)
from outrider.host.process import FrameConnection
from outrider.protocol.speculation import Features, FeaturesBegin, ProjectionPart

MAX_HELD_BYTES = 16 << 20
"""Features of one stream that may wait for the engine; the stream is read no further while there are more."""


class FeatureInflow:
    """Sequence numbers and bytes of features between a stream's reader and the engine. Used on the event loop alone.

    Features are released in their order, whatever the order in which the engine is done with them.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        """Bytes by sequence number, in rising order."""
        self._handed_over: deque[Sequence[int]] = deque()
        self._num_bytes = 0
        self._newest = 0
        self._through = 0
        self._told = 0
        self._has_news = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()

    async def admit(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """Hold what came in one message, as (sequence number, bytes), once there is room.

        False, and nothing is held, for a piece whose number does not rise.
        """
        await self._may_read.wait()
        admitted = [self._hold(sequence, num_bytes) for sequence, num_bytes in pieces]
        if self._num_bytes > MAX_HELD_BYTES:
            self._may_read.clear()
        return admitted

    def hand_over(self, sequences: Sequence[int]) -> None:
        """The engine has them now: the next `taken` is of these."""
        self._handed_over.append(sequences)

    def taken(self) -> None:
        """The engine is done with those that it has had longest."""
        self.release(*self._handed_over.popleft())

    def release(self, *sequences: int) -> None:
        """Held features are done with."""
        for sequence in sequences:
            self._num_bytes -= self._held.pop(sequence)
        self._through = next(iter(self._held), self._newest + 1) - 1
        self._has_news.set()
        if self._num_bytes <= MAX_HELD_BYTES:
            self._may_read.set()

    async def next_release(self) -> int:
        """Wait for releases; returns the number of the last features that are done with together with all before."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if self._through > self._told:
                self._told = self._through
                return self._told

    def _hold(self, sequence: int, num_bytes: int) -> bool:
        if sequence <= self._newest:
            return False
        self._newest = sequence
        self._held[sequence] = num_bytes
        self._num_bytes += num_bytes
        return True


class RemoteFeatures(FrameConnection[FeaturesFromEngine]):
    """The door's end of the socket that features take."""

    def __init__(self) -> None:
        super().__init__(features_from_engine)
        self._numbers = itertools.count(1)
        self._streams: dict[int, FeatureStream] = {}

    async def open(self, session: int, begin: FeaturesBegin) -> FeatureStream:
        """Begin a features stream of the session of this number; returns once the engine has mapped its ring, or not.

        A beginning without a ring waits for nothing.
        """
        number = next(self._numbers)
        stream = self._streams[number] = FeatureStream(self, number)
        self.send(StreamUp(number, session, begin))
        if begin.ring is not None:
            try:
                stream.uses_ring = await stream.ready
            except asyncio.CancelledError:
                stream.close()
                raise
        return stream

    def forget(self, number: int) -> None:
        """A stream has ended."""
        if self._streams.pop(number, None) is not None:
            self.send(StreamDown(number))

    def receive(self, frame: FeaturesFromEngine) -> None:
        """See FrameConnection."""
        # A stream that ended meanwhile is not there any more.
        if (stream := self._streams.get(frame.stream)) is not None:
            stream.receive(frame)


class FeatureStream:
    """One features stream on its way to the engine."""

    def __init__(self, remote: RemoteFeatures, number: int) -> None:
        self.inflow = FeatureInflow()
        self.uses_ring = False
        self.broken = False
        """Whether its ring cannot be read any more."""
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the engine has mapped the ring."""
        self._remote = remote
        self._number = number
        self._part: asyncio.Future[tuple[ProjectionPart, bool]] | None = None

    async def submit(self, pieces: Sequence[Features], sequences: Sequence[int]) -> None:
        """Hand over what came in one message; numbers of all that is released with it. Returns when there is room."""
        self.inflow.hand_over(sequences)
        self._remote.send(Pieces(self._number, list(pieces)))
        await self._remote.writable()

    async def matrix_part(self, offset: int) -> tuple[ProjectionPart, bool]:
        """The bytes of the drafter's projection from `offset` on, and whether they are the last."""
        self._part = asyncio.get_running_loop().create_future()
        self._remote.send(AskMatrix(self._number, offset))
        return await self._part

    def close(self) -> None:
        """It has ended."""
        self._remote.forget(self._number)

    def receive(self, frame: FeaturesFromEngine) -> None:
        """Handle a frame of the engine."""
        match frame:
            case Taken():
                self.broken = frame.broken
                self.inflow.taken()
            case StreamReady():
                if not self.ready.done():
                    self.ready.set_result(frame.uses_ring)
            case MatrixPart():
                if self._part is not None and not self._part.done():
                    part = frame.part
                    self._part.set_result((part, part.offset + len(part.data) >= frame.total))

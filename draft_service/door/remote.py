"""The engine as the door sees it: sessions, messages and features go in; trees and counts come out."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from draft_service.frames import (
    AskProjection,
    AskState,
    DraftEngineState,
    DrafterProfile,
    Drain,
    FeaturesFromEngine,
    FeaturesTaken,
    FeatureStreamDown,
    FeatureStreamReady,
    FeatureStreamUp,
    FromEngine,
    ProjectionAnswer,
    RingBroken,
    SessionUp,
    TurnUpdates,
    features_from_engine,
    from_engine,
)
from outrider.errors import InternalError, OutriderError, OverloadedError, UnavailableError
from outrider.host.frames import FeaturePieces, FromVerify, SessionDown, SessionLost
from outrider.host.process import EngineConnection, FrameConnection
from outrider.protocol.speculation import DraftMessage, Features, FeaturesBegin, ProjectionPart, VerifyMessage


class RemoteFeatures(FrameConnection[FeaturesFromEngine]):
    """The door's end of the socket for features."""

    def __init__(self) -> None:
        super().__init__(features_from_engine)
        self.streams: dict[int, FeatureStream] = {}
        """Streams that have not ended, by session."""

    async def open(self, session: int, begin: FeaturesBegin) -> FeatureStream:
        """Begin the features stream of a session.

        With a ring, return once the engine has mapped it or has failed to; without one, return at once.
        """
        stream = self.streams[session] = FeatureStream(self, session)
        self.send(FeatureStreamUp(session, begin))
        if begin.ring is not None:
            try:
                stream.uses_ring = await stream.ready
            except asyncio.CancelledError:
                stream.close()
                raise
        return stream

    def receive(self, frame: FeaturesFromEngine) -> None:
        """See FrameConnection."""
        # The stream may have ended meanwhile.
        if (stream := self.streams.get(frame.session)) is not None:
            stream.receive(frame)


class FeatureStream:
    """The door's side of one features stream, whose messages the engine takes in order."""

    def __init__(self, remote: RemoteFeatures, session: int) -> None:
        self.uses_ring = False
        self.broken = False
        """Whether the stream's ring cannot be read any more."""
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
        """Hand over the pieces of one message, each with its sequence number; return how many were dropped.

        Returns once most of the data has left, so that no stream is read faster than the engine works. Malformed pieces
        (None) and pieces whose number does not rise are dropped.
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
        """Wait until the engine has released more features; return the sequence number of the last ones.

        Raises InternalError once the ring cannot be read any more.
        """
        await self._has_release.wait()
        if self.broken:
            raise InternalError("the ring of features cannot be read any more")
        self._has_release.clear()
        return self._released

    async def projection_part(self, offset: int) -> tuple[ProjectionPart, bool]:
        """Return the part of the drafter's projection at `offset`, and whether it is the last one."""
        self._part = asyncio.get_running_loop().create_future()
        self._remote.send(AskProjection(self._session, offset))
        return await self._part

    def close(self) -> None:
        """Tell the engine that the stream has ended."""
        if self._remote.streams.pop(self._session, None) is not None:
            self._remote.send(FeatureStreamDown(self._session))

    def receive(self, frame: FeaturesFromEngine) -> None:
        """Handle a frame from the engine."""
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


_STATE_SECONDS = 1.0
"""How long to wait for the engine's state before using the last known one."""
_DRAIN_POLL_SECONDS = 0.05


class VerifySession:
    """A speculation stream, and the bounded queue of the engine's answers to it. Used only on the event loop.

    A verify service that does not read loses its session; other sessions are not affected.
    """

    def __init__(self, max_queued: int) -> None:
        self.number = 0
        """The session's number in frames to the engine; 0 before it begins and after it has ended."""
        self._max_queued = max_queued
        self._outbound: deque[DraftMessage] = deque()
        self._has_outbound = asyncio.Event()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Retrieve the error here: nobody has to wait for the end, and asyncio warns of errors never retrieved.
        self._over.add_done_callback(lambda over: over.cancelled() or over.exception())

    def send(self, messages: Sequence[DraftMessage]) -> None:
        """Queue answers. Only those already waiting count against the limit: many requests may be answered at once."""
        if self._over.done():
            return
        if len(self._outbound) > self._max_queued:
            waiting = f"more than {self._max_queued} answers wait to be read; read the stream faster"
            self.end(OverloadedError(waiting, code="slow_reader"))
        else:
            self._outbound.extend(messages)
        self._has_outbound.set()

    async def next_answers(self) -> list[DraftMessage]:
        """Wait for answers and return all of them; empty once too many have waited."""
        await self._has_outbound.wait()
        self._has_outbound.clear()
        answers = list(self._outbound)
        self._outbound.clear()
        return answers

    async def over(self) -> None:
        """Wait until the session has ended. Raises OverloadedError once too many answers wait to be read, and
        UnavailableError once its line is lost.

        Separate from `next_answers`, because a writer whose peer reads nothing never returns from its write.
        """
        await asyncio.shield(self._over)

    def end(self, error: OutriderError | None = None) -> None:
        """End the session: drop answers from now on, and give `error` to whoever waits for the end."""
        self._outbound.clear()
        if not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)


class RemoteDraftEngine(EngineConnection[FromEngine, DrafterProfile]):
    """The door's end of the socket for commits and trees."""

    SILENCE = "the engine has not answered"

    def __init__(self) -> None:
        super().__init__(from_engine)
        self.state = DraftEngineState()
        """The last state that the engine reported."""
        self.on_state: Callable[[DraftEngineState], None] | None = None
        """Called with each state, to take its counts."""
        self._numbers = itertools.count(1)
        self._sessions: dict[int, VerifySession] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}

    @property
    def num_requests(self) -> int:
        """Requests that were open at the last report."""
        return self.state.num_requests

    def expects_sign(self) -> bool:
        """See EngineConnection. Asks for the state; the answer is the sign."""
        self.send(AskState(next(self._numbers)))
        return True

    def attach(self, session: VerifySession, up: SessionUp) -> None:
        """Give a new session its number, and announce it to the engine."""
        session.number = next(self._numbers)
        self._sessions[session.number] = session
        self.send(replace(up, session=session.number))

    def submit(self, session: VerifySession, messages: list[VerifyMessage]) -> None:
        """Have the engine apply a batch of a session's messages."""
        self.send(FromVerify(session.number, messages))

    def detach(self, session: VerifySession) -> None:
        """Have the engine free everything of a session."""
        del self._sessions[session.number]
        self.send(SessionDown(session.number))
        session.number = 0

    async def drain(self) -> None:
        """Open no more requests; return once none is open, or the engine is gone."""
        self.send(Drain())
        await self._refresh_state()
        while self.state.num_requests and not self.gone:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
            await self._refresh_state()

    async def ask(self) -> DraftEngineState:
        """Return the state after everything sent so far; if the engine is busy or gone, the last known state."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._refresh_state(), _STATE_SECONDS)
        return self.state

    async def _refresh_state(self) -> None:
        """Wait until `state` covers everything sent so far, or the engine is gone."""
        if self.gone:
            return
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(AskState(number))
        try:
            await answer
        finally:
            self._asked.pop(number, None)

    def receive(self, frame: FromEngine) -> None:
        """See FrameConnection."""
        match frame:
            case TurnUpdates():
                for answers in frame.messages:
                    # The session may have ended meanwhile.
                    if (session := self._sessions.get(answers.session)) is not None:
                        session.send(answers.messages)
            case DraftEngineState():
                self._take_state(frame)
            case SessionLost():
                if (session := self._sessions.get(frame.session)) is not None:
                    session.end(UnavailableError("the line between the engines is lost; begin a new session"))

    def on_lost(self) -> None:
        """Release everybody who waits for the state."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)

    def _take_state(self, state: DraftEngineState) -> None:
        self.num_signs += 1
        self.state = state
        if self.on_state is not None:
            self.on_state(state)
        answer = self._asked.get(state.reply_to)
        if answer is not None and not answer.done():
            answer.set_result(None)

"""The engine as the door sees it: sessions and features go in, trees and figures come out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress

from draft_service.door.feature_door import FeatureInflow
from draft_service.door.session import Session
from draft_service.frames import (
    Ask,
    AskMatrix,
    Drain,
    Drained,
    FeaturesFromEngine,
    FromEngine,
    Heard,
    LineLost,
    MatrixPart,
    Pieces,
    Ready,
    Refused,
    Serve,
    SessionDown,
    SessionUp,
    State,
    Stop,
    StreamDown,
    StreamReady,
    StreamUp,
    Taken,
    Told,
    features_from_engine,
    from_engine,
)
from outrider.errors import UnavailableError
from outrider.host.remote import EngineEnd, FrameEnd
from outrider.protocol.messages import FEATURE_ITEM_BYTES, Features, FeaturesBegin, VerifyMessage
from outrider.protocol.part_codec import pack_features, pack_ring, pack_verify, unpack_drafts
from outrider.tree.projection import ProjectionPart

_STATE_SECONDS = 1.0
"""How long an engine may take to tell its state; then the last one is what is known."""


class RemoteDraftEngine(EngineEnd[FromEngine, Ready]):
    """The door's end of the socket that trees take."""

    def __init__(self, on_state: Callable[[State], None] | None = None) -> None:
        """`on_state` is told what was counted."""
        super().__init__(from_engine)
        self.state = State()
        """What was open a moment ago."""
        self.on_state = on_state
        self._numbers = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._session_numbers: dict[Session, int] = {}
        self._asked: dict[int, asyncio.Future[State]] = {}
        self._drained: list[asyncio.Future[None]] = []

    def attach(self, session: Session) -> None:
        """A session began."""
        number = next(self._numbers)
        self._sessions[number] = session
        self._session_numbers[session] = number
        parts = None if session.parts is None else sorted(session.parts)
        self.send(SessionUp(number, session.vocab_size, parts, session.line_token))

    def number_of(self, session: Session) -> int:
        """The number under which the engine knows a session; 0 for one that has ended."""
        return self._session_numbers.get(session, 0)

    def submit(self, session: Session, messages: Sequence[VerifyMessage]) -> None:
        """Have a batch of an admitted session's messages applied."""
        if number := self.number_of(session):
            self.send(Heard(number, pack_verify(messages)))

    def detach(self, session: Session) -> None:
        """Have everything of a session freed."""
        number = self._session_numbers.pop(session)
        del self._sessions[number]
        self.send(SessionDown(number))

    def serve_target(self, tokenizer_hash: str, *, anew: bool) -> None:
        """The next sessions are of this target; `anew` if it is another one than before."""
        self.send(Serve(tokenizer_hash, anew))

    def drain(self) -> asyncio.Future[None]:
        """Open no more requests; the future is done once none is open, or the engine is gone."""
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.gone:
            drained.set_result(None)
            return drained
        self._drained.append(drained)
        self.send(Drain())
        return drained

    async def ask(self) -> State:
        """The state after all that was sent before, or the last one that is known of an engine that is busy."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self.send(Ask(number))
        with suppress(TimeoutError, UnavailableError):
            await asyncio.wait_for(answer, _STATE_SECONDS)
        self._asked.pop(number, None)
        return self.state

    def send_stop(self) -> None:
        """Let the engine end."""
        self.send(Stop())

    def take(self, frame: FromEngine) -> None:
        """A frame has come."""
        match frame:
            case Told():
                self._hear(frame)
            case State():
                self._note(frame)
            case Drained():
                self._settle_drained()
            case LineLost():
                if (session := self._sessions.get(frame.session)) is not None:
                    session.lose_line()
            case Ready():
                self.serves(frame)
            case Refused():
                self.refused(frame.message)

    def on_lost(self) -> None:
        """Whoever waits for an answer gets none."""
        self._settle_drained()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(UnavailableError("the draft engine is gone"))

    def _hear(self, told: Told) -> None:
        for said in told.said:
            # A session that ended meanwhile is not there any more.
            if (session := self._sessions.get(said.session)) is not None:
                session.send(unpack_drafts(said.messages))
        for number, count in told.read.items():
            if (session := self._sessions.get(number)) is not None:
                session.batches_done(count)

    def _note(self, state: State) -> None:
        self.state = state
        if self.on_state is not None:
            self.on_state(state)
        answer = self._asked.pop(state.answers, None)
        if answer is not None and not answer.done():
            answer.set_result(state)

    def _settle_drained(self) -> None:
        for drained in self._drained:
            if not drained.done():
                drained.set_result(None)
        self._drained.clear()


class RemoteFeatures(FrameEnd[FeaturesFromEngine]):
    """The door's end of the socket that features take."""

    def __init__(self) -> None:
        super().__init__(features_from_engine)
        self._numbers = itertools.count(1)
        self._streams: dict[int, FeatureStream] = {}

    async def open(self, session: int, begin: FeaturesBegin, inflow: FeatureInflow) -> FeatureStream:
        """Begin a features stream of the session of this number; returns once the engine has mapped its ring, or not.

        A beginning without a ring waits for nothing.
        """
        number = next(self._numbers)
        stream = self._streams[number] = FeatureStream(self, number, inflow)
        row_bytes = begin.width * FEATURE_ITEM_BYTES[begin.dtype]
        self.send(StreamUp(number, session, row_bytes, begin.dtype, begin.projected, pack_ring(begin.ring)))
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

    def take(self, frame: FeaturesFromEngine) -> None:
        """A frame has come."""
        # A stream that ended meanwhile is not there any more.
        if (stream := self._streams.get(frame.stream)) is not None:
            stream.take(frame)


class FeatureStream:
    """One features stream on its way to the engine."""

    def __init__(self, remote: RemoteFeatures, number: int, inflow: FeatureInflow) -> None:
        self.uses_ring = False
        self.broken = False
        """Whether its ring cannot be read any more."""
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """Whether the engine has mapped the ring."""
        self._remote = remote
        self._number = number
        self._inflow = inflow
        self._part: asyncio.Future[tuple[ProjectionPart, bool]] | None = None

    async def submit(self, pieces: Sequence[Features], sequences: Sequence[int]) -> None:
        """Hand over what came in one message; numbers of all that is released with it. Returns when there is room."""
        self._inflow.hand_over(sequences)
        self._remote.send(Pieces(self._number, pack_features(pieces)))
        await self._remote.has_room()

    async def matrix_part(self, offset: int) -> tuple[ProjectionPart, bool]:
        """The bytes of the drafter's projection from `offset` on, and whether they are the last."""
        self._part = asyncio.get_running_loop().create_future()
        self._remote.send(AskMatrix(self._number, offset))
        return await self._part

    def close(self) -> None:
        """It has ended."""
        self._remote.forget(self._number)

    def take(self, frame: FeaturesFromEngine) -> None:
        """A frame has come."""
        match frame:
            case Taken():
                self.broken = frame.broken
                self._inflow.taken()
            case StreamReady():
                if not self.ready.done():
                    self.ready.set_result(frame.uses_ring)
            case MatrixPart():
                if self._part is not None and not self._part.done():
                    part = ProjectionPart(frame.num_columns, frame.dtype, frame.offset, bytes(frame.data))
                    self._part.set_result((part, frame.offset + len(frame.data) >= frame.total))

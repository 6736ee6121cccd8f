"""The engine as the door sees it: sessions and their messages go in, trees and figures come out."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from msgspec.structs import replace

from draft_service.frames import (
    AskState,
    DraftEngineState,
    DrafterProfile,
    Drain,
    FromEngine,
    SessionUp,
    TurnUpdates,
    from_engine,
)
from outrider.errors import OutriderError, OverloadedError, UnavailableError
from outrider.host.frames import FromVerify, SessionDown, SessionLost
from outrider.host.process import EngineConnection
from outrider.protocol.speculation import DraftMessage, VerifyMessage

_STATE_SECONDS = 1.0
"""How long an engine may take to tell its state; then the last one is what is known."""
_DRAIN_POLL_SECONDS = 0.05


class VerifySession:
    """A speculation stream, and the bounded queue of what the engine answers it. Used on the event loop alone.

    A verify service that does not read loses its session and harms no other.
    """

    def __init__(self, max_queued: int) -> None:
        self.number = 0
        """Number under which the engine knows it; 0 before its begin and after its end."""
        self._max_queued = max_queued
        self._outbound: deque[DraftMessage] = deque()
        self._has_outbound = asyncio.Event()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Whoever waits for it is told why; nobody has to.
        self._over.add_done_callback(lambda over: over.cancelled() or over.exception())

    def send(self, messages: Sequence[DraftMessage]) -> None:
        """Queue answers."""
        if self._over.done():
            return
        self._outbound.extend(messages)
        if len(self._outbound) > self._max_queued:
            waiting = f"more than {self._max_queued} answers wait to be read; read the stream faster"
            self._end(OverloadedError(waiting, code="slow_reader"))
        self._has_outbound.set()

    async def next_answers(self) -> list[DraftMessage]:
        """Wait for answers and take all of them; none once too many have waited."""
        await self._has_outbound.wait()
        self._has_outbound.clear()
        answers = list(self._outbound)
        self._outbound.clear()
        return answers

    def lose_line(self) -> None:
        """The verify engine has hung up where it spoke to the engine here."""
        self._end(UnavailableError("the line between the engines is lost; begin a new session"))

    def close(self) -> None:
        """Answers are dropped from here on."""
        self._end(None)

    async def over(self) -> None:
        """Wait until the session is closed. Raises OverloadedError once too many answers wait to be read, and
        UnavailableError once its line is lost.

        Apart from `next_answers`, because a writer whose peer reads nothing comes back from no write.
        """
        await asyncio.shield(self._over)

    def _end(self, error: OutriderError | None) -> None:
        self._outbound.clear()
        if not self._over.done():
            if error is None:
                self._over.set_result(None)
            else:
                self._over.set_exception(error)


class RemoteDraftEngine(EngineConnection[FromEngine, DrafterProfile]):
    """The door's end of the socket that trees take."""

    def __init__(self) -> None:
        super().__init__(from_engine)
        self.state = DraftEngineState()
        """What was open a moment ago."""
        self.on_state: Callable[[DraftEngineState], None] | None = None
        """Told what was counted."""
        self._numbers = itertools.count(1)
        self._sessions: dict[int, VerifySession] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}

    def attach(self, session: VerifySession, up: SessionUp) -> None:
        """A session began; it gets its number here."""
        session.number = next(self._numbers)
        self._sessions[session.number] = session
        self.send(replace(up, session=session.number))

    def submit(self, session: VerifySession, messages: list[VerifyMessage]) -> None:
        """Have a batch of a session's messages applied."""
        self.send(FromVerify(session.number, messages))

    def detach(self, session: VerifySession) -> None:
        """Have everything of a session freed."""
        del self._sessions[session.number]
        self.send(SessionDown(session.number))
        session.number = 0

    async def drain(self) -> None:
        """Open no more requests; returns once none is open, or the engine is gone."""
        self.send(Drain())
        await self._refresh_state()
        while self.state.num_requests and not self.gone:
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
            await self._refresh_state()

    async def ask(self) -> DraftEngineState:
        """The state after all that was sent before, or the last one that is known of an engine that is busy or gone."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._refresh_state(), _STATE_SECONDS)
        return self.state

    async def _refresh_state(self) -> None:
        """Return when `state` tells of all that was sent before, or the engine is gone."""
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
                self._deliver(frame)
            case DraftEngineState():
                self._take_state(frame)
            case SessionLost():
                if (session := self._sessions.get(frame.session)) is not None:
                    session.lose_line()

    def on_lost(self) -> None:
        """Whoever waits for its state waits no longer."""
        for answer in self._asked.values():
            if not answer.done():
                answer.set_result(None)

    def _deliver(self, updates: TurnUpdates) -> None:
        for answers in updates.messages:
            # A session that ended meanwhile is not there any more.
            if (session := self._sessions.get(answers.session)) is not None:
                session.send(answers.messages)

    def _take_state(self, state: DraftEngineState) -> None:
        self.state = state
        if self.on_state is not None:
            self.on_state(state)
        answer = self._asked.get(state.answers)
        if answer is not None and not answer.done():
            answer.set_result(None)

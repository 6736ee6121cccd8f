"""Where the engine finds what it is told: by the door, and by verify engines of this host."""

from __future__ import annotations

import select
from collections import deque
from dataclasses import dataclass, field
from time import monotonic

from draft_service.frames import FeaturesFromDoor, FromDoor, SessionDown, SessionUp
from outrider.host.frames import Stop
from outrider.host.line import DraftBatch, Line, LineHello, Listener, VerifyBatch
from outrider.host.pipe import Pipe, wait_for_any
from outrider.logs import get_logger
from outrider.protocol.speculation import DraftMessage, VerifyMessage

_logger = get_logger(__name__)


_CALL_SECONDS = 5.0
"""How long a caller may take to say which session it is."""
_THEM = "a verify service on this host"
_MAX_CALLERS = 64
"""Lines that may be open and belong to no session."""

_Caller = Line[LineHello | VerifyBatch]


@dataclass(slots=True)
class _Call:
    """Somebody who belongs to no session yet."""

    since: float
    frames: list[LineHello | VerifyBatch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LineMessages:
    """What verify sent in one frame, in order."""

    session: int
    messages: list[VerifyMessage]


class VerifyLines:
    """The draft's ends of all lines. The engine's thread alone uses them.

    They register with the poll object of whoever waits for them.
    """

    def __init__(self, listener: Listener | None, poll: select.poll) -> None:
        self.lost: list[int] = []
        """Sessions whose line is gone, to be told to the door."""
        self.listener = listener
        self._poll = poll
        self._awaited: dict[str, int] = {}
        self._callers: dict[_Caller, _Call] = {}
        self._lines: dict[int, _Caller] = {}
        self._registered: dict[_Caller, int] = {}
        """Descriptors, which a line that closed itself does not know any more."""
        if listener is not None:
            poll.register(listener.fileno(), select.POLLIN)

    def open_lines(self) -> list[_Caller]:
        """All that something may come from but the listener."""
        return [*self._callers, *self._lines.values()]

    def expect(self, session: int, token: str) -> None:
        """A session began, whose verify engine may call."""
        if token:
            self._awaited[token] = session

    def forget(self, session: int) -> None:
        """A session has ended."""
        self._awaited = {token: number for token, number in self._awaited.items() if number != session}
        line = self._lines.pop(session, None)
        if line is not None:
            self._hang_up(line)

    def answer(self) -> None:
        """Hear who calls. To be followed by `expect` for the sessions that are known by now, and then by `take`."""
        if self.listener is None:
            return
        for caller in self.listener.accept():
            self._callers[caller] = _Call(monotonic())
            self._registered[caller] = caller.fileno()
            self._poll.register(caller.fileno(), select.POLLIN)
        for caller, call in self._callers.items():
            call.frames += caller.receive_from(_THEM)

    def take(self) -> list[LineMessages]:
        """What has come, without waiting."""
        heard: list[LineMessages] = []
        for caller, call in list(self._callers.items()):
            self._identify(caller, call, heard)
        for session, line in list(self._lines.items()):
            self._hear(session, line.receive_from(_THEM), heard)
            if line.closed:
                self._lose(session)
        return heard

    def send(self, session: int, messages: list[DraftMessage]) -> bool:
        """Send messages if the session has a line; whether it has one."""
        line = self._lines.get(session)
        if line is None:
            return False
        line.send(DraftBatch(messages))
        if line.closed:
            self._lose(session)
        return True

    def flush(self) -> None:
        """Hand the kernel what it did not take before."""
        for line in self._lines.values():
            if line.backlog:
                line.flush()

    def close(self) -> None:
        """Take no more calls, and end those that there are."""
        for line in (*self._callers, *self._lines.values()):
            line.close()
        if self.listener is not None:
            self.listener.close()

    def _identify(self, caller: _Caller, call: _Call, heard: list[LineMessages]) -> None:
        session, frames = None, call.frames
        if frames and isinstance(frames[0], LineHello):
            session = self._awaited.pop(frames[0].token, None)
        if session is not None and not caller.closed:
            del self._callers[caller]
            self._lines[session] = caller
            self._hear(session, frames[1:], heard)
        elif frames or caller.closed or monotonic() - call.since > _CALL_SECONDS or len(self._callers) > _MAX_CALLERS:
            del self._callers[caller]
            self._hang_up(caller)

    def _hear(self, session: int, frames: list[LineHello | VerifyBatch], heard: list[LineMessages]) -> None:
        for frame in frames:
            if isinstance(frame, LineHello):
                _logger.error("a verify service on this host named its session twice")
                self._lose(session)
                return
            heard.append(LineMessages(session, frame.messages))

    def _lose(self, session: int) -> None:
        line = self._lines.pop(session, None)
        if line is not None:
            self._hang_up(line)
            self.lost.append(session)

    def _hang_up(self, line: _Caller) -> None:
        self._poll.unregister(self._registered.pop(line))
        line.close()


class DraftInbox:
    """Frames on both sockets to the door. The engine's thread alone uses it.

    A door that is gone, or that says what makes no sense, has `Stop` as its last word.
    """

    def __init__(
        self, pipe: Pipe[FromDoor], features: Pipe[FeaturesFromDoor], listener: Listener | None = None
    ) -> None:
        """`listener`: where verify engines of this host call."""
        self.stopped = False
        """Whether the door asked for the end."""
        self.ended: set[int] = set()
        """Sessions whose end has come and was not handled yet: what they sent before is not worth handling."""
        self._pipe = pipe
        self._features = features
        self._arrived: deque[FromDoor | LineMessages] = deque()
        self._arrived_features: deque[FeaturesFromDoor] = deque()
        self._over = False
        self._poll = select.poll()
        self._poll.register(pipe.fileno(), select.POLLIN)
        self._poll.register(features.fileno(), select.POLLIN)
        self.lines = VerifyLines(listener, self._poll)

    def waiting(self) -> bool:
        """Whether something has come, without taking it: about a microsecond."""
        return bool(self._arrived or self._arrived_features or (not self._over and self._poll.poll(0)))

    def next(self) -> FromDoor | FeaturesFromDoor | LineMessages | None:
        """The next frame; None if there is none now. Features come when nothing else does."""
        if not self._arrived and not self._over and self._poll.poll(0):
            self._receive()
        if self._arrived:
            return self._arrived.popleft()
        return self._arrived_features.popleft() if self._arrived_features else None

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds, None for ever, until something comes or an unsent rest can go."""
        if self._arrived or self._arrived_features or self._over:
            return
        listener = self.lines.listener
        wait_for_any(
            [self._pipe, self._features, *self.lines.open_lines()], timeout, [] if listener is None else [listener]
        )

    def _receive(self) -> None:
        # In this order: the door has told of a session before anybody can call for it.
        self.lines.answer()
        frames = self._pipe.receive_from("the door")
        self._arrived += frames
        for frame in frames:
            if isinstance(frame, SessionUp):
                self.lines.expect(frame.session, frame.line_token)
            elif isinstance(frame, SessionDown):
                self.lines.forget(frame.session)
                self.ended.add(frame.session)
        self._arrived += self.lines.take()
        # Those that came before are done first, so they are read no faster than they are done.
        if not self._arrived_features:
            self._arrived_features += self._features.receive_from("the door")
        if any(isinstance(frame, Stop) for frame in frames):
            self.stopped = self._over = True
        elif self._pipe.closed or self._features.closed:
            self._over = True
            self._arrived.append(Stop())

"""The verify engine's inbox: frames of the door on a socket, and of draft engines of this host on lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from outrider.errors import InternalError, OutriderError
from outrider.host.frames import Start, Stop
from outrider.host.line import DraftBatch, Line, VerifyBatch, dial
from outrider.host.pipe import Pipe, wait_for_any
from outrider.logs import get_logger
from outrider.protocol.generation import GenerationUpdate
from outrider.protocol.speculation import DraftMessage, VerifyMessage
from outrider.tree.handshake import Terms
from outrider.tree.projection import Projection
from verify_service.engine.engine import Action, VerifyEngine
from verify_service.engine.reporter import RelayedConnection, VerifyReporter
from verify_service.engine.request import Request
from verify_service.frames import (
    Cancel,
    DraftDown,
    DraftReset,
    DraftUp,
    FeaturesDone,
    FeaturesUp,
    FromDoor,
    FromDraft,
    ProjectionFrame,
    Submit,
)
from verify_service.speculation.drafts import Drafts

log = get_logger(__name__)


class LineConnection(RelayedConnection):
    """A draft's session whose trees take a line; all else takes the door."""

    def __init__(self, session: int, address: str, pipe: Pipe[FromDoor], line: Line[DraftBatch]) -> None:
        super().__init__(session, address, pipe)
        self.line = line

    def send(self, messages: list[VerifyMessage]) -> None:
        """See RelayedConnection."""
        self.line.send(VerifyBatch(messages))


class DraftLines:
    """The engine's ends of all lines. The engine's thread alone uses them.

    A line is read again when what came last was dealt with, so a draft that never stops holds up nobody.
    """

    def __init__(self, pipe: Pipe[FromDoor], drafts: Drafts, post: Callable[[Action], None]) -> None:
        """`pipe`: to the door. `post`: leaves an action for the engine."""
        self._pipe = pipe
        self._drafts = drafts
        self._post = post
        self._connections: dict[int, LineConnection] = {}
        self._busy: set[int] = set()
        """Sessions of which something has come that was not dealt with."""

    def connect(self, frame: DraftUp) -> RelayedConnection:
        """The connection to a draft whose session began: a line, if its engine is on this host."""
        offer = frame.terms.line
        line = None if offer is None else dial(offer.host, offer.path, offer.token)
        if line is None:
            return RelayedConnection(frame.session, frame.address, self._pipe)
        log.info("draft %s is on this host: its engine is spoken to directly", frame.address)
        connection = self._connections[frame.session] = LineConnection(frame.session, frame.address, self._pipe, line)
        return connection

    def forget(self, session: int) -> None:
        """A session has ended."""
        connection = self._connections.pop(session, None)
        self._busy.discard(session)
        if connection is not None:
            connection.line.close()

    def take(self) -> bool:
        """Post what has come; whether there was anything."""
        received = False
        for session, connection in list(self._connections.items()):
            connection.line.flush()
            if session not in self._busy:
                received |= self._read_line(session, connection)
            if connection.line.closed:
                # The door ends the session and dials anew.
                self.forget(session)
                self._pipe.send(DraftReset(session))
        return received

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds, None for ever, until something comes, of the door too."""
        if self._pipe.closed:
            return
        wait_for_any([self._pipe, *(connection.line for connection in self._connections.values())], timeout)

    def _read_line(self, session: int, connection: LineConnection) -> bool:
        batches = connection.line.receive_from(f"draft {connection.address}")
        if not batches:
            return connection.line.closed
        arrived_at = monotonic()
        self._busy.add(session)
        # One by one, so that the engine may turn to something else in between.
        for batch in batches:
            for message in batch.messages:
                self._post(partial(self._receive, session, connection, message, arrived_at))
        self._post(lambda: self._busy.discard(session))
        return True

    def _receive(self, session: int, connection: LineConnection, message: DraftMessage, arrived_at: float) -> None:
        if session in self._connections:
            self._drafts.receive(connection, [message], arrived_at)


@dataclass(slots=True)
class _DraftSession:
    """A session with a draft, and as much of its projection as has come."""

    connection: RelayedConnection
    terms: Terms
    projection_dtype: str = ""
    projection: bytearray = field(default_factory=bytearray)

    def take_projection(self) -> Projection | None:
        """The projection, all of which is here, if one was asked for."""
        if not self.projection:
            return None
        matrix, self.projection = self.projection, bytearray()
        terms = self.terms
        return Projection(
            terms.feature_layers, terms.projection_columns, self.projection_dtype, matrix, terms.projection_hash
        )


class SocketInbox:
    """The engine's inbox, fed by the door's frames and by lines. The engine's thread alone uses it."""

    def __init__(self, pipe: Pipe[FromDoor]) -> None:
        """To be used after `serve`: an engine is built with its inbox."""
        self.stopped = False
        """Whether the door asked for the end."""
        self._pipe = pipe
        self._actions: deque[Action] = deque()
        self._requests: dict[int, Request] = {}
        self._sessions: dict[int, _DraftSession] = {}
        self._engine: VerifyEngine
        self._reporter: VerifyReporter
        self._lines: DraftLines

    def serve(self, engine: VerifyEngine, reporter: VerifyReporter) -> None:
        """From now on frames are for this engine."""
        self._engine = engine
        self._reporter = reporter
        self._lines = DraftLines(self._pipe, engine.drafts, self.post)

    def post(self, action: Action) -> None:
        """Leave an action."""
        self._actions.append(action)

    def take(self, timeout: float | None) -> list[Action]:
        """All actions, after waiting for the door up to `timeout` seconds; None does not wait.

        Returns as soon as the door has sent something, also where that asks for no action.
        """
        received = self._receive()
        if timeout is not None and not received and not self._actions:
            self._lines.wait(timeout)
            self._receive()
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def _receive(self) -> bool:
        """Take in what was sent; whether there was anything, or never will be again."""
        # A spinning engine waits nowhere, which is where the rest of a long frame would leave.
        self._pipe.flush()
        frames = self._pipe.receive()
        for frame in frames:
            self._handle(frame)
        if self._pipe.closed:
            self._engine.stop()
        # Behind the door's frames: a session that is over is not read.
        return self._lines.take() or bool(frames) or self.stopped or self._pipe.closed

    def _handle(self, frame: FromDoor) -> None:
        """One frame, in the order of arrival. What it asks for is done when the engine takes its actions."""
        match frame:
            case Submit():
                self._submit(frame)
            case Cancel():
                self._cancel(frame.number)
            case FromDraft():
                self._receive_from_draft(frame)
            case DraftUp():
                session = self._sessions[frame.session] = _DraftSession(self._lines.connect(frame), frame.terms)
                self._engine.draft_connected(session.connection, frame.terms)
            case DraftDown():
                self._lines.forget(frame.session)
                self._engine.draft_disconnected(self._sessions.pop(frame.session).connection)
            case ProjectionFrame():
                # The door has checked that it follows, and how many there are.
                session = self._sessions[frame.session]
                session.projection_dtype = frame.part.dtype
                session.projection += frame.part.data
            case FeaturesUp():
                session = self._sessions[frame.session]
                opened = self._engine.features.opened
                self.post(partial(opened, session.connection, frame.window, frame.uses_ring, session.take_projection()))
            case FeaturesDone():
                released = self._engine.features.released
                self.post(partial(released, self._sessions[frame.session].connection, frame.through))
            case Stop():
                self.stopped = True
                self._engine.stop()
            case Start():
                raise InternalError("the door started twice")

    def _submit(self, frame: Submit) -> None:
        number = frame.number

        def sink(update: GenerationUpdate) -> None:
            if update.last:
                self._requests.pop(number, None)
            self._reporter.update(number, update)

        try:
            self._engine.limits.check(frame.request)
            request = Request.begin(frame.request, sink, self._engine.limits.vocab_size)
            self._requests[number] = request
            self._engine.submit(request)
        except OutriderError as error:
            sink(GenerationUpdate(error=error))

    def _cancel(self, number: int) -> None:
        request = self._requests.pop(number, None)
        # One that ended meanwhile has said so in its last update.
        if request is not None:
            self._engine.cancel(request)
            self.post(lambda: self._reporter.ended(number))

    def _receive_from_draft(self, frame: FromDraft) -> None:
        connection = self._sessions[frame.session].connection
        # One by one, so that the engine may turn to something else in between.
        for message in frame.messages:
            self.post(partial(self._engine.drafts.receive, connection, [message], frame.arrived_at))
        self.post(lambda: self._reporter.read(frame.session, frame.weight))

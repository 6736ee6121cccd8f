"""The verify engine's inbox: frames of the door on a socket, and of draft engines of this host on lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from time import monotonic

from outrider.errors import InternalError, OutriderError
from outrider.host.frames import SessionDown, Start, Stop
from outrider.host.line import DraftBatch, Line, dial
from outrider.host.pipe import Pipe, wait_for_any
from outrider.logs import get_logger
from outrider.protocol.generation import GenerationUpdate
from outrider.protocol.speculation import DraftMessage
from verify_service.engine.engine import Action, VerifyEngine
from verify_service.engine.reporter import VerifyReporter
from verify_service.engine.request import Request
from verify_service.frames import (
    Cancel,
    DraftUp,
    FeaturesDone,
    FeaturesUp,
    FromDoor,
    FromDraft,
    ProjectionFrame,
    Submit,
)
from verify_service.speculation.connection import DraftServiceConnection

log = get_logger(__name__)


class SocketInbox:
    """The engine's inbox, fed by the door's frames and by lines. The engine's thread alone uses it."""

    def __init__(self, pipe: Pipe[FromDoor]) -> None:
        """To be used after `serve`: an engine is built with its inbox."""
        self.stopped = False
        """Whether the door asked for the end."""
        self._pipe = pipe
        self._actions: deque[Action] = deque()
        self._requests: dict[int, Request] = {}
        self._sessions: dict[int, DraftServiceConnection] = {}
        self._lines: dict[int, tuple[DraftServiceConnection, Line[DraftBatch]]] = {}
        """Lines that were not lost, by session."""
        self._engine: VerifyEngine
        self._reporter: VerifyReporter

    def serve(self, engine: VerifyEngine, reporter: VerifyReporter) -> None:
        """From now on frames are for this engine."""
        self._engine = engine
        self._reporter = reporter

    def post(self, action: Action) -> None:
        """Leave an action."""
        self._actions.append(action)

    def take(self, timeout: float | None) -> list[Action]:
        """All actions, after waiting for the door up to `timeout` seconds; None does not wait.

        Returns as soon as the door has sent something, also where that asks for no action.
        """
        received = self._receive()
        if timeout is not None and not received and not self._actions:
            wait_for_any([self._pipe, *(line for _, line in self._lines.values())], timeout)
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
        return self._receive_from_lines() or bool(frames) or self.stopped or self._pipe.closed

    def _receive_from_lines(self) -> bool:
        """Post what has come on lines; whether there was anything. A draft that never stops holds up nobody."""
        received = False
        for connection, line in list(self._lines.values()):
            line.flush()
            batches = [] if connection.is_busy else line.receive_from(f"draft {connection.address}")
            if batches:
                received = connection.is_busy = True
                arrived_at = monotonic()
                for batch in batches:
                    self._post_messages(connection, batch.messages, arrived_at)
                    if batch.released:
                        self.post(partial(self._engine.features.released, connection, batch.released))
                self.post(partial(setattr, connection, "is_busy", False))
            if line.closed:
                # The door ends the session and dials anew.
                received = True
                self._forget_line(connection)
                connection.reset()
        return received

    def _handle(self, frame: FromDoor) -> None:
        """One frame, in the order of arrival. What it asks for is done when the engine takes its actions."""
        match frame:
            case Submit():
                self._submit(frame)
            case Cancel():
                self._cancel(frame.number)
            case FromDraft():
                self._post_messages(self._sessions[frame.session], frame.messages, frame.arrived_at)
                self.post(partial(self._reporter.read, frame.session, frame.weight))
            case DraftUp():
                connection = self._sessions[frame.session] = self._connect(frame)
                self._engine.draft_connected(connection, frame.terms)
            case SessionDown():
                connection = self._sessions.pop(frame.session)
                self._forget_line(connection)
                self._engine.draft_disconnected(connection)
            case ProjectionFrame():
                # The door has checked that it follows, and how many there are.
                connection = self._sessions[frame.session]
                connection.projection_dtype = frame.part.dtype
                connection.projection += frame.part.data
            case FeaturesUp():
                connection = self._sessions[frame.session]
                opened = self._engine.features.opened
                self.post(partial(opened, connection, frame.window, frame.uses_ring, connection.take_projection()))
            case FeaturesDone():
                released = self._engine.features.released
                self.post(partial(released, self._sessions[frame.session], frame.through))
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

    def _connect(self, up: DraftUp) -> DraftServiceConnection:
        """The connection to a draft whose session began, with a line if its engine is on this host."""
        connection = DraftServiceConnection(up.session, up.address, self._pipe, up.terms)
        offer = up.terms.line
        if offer is not None and (line := dial(offer.host, offer.path, offer.token)) is not None:
            log.info("draft %s is on this host: its engine is spoken to directly", up.address)
            connection.line = line
            self._lines[up.session] = connection, line
        return connection

    def _forget_line(self, connection: DraftServiceConnection) -> None:
        """A session has ended, or its line was lost."""
        if self._lines.pop(connection.session, None) is not None and connection.line is not None:
            connection.line.close()

    def _post_messages(
        self, connection: DraftServiceConnection, messages: Sequence[DraftMessage], arrived_at: float
    ) -> None:
        # One by one, so that the engine may turn to something else in between.
        for message in messages:
            self.post(partial(self._receive_message, connection, message, arrived_at))

    def _receive_message(self, connection: DraftServiceConnection, message: DraftMessage, arrived_at: float) -> None:
        if connection.line is None or not connection.line.closed:
            self._engine.drafts.receive(connection, [message], arrived_at)

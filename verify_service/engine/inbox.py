"""Where the engine finds what it is told: by the door on its socket, and by draft engines of this host on lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
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
from verify_service.engine.engine import Action, VerifyEngine, VerifyInbox
from verify_service.engine.reporter import ReporterPort, VerifyReporter
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


class LinePort(ReporterPort):
    """A draft's session: trees on a line, all else through the door."""

    def __init__(self, session: int, address: str, pipe: Pipe[FromDoor], line: Line[DraftBatch]) -> None:
        super().__init__(session, address, pipe)
        self.line = line

    def send(self, messages: list[VerifyMessage]) -> None:
        """See ReporterPort."""
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
        self._ports: dict[int, LinePort] = {}
        self._busy: set[int] = set()
        """Sessions of which something has come that was not dealt with."""

    def port(self, frame: DraftUp) -> ReporterPort:
        """How to speak to a draft whose session began: on a line, if it can be called."""
        offer = frame.terms.line
        line = None if offer is None else dial(offer.host, offer.path, offer.token)
        if line is None:
            return ReporterPort(frame.session, frame.address, self._pipe)
        log.info("draft %s is on this host: its engine is spoken to directly", frame.address)
        port = self._ports[frame.session] = LinePort(frame.session, frame.address, self._pipe, line)
        return port

    def forget(self, session: int) -> None:
        """A session has ended."""
        port = self._ports.pop(session, None)
        self._busy.discard(session)
        if port is not None:
            port.line.close()

    def take(self) -> bool:
        """Leave the engine what has come; whether there was anything."""
        heard = False
        for session, port in list(self._ports.items()):
            port.line.flush()
            if session not in self._busy:
                heard |= self._hear(session, port)
            if port.line.closed:
                # The door ends the session and dials anew.
                self.forget(session)
                self._pipe.send(DraftReset(session))
        return heard

    def wait(self, timeout: float | None) -> None:
        """Wait up to `timeout` seconds, None for ever, until something comes, of the door too."""
        if self._pipe.closed:
            return
        wait_for_any([self._pipe, *(port.line for port in self._ports.values())], timeout)

    def _hear(self, session: int, port: LinePort) -> bool:
        batches = port.line.receive_from(f"draft {port.address}")
        if not batches:
            return port.line.closed
        arrived_at = monotonic()
        self._busy.add(session)
        # One by one, so that the engine may turn to something else in between.
        for batch in batches:
            for message in batch.messages:
                self._post(partial(self._receive, session, port, message, arrived_at))
        self._post(lambda: self._busy.discard(session))
        return True

    def _receive(self, session: int, port: LinePort, message: DraftMessage, arrived_at: float) -> None:
        if session in self._ports:
            self._drafts.receive(port, [message], arrived_at)


class SocketInbox:
    """The engine's inbox, fed by the door. The engine's thread alone uses it."""

    def __init__(self, pipe: Pipe[FromDoor]) -> None:
        self.stopped = False
        """Whether the door asked for the end, or is gone."""
        self._pipe = pipe
        self._actions: deque[Action] = deque()
        self._handler: FrameHandler | None = None
        self._lines: DraftLines | None = None

    def serve(self, engine: VerifyEngine, reporter: VerifyReporter) -> None:
        """From now on frames are for this engine; it posts here what they ask for."""
        self._lines = DraftLines(self._pipe, engine.drafts, self.post)
        self._handler = FrameHandler(engine, reporter, self._lines, self)

    def post(self, action: Action) -> None:
        """Leave an action."""
        self._actions.append(action)

    def take(self, timeout: float | None) -> list[Action]:
        """All actions, after waiting for the door up to `timeout` seconds; None does not wait.

        Returns as soon as the door has said something, also where that asks for no action.
        """
        heard = self._receive()
        if timeout is not None and not heard and not self._actions:
            self._wait(timeout)
            self._receive()
        actions = list(self._actions)
        self._actions.clear()
        return actions

    def _receive(self) -> bool:
        """Take in what the door sent; whether there was anything, or never will be again."""
        # A spinning engine waits nowhere, which is where the rest of a long frame would leave.
        self._pipe.flush()
        frames = self._pipe.receive()
        for frame in frames:
            self._handle(frame)
        if self._pipe.closed and not self.stopped:
            self._handle(Stop())
        # Behind the door's frames: a session that is over is not read.
        heard = self._lines is not None and self._lines.take()
        return heard or bool(frames) or self.stopped

    def _wait(self, timeout: float) -> None:
        if self._lines is None:
            self._pipe.wait(timeout)
        else:
            self._lines.wait(timeout)

    def _handle(self, frame: FromDoor) -> None:
        if isinstance(frame, Stop):
            self.stopped = True
        if self._handler is not None:
            self._handler.handle(frame)


class FrameHandler:
    """Does what the door's frames ask of an engine."""

    def __init__(self, engine: VerifyEngine, reporter: VerifyReporter, lines: DraftLines, inbox: VerifyInbox) -> None:
        self._engine = engine
        self._reporter = reporter
        self._lines = lines
        self._inbox = inbox
        self._requests: dict[int, Request] = {}
        self._ports: dict[int, ReporterPort] = {}
        self._terms: dict[int, Terms] = {}
        self._matrices: dict[int, tuple[str, bytearray]] = {}
        """Projections that are on their way, as far as they are here, and their dtypes."""

    def handle(self, frame: FromDoor) -> None:
        """One frame, in the order of arrival. What it asks for is done when the engine takes its inbox."""
        match frame:
            case Submit():
                self._submit(frame)
            case Cancel():
                self._cancel(frame.number)
            case FromDraft():
                self._hear(frame)
            case DraftUp():
                port = self._ports[frame.session] = self._lines.port(frame)
                self._terms[frame.session] = frame.terms
                self._engine.draft_connected(port, frame.terms)
            case DraftDown():
                self._terms.pop(frame.session)
                self._matrices.pop(frame.session, None)
                self._lines.forget(frame.session)
                self._engine.draft_disconnected(self._ports.pop(frame.session))
            case ProjectionFrame():
                # The door has checked that it follows, and how many there are.
                _, matrix = self._matrices.setdefault(frame.session, (frame.part.dtype, bytearray()))
                matrix += frame.part.data
            case FeaturesUp() | FeaturesDone():
                self._hear_of_features(frame)
            case Stop():
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
            self._inbox.post(lambda: self._reporter.ended(number))

    def _hear_of_features(self, frame: FeaturesUp | FeaturesDone) -> None:
        port, features = self._ports.get(frame.session), self._engine.features
        if port is None:
            return
        if isinstance(frame, FeaturesUp):
            projection = self._take_projection(frame.session)
            self._inbox.post(partial(features.opened, port, frame.window, frame.uses_ring, projection))
        else:
            self._inbox.post(partial(features.released, port, frame.through))

    def _take_projection(self, session: int) -> Projection | None:
        """What has come of a session's projection, which is all of it."""
        terms, (dtype, matrix) = self._terms[session], self._matrices.pop(session, ("", bytearray()))
        if not matrix:
            return None
        return Projection(terms.feature_layers, terms.projection_columns, dtype, matrix, terms.projection_hash)

    def _hear(self, frame: FromDraft) -> None:
        port = self._ports.get(frame.session)
        if port is None:
            return
        # One by one, so that the engine may turn to something else in between.
        for message in frame.messages:
            self._inbox.post(partial(self._engine.drafts.receive, port, [message], frame.arrived_at))
        self._inbox.post(lambda: self._reporter.read(frame.session, frame.weight))

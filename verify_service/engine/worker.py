"""The engine process: `outrider.host.launch` calls `main` with the socket to the door. One thread, no event loop.

It loads what the door's `Start` names, says `Ready` or `Refused`, and runs rounds until told to stop or the door is
gone. Its inbox takes frames from the door, and from draft engines on this host over lines; its reporter gathers what
the engine tells the door. The door handles signals: it starts this process with SIGINT and SIGTERM blocked.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from outrider.config.verify import VerifyOptions
from outrider.host.frames import FeaturePieces, FromVerify, SessionDown, SessionLost, Stop
from outrider.host.line import DraftBatch, FeatureBatch, Line, VerifyBatch, dial
from outrider.host.worker import BuiltEngine, Pipe, run_worker, wait_for_any
from outrider.logs import get_logger
from outrider.protocol.generation import GenerationUpdate
from outrider.protocol.speculation import DraftMessage, Features, FeaturesBegin, VerifyMessage
from outrider.tree.handshake import Projection, Terms
from verify_service.engine.build import assemble
from verify_service.engine.engine import Action, VerifyEngine, VerifyInbox
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, count_given
from verify_service.frames import (
    Cancel,
    DraftStatus,
    DraftUp,
    EngineUpdates,
    FeatureStreamAccepted,
    FeatureStreamReleased,
    FromDoor,
    FromDraft,
    OpenFeatureStream,
    ProjectionFrame,
    RoundFigures,
    RoundReport,
    Snapshot,
    Submit,
    TargetProfile,
    from_door,
)

SNAPSHOT_SECONDS = 0.25
"""Least time between two snapshots of a busy engine."""


class VerifyReporter:
    """The engine's observer, which also takes every request's updates. Nothing is sent before `flush`."""

    def __init__(self, pipe: Pipe[FromDoor], clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe = pipe
        self._clock = clock
        self._engine: VerifyEngine | None = None
        self._updates: list[tuple[int, GenerationUpdate]] = []
        self._ended: list[int] = []
        self._rounds: list[RoundReport] = []
        self._read: Counter[int] = Counter()
        self._snapshot: Snapshot | None = None
        self._snapshot_at = float("-inf")

    def watch(self, engine: VerifyEngine) -> None:
        """Report this engine's state, too."""
        self._engine = engine

    def update(self, number: int, update: GenerationUpdate) -> None:
        """Add an update of request `number`."""
        self._updates.append((number, update))

    def ended(self, number: int) -> None:
        """Note that the cancelled request `number` has left the engine."""
        self._ended.append(number)

    def read(self, session: int, weight: int) -> None:
        """Note that messages of a draft were taken."""
        self._read[session] += weight

    def round(self, entries: Sequence[Entry], updates: Sequence[GenerationUpdate], figures: RoundFigures) -> None:
        """See Observer."""
        grown = [pair for pair in zip(entries, updates, strict=True) if pair[0].nodes.scores]
        report = RoundReport(
            num_nodes=sum(len(entry.nodes) for entry in entries),
            num_prefilled=sum(entry.num_extend for entry in entries if entry.prefills),
            committed=[len(update.token_ids) for update in updates if update.token_ids],
            accepted=[update.num_accepted_tokens for update in updates if update.num_accepted_tokens],
            num_failed=sum(update.error is not None for update in updates),
            figures=figures,
            num_grown=sum(len(entry.nodes) - len(entry.nodes.slots) for entry, _ in grown),
            num_grown_accepted=sum(
                max(update.num_accepted_tokens - count_given(entry.nodes, update.token_ids), 0)
                for entry, update in grown
            ),
        )
        self._rounds.append(report)

    def flush(self) -> None:
        """Send what has gathered, and now and then the engine's state."""
        snapshot = self._new_snapshot()
        if self._updates or self._ended or self._rounds or self._read or snapshot is not None:
            self._pipe.send(EngineUpdates(self._updates, self._ended, self._rounds, self._read, snapshot))
            self._updates, self._ended, self._rounds = [], [], []
            self._read.clear()

    def _new_snapshot(self) -> Snapshot | None:
        """Return the engine's state, if it has changed and it is time to report it."""
        engine, last = self._engine, self._snapshot
        if engine is None:
            return None
        now = self._clock()
        idle = not engine.scheduler.running and not engine.scheduler.waiting
        was_idle = last is not None and not last.num_running and not last.num_waiting
        if now - self._snapshot_at < SNAPSHOT_SECONDS and idle == was_idle:
            return None
        drafts = engine.drafts
        self._snapshot_at = now
        self._snapshot = Snapshot(
            num_running=len(engine.scheduler.running),
            num_waiting=len(engine.scheduler.waiting),
            num_pages=engine.memory.num_pages,
            num_pages_used=engine.memory.num_used,
            num_preemptions=engine.scheduler.num_preemptions,
            dropped=dict(drafts.dropped),
            declined=dict(drafts.declined),
            drafts=[
                DraftStatus(replica.connection.address, replica.health.good, replica.health.times.typical)
                for replica in drafts.replicas.values()
            ],
            cost=engine.budget.cost.table(),
            graphs_pending=engine.features.num_pending,
            drafts_waiting=engine.features.num_waiting,
            num_displaced=engine.scheduler.num_displaced,
        )
        return self._snapshot if self._snapshot != last else None


log = get_logger(__name__)


@dataclass(eq=False, slots=True)
class DraftServiceConnection:
    """A session with a draft service, see DraftConnection.

    The door has its streams; if the draft's engine is on this host, this object has a line to it. No method blocks
    while the door reads.
    """

    session: int
    address: str
    pipe: Pipe[FromDoor]
    terms: Terms = field(default_factory=Terms)
    line: Line[DraftBatch] | None = None
    """Carries the speculation stream's messages, and those of the features stream about features in a ring."""
    is_busy: bool = False
    """Whether messages of the line are still to be processed: until they are, it is not read."""
    projection_dtype: str = ""
    projection: bytearray = field(default_factory=bytearray)
    """The bytes of the projection that have come."""

    def send(self, messages: list[VerifyMessage]) -> None:
        """See DraftConnection."""
        if self.line is not None:
            self.line.send(VerifyBatch(messages))
        else:
            self.pipe.send(FromVerify(self.session, messages))

    @property
    def has_room(self) -> bool:
        """See DraftConnection."""
        # Reports of rounds should not queue behind much else.
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
        """See DraftConnection: the door dials the draft again, and reports the session down, and a new one up."""
        self.pipe.send(SessionLost(self.session))

    def take_projection(self) -> Projection | None:
        """Take the projection, all of which has come; None if none was asked for."""
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
        """Call `serve` before use: an engine is built with its inbox."""
        self.stopped = False
        """Whether the door asked the engine to stop."""
        self._pipe = pipe
        self._actions: list[Action] = []
        self._requests: dict[int, Request] = {}
        self._sessions: dict[int, DraftServiceConnection] = {}
        self._lines: dict[int, tuple[DraftServiceConnection, Line[DraftBatch]]] = {}
        """Lines that were not lost, by session."""
        self._engine: VerifyEngine
        self._reporter: VerifyReporter

    def serve(self, engine: VerifyEngine, reporter: VerifyReporter) -> None:
        """Pass frames to this engine from now on."""
        self._engine = engine
        self._reporter = reporter

    def post(self, action: Action) -> None:
        """Queue an action."""
        self._actions.append(action)

    def take(self, timeout: float | None) -> list[Action]:
        """Return all actions, after waiting up to `timeout` seconds for messages; None does not wait.

        Returns as soon as something has come, even if it asks for no action.
        """
        received = self._receive()
        if timeout is not None and not received and not self._actions:
            wait_for_any([self._pipe, *(line for _, line in self._lines.values())], timeout)
            self._receive()
        actions, self._actions = self._actions, []
        return actions

    def _receive(self) -> bool:
        """Take in what was sent. Returns whether there was anything, or there is nothing more to come."""
        # The rest of a long frame leaves while an engine waits, which a spinning one never does.
        self._pipe.flush()
        frames = self._pipe.receive()
        for frame in frames:
            self._handle(frame)
        if self._pipe.closed:
            self._engine.stop()
        # Lines come after the door's frames: a session that is over is not read.
        return self._receive_from_lines() or bool(frames) or self.stopped or self._pipe.closed

    def _receive_from_lines(self) -> bool:
        """Post what came on lines; returns whether anything did. A draft that sends endlessly delays no other work."""
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
                # The door ends the session and dials again.
                received = True
                self._forget_line(connection)
                connection.reset()
        return received

    def _handle(self, frame: FromDoor) -> None:
        """Handle one frame, in order of arrival. Its actions are run when the engine takes them."""
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
                # The door has checked the order and number of parts.
                connection = self._sessions[frame.session]
                connection.projection_dtype = frame.part.dtype
                connection.projection += frame.part.data
            case FeatureStreamAccepted():
                connection = self._sessions[frame.session]
                opened = self._engine.features.opened
                self.post(partial(opened, connection, frame.window, frame.uses_ring, connection.take_projection()))
            case FeatureStreamReleased():
                released = self._engine.features.released
                self.post(partial(released, self._sessions[frame.session], frame.through))
            case Stop():
                self.stopped = True
                self._engine.stop()

    def _submit(self, frame: Submit) -> None:
        number = frame.number

        def sink(update: GenerationUpdate) -> None:
            if update.last:
                self._requests.pop(number, None)
            self._reporter.update(number, update)

        request = self._requests[number] = Request.begin(frame.request, sink, self._engine.limits.vocab_size)
        self._engine.submit(request)

    def _cancel(self, number: int) -> None:
        request = self._requests.pop(number, None)
        # A request that has ended meanwhile has sent its last update.
        if request is not None:
            self._engine.cancel(request)
            self.post(lambda: self._reporter.ended(number))

    def _connect(self, up: DraftUp) -> DraftServiceConnection:
        """Return a connection to a draft whose session began, with a line if its engine is on this host."""
        connection = DraftServiceConnection(up.session, up.address, self._pipe, up.terms)
        offer = up.terms.line
        if offer is not None and (line := dial(offer.host, offer.path, offer.token)) is not None:
            log.info("draft %s is on this host: its engine is spoken to directly", up.address)
            connection.line = line
            self._lines[up.session] = connection, line
        return connection

    def _forget_line(self, connection: DraftServiceConnection) -> None:
        """Close a session's line, if it has one: the session has ended, or the line was lost."""
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


Build = Callable[[VerifyOptions, VerifyInbox, VerifyReporter], tuple[VerifyEngine, TargetProfile]]
"""Makes the engine that the options ask for. Raises ConfigError when they cannot be met."""


def main(argv: list[str]) -> int:
    """Serve the door at the other end of an inherited socket; returns the exit code."""
    return run_worker("verify", argv, [from_door], partial(connect, build=assemble))


def connect(options: VerifyOptions, pipe: Pipe[FromDoor], build: Build) -> BuiltEngine[TargetProfile]:
    """Build an engine that is connected to the door. Raises what `build` raises."""
    inbox, reporter = SocketInbox(pipe), VerifyReporter(pipe)
    engine, served = build(options, inbox, reporter)
    reporter.watch(engine)
    inbox.serve(engine, reporter)

    def run() -> bool:
        engine.run()
        return inbox.stopped

    return BuiltEngine(served, run)

"""The engine process: `outrider.host.launch` calls `main` with the sockets to the door. One thread, no event loop.

It loads the drafters that the door's `Start` names, says `Ready` or `Refused`, and grows trees until it is told to stop
or the door is gone. `DraftEngine` owns the requests and the drafter, and grows trees that follow commits.
`DraftReporter` sends the door answers after each turn, and the state now and then. Signals are left to the door, which
starts this process with SIGINT and SIGTERM blocked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, perf_counter
from typing import TypeVar

from msgspec.structs import replace

from draft_service.engine.inbox import DraftInbox, FeatureReceiver, LineFeatures, VerifyLines
from draft_service.frames import (
    GROWTH_SECONDS,
    AskProjection,
    AskState,
    DraftEngineState,
    DrafterProfile,
    Drain,
    FeaturesFromDoor,
    FeatureStreamDown,
    FeatureStreamUp,
    FromDoor,
    SessionUp,
    ToVerify,
    TurnUpdates,
    features_from_door,
    from_door,
)
from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter
from outrider.drafting.model.drafter import find_mapper, workplace
from outrider.drafting.model.features import MemoryMapper
from outrider.drafting.registry import build_drafter
from outrider.drafting.requests import AnswerPort, Requests, drafters_of_any_target, introduce
from outrider.errors import ConfigError, is_device_failure, raise_device_failure
from outrider.host.frames import FeaturePieces, FromVerify, SessionDown, SessionLost, Stop
from outrider.host.line import Listener, listen
from outrider.host.process import switch_threads_often
from outrider.host.worker import (
    BuiltEngine,
    GarbageCollector,
    Pipe,
    disable_automatic_collection,
    pin_to_cores,
    run_worker,
)
from outrider.logs import get_logger
from outrider.models.drafters.kinds import without_model
from outrider.protocol.speculation import DraftMessage, Features, LineOffer, VerifyMessage

_logger = get_logger(__name__)

_Key = TypeVar("_Key")

STATE_SECONDS = 0.25
"""Least time between two unasked reports of the state."""

_SLICE_SECONDS = 0.001
"""Time of growth before new nodes are sent; a burst after a miss fits in."""
_MAX_FRAMES_PER_TURN = 64
_TURNS_PER_WORK = 8
"""While trees grow, the drafter does other work in one of this many turns."""
_WATCH_SECONDS = 0.02
"""How long an engine with nothing to grow polls its sockets before it sleeps on them, if it can map GPU memory.
Features and the next round's commit come within this time, and a sleeping thread wakes late, with cold caches."""
_MAPPING_POLL_SECONDS = 0.001
"""How often an idle engine checks whether a ring has been mapped."""
_MAX_FAILED_TURNS = 10
"""This many failed turns within _FAILED_TURNS_SECONDS end the engine; a supervisor then starts a fresh one."""
_FAILED_TURNS_SECONDS = 60.0


class DraftReporter:
    """Sends the engine's messages to the door: answers with `flush` after each turn, counts with the state."""

    def __init__(self, pipe: Pipe[FromDoor], drafter: AnyDrafter, requests: Requests, lines: VerifyLines) -> None:
        self._pipe = pipe
        self._drafter = drafter
        self._requests = requests
        self._lines = lines
        self._answers: dict[int, list[DraftMessage]] = {}
        self._state_at = float("-inf")
        self._changed = False
        self._slices = [0] * (len(GROWTH_SECONDS) + 1)
        self._slice_seconds = 0.0

    def answer(self, session: int, messages: Sequence[DraftMessage]) -> None:
        """Queue answers for a session until `flush`."""
        self._answers.setdefault(session, []).extend(messages)

    def flush(self) -> None:
        """Send the queued answers, on the session's line if it has one."""
        self._changed = True
        for session in list(self._answers):
            if self._lines.send(session, self._answers[session]):
                del self._answers[session]
        self._lines.flush()
        for session in self._lines.lost:
            self._pipe.send(SessionLost(session))
        self._lines.lost.clear()
        if self._answers:
            self._pipe.send(TurnUpdates([ToVerify(session, parts) for session, parts in self._answers.items()]))
            self._answers.clear()
        elif self._pipe.backlog:
            self._pipe.flush()

    def count_slice(self, seconds: float) -> None:
        """Count a slice of growth that took `seconds`."""
        self._slices[bisect_left(GROWTH_SECONDS, seconds)] += 1
        self._slice_seconds += seconds

    @property
    def seconds_left(self) -> float | None:
        """Time until the next report of the state is due; None if nothing has changed."""
        return max(0.0, self._state_at + STATE_SECONDS - monotonic()) if self._changed else None

    def report_state(self, reply_to: int = 0) -> None:
        """Send the state as the answer to the `AskState` with this number, or, without a number, if it is due."""
        if reply_to or self.seconds_left == 0.0:
            self._state_at, self._changed = monotonic(), False
            self._pipe.send(self._take_state(reply_to))

    def _take_state(self, reply_to: int) -> DraftEngineState:
        """Return the present state with the counts since the last one, and reset these."""
        requests = self._requests
        slices, self._slices = self._slices, [0] * len(self._slices)
        slice_seconds, self._slice_seconds = self._slice_seconds, 0.0
        phases, phase_seconds = requests.growth.answer_phases.take()
        return DraftEngineState(
            reply_to=reply_to,
            num_requests=len(requests),
            num_nodes=requests.growth.num_live,
            gauges=dict(self._drafter.gauges()),
            grown=_emptied(requests.growth.grown),
            commits=_emptied(requests.commits),
            declines=_emptied(requests.declines),
            dropped=_emptied(requests.dropped),
            bursts=requests.growth.take_counts(),
            slices=slices,
            slice_seconds=slice_seconds,
            phases=phases,
            phase_seconds=phase_seconds,
        )


def _emptied(counts: Counter[_Key]) -> dict[_Key, int]:
    taken = dict(counts)
    counts.clear()
    return taken


class DraftEngine:
    """Follows commits, grows trees ahead of them, and sends what has grown.

    A turn handles the frames that have arrived, grows for a slice or until more frames arrive, and sends new nodes.
    While there is something to grow, the engine polls its sockets; otherwise it sleeps on them, on a GPU after a while.
    """

    def __init__(
        self,
        drafter: AnyDrafter,
        options: DraftOptions,
        pipe: Pipe[FromDoor],
        features: Pipe[FeaturesFromDoor],
        mapper: MemoryMapper | None,
        listener: Listener | None,
    ) -> None:
        """`mapper` maps verify's memory for the drafter's device, None if that is impossible. `listener` accepts lines
        from verify engines on this host."""
        self.requests = Requests(drafter, options)
        self.inbox = DraftInbox(pipe, features, listener)
        self._reporter = DraftReporter(pipe, drafter, self.requests, self.inbox.lines)
        self._features = FeatureReceiver(features, drafter, mapper, self._apply, self._fail_features)
        self._ports: dict[int, AnswerPort] = {}
        self._target: tuple[int, str] | None = None
        """Vocabulary size and hash of token ids of the newest session."""
        self._watch_seconds = 0.0 if mapper is None else _WATCH_SECONDS
        # Requests leave no reference cycles, and tries of open ones have a million nodes: a full collection would take
        # a second.
        self._garbage = GarbageCollector(looks_at_all=False)
        self._stopping = False
        self._num_turns = 0

    def run(self) -> None:
        """Take turns until the door sends Stop or is gone, the device fails, or turns fail again and again."""
        failures: deque[float] = deque(maxlen=_MAX_FAILED_TURNS)
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                failures.append(perf_counter())
                often = len(failures) == _MAX_FAILED_TURNS and failures[-1] - failures[0] < _FAILED_TURNS_SECONDS
                if often or is_device_failure(error):
                    _logger.error("the engine failed; the service exits to be restarted", exc_info=error)
                    break
                _logger.error("a turn of the engine failed", exc_info=error)
        self.inbox.lines.close()

    def _turn(self) -> None:
        growth = self.requests.growth
        if growth.idle and not (growth.has_work or growth.has_updates):
            self._wait()
        self._process_frames()
        if not growth.idle:
            began = perf_counter()
            growth.grow(began + _SLICE_SECONDS, self.inbox.waiting)
            if growth.device_idle and self.inbox.waiting():
                self._process_frames()
                growth.grow(perf_counter() + _SLICE_SECONDS, self.inbox.waiting)
            self._reporter.count_slice(perf_counter() - began)
        self._num_turns += 1
        if growth.has_work and (growth.idle or self._num_turns % _TURNS_PER_WORK == 0):
            growth.work(perf_counter() + _SLICE_SECONDS)
        self.requests.send_nodes()
        self._reporter.flush()
        self._maintain()

    def _maintain(self) -> None:
        """Do what can wait until answers are sent."""
        if self._features.mapping:
            self._features.report_mapped()
        self._reporter.report_state()
        self._garbage.collect_young()

    def _wait(self) -> None:
        """Sleep until a frame arrives, and meanwhile report mapped rings and the state."""
        if not len(self.requests):
            self._garbage.collect_and_freeze()
        elif self._watch():
            return
        while not self.inbox.waiting():
            times = [self._reporter.seconds_left, _MAPPING_POLL_SECONDS if self._features.mapping else None]
            timeout = min((seconds for seconds in times if seconds is not None), default=None)
            self.inbox.wait(timeout)
            if timeout is not None:
                self._features.report_mapped()
                self._reporter.report_state()

    def _watch(self) -> bool:
        """Poll the sockets for `_watch_seconds` without sleeping. Return whether a frame has arrived."""
        end = perf_counter() + self._watch_seconds
        while perf_counter() < end:
            if self.inbox.waiting():
                return True
        return False

    def _process_frames(self) -> None:
        for _ in range(_MAX_FRAMES_PER_TURN):
            frame = self.inbox.next()
            if frame is None:
                return
            self._handle(frame)

    def _handle(self, frame: FromDoor | FeaturesFromDoor | LineFeatures) -> None:
        match frame:
            case FromVerify():
                self._apply(frame.session, frame.messages)
            case LineFeatures():
                self._features.take_on_line(frame.session, frame.features)
                self.inbox.lines.release(frame.session, frame.features[-1].sequence)
            case SessionUp():
                self._begin(frame)
            case SessionDown():
                self.inbox.ended.discard(frame.session)
                self.requests.detach(self._ports.pop(frame.session))
            case AskState():
                self._reporter.flush()
                self._reporter.report_state(frame.number)
            case Drain():
                self.requests.draining = True
            case Stop():
                self._stopping = True
            case FeatureStreamUp() | FeatureStreamDown() | FeaturePieces() | AskProjection():
                self._features.handle(frame)

    def _begin(self, up: SessionUp) -> None:
        """Begin a session; if its target differs from the last one, forget what was learned from that one's text."""
        target = (up.vocab_size, up.token_ids_hash)
        if target != self._target:
            self._target = target
            self.requests.growth.forget_target()
            self.requests.grammars.serve(up.token_ids_hash)
        self._ports[up.session] = AnswerPort(up.vocab_size, up.parts, partial(self._reporter.answer, up.session))

    def _apply(self, session: int, messages: Sequence[VerifyMessage | Features]) -> None:
        """Handle a session's messages, unless the session has ended meanwhile."""
        port = self._ports.get(session)
        if port is None or session in self.inbox.ended:
            return
        for message in messages:
            try:
                self.requests.handle(port, message)
            except Exception as error:
                raise_device_failure(error)
                _logger.error("a message could not be handled", exc_info=error)
                self.requests.fail(port, message)

    def _fail_features(self, session: int, pieces: Sequence[Features]) -> None:
        """Give up the requests whose features could not be read."""
        port = self._ports.get(session)
        if port is not None:
            for features in pieces:
                self.requests.fail(port, features)


Build = Callable[[DraftOptions], tuple[AnyDrafter, MemoryMapper | None]]
"""Makes the drafter, and the mapper of verify's memory if its device can map it. Raises ConfigError."""


def main(argv: list[str]) -> int:
    """Serve the door at the other end of two inherited sockets; return the exit code."""
    return run_worker("draft", argv, (from_door, features_from_door), partial(connect, build=assemble))


def assemble(options: DraftOptions) -> tuple[AnyDrafter, MemoryMapper | None]:
    """Load the drafters that the options name. Raises ConfigError."""
    pin_to_cores(options.engine_cpus)
    switch_threads_often()
    drafter = build_drafter(options)
    mapper = find_mapper(drafter)
    disable_automatic_collection()
    return drafter, mapper


def connect(
    options: DraftOptions, pipe: Pipe[FromDoor], features: Pipe[FeaturesFromDoor], build: Build
) -> BuiltEngine[DrafterProfile]:
    """Build an engine that is connected to the door.

    Raises what `build` raises. If a draft model with NGRAM beside it fails to load, log the error and go on with NGRAM.
    """
    try:
        drafter, mapper = build(options)
    except ConfigError as error:
        options = without_model(options, error)
        drafter, mapper = build(options)
    listener = listen(options.local_line)
    line = None if listener is None else LineOffer(listener.host, listener.path)
    engine = DraftEngine(drafter, options, pipe, features, mapper, listener)

    def run() -> bool:
        with workplace(drafter):
            engine.run()
        return engine.inbox.stopped

    return BuiltEngine(describe(drafter, options, maps_memory=mapper is not None, line=line), run)


def describe(
    drafter: AnyDrafter, options: DraftOptions, *, maps_memory: bool = False, line: LineOffer | None = None
) -> DrafterProfile:
    """Return what the door needs to know about the drafter of the options."""
    hello = replace(introduce(drafter, options), line=line)
    return DrafterProfile(hello, drafters_of_any_target(drafter), maps_memory, tuple(drafter.gauges()))

"""The engine process: `python -m verify_service.engine.worker FD`, with the socket to the door. One thread, no loop.

It loads what the door's `Start` names, says `Ready` or `Refused`, and runs rounds until told to stop or the door is
gone. Signals are the door's business: it starts this process with SIGINT and SIGTERM blocked.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from outrider.config.verify import VerifyOptions
from outrider.errors import InternalError, OutriderError
from outrider.host.frames import Start, Stop
from outrider.host.pipe import Pipe
from outrider.host.worker import BuiltEngine, leave, run_worker
from outrider.protocol.part_codec import unpack_drafts
from outrider.protocol.parts import DraftPart
from outrider.sampling.sampler import RequestSampler
from outrider.tree.handshake import Terms
from outrider.tree.projection import Projection
from verify_service.engine.build import Built, assemble
from verify_service.engine.engine import VerifyEngine
from verify_service.engine.inbox import Action, VerifyInbox
from verify_service.engine.lines import DraftLines
from verify_service.engine.reporter import ReporterPort, VerifyReporter
from verify_service.engine.request import Request
from verify_service.frames.codec import unpack_submission
from verify_service.frames.drafts import DraftDown, DraftUp, FeaturesDone, FeaturesUp, FromDraft, ProjectionFrame
from verify_service.frames.engine import ServedModel
from verify_service.frames.messages import FromDoor, from_door
from verify_service.frames.requests import Cancel, Submit
from verify_service.frames.submission import Submission, Update


class Build(Protocol):
    """Makes the engine that the options ask for."""

    def __call__(self, options: VerifyOptions, inbox: VerifyInbox, observer: VerifyReporter) -> Built:
        """Raises ConfigError when they cannot be met."""


def main(argv: list[str]) -> int:
    """Serve the door at the other end of an inherited socket; returns the exit code."""
    return run_worker("verify", argv, [from_door], partial(connect, build=assemble))


def connect(options: VerifyOptions, pipe: Pipe[FromDoor], build: Build) -> BuiltEngine[ServedModel]:
    """An engine that hears and answers the door. Raises what `build` raises."""
    inbox, reporter = SocketInbox(pipe), VerifyReporter(pipe)
    built = build(options, inbox, reporter)
    reporter.watch(built.engine)
    inbox.serve(built.engine, reporter)

    def run() -> bool:
        built.engine.run()
        return inbox.stopped

    return BuiltEngine(built.served, run)


def make_request(submission: Submission, sink: Callable[[Update], None], vocab_size: int) -> Request:
    """A request at its start, as the engine sees it. Raises InvalidRequestError for what the door should not let in."""
    tokens = list(submission.tokens)
    return Request(
        request_id=submission.request_id,
        tokens=tokens,
        prompt_len=len(tokens),
        sampling=submission.sampling,
        sampler=RequestSampler(submission.sampling, tokens, vocab_size),
        max_tokens=submission.max_tokens,
        stop_ids=submission.stop_ids,
        speculate=submission.speculate,
        num_prompt_logprobs=submission.num_prompt_logprobs,
        trace=submission.trace,
        priority=submission.priority,
        tenant=submission.tenant,
        client=submission.client,
        sink=sink,
    )


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
                terms = Terms(
                    max_positions=frame.max_positions,
                    feature_layers=tuple(frame.feature_layers),
                    projection_columns=frame.projection_columns,
                    projection_hash=frame.projection_hash,
                    features_optional=frame.features_optional,
                    sources=tuple(frame.sources),
                )
                self._terms[frame.session] = terms
                self._engine.draft_connected(port, terms)
            case DraftDown():
                self._terms.pop(frame.session)
                self._matrices.pop(frame.session, None)
                self._lines.forget(frame.session)
                self._engine.draft_disconnected(self._ports.pop(frame.session))
            case ProjectionFrame():
                # The door has checked that it follows, and how many there are.
                _, matrix = self._matrices.setdefault(frame.session, (frame.dtype, bytearray()))
                matrix += frame.data
            case FeaturesUp() | FeaturesDone():
                self._hear_of_features(frame)
            case Stop():
                self._engine.stop()
            case Start():
                raise InternalError("the door started twice")

    def _submit(self, frame: Submit) -> None:
        number = frame.number

        def sink(update: Update) -> None:
            if update.last:
                self._requests.pop(number, None)
            self._reporter.update(number, update)

        try:
            request = make_request(unpack_submission(frame), sink, self._engine.limits.vocab_size)
            self._requests[number] = request
            self._engine.submit(request)
        except OutriderError as error:
            sink(Update(error=error))

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
        for part in frame.messages:
            self._inbox.post(partial(self._receive, port, part, frame.arrived_at))
        self._inbox.post(lambda: self._reporter.read(frame.session, frame.weight))

    def _receive(self, port: ReporterPort, part: DraftPart, arrived_at: float) -> None:
        self._engine.drafts.receive(port, unpack_drafts([part]), arrived_at)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

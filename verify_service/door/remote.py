"""The engine as the door sees it: requests and drafts go in, updates and figures come out."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from outrider.errors import OutriderError, OverloadedError, UnavailableError, count_of
from outrider.host.frames import FeaturePieces, FromVerify, SessionDown, SessionLost
from outrider.host.process import EngineConnection
from outrider.logs import get_logger
from outrider.protocol.generation import GenerationRequest, GenerationUpdate
from outrider.protocol.speculation import (
    Decline,
    DraftMessage,
    Features,
    FeaturesBegin,
    Grow,
    Hello,
    VerifyMessage,
)
from outrider.tree.handshake import Terms
from verify_service.frames import (
    ENGINE_FAILED,
    ENGINE_STOPPED,
    Cancel,
    DraftUp,
    EngineUpdates,
    FromDraft,
    FromEngine,
    OpenFeatureStream,
    RoundReport,
    Snapshot,
    Submit,
    TargetProfile,
    from_engine,
)

log = get_logger(__name__)

DEFAULT_MAX_TOKENS = 262144
MAX_UNREAD_DRAFT_WEIGHT = 65536
"""Weight of one draft's messages that the engine may leave unread: about 0.1 s of work."""
_END_INTERVAL_LEARN = 0.2
"""Weight of the newest time between the ends of two requests."""
_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 30.0

Deliver = Callable[[GenerationUpdate], None]


class Backlog:
    """Unfinished requests, and the prompt tokens of those that wait for their first token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_tokens = DEFAULT_MAX_TOKENS
        self.refused: Counter[str] = Counter()
        """Number of refused requests, by reason."""
        self.slow_readers = 0
        """Answers that were ended because they were not read."""
        self._clock = clock
        self._max_unfinished = 0
        self._max_waiting = 0
        self._unfinished: dict[int, int] = {}
        """By request number, the prompt tokens of requests without a token yet, and 0 for others."""
        self.num_tokens = 0
        """Prompt tokens of all requests without a token yet."""
        self._ended_at: float | None = None
        self._seconds_between_ends = 0.0

    def open(self, max_running: int, max_waiting: int) -> None:
        """Set the limits of an engine that has become ready."""
        self._max_unfinished = max_running + max_waiting
        self._max_waiting = max_waiting

    def admit(self, number: int, num_tokens: int) -> None:
        """Count a request in. Raises OverloadedError if there is no place, with the time when one may be free."""
        if len(self._unfinished) >= self._max_unfinished:
            waiting = f"{count_of(self._max_waiting, 'request')} {'is' if self._max_waiting == 1 else 'are'} waiting"
            raise self._refusal("requests", f"{waiting} already, which is the limit; try again later")
        # Alone, a prompt may be as long as the context allows: otherwise it could never be served.
        if self.num_tokens and self.num_tokens + num_tokens > self.max_tokens:
            raise self._refusal(
                "tokens",
                f"{self.num_tokens} prompt tokens are waiting already, {num_tokens} more would exceed the limit of "
                f"{self.max_tokens}; try again later",
            )
        self._unfinished[number] = num_tokens
        self.num_tokens += num_tokens

    def began(self, number: int) -> None:
        """Note that a request has its first token."""
        if num_tokens := self._unfinished.get(number):
            self.num_tokens -= num_tokens
            self._unfinished[number] = 0

    def ended(self, number: int) -> None:
        """Note that a request is over, however it ended."""
        if number not in self._unfinished:
            return
        self.num_tokens -= self._unfinished.pop(number)
        now = self._clock()
        if self._ended_at is not None:
            self._seconds_between_ends += _END_INTERVAL_LEARN * (now - self._ended_at - self._seconds_between_ends)
        # Idle time does not show how fast requests end.
        self._ended_at = now if self._unfinished else None

    def _refusal(self, reason: str, message: str) -> OverloadedError:
        self.refused[reason] += 1
        retry_after = min(max(self._seconds_between_ends, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
        return OverloadedError(message, retry_after=retry_after)


class DraftStream(Protocol):
    """The streams of a session with one draft service. Methods must not block."""

    address: str
    number: int
    """The session's number in frames to the engine."""
    unread_weight: int
    """Weight of the draft's messages that the engine has not taken."""

    def send(self, messages: list[VerifyMessage]) -> None:
        """Queue messages, in order."""

    def begin_features(self, begin: FeaturesBegin) -> None:
        """Open the features stream, under the session's own token."""

    def send_features(self, messages: list[Features]) -> None:
        """Queue features, in order."""

    def reset(self) -> None:
        """End the session; it is reported down, and up again once it is reopened."""


class RemoteVerifyEngine(EngineConnection[FromEngine, TargetProfile]):
    """The door's end of the socket to the engine process. Everything happens on the event loop.

    `on_round` is called with the report of every round.
    """

    SILENCE = "no round has ended"

    def __init__(self, on_round: Callable[[RoundReport], None]) -> None:
        super().__init__(from_engine)
        self.snapshot = Snapshot()
        """The engine's state a moment ago."""
        self._on_round = on_round
        self._numbers = itertools.count(1)
        self._answers: dict[int, Deliver | None] = {}
        """Listeners of the requests that the engine has not ended yet; None for one that was cancelled."""
        self.backlog = Backlog()
        self._sessions: dict[int, DraftStream] = {}

    @property
    def num_requests(self) -> int:
        """Requests in rounds, and those that wait for a place."""
        return len(self._answers)

    @property
    def num_running(self) -> int:
        """Requests in rounds."""
        return min(self.snapshot.num_running, len(self._answers))

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place."""
        return self.num_requests - self.num_running

    @property
    def num_healthy(self) -> int:
        """Draft services connected and answering."""
        return sum(draft.healthy for draft in self.snapshot.drafts)

    def submit(self, request: GenerationRequest, deliver: Deliver) -> int:
        """Queue a request; returns its number. `deliver` gets every update, the last one included.

        Raises OverloadedError when too many requests or prompt tokens wait, UnavailableError when stopping.
        """
        if not self.alive:
            raise UnavailableError("the verify service is stopping")
        number = next(self._numbers)
        self.backlog.admit(number, len(request.prompt_token_ids))
        self._answers[number] = deliver
        self.send(Submit(number, request))
        return number

    def cancel(self, number: int) -> None:
        """End a request without a further update; its pages are free before the next round."""
        if number in self._answers:
            self._answers[number] = None
            self.send(Cancel(number))

    def end_answers(self, reason: OutriderError) -> int:
        """End every request with this error, and return how many callers were waiting for one."""
        callbacks = {number: deliver for number, deliver in self._answers.items() if deliver is not None}
        for number, deliver in callbacks.items():
            self.cancel(number)
            deliver(GenerationUpdate(error=reason))
        return len(callbacks)

    def expects_sign(self) -> bool:
        """See EngineConnection: with requests, the engine reports every round, and the end of every request."""
        return bool(self._answers)

    def draft_connected(self, stream: DraftStream, terms: Terms | None = None) -> None:
        """Tell the engine that a session with a draft service began."""
        stream.number, stream.unread_weight = next(self._numbers), 0
        self._sessions[stream.number] = stream
        self.send(DraftUp(stream.number, stream.address, terms or Terms()))

    def draft_disconnected(self, stream: DraftStream) -> None:
        """Tell the engine that a session with a draft service ended."""
        del self._sessions[stream.number]
        self.send(SessionDown(stream.number))

    def draft_received(self, stream: DraftStream, messages: list[DraftMessage]) -> None:
        """Pass on a draft's messages. One that floods the engine (`MAX_UNREAD_DRAFT_WEIGHT`) loses its session."""
        weight = unread_weight(messages)
        if stream.unread_weight + weight > MAX_UNREAD_DRAFT_WEIGHT:
            log.warning("draft %s floods the engine; its session is reset", stream.address)
            stream.reset()
            return
        stream.unread_weight += weight
        # The engine only counts a hello in mid-stream, whatever it says.
        messages = [Hello(0, 0) if isinstance(message, Hello) else message for message in messages]
        # Note the time: messages may lie unread for a whole round, which is not the draft's fault.
        self.send(FromDraft(stream.number, time.monotonic(), weight, messages))

    def on_ready(self, served: TargetProfile) -> None:
        """See EngineConnection."""
        self.backlog.open(served.max_running, served.max_waiting)

    def on_lost(self) -> None:
        """Tell the callers of all unfinished requests."""
        reason = UnavailableError(ENGINE_STOPPED if self.stopping else ENGINE_FAILED)
        answers, self._answers = self._answers, {}
        for deliver in answers.values():
            if deliver is not None:
                deliver(GenerationUpdate(error=reason))

    def receive(self, frame: FromEngine) -> None:
        """See FrameConnection."""
        if isinstance(frame, EngineUpdates):
            self._deliver(frame)
            return
        stream = self._sessions.get(frame.session)
        if stream is None:  # the session has ended meanwhile
            return
        match frame:
            case FromVerify():
                stream.send(frame.messages)
            case OpenFeatureStream():
                stream.begin_features(frame.begin)
            case FeaturePieces():
                stream.send_features(frame.features)
            case SessionLost():
                stream.reset()

    def _deliver(self, frame: EngineUpdates) -> None:
        self.num_signs += bool(frame.updates or frame.ended or frame.rounds)
        for number, update in frame.updates:
            deliver = self._answers.get(number)
            if update.token_ids:
                self.backlog.began(number)
            if update.last:
                self._answers.pop(number, None)
                self.backlog.ended(number)
            if deliver is not None:
                deliver(update)
        for number in frame.ended:
            self._answers.pop(number, None)
            self.backlog.ended(number)
        for report in frame.rounds:
            self._on_round(report)
        for number, weight in frame.read.items():
            if (stream := self._sessions.get(number)) is not None:
                stream.unread_weight -= weight
        if frame.snapshot is not None:
            self.snapshot = frame.snapshot


def unread_weight(messages: Sequence[DraftMessage]) -> int:
    """Return the weight of a draft's messages: 16 for each, and 1 for each of its nodes or characters.

    A Grow counts by its longest array: if the lengths differ it is malformed, but takes memory all the same.
    """
    return sum(16 + _length(message) for message in messages)


def _length(message: DraftMessage) -> int:
    match message:
        case Grow():
            return max(len(message.token_ids), len(message.parents), len(message.scores), len(message.sources))
        case Decline():
            return len(message.detail)
        case _:
            return 0

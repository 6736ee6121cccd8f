"""What the engine tells the door: trees turn by turn, and its state now and then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic

from draft_service.engine.lines import VerifyLines
from draft_service.engine.requests import Requests
from draft_service.engine.tally import Tally
from draft_service.frames import Drained, FromDoor, LineLost, Said, Told
from outrider.drafting.base import AnyDrafter
from outrider.host.pipe import Pipe
from outrider.protocol.messages import DraftMessage
from outrider.protocol.part_codec import pack_drafts
from outrider.protocol.parts import DraftPart

STATE_SECONDS = 0.25
"""Least time between two states that were not asked for."""
_MOST_UNTOLD = 32
"""Batches that were read before the door is told of that alone; mostly it is told beside an answer."""


class DraftReporter:
    """The engine's words to the door. Answers leave with `flush`, turn by turn."""

    def __init__(
        self,
        pipe: Pipe[FromDoor],
        drafter: AnyDrafter,
        requests: Requests,
        lines: VerifyLines,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.tally = Tally()
        self._pipe = pipe
        self._drafter = drafter
        self._requests = requests
        self._lines = lines
        self._clock = clock
        self._said: dict[int, list[DraftPart]] = {}
        self._read: Counter[int] = Counter()
        self._num_read = 0
        self._told_at = float("-inf")
        self._changed = False

    def say(self, session: int, messages: Sequence[DraftMessage]) -> None:
        """Answers for a session."""
        self._said.setdefault(session, []).extend(pack_drafts(messages))

    def read(self, session: int) -> None:
        """A batch of a session was handled."""
        self._read[session] += 1
        self._num_read += 1

    def flush(self, *, idle: bool) -> None:
        """Send what was said; `idle` that nothing more is to be expected soon."""
        self._changed = True
        self._say_on_lines()
        if self._said or self._num_read >= _MOST_UNTOLD or (idle and self._num_read):
            said = [Said(session, parts) for session, parts in self._said.items()]
            self._pipe.send(Told(said, dict(self._read)))
            self._said.clear()
            self._read.clear()
            self._num_read = 0
        elif self._pipe.backlog:
            self._pipe.flush()

    def _say_on_lines(self) -> None:
        for session in list(self._said):
            if self._lines.send(session, self._said[session]):
                del self._said[session]
        self._lines.flush()
        for session in self._lines.lost:
            self._pipe.send(LineLost(session))
        self._lines.lost.clear()

    @property
    def seconds_left(self) -> float | None:
        """Until the state should be told; None if there is nothing new in it."""
        return max(0.0, self._told_at + STATE_SECONDS - self._clock()) if self._changed else None

    def tell_state(self, answers: int = 0) -> None:
        """Send the state now: as an answer to the `Ask` of this number, or unasked if it is time."""
        if not answers and self.seconds_left != 0.0:
            return
        self._told_at, self._changed = self._clock(), False
        self._pipe.send(self.tally.take(self._requests, dict(self._drafter.gauges()), answers))

    def drained(self) -> None:
        """No request is open any more."""
        self._pipe.send(Drained())


class SessionPeer:
    """A session whose other half is in the door: see Peer."""

    def __init__(self, number: int, vocab_size: int, parts: frozenset[int] | None, reporter: DraftReporter) -> None:
        self.number = number
        self.vocab_size = vocab_size
        self.parts = parts
        self.closed = False
        """Whether the stream has ended; what it sent last is not worth handling."""
        self._reporter = reporter

    def send(self, messages: Sequence[DraftMessage]) -> None:
        """Send answers at the end of the turn."""
        if not self.closed:
            self._reporter.say(self.number, messages)

"""Whether a draft service answers, and how fast."""

from __future__ import annotations

from collections.abc import Callable

_LEARN = 0.1
_SLOW_FACTOR = 10.0
_SLOW_FLOOR = 0.05
_LOST_SECONDS = 2.0


class PeerHealth:
    """Times from a commit to the draft's acknowledgement of it, in seconds.

    A peer is good while its oldest unanswered commit is young for it, and lost when nothing came back for two
    seconds: it may be stopped, or its link dead without a word.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Forget everything, as at the start of a session."""
        self.typical = 0.002
        self.late = 0.006
        """About the 95th percentile of answers."""
        self._unanswered: dict[int, tuple[int, float]] = {}
        self._newest: dict[int, tuple[int, float]] = {}

    def sent(self, number: int, length: int) -> None:
        """A request was opened or committed up to `length`; the oldest unanswered one counts."""
        self._newest[number] = (length, self._clock())
        self._unanswered.setdefault(number, self._newest[number])

    def answered(self, number: int, acked_len: int, at: float) -> None:
        """An answer of time `at` says that the draft has applied commits up to `acked_len`."""
        length, since = self._unanswered.get(number, (0, 0.0))
        if not length or acked_len < length:
            return
        self._note(max(at - since, 0.0))
        # What was sent while this one was under way is still to be answered, or nobody would miss its answer.
        if self._newest[number][0] > acked_len:
            self._unanswered[number] = self._newest[number]
        else:
            self.forget(number)

    def forget(self, number: int) -> None:
        """No answer is expected any more."""
        self._unanswered.pop(number, None)
        self._newest.pop(number, None)

    def waited(self, number: int) -> float:
        """Seconds since the oldest unanswered commit of a request; 0 when all are answered."""
        entry = self._unanswered.get(number)
        return self._clock() - entry[1] if entry else 0.0

    @property
    def good(self) -> bool:
        """Whether waiting for this peer can be worth it."""
        return self._oldest() < max(_SLOW_FLOOR, _SLOW_FACTOR * self.typical)

    @property
    def lost(self) -> bool:
        """Whether the session should be given up."""
        return self._oldest() > _LOST_SECONDS

    def _oldest(self) -> float:
        # Copied at once: scrapes and load reports ask from threads of their own.
        unanswered = list(self._unanswered.values())
        return self._clock() - min(since for _, since in unanswered) if unanswered else 0.0

    def _note(self, seconds: float) -> None:
        self.typical += _LEARN * (seconds - self.typical)
        # A quantile by stochastic steps: up 19 times as far as down settles where 1 in 20 answers is later.
        step = _LEARN * max(self.typical, 1e-4)
        self.late = max(self.late + (step if seconds > self.late else -step / 19), self.typical)

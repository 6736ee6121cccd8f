"""Whether speculation as a whole pays, measured: tokens per second of rounds with it and of rounds without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.logs import get_logger

log = get_logger(__name__)

MIN_REQUESTS = 16
"""With fewer in a round, what drafts cost the host is small, and what a few rounds bring is mostly chance."""

FEW_ROUNDS = 8
"""Rounds without speculation that are enough to know their speed: all bring one token a request."""

_MEASURED_TOKENS = 2048
_MIN_ROUNDS = 32
"""Rounds with speculation that are measured: as many as bring so many tokens, and no fewer than these."""

_SETTLE_PLAIN = 2
_SETTLE_SPECULATIVE = 16
"""Rounds left out after a switch: what drafts had sent is still taken, or they have to catch up."""

MARGIN = 1.02
"""Speculation must be so much faster than plain rounds to be taken up again."""

_HOPELESS = 0.9
"""A trial that is so slow after a few rounds ends at once."""

CLEAR_GAIN = 1.25
"""Speculation so much faster than plain rounds could be, by their times at the start, is not doubted."""

_FIRST_SPAN = 64
_SPAN_AFTER_SWITCH = 256
_MAX_SPAN = 4096
"""Rounds between two trials of the other way: few at first, twice as many after each that changed nothing."""


@dataclass(slots=True)
class _Window:
    """Rounds that were measured one way."""

    num_rounds: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    seconds: float = 0.0

    def add(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        self.num_rounds += 1
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        self.seconds += seconds

    @property
    def speed(self) -> float:
        """Tokens per second and request."""
        return self.num_tokens / self.num_requests * self.num_rounds / self.seconds


class Payoff:
    """Decides whether rounds speculate.

    What drafts cost beside the nodes of a round (messages that are read, commits that are told, trees that are looked
    at, processes on the same cores) is paid in rounds without nodes, too. So it is part of t(M) for every M, and the
    budget cannot weigh it. Here rounds with all of it are compared with rounds with none.

    The way in use is measured before each trial of the other, at about the same number of requests; a trial during
    which that number changes proves nothing.
    """

    def __init__(self, plain_seconds: Callable[[int], float]) -> None:
        """`plain_seconds`: what a round of so many tokens takes at least."""
        self._plain_seconds = plain_seconds
        self.speculates = True
        """Whether rounds should speculate now."""
        self._before: _Window | None = None
        """Of the way in use, while the other one is tried."""
        self._window = _Window()
        self._num_requests = 0
        """Of the first round of the window; in a trial of the window before."""
        self._judged_at = 0
        """About so many requests the span is for."""
        self._num_skipped = 0
        self._span = self._num_left = _FIRST_SPAN

    def restart(self) -> None:
        """Drafts have changed: rounds speculate, and what was measured is forgotten."""
        self._settle(speculates=True, span=_FIRST_SPAN)

    def observe(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """A round without prefill brought `num_requests` requests so many tokens; its gap and hold are in `seconds`."""
        if num_requests < MIN_REQUESTS:
            if not self.speculates or self._before is not None:
                self.restart()
            return
        if not self._judged_at / 2 <= num_requests <= 2 * self._judged_at and self._before is None:
            self._judged_at = num_requests
            self._settle(self.speculates, _FIRST_SPAN)
        if self._num_skipped:
            self._num_skipped -= 1
            return
        self._num_left -= 1
        if self._before is None and self._num_left >= self._wanted(num_requests):
            return
        if not self._window.num_rounds and self._before is None:
            self._num_requests = num_requests
        if abs(num_requests - self._num_requests) > max(self._num_requests // 8, 1):
            return self._departed()
        self._window.add(num_requests, num_tokens, seconds)
        is_full = self._window.num_rounds >= self._wanted(self._num_requests)
        if self._before is not None:
            few = self._window.num_rounds >= FEW_ROUNDS
            if is_full or (few and self._window.speed < _HOPELESS * self._before.speed):
                self._compare(self._before)
        elif is_full:
            self._try_other()

    def _wanted(self, num_requests: int) -> int:
        return max(_MEASURED_TOKENS // num_requests, _MIN_ROUNDS) if self.speculates else FEW_ROUNDS

    def _departed(self) -> None:
        """The number of requests has changed: what was measured says nothing of it."""
        if self._before is not None:
            self._settle(speculates=not self.speculates, span=self._span)
        else:
            self._window = _Window()

    def _try_other(self) -> None:
        if self.speculates and self._window.speed * self._plain_seconds(self._num_requests) >= CLEAR_GAIN:
            return self._settle(speculates=True, span=self._span)
        self._before = self._window
        self._switch(not self.speculates)

    def _compare(self, before: _Window) -> None:
        now = self._window
        if now.speed > (MARGIN if self.speculates else 1.0) * before.speed:
            log.info(
                "%s: %.0f tokens per second at %d requests, %.0f before",
                "drafts are used again" if self.speculates else "drafts are left out, they cost more than they bring",
                now.speed * self._num_requests,
                self._num_requests,
                before.speed * self._num_requests,
            )
            self._settle(speculates=self.speculates, span=_SPAN_AFTER_SWITCH)
        else:
            self._settle(speculates=not self.speculates, span=min(2 * self._span, _MAX_SPAN))

    def _settle(self, speculates: bool, span: int) -> None:
        """Go on one way, until the next trial of the other."""
        self._before = None
        self._switch(speculates)
        self._span = self._num_left = span

    def _switch(self, speculates: bool) -> None:
        self._window = _Window()
        if speculates != self.speculates:
            self.speculates = speculates
            self._num_skipped = _SETTLE_SPECULATIVE if speculates else _SETTLE_PLAIN

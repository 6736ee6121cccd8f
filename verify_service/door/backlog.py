"""What a verify service has taken in and not begun: bounded by requests and by prompt tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from outrider.errors import OverloadedError

DEFAULT_MAX_TOKENS = 262144
_LEARN = 0.2
_MIN_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 30.0


class Backlog:
    """Requests that are unfinished, and prompt tokens of those that wait for their first token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_tokens = DEFAULT_MAX_TOKENS
        self.refused: Counter[str] = Counter()
        """Requests that were not let in, by reason."""
        self.slow_readers = 0
        """Answers that were ended because nobody read them."""
        self._clock = clock
        self._max_unfinished = 0
        self._max_waiting = 0
        self._unfinished: set[int] = set()
        self._waiting: dict[int, int] = {}
        """Prompt tokens of each request without a token, by its number."""
        self.num_tokens = 0
        """Sum of these."""
        self._ended_at: float | None = None
        self._seconds_between_ends = 0.0

    def open(self, max_running: int, max_waiting: int) -> None:
        """The engine is ready for so many requests."""
        self._max_unfinished = max_running + max_waiting
        self._max_waiting = max_waiting

    def admit(self, number: int, num_tokens: int) -> None:
        """Take a request in. Raises OverloadedError, with the time after which a place may be free."""
        if len(self._unfinished) >= self._max_unfinished:
            raise self._refusal(
                "requests", f"{self._max_waiting} requests are waiting already, the most allowed; try again later"
            )
        # Alone it may be as long as the context allows: otherwise it could never be served.
        if self._waiting and self.num_tokens + num_tokens > self.max_tokens:
            raise self._refusal(
                "tokens",
                f"{self.num_tokens} prompt tokens are waiting already, {num_tokens} more would exceed the limit of "
                f"{self.max_tokens}; try again later",
            )
        self._unfinished.add(number)
        self._waiting[number] = num_tokens
        self.num_tokens += num_tokens

    def began(self, number: int) -> None:
        """A request has its first token."""
        self.num_tokens -= self._waiting.pop(number, 0)

    def ended(self, number: int) -> None:
        """A request is over, however it ended."""
        if number not in self._unfinished:
            return
        self.began(number)
        self._unfinished.discard(number)
        now = self._clock()
        if self._ended_at is not None:
            self._seconds_between_ends += _LEARN * (now - self._ended_at - self._seconds_between_ends)
        self._ended_at = now

    def _refusal(self, reason: str, message: str) -> OverloadedError:
        self.refused[reason] += 1
        retry_after = min(max(self._seconds_between_ends, _MIN_RETRY_SECONDS), _MAX_RETRY_SECONDS)
        return OverloadedError(message, retry_after=retry_after)

"""What one request of a load generator gave, as its client saw it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

ACCEPTED, BONUS, PLAIN = 1, 2, 3
"""Where a token came from: the numbers of TokenOrigin."""


@dataclass(slots=True)
class Record:
    """One request. Times are in seconds since the start of the measurement."""

    due: float
    """When it should have been sent; waiting for a place of --max-concurrency counts as latency."""
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many."""
    end: float = 0.0
    error: str = ""
    """The error's code; empty for a complete answer."""
    detail: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_rounds: int = 0
    """Rounds with draft tokens; known only where tokens come with their origin."""
    accepted_at: Counter[int] = field(default_factory=Counter)
    """Rounds that accepted a draft token at this depth, the root's children being 1; known likewise."""
    _run: int = 0

    @property
    def tokens(self) -> int:
        """Generated tokens that came."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.due if self.arrivals else None

    @property
    def latency(self) -> float:
        """Seconds to the end."""
        return self.end - self.due

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token after the first message."""
        later = self.tokens - self.arrivals[0][1] if self.arrivals else 0
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else None

    def gaps(self) -> Iterable[tuple[float, int]]:
        """Seconds between two messages, and the number of tokens that the second one brought."""
        for (before, _), (at, count) in zip(self.arrivals, self.arrivals[1:], strict=False):
            yield at - before, count

    def take(self, at: float, count: int) -> None:
        """Tokens came."""
        if count:
            self.arrivals.append((at, count))

    def take_origins(self, origins: Iterable[int]) -> None:
        """The same tokens' origins, which tell rounds apart: accepted tokens, then the target's own."""
        for origin in origins:
            if origin == ACCEPTED:
                self._run += 1
                self.accepted_at[self._run] += 1
            else:
                self._end_round(origin == BONUS or self._run > 0)

    def finish(self, at: float, error: str = "", detail: str = "") -> None:
        """The stream ended."""
        self.end, self.error, self.detail = at, error, detail
        self._end_round(self._run > 0)  # a stop or a limit cut the target's own token off

    def _end_round(self, drafted: bool) -> None:
        self.drafted_rounds += drafted
        self._run = 0

    def as_dict(self) -> dict[str, object]:
        """For a detailed report."""
        return {
            "due": round(self.due, 6),
            "ttft": self.ttft,
            "latency": self.latency,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.tokens,
            "arrivals": [[round(at, 6), count] for at, count in self.arrivals],
            "rounds": self.rounds,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "error": self.error,
        }

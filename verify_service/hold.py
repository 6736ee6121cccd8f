"""Whether a round should wait for a draft's answer (rule 2 of the design: never blindly)."""

from __future__ import annotations

from collections.abc import Sequence

from verify_service.budget import Budget
from verify_service.drafts import PROMISE_NODES, Link

MIN_GAIN = 1.02
"""Holding must promise this much more tokens per second: estimates are no better than that."""


class HoldPolicy:
    """Compares tokens per second of a round now with those of a round after the awaited answers."""

    def __init__(self, budget: Budget, max_seconds: float) -> None:
        self._budget = budget
        self._max_seconds = max_seconds

    def seconds(
        self, awaited: Sequence[Link], num_tokens: int, expected: float, seconds: float, beside: float = 0.0
    ) -> float:
        """How long to wait at most, from now; 0 means not at all.

        `awaited` are links of the round that await an answer. The round computes `num_tokens` tokens before any nodes,
        and as it stands is expected to commit `expected` tokens in `seconds`, `beside` of which go into other things.
        """
        awaited = [link for link in awaited if link.awaited and link.peer is not None and link.peer.health.good]
        if not awaited or not self._max_seconds or not self._budget.max_nodes:
            return 0.0
        gain = sum(link.gain for link in awaited)
        promised = min(PROMISE_NODES * len(awaited), self._budget.max_nodes)
        then = self._budget.cost.seconds(num_tokens + promised) + beside
        # A wait of w pays while (expected + gain) / (then + w) beats expected / seconds.
        pays = (expected + gain) * seconds / (expected * MIN_GAIN) - then
        typical = max(self._remaining(link, late=False) for link in awaited)
        if pays <= typical:
            return 0.0
        late = max(self._remaining(link, late=True) for link in awaited)
        return min(pays, late, self._max_seconds)

    def _remaining(self, link: Link, late: bool) -> float:
        if link.peer is None:
            return 0.0
        health = link.peer.health
        return max((health.late if late else health.typical) - health.waited(link.number), 0.0)

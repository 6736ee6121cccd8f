"""Whether a round should wait for a draft's answer (rule 2 of the design: never blindly)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from verify_service.budget import Budget
from verify_service.drafts import PROMISE_NODES, Link

MIN_GAIN = 1.02
"""Holding must promise this much more tokens per second: estimates are no better than that."""


class HoldPolicy:
    """Compares tokens per second of a round now with those of a round after the awaited answers."""

    def __init__(self, budget: Budget, max_seconds: float) -> None:
        self._budget = budget
        self._max_seconds = max_seconds

    def seconds(self, links: Sequence[Link], num_extend: int, num_roots: int, probs: NDArray[np.float64]) -> float:
        """How long to wait at most, from now; 0 means not at all.

        `links` are those of the round's requests, `probs` the path probabilities of the nodes at hand, descending.
        """
        awaited = [link for link in links if link.awaited and link.peer is not None and link.peer.health.good]
        if not awaited or not self._max_seconds or not self._budget.max_nodes:
            return 0.0
        expected, seconds = self._budget.rate(num_extend, num_roots, probs)
        gain = sum(link.gain for link in awaited)
        then = float(self._budget.cost.seconds(num_extend + min(PROMISE_NODES * len(awaited), self._budget.max_nodes)))
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

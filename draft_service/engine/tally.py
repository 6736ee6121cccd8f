"""What an engine has counted and not told yet."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from typing import TypeVar

from draft_service.engine.requests import Requests
from draft_service.frames import GROWTH_SECONDS, State

_Key = TypeVar("_Key")


class Tally:
    """Counts in plain numbers: the engine has no metrics of its own."""

    def __init__(self) -> None:
        self._slices = [0] * (len(GROWTH_SECONDS) + 1)
        self._slice_seconds = 0.0

    def slice(self, seconds: float) -> None:
        """A slice of growth took so long."""
        self._slices[bisect_left(GROWTH_SECONDS, seconds)] += 1
        self._slice_seconds += seconds

    def take(self, requests: Requests, gauges: dict[str, int], answers: int = 0) -> State:
        """The state now, with all that was counted since the last time."""
        bursts: defaultdict[str, float] = defaultdict(float)

        def count(name: str, amount: float) -> None:
            bursts[name] += amount

        requests.growth.count_into(count)
        slices, self._slices = self._slices, [0] * len(self._slices)
        slice_seconds, self._slice_seconds = self._slice_seconds, 0.0
        return State(
            answers=answers,
            num_requests=len(requests),
            num_nodes=requests.growth.num_live,
            gauges=gauges,
            grown=_emptied(requests.growth.ledger.grown),
            commits={outcome.value: count for outcome, count in _emptied(requests.commits).items()},
            declines={reason.value: count for reason, count in _emptied(requests.declines).items()},
            dropped=_emptied(requests.dropped),
            bursts=dict(bursts),
            slices=slices,
            slice_seconds=slice_seconds,
        )


def _emptied(counts: Counter[_Key]) -> dict[_Key, int]:
    taken = dict(counts)
    counts.clear()
    return taken

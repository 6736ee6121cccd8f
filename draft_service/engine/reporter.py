"""What the engine tells the door: trees turn by turn, and its state now and then."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from time import monotonic
from typing import TypeVar

from draft_service.engine.inbox import VerifyLines
from draft_service.frames import GROWTH_SECONDS, DraftEngineState, FromDoor, ToVerify, TurnUpdates
from outrider.drafting.base import AnyDrafter
from outrider.drafting.requests import Requests
from outrider.host.frames import SessionLost
from outrider.host.pipe import Pipe
from outrider.protocol.speculation import DraftMessage

_Key = TypeVar("_Key")

STATE_SECONDS = 0.25
"""Least time between two states that were not asked for."""


class DraftReporter:
    """The engine's words to the door. Answers leave with `flush`, turn by turn; counts with the state."""

    def __init__(self, pipe: Pipe[FromDoor], drafter: AnyDrafter, requests: Requests, lines: VerifyLines) -> None:
        self._pipe = pipe
        self._drafter = drafter
        self._requests = requests
        self._lines = lines
        self._answers: dict[int, list[DraftMessage]] = {}
        self._state_at = float("-inf")
        self._changed = False
        self._slices = [0] * (len(GROWTH_SECONDS) + 1)
        self._slice_seconds = 0.0

    def answer(self, session: int, messages: Sequence[DraftMessage]) -> None:
        """Answers for a session."""
        self._answers.setdefault(session, []).extend(messages)

    def flush(self) -> None:
        """Send the answers."""
        self._changed = True
        self._answer_on_lines()
        if self._answers:
            self._pipe.send(TurnUpdates([ToVerify(session, parts) for session, parts in self._answers.items()]))
            self._answers.clear()
        elif self._pipe.backlog:
            self._pipe.flush()

    def _answer_on_lines(self) -> None:
        for session in list(self._answers):
            if self._lines.send(session, self._answers[session]):
                del self._answers[session]
        self._lines.flush()
        for session in self._lines.lost:
            self._pipe.send(SessionLost(session))
        self._lines.lost.clear()

    def count_slice(self, seconds: float) -> None:
        """A slice of growth took so long."""
        self._slices[bisect_left(GROWTH_SECONDS, seconds)] += 1
        self._slice_seconds += seconds

    @property
    def seconds_left(self) -> float | None:
        """Until the state should be told; None if there is nothing new in it."""
        return max(0.0, self._state_at + STATE_SECONDS - monotonic()) if self._changed else None

    def tell_state(self, answers: int = 0) -> None:
        """Send the state now: as an answer to the `AskState` of this number, or unasked if it is time."""
        if answers or self.seconds_left == 0.0:
            self._state_at, self._changed = monotonic(), False
            self._pipe.send(self._take_state(answers))

    def _take_state(self, answers: int) -> DraftEngineState:
        """The state now, with all that was counted since the last time."""
        requests = self._requests
        slices, self._slices = self._slices, [0] * len(self._slices)
        slice_seconds, self._slice_seconds = self._slice_seconds, 0.0
        phases, phase_seconds = requests.growth.answer_phases.take()
        return DraftEngineState(
            answers=answers,
            num_requests=len(requests),
            num_nodes=requests.growth.num_live,
            gauges=dict(self._drafter.gauges()),
            grown=_emptied(requests.growth.grown),
            commits={outcome.value: count for outcome, count in _emptied(requests.commits).items()},
            declines={reason.value: count for reason, count in _emptied(requests.declines).items()},
            dropped=_emptied(requests.dropped),
            bursts=requests.growth.take_counts(),
            slices=slices,
            slice_seconds=slice_seconds,
            phases=phases,
            phase_seconds=phase_seconds,
        )


def _emptied(counts: Counter[_Key]) -> dict[_Key, int]:
    taken = dict(counts)
    counts.clear()
    return taken

"""Phases of answers: what counts as which, and what is counted once."""

from __future__ import annotations

import pytest

from outrider.drafting.tree_growth import ANSWER_SECONDS, AnswerPhases


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_phase_lasts_from_the_end_of_the_one_before() -> None:
    clock = Clock()
    times = AnswerPhases(clock)
    times.note(1, "features")  # nothing is owed
    times.begin(1)
    for at, phase in ((0.1, "features"), (0.3, "launch"), (0.4, "features"), (1.0, "burst")):
        clock.now = at
        times.note(1, phase)
        times.begin(1)  # a second commit before the answer to the first
    clock.now = 1.5
    times.end(1)
    times.end(1)
    counts, seconds = times.take()
    assert seconds == pytest.approx({"features": 0.2, "launch": 0.2, "burst": 0.6, "send": 0.5})
    assert {phase: sum(found) for phase, found in counts.items()} == dict.fromkeys(seconds, 1)
    assert counts["send"][ANSWER_SECONDS.index(0.5)] == 1
    assert times.take() == ({}, {})


def test_what_was_closed_is_not_counted() -> None:
    times = AnswerPhases(Clock())
    times.begin(1)
    times.forget(1)
    times.end(1)
    assert times.take() == ({}, {})

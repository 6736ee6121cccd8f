"""A device goes on without a gap: the host begins early enough, and deals with parts that are long enough for it."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.drafting.model.drafter import GrowthOptions
from outrider.drafting.model.runner import BurstRunner


class Launches:
    """As much of a runner as its clockwork needs."""

    quiet_seconds = BurstRunner.quiet_seconds
    note_launch = BurstRunner.note_launch

    def __init__(self, expected: float) -> None:
        self.expected = expected
        self.launch_seconds = 0.0

    def expected_seconds(self, pending: object) -> float:
        return self.expected


def quiet(expected: float, launch: float) -> float:
    runner: Any = Launches(expected)
    for _ in range(200):
        runner.note_launch(launch)
    found: float = runner.quiet_seconds(None)
    return found


@pytest.mark.parametrize("launch", [0.0, 0.0001, 0.0004, 0.01])
def test_there_is_time_to_go_on_before_the_end(launch: float) -> None:
    expected = 0.0006
    left = expected - quiet(expected, launch)
    assert 0.0 <= quiet(expected, launch) <= expected
    assert left >= min(launch, expected)


@pytest.mark.parametrize(("step", "host", "steps"), [(0.0006, 0.0004, 1), (0.0006, 0.0009, 2), (0.0003, 0.002, 2)])
def test_parts_are_as_long_as_the_host_needs(step: float, host: float, steps: int) -> None:
    assert GrowthOptions(1024, most_steps=8).part_steps(1, step, host) == steps

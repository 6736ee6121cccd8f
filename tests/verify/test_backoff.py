"""What fails again and again is tried less and less often, and said seldom."""

from __future__ import annotations

import logging

import pytest

from verify_service.door.session import Backoff, ThrottledWarnings


def test_pauses_double_up_to_the_longest_and_begin_anew_after_a_long_try() -> None:
    now = 0.0
    backoff = Backoff(0.5, 3.0, lambda: now)
    pauses = []
    for seconds in (0.0, 1.0, 2.9, 0.0, 3.0, 0.0):
        backoff.begin()
        now += seconds
        pauses.append(backoff.failed())
    assert pauses == [0.5, 1.0, 2.0, 3.0, 0.5, 1.0]


def test_a_warning_comes_at_most_once_in_so_many_seconds_with_the_number_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter((0.0, 1.0, 9.9, 10.0, 19.9, 30.0, 40.0))
    seldom = ThrottledWarnings(logging.getLogger("test"), 10.0, lambda: next(times))
    for _ in range(7):
        seldom.warn("%s is odd", "x")
    assert [record.getMessage() for record in caplog.records] == [
        "x is odd",
        "x is odd (and 2 like it before)",
        "x is odd (and 1 like it before)",
        "x is odd",
    ]

"""What fails again and again is said seldom."""

from __future__ import annotations

import logging

import pytest

from outrider.logs import ThrottledWarnings


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

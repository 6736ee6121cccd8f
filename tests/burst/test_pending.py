"""Waiting for a burst on a device: what arrives is seen at once, and so is the end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.drafting.model.burst import StepBucket
from outrider.drafting.model.runner import PendingBurst


class Event:
    """A device's event that has come after so many looks, or when it is waited for."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def pending(event: Event | None, expected: float) -> tuple[PendingBurst, list[float]]:
    noted: list[float] = []
    runner: Any = SimpleNamespace(
        expected_seconds=lambda pending: expected,
        quiet_seconds=lambda pending: expected,
        note_launch=lambda seconds: None,
        note_seconds=lambda pending, seconds: noted.append(seconds),
        run_until=lambda interrupted: None,
        go_on=lambda pending, num_steps, reroots: PendingBurst(runner, pending.burst, pending.bucket, num_steps, 2),
    )
    burst: Any = None
    made = PendingBurst(runner, burst, StepBucket(8, 1, 4), 2)
    made.event = event  # type: ignore[assignment]
    return made, noted


def test_what_arrives_ends_the_wait_while_the_end_is_far() -> None:
    one, noted = pending(Event(looks=1000), expected=3600.0)
    answers = iter([False, False, True])
    assert not one.wait_until_over(lambda: next(answers))
    assert not noted


def test_the_end_of_a_burst_is_seen_and_timed() -> None:
    one, noted = pending(Event(looks=3), expected=3600.0)
    assert one.wait_until_over(lambda: False)
    assert len(noted) == 1


def test_what_arrives_near_the_end_is_seen_too() -> None:
    one, noted = pending(Event(looks=1000), expected=0.0)
    assert one.wait_until_nearly_over(lambda: True)
    assert not one.wait_until_over(lambda: True)
    assert not noted
    assert one.wait_until_over(lambda: False)
    assert len(noted) == 1


def test_a_part_is_timed_from_the_end_of_the_part_before() -> None:
    one, _ = pending(Event(looks=3), expected=3600.0)
    more = one.go_on(3)
    assert more is not None and (more.first_step, more.num_steps) == (2, 3)
    queued = more.began
    assert one.wait_until_nearly_over(lambda: False) and more.began == queued
    assert one.wait_until_over(lambda: False)
    assert more.began > queued


def test_without_a_device_there_is_nothing_to_wait_for() -> None:
    one, _ = pending(None, expected=3600.0)
    assert one.wait_until_over(lambda: True)

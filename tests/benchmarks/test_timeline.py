"""How the benchmark of a round's timeline reads the device's record."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.engine.timeline import figures, spans_of


def graph(number: int, begin: float, kernels: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """A launch at `begin`, and its kernels' begins and durations after it."""
    launch = {"name": "cudaGraphLaunch", "ts": begin, "args": {"correlation": number}}
    ran = [
        {"name": "k", "cat": "kernel", "ts": begin + at, "dur": length, "args": {"correlation": number}}
        for at, length in kernels
    ]
    return [launch, *ran]


def one_round(number: int, begin: float, num_steps: int) -> list[dict[str, Any]]:
    """Verify takes 100 with 4 idle, the extension 20, each step 10, the choice 5; 1 between two graphs."""
    events = graph(number, begin, [(0, 20), (22, 38), (60, 20), (82, 18)])
    at = begin + 101
    for index, length in enumerate([20.0, *[10.0] * num_steps, 5.0]):
        events += graph(number + 1 + index, at, [(0, length)])
        at += length + 1
    return events


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_round_is_told_by_its_graphs(num_steps: int) -> None:
    length = 101 + 21 + 11 * num_steps + 6
    events = [event for index in range(4) for event in one_round(10 * index, index * (length + 7.0), num_steps)]
    spans = spans_of([{"name": "other"}, *events])
    assert [span.phase for span in spans] == ["verify", "extension", *["step"] * num_steps, "choice"] * 4
    found = figures(spans)
    assert found["round_us"] == length + 7
    assert (found["verify_us"], found["verify_idle_us"], found["verify_kernels"]) == (100, 4, 4)
    assert (found["extension_us"], found["step_us"], found["choice_us"]) == (20, 10 * num_steps, 5)
    assert (found["steps"], found["between_graphs_us"], found["between_rounds_us"]) == (num_steps, num_steps + 2, 8)


def test_kernels_beside_each_other_are_busy_once() -> None:
    (span,) = spans_of(graph(1, 0.0, [(0, 10), (5, 10), (20, 5)]))
    assert (span.busy, span.end, span.num_kernels) == (20, 25, 3)
    assert spans_of([]) == []

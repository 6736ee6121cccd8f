"""Bursts that go on: the device has its next steps before the host has looked at those before."""

from __future__ import annotations

import math

import pytest
from growth_rig import GOES_ON, Rig, continuation, path_scores
from integrity import check_forest

from outrider.config.draft import DraftOptions
from outrider.protocol.speculation import DeclineReason


def test_a_burst_goes_on_from_its_own_pool_while_nothing_waits_for_its_end() -> None:
    """The device has its next steps before the host has looked at those before."""
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0), **GOES_ON)
    request = rig.open(1, [1, 2, 3], credit=60)
    rig.turn()
    assert rig.runner.parts == []
    held = []
    for _ in range(6):
        rig.turn()
        held.append(len(request.held()))
    assert len(rig.runner.bursts) == 1 and rig.runner.parts == [1] * 6
    assert 0 < held[0] < held[-1], "each part is published when it has landed"
    request.check()
    rig.turn()
    assert len(rig.runner.bursts) == 2, "a burst has eight steps at most"
    check_forest(rig.growth._forest)


def test_parts_have_two_steps_where_the_host_needs_longer_than_one_to_queue_them() -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0), **GOES_ON)
    rig.runner.step_seconds, rig.runner.launch_seconds = 0.1, 0.15
    rig.open(1, [1, 2, 3], credit=60)
    for _ in range(3):
        rig.turn()
    assert rig.runner.parts == [2, 2]


def test_parts_run_what_bursts_would_run() -> None:
    """Best first over all that is known, whether the host looks or not."""
    grown = []
    for shape in ({}, GOES_ON):
        rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.05), **({"region": 256} | shape))
        request = rig.open(1, [1, 2, 3], credit=40)
        rig.settle()
        rig.commit(1, continuation(request.tokens, 2), credit=40)
        rig.settle()
        request.check()
        assert len(set(rig.runner.ran)) == len(rig.runner.ran)
        grown.append(path_scores(request.held()))
    assert grown[0][:12] == pytest.approx(grown[1][:12], rel=1e-6)


@pytest.mark.parametrize("what", ["open", "pause"])
def test_a_burst_does_not_go_on_when_something_waits_for_its_end(what: str) -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0), **GOES_ON)
    request = rig.open(1, [1, 2, 3], credit=60)
    rig.open(2, [4, 5], credit=60)
    for _ in range(2):
        rig.turn()
    parts, bursts = len(rig.runner.parts), len(rig.runner.bursts)
    assert parts
    if what == "open":
        rig.open(3, [6], credit=60)
    else:
        rig.pause(2)
    rig.turn()
    assert (len(rig.runner.parts), len(rig.runner.bursts)) == (parts, bursts + 1)
    request.check()


def test_a_part_that_fails_takes_its_requests_along_and_no_other() -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0), **GOES_ON)
    rig.open(1, [1, 2, 3], credit=60)
    rig.turn()
    rig.runner.wait_fault = lambda burst: RuntimeError("no memory")
    rig.turn()
    rig.runner.wait_fault = lambda burst: None
    rig.settle()
    assert rig.gone[1].declined is DeclineReason.UNSPECIFIED
    request = rig.open(2, [5, 6])
    rig.settle()
    assert request.held()
    rig.close(2)
    rig.settle()
    rig.check_nothing_left()


@pytest.mark.parametrize(("num_rows", "width"), [(1, 32), (16, 64), (20, 128), (32, 128)])
def test_steps_are_wide_for_many_requests_alone(num_rows: int, width: int) -> None:
    rig = Rig(
        DraftOptions(max_positions=300, min_path_probability=0.0, speculative_algorithm=("STANDALONE",)),
        num_rows=num_rows, num_pages=1024, max_seeds=512, max_width=128, **GOES_ON,
    )  # fmt: skip
    for number in range(num_rows):
        rig.open(number, [number + 1, 2, 3], credit=200)
    for _ in range(8):
        rig.turn()
    assert max(burst.width for burst in rig.runner.bursts) == width


def test_a_chain_goes_on_past_commits() -> None:
    options = DraftOptions(max_positions=400, min_path_probability=0.0)
    rig = Rig(options, branching=1, **GOES_ON | {"max_steps": 64, "max_width": 64, "max_seeds": 512, "num_pages": 1024})
    request = rig.open(1, list(range(1, 9)), credit=60)
    for _ in range(3):
        for _ in range(12):
            rig.turn()
        rig.commit(1, continuation(request.tokens, 3), credit=60)
    assert len(rig.runner.bursts) == 1 and len(rig.runner.parts) > 20


def test_a_burst_that_cannot_go_on_lands_and_others_follow() -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0), **GOES_ON)
    request = rig.open(1, [1, 2, 3], credit=60)
    rig.turn()
    growth = rig.requests.growth
    rig.runner.launch_fault = RuntimeError("no memory")
    growth.grow(math.inf, lambda: True)
    assert growth.device_idle and not rig.runner.parts
    rig.runner.launch_fault = None
    rig.settle()
    request.check()
    assert request.held() and not rig.gone
    assert len(rig.runner.bursts) > 1 and rig.runner.parts

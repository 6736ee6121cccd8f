"""What a growth with a model cannot serve is declined, and harms no other request."""

from __future__ import annotations

import pytest
from growth_rig import Rig, continuation

from outrider.protocol.speculation import DeclineReason


def test_requests_past_the_rows_are_declined_and_rows_are_used_again() -> None:
    rig = Rig(num_rows=2)
    for number in (1, 2, 3):
        rig.open(number, [number])
    rig.settle()
    assert rig.gone[3].declined is DeclineReason.OVERLOADED
    rig.close(1)
    request = rig.open(4, [4])
    rig.settle()
    assert request.held()


def test_without_pages_a_request_is_declined_and_may_come_again() -> None:
    rig = Rig(num_pages=6)
    rig.open(1, list(range(1, 21)))
    rig.settle()
    rig.open(2, list(range(1, 13)))
    rig.settle()
    assert rig.gone[2].declined is DeclineReason.OVERLOADED
    rig.close(1)
    request = rig.open(3, list(range(1, 13)))
    rig.settle()
    assert request.held()
    rig.close(3)
    rig.settle()
    rig.check_nothing_left()


def test_of_prompts_that_do_not_fit_together_one_is_served() -> None:
    rig = Rig(num_pages=80)
    for number in (1, 2, 3):  # each needs 50 pages, and more than one forward
        rig.open(number, [number] * 200)
    rig.settle()
    assert [number for number, request in rig.open_requests.items() if request.held()] == [1]
    assert {gone.declined for gone in rig.gone.values()} == {DeclineReason.OVERLOADED}
    # The others were refused before anything of them was computed.
    assert sum(count for _, count in rig.runner.extended) == 199


def test_requests_that_need_a_page_at_once_get_those_of_the_one_that_finds_none() -> None:
    rig = Rig(num_pages=12)
    for number in (1, 2, 3):
        rig.open(number, [number] * 13)
    rig.settle()
    for _ in range(6):
        for number, request in rig.open_requests.items():
            rig.commit(number, continuation(request.tokens, 1))
        rig.settle()
    assert len(rig.open_requests) == 2
    for number in list(rig.open_requests):
        assert rig.open_requests[number].held()
        rig.close(number)
    rig.settle()
    rig.check_nothing_left()


def test_a_sequence_is_served_as_far_as_positions_go() -> None:
    rig = Rig(max_context=24)
    request = rig.open(1, list(range(1, 10)))
    rig.settle()
    while 1 in rig.open_requests:
        if len(request.tokens) < 18:
            assert request.held()
        rig.commit(1, continuation(request.tokens, 1))
        rig.settle()
    assert request.declined is DeclineReason.TOO_LONG
    assert len(request.tokens) == 25
    rig.check_nothing_left()


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_burst_that_fails_takes_its_requests_along_and_no_other(where: str) -> None:
    rig = Rig()
    other = rig.open(1, [1, 2, 3], credit=6)
    rig.settle()
    rig.open(2, [5, 6])
    rig.open(3, [7, 8])
    if where == "launch":
        rig.runner.launch_fault = RuntimeError("no memory")
    else:
        rig.runner.wait_fault = lambda burst: RuntimeError("no memory")
    rig.turn()
    rig.runner.launch_fault, rig.runner.wait_fault = None, lambda burst: None
    rig.settle()
    assert {number: gone.declined for number, gone in rig.gone.items()} == {
        2: DeclineReason.UNSPECIFIED,
        3: DeclineReason.UNSPECIFIED,
    }
    rig.commit(1, continuation(other.tokens, 1))
    rig.settle()
    assert other.held()
    rig.close(1)
    rig.settle()
    rig.check_nothing_left()


def test_a_prompt_that_fails_harms_no_other() -> None:
    rig = Rig()
    other = rig.open(1, [1, 2, 3])
    rig.settle()
    rig.runner.extend_fault = RuntimeError("no memory")
    rig.open(2, [3] * 50)
    rig.settle()
    assert rig.gone[2].declined is DeclineReason.UNSPECIFIED
    rig.commit(1, continuation(other.tokens, 2))
    rig.settle()
    assert other.held()

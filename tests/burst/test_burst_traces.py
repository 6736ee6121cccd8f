"""Growth with a model, whatever verify does."""

from __future__ import annotations

import pytest
from examples import examples
from growth_rig import GOES_ON, Rig, continuation
from growth_steps import act, steps
from hypothesis import given, settings
from hypothesis import strategies as st

LONE = GOES_ON | {"branching": 2, "lone_branching": 3}


@pytest.mark.parametrize("shape", [{}, GOES_ON, LONE], ids=["one part", "goes on", "more candidates of one"])
@settings(max_examples=examples(25))
@given(trace=st.lists(steps, max_size=50))
def test_whatever_verify_does_the_runner_has_no_complaint_and_nothing_leaks(
    shape: dict[str, int], trace: list[tuple]
) -> None:
    rig = Rig(**shape)
    for number, step in enumerate([("open", 3), *trace]):
        act(rig, number, step)
    rig.runner.auto_ready = True
    rig.settle()
    for _ in range(2):  # what was lost is noticed and grown anew within two exchanges
        for number in sorted(rig.open_requests):
            rig.resume(number)
            rig.commit(number, continuation(rig.open_requests[number].tokens, 1))
        rig.settle()
    for request in rig.open_requests.values():
        request.check()
        assert request.held()
    for number in sorted(rig.open_requests):
        rig.close(number)
    rig.settle()
    if not rig.growth._active:
        rig.growth._apply()
    rig.check_nothing_left()

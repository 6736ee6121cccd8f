"""A round of many requests is not held up by finding out that no wait pays: a glance tells, and says the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_peer import Clock, Recorder, request

from verify_service.speculation.budget import WIDTHS, Budget, Choice, CostModel
from verify_service.speculation.draft_wait import DraftWaitPolicy, DraftWaitState
from verify_service.speculation.drafts import Drafts
from verify_service.speculation.health import MAX_PARTS

gains = st.floats(-0.2, 4.0)
seconds = st.floats(0.0, 0.01)
parts = st.tuples(st.integers(0, 3), st.floats(0.0, 1.0))
states = st.tuples(
    gains, gains, st.booleans(), st.booleans(), st.booleans(), seconds, st.integers(0, 1), st.booleans(), parts
)
"""Gains after a miss and a hit; whether the answer is awaited, after a hit, asked for; how long ago; of which draft;
whether that has answered before; parts behind the answer, and how soon the tree ends."""
speeds = st.tuples(seconds, seconds, st.floats(-0.1, 1.0), st.floats(0.0, 1.0), st.floats(0.0, 2.0))
"""Of a draft: until its answer, until more of it; what more brings; how often the round after finds nodes; how far a
part deepens a tree."""


def states_of(drawn: list[tuple], drafts: list[tuple], clock: Clock) -> list[DraftWaitState]:
    service = Drafts(vocab_size=50, max_nodes=64, clock=clock)
    for index in range(2):
        service.connected(Recorder(str(index)))
    health = [replica.health for replica in service.replicas.values()]
    for one, (answer, more, more_gain, found, deepens) in zip(health, drafts, strict=True):
        one.opens.typical = 3 * answer
        for answers in (one.misses, one.hits):
            answers.answer.typical = answers.answer.late = answer
            answers.more.typical = answers.more.late = more
            answers.later.typical = answers.later.late = 0.3 * more
            answers.more_gain, answers.found, answers.part_gains = more_gain, found, [deepens] * MAX_PARTS
    states = []
    for gain, hit_gain, awaited, after_hit, asked, ago, replica, has_answered, (num_parts, end_chance) in drawn:
        service.admit(one := request([1, 2]))
        spec = service.spec(one)
        assert spec is not None
        state = spec.wait
        state.health, state.miss_gain, state.hit_gain, state.after_hit = health[replica], gain, hit_gain, after_hit
        state.awaits_answer, state.has_answered = awaited, has_answered
        state.num_parts, state.end_chance = 0 if awaited else num_parts, end_chance
        state.sent_at, state.answered_at = clock.now - ago if asked else None, None if awaited else clock.now - ago
        states.append(state)
    return states


@given(
    st.lists(states, min_size=1, max_size=6),
    st.lists(speeds, min_size=2, max_size=2),
    st.integers(1, 40),
    st.floats(1, 60),
)
def test_a_glance_decides_nothing_else(drawn: list[tuple], drafts: list[tuple], nodes: int, expected: float) -> None:
    clock = Clock()
    states = states_of(drawn, drafts, clock)
    policy = DraftWaitPolicy(Budget(CostModel([0.005] * len(WIDTHS)), 64), 0.02)
    choice = Choice(nodes, expected, 0.005, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "_is_hopeless", lambda awaited, choice, now: False)
        looked_at = policy.wait_seconds(states, 4, choice, now=clock.now)
    assert policy.wait_seconds(states, 4, choice, now=clock.now) == looked_at

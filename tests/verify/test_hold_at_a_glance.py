"""A round of many requests is not held up by finding out that no wait pays: a glance tells, and says the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_peer import Clock, Recorder, request

from verify_service.speculation.budget import WIDTHS, Budget, Choice, CostModel
from verify_service.speculation.draft_wait import DraftWaitPolicy
from verify_service.speculation.drafts import Drafts
from verify_service.speculation.health import MOST_PARTS
from verify_service.speculation.link import SpeculativeRequest

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


def links_of(drawn: list[tuple], drafts: list[tuple], clock: Clock) -> list[SpeculativeRequest]:
    service = Drafts(vocab_size=50, max_nodes=64, clock=clock)
    for index in range(2):
        service.connected(Recorder(str(index)))
    peers = list(service.peers.values())
    for peer, (answer, more, more_gain, found, deepens) in zip(peers, drafts, strict=True):
        peer.health.opens.typical = 3 * answer
        for answers in (peer.health.misses, peer.health.hits):
            answers.answer.typical = answers.answer.late = answer
            answers.more.typical = answers.more.late = more
            answers.later.typical = answers.later.late = 0.3 * more
            answers.more_gain, answers.found, answers.deepens = more_gain, found, [deepens] * MOST_PARTS
    links = []
    for gain, hit_gain, awaited, after_hit, asked, ago, peer, caught_up, (num_parts, ends) in drawn:
        service.admit(one := request([1, 2]))
        link = service.link(one)
        assert link is not None
        link.peer, link.gain, link.hit_gain, link.after_hit = peers[peer], gain, hit_gain, after_hit
        link.awaited, link.caught_up = awaited, caught_up
        link.num_parts, link.ends = 0 if awaited else num_parts, ends
        link.asked_at, link.answered_at = clock.now - ago if asked else None, None if awaited else clock.now - ago
        links.append(link)
    return links


@given(
    st.lists(states, min_size=1, max_size=6),
    st.lists(speeds, min_size=2, max_size=2),
    st.integers(1, 40),
    st.floats(1, 60),
)
def test_a_glance_decides_nothing_else(drawn: list[tuple], drafts: list[tuple], nodes: int, expected: float) -> None:
    links = links_of(drawn, drafts, Clock())
    policy = DraftWaitPolicy(Budget(CostModel([0.005] * len(WIDTHS)), 64), 0.02)
    choice = Choice(nodes, expected, 0.005, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "_is_hopeless", lambda awaited, choice: False)
        looked_at = policy.seconds(links, 4, choice)
    assert policy.seconds(links, 4, choice) == looked_at

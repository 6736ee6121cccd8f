"""Requests whose prompt a draft computes: what they take is told apart, and holds nobody else up."""

from __future__ import annotations

from scripted_peer import Clock, Recorder, follow, request, tree

from verify_service.speculation.budget import WIDTHS, Budget, CostModel, Forest
from verify_service.speculation.draft_wait import DraftWaitPolicy
from verify_service.speculation.drafts import Drafts, SpeculativeRequest

ROUND = 0.0045
"""Seconds of a round of an 8B model on a large GPU."""


def test_what_prompts_take_says_nothing_of_answers_to_commits_and_is_not_waited_for() -> None:
    clock = Clock()
    drafts = Drafts(vocab_size=50, max_nodes=64, clock=clock)
    port = Recorder()
    drafts.connected(port)
    policy = DraftWaitPolicy(Budget(CostModel([ROUND] * len(WIDTHS)), 63), 0.02)

    def wait(spec: SpeculativeRequest) -> float:
        choice = Budget(CostModel([ROUND] * len(WIDTHS)), 63).choose(1, 1, Forest([spec.mirror], [99]).best())
        return policy.wait_seconds([spec.wait] if spec.wait.expects else [], 1, choice, now=clock.now)

    first_waits, waits = [], []
    for _ in range(12):  # longer, and it would be in doubt
        drafts.admit(asked := request([1, 2]))
        spec = drafts.spec(asked)
        assert spec is not None
        first_waits.append(wait(spec))
        clock.now += 0.03
        drafts.receive(port, [tree(spec.number, 1, 2, [3])], clock.now)
        for epoch in range(2, 6):
            asked.tokens.append(40)
            follow(drafts, asked)
            waits.append(wait(spec))
            clock.now += 0.001
            drafts.receive(port, [tree(spec.number, epoch, asked.committed_len, [3])], clock.now)
        drafts.close(asked)
    assert first_waits[0] and not any(first_waits[-6:])
    assert all(waits[-10:])


def test_a_request_that_opens_keeps_no_other_from_being_waited_for() -> None:
    clock = Clock()
    drafts = Drafts(vocab_size=50, max_nodes=64, clock=clock)
    port = Recorder()
    drafts.connected(port)
    budget = Budget(CostModel([ROUND] * len(WIDTHS)), 63)
    policy = DraftWaitPolicy(budget, 0.02)
    specs = []
    for _ in range(2):
        drafts.admit(asked := request([1, 2]))
        specs.append(drafts.spec(asked))
    health = next(iter(drafts.replicas.values())).health
    health.opens.typical, health.misses.answer.typical = 0.2, 0.001
    missing, opening = specs
    missing.wait.miss_gain = 3.0
    drafts.receive(port, [tree(missing.number, 1, 2, [3])], clock.now)
    missing.request.tokens.append(40)
    follow(drafts, missing.request)
    choice = budget.choose(2, 2, [])
    assert policy.wait_seconds([missing.wait], 2, choice, now=clock.now)
    assert policy.wait_seconds([missing.wait, opening.wait], 2, choice, now=clock.now)
    assert not policy.wait_seconds([opening.wait], 2, choice, now=clock.now)

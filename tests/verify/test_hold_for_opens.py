"""Requests whose prompt a draft computes: what they take is told apart, and holds nobody else up."""

from __future__ import annotations

from scripted_peer import Clock, Recorder, follow, request, tree

from verify_service.budget import WIDTHS, Budget, CostModel
from verify_service.drafts import Drafts
from verify_service.forest import Forest
from verify_service.hold import HoldPolicy
from verify_service.link import Link

ROUND = 0.0045
"""Seconds of a round of an 8B model on a large GPU."""


def test_what_prompts_take_says_nothing_of_answers_to_commits_and_is_not_waited_for() -> None:
    clock = Clock()
    drafts = Drafts(vocab_size=50, max_nodes=64, clock=clock)
    port = Recorder()
    drafts.connected(port)
    policy = HoldPolicy(Budget(CostModel([ROUND] * len(WIDTHS)), 63), 0.02)

    def wait(link: Link) -> float:
        choice = Budget(CostModel([ROUND] * len(WIDTHS)), 63).choose(1, 1, Forest([link.mirror], [99]).best())
        return policy.seconds([link] if link.expects else [], 1, choice)

    first_waits, waits = [], []
    for _ in range(12):  # longer, and it would be in doubt
        drafts.admit(asked := request([1, 2]))
        link = drafts.link(asked)
        assert link is not None
        first_waits.append(wait(link))
        clock.now += 0.03
        drafts.receive(port, [tree(link.number, 1, 2, [3])], clock.now)
        for epoch in range(2, 6):
            asked.tokens.append(40)
            follow(drafts, asked)
            waits.append(wait(link))
            clock.now += 0.001
            drafts.receive(port, [tree(link.number, epoch, asked.committed_len, [3])], clock.now)
        drafts.close(asked)
    assert first_waits[0] and not any(first_waits[-6:])
    assert all(waits[-10:])


def test_a_request_that_opens_keeps_no_other_from_being_waited_for() -> None:
    clock = Clock()
    drafts = Drafts(vocab_size=50, max_nodes=64, clock=clock)
    port = Recorder()
    drafts.connected(port)
    budget = Budget(CostModel([ROUND] * len(WIDTHS)), 63)
    policy = HoldPolicy(budget, 0.02)
    links = []
    for _ in range(2):
        drafts.admit(asked := request([1, 2]))
        links.append(drafts.link(asked))
    health = next(iter(drafts.peers.values())).health
    health.opens.typical, health.misses.answer.typical = 0.2, 0.001
    missing, opening = links
    missing.gain = 3.0
    drafts.receive(port, [tree(missing.number, 1, 2, [3])], clock.now)
    missing.request.tokens.append(40)
    follow(drafts, missing.request)
    choice = budget.choose(2, 2, [])
    assert policy.seconds([missing], 2, choice)
    assert policy.seconds([missing, opening], 2, choice)
    assert not policy.seconds([opening], 2, choice)


def test_a_draft_that_has_only_heard_of_a_request_computes_its_prompt_still() -> None:
    """What others' answers take meanwhile is told apart, too, and waited for only if it pays."""
    clock = Clock()
    drafts = Drafts(vocab_size=50, max_nodes=64, clock=clock)
    port = Recorder()
    drafts.connected(port)
    budget = Budget(CostModel([ROUND] * len(WIDTHS)), 63)
    policy = HoldPolicy(budget, 0.02)
    drafts.admit(one := request([1, 2]))
    link = drafts.link(one)
    assert link is not None and link.peer is not None
    peer = link.peer

    def answer(to: Link, tokens: list[int]) -> None:
        clock.now += 0.0001
        epoch = to.mirror.epoch + 1
        drafts.receive(port, [tree(to.number, epoch, to.request.committed_len, tokens)], clock.now)

    def miss(seconds: float) -> float:
        """How long a round would wait for an answer that comes so late."""
        one.tokens.append(40)
        follow(drafts, one)
        link.gain = 2.0
        wait = policy.seconds([link], 1, budget.choose(1, 1, []))
        clock.now += seconds
        answer(link, [3])
        clock.now += ROUND
        return wait

    answer(link, [3])
    for _ in range(7):  # more misses in a row, and it would be in doubt
        drafts.admit(other := request([1, 2]))
        opening = drafts.link(other)
        assert opening is not None
        answer(opening, [])
        assert not opening.caught_up and peer.num_opening == 1
        last_slow = [miss(0.012) for _ in range(4)][-1]
        opening.request.tokens.append(3)
        follow(drafts, other)
        answer(opening, [4])
        assert opening.caught_up and peer.num_opening == 0
        last_quick = [miss(0.001) for _ in range(4)][-1]
        drafts.close(other)
    assert last_quick and not last_slow
    assert peer.health.opens.typical > 0.02 and peer.health.misses.answer.typical < 0.002
    drafts.admit(gone := request([1, 2]))
    assert peer.num_opening == 1
    drafts.close(gone)
    assert peer.num_opening == 0

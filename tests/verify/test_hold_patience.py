"""Patience: rounds that have nodes are held for what a draft adds to them, while it comes fast enough."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from scripted_peer import Clock, Recorder, follow, request, tree

from verify_service.engine.request import Request
from verify_service.engine.round import Entry
from verify_service.engine.scheduler import Offer
from verify_service.speculation.budget import WIDTHS, Budget, CostModel
from verify_service.speculation.draft_wait import DraftWaitPolicy
from verify_service.speculation.drafts import Drafts
from verify_service.speculation.forest import Forest

ROUND, PART = 0.0045, 0.001
"""Seconds of a round, and until a draft has made its tree one part deeper."""
DEPTH = 3
"""Nodes of a part, each below the one before."""


class Scene:
    """Requests of a draft that is always one part ahead: each round commits what it had, and leaves one node."""

    def __init__(self, requests: int = 1, patient: bool = True) -> None:
        self.clock, self.port, self.score = Clock(), Recorder(), -0.05
        self.drafts = Drafts(vocab_size=50, max_nodes=64, clock=self.clock, patient=patient)
        self.drafts.connected(self.port)
        self.budget = Budget(CostModel([ROUND] * len(WIDTHS)), 63)
        self.requests = [request([1, 2]) for _ in range(requests)]
        self.num_nodes = dict.fromkeys(self.requests, 0)
        for one in self.requests:
            self.drafts.admit(one)
            self.grow(one, DEPTH)
        self.request = self.requests[0]
        self.link = self.drafts.link(self.request)

    def grow(self, one: Request, count: int) -> None:
        """The draft says so many nodes more, or none."""
        link, first = self.drafts.link(one), self.num_nodes[one] + 1
        says = tree(link.number, 1, 2, [5 + (first + i) % 40 for i in range(count)], first, self.score)
        self.num_nodes[one] += count
        self.drafts.receive(self.port, [replace(says, acked_len=one.committed_len)], self.clock.now)

    def hit(self) -> None:
        """A round commits all nodes but the last."""
        for one in self.requests:
            mirror = self.drafts.link(one).mirror
            chain = sorted(mirror.descend(), key=mirror.depths.__getitem__)[:-1]
            one.tokens += [mirror.token_ids[slot] for slot in chain]
            follow(self.drafts, one, len(chain))

    def rounds(self, count: int = 60, adds: int = DEPTH) -> None:
        """So many rounds, each of which the draft answers in its time."""
        for _ in range(count):
            self.hit()
            self.wait()
            for one in self.requests:
                self.clock.now += PART
                self.grow(one, adds)
            if not adds:
                for one in self.requests:
                    self.clock.now += ROUND
                    self.grow(one, DEPTH)
            self.clock.now += ROUND

    def wait(self, patience: float = 1.0, turns: bool = False) -> float:
        """How long the next round would be held, and that it is run."""
        mirrors = [self.drafts.link(one).mirror for one in self.requests]
        forest = Forest(mirrors, [99] * len(mirrors))
        choice = self.budget.choose(len(mirrors), len(mirrors), forest.best())
        awaited = [link for one in self.requests if (link := self.drafts.link(one)).expects]
        offer = Offer([Entry(one, 1) for one in self.requests], forest, choice, awaited, len(mirrors), 0.0)
        offer.look_for_ends(63)
        self.budget.took(choice)
        policy = DraftWaitPolicy(self.budget, 0.02, turns=turns, patience=patience)
        return policy.seconds(awaited, len(mirrors), choice)


@pytest.fixture(scope="module")
def scene() -> Scene:
    """A round just ended, and one node is left of a tree that three more are added to soon."""
    scene = Scene()
    scene.rounds()
    scene.hit()
    return scene


def test_a_round_with_nodes_is_held_for_deeper_ones(scene: Scene) -> None:
    assert scene.link.mirror.has_nodes and scene.link.grows
    assert PART <= scene.wait() < 0.006, "19 of 20 answers are here by then"


def test_what_comes_slower_than_patience_has_it_is_not_waited_for(scene: Scene) -> None:
    """Three nodes in a millisecond are more than rounds of two tokens in 4.5 bring, and no 20 times as many."""
    assert scene.budget.usual_rate == pytest.approx(1.95 / ROUND, rel=0.05)
    assert scene.wait(patience=1.0) and scene.wait(patience=0.5) and not scene.wait(patience=0.05)


def test_without_patience_it_is_not_held(scene: Scene) -> None:
    assert scene.wait(patience=0.0) == 0


def test_drafts_that_take_turns_with_rounds_have_waits_of_their_own(scene: Scene) -> None:
    assert scene.wait(turns=True) == 0


def test_services_without_patience_expect_nothing_of_a_hit() -> None:
    scene = Scene(patient=False)
    scene.rounds(2)
    scene.hit()
    assert not scene.link.grows and not scene.link.expects


def test_a_draft_that_adds_nothing_is_not_waited_for() -> None:
    """Not in time, at least: its nodes come when the round is over."""
    scene = Scene()
    scene.rounds(adds=0)
    scene.hit()
    assert scene.link.grows and scene.wait() == 0


def test_what_hangs_below_an_unlikely_node_is_not_waited_for() -> None:
    scene = Scene()
    scene.rounds()
    scene.score = -6.0
    scene.grow(scene.request, 1)
    scene.hit()
    assert scene.link.grows and scene.link.mirror.has_nodes and scene.wait() == 0


@pytest.mark.parametrize(("requests", "grows"), [(4, True), (5, False)])
def test_depth_is_worth_no_wait_among_many_requests(requests: int, grows: bool) -> None:
    scene = Scene(requests)
    scene.rounds(3)
    scene.hit()
    assert scene.link.grows is grows


def test_the_end_of_its_draft_ends_the_wait() -> None:
    scene = Scene()
    scene.rounds()
    scene.hit()
    assert scene.wait()
    scene.drafts.disconnected(scene.port)
    assert not scene.link.grows and not scene.link.expects and scene.link.first_gain == scene.link.gain < inf


def test_rounds_of_prompts_alone_do_not_make_rounds_seem_slow() -> None:
    budget = Budget(CostModel([ROUND] * len(WIDTHS)), 63)
    budget.took(budget.choose(1, 1, [0.5]))
    usual = budget.usual_rate
    budget.took(budget.choose(64, 0, []))
    assert budget.usual_rate == usual == pytest.approx(1.5 / ROUND)

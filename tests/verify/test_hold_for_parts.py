"""Parts behind an answer: a round waits for one after the other while all of the tree is likely to be committed."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_peer import Clock, Recorder, follow, request, tree

from outrider.protocol.speculation import Grow
from outrider.tree.mirror import TreeMirror
from verify_service.engine.round import Entry
from verify_service.engine.scheduler import NodePlan
from verify_service.speculation.budget import WIDTHS, Budget, CostModel, Forest
from verify_service.speculation.draft_wait import DraftWaitPolicy
from verify_service.speculation.drafts import Drafts, SpeculativeRequest

ROUND, PART = 0.0045, 0.0005
"""Seconds of a round of an 8B model on a large GPU, and of a step of its draft."""


class Grown:
    """A request whose draft answers each miss with one node, and deepens the tree by one part after the other."""

    def __init__(self, drafts: Drafts, port: Recorder, clock: Clock) -> None:
        self._drafts, self._port, self._clock = drafts, port, clock
        self._epoch = 0
        self.request = request([1, 2])
        drafts.admit(self.request)
        spec = drafts.spec(self.request)
        assert spec is not None
        self.spec: SpeculativeRequest = spec
        self.answer()

    def answer(self) -> None:
        self._epoch += 1
        self._send([5], 1)

    def part(self, node: int, score: float = -0.05) -> None:
        """A node below the last one, `node`."""
        self._clock.now += PART
        self._send([5 + node], node + 1, score)

    def send_no_nodes(self) -> None:
        self._clock.now += PART
        self._send([], 3)

    def _send(self, tokens: list[int], first: int, score: float = -0.05) -> None:
        grow = tree(self.spec.number, self._epoch, self.request.committed_len, tokens, first, score)
        self._drafts.receive(self._port, [grow], self._clock.now)

    def miss(self) -> None:
        """A round commits all of the tree and something else, and the draft answers."""
        mirror = self.spec.mirror
        chain = [mirror.token_ids[slot] for slot in mirror.descend()]
        self.request.tokens += [*chain, 40]
        follow(self._drafts, self.request, len(chain) + 1)
        self._clock.now += 0.001
        self.answer()


class Scene:
    def __init__(self, requests: int = 1) -> None:
        self.clock = Clock()
        self.drafts = Drafts(vocab_size=50, max_nodes=64, clock=self.clock)
        port = Recorder()
        self.drafts.connected(port)
        self.replica = self.drafts.replicas[port]
        self.all = [Grown(self.drafts, port, self.clock) for _ in range(requests)]
        self.first = self.all[0]
        self._budget = Budget(CostModel([ROUND] * len(WIDTHS)), 63)

    def plan(self) -> NodePlan:
        forest = Forest([one.spec.mirror for one in self.all], [99] * len(self.all))
        choice = self._budget.choose(len(self.all), len(self.all), forest.best())
        awaited = [one.spec.wait for one in self.all if one.spec.wait.expects]
        return NodePlan([Entry(one.request, 1) for one in self.all], forest, choice, awaited, len(self.all), 0.0)

    def wait(self) -> float:
        """How long the next round would be held."""
        plan = self.plan()
        plan.note_end_chances(63)
        policy = DraftWaitPolicy(self._budget, 0.02)
        return policy.wait_seconds(plan.awaited, plan.num_tokens, plan.choice, now=self.clock.now)


@pytest.fixture
def scene() -> Scene:
    """A draft that was seen to deepen its trees by four parts, each of which is likely to be committed."""
    scene = Scene()
    for _ in range(40):
        scene.first.miss()
        for node in range(1, 5):
            scene.first.part(node)
        scene.clock.now += ROUND
    scene.first.miss()
    return scene


def test_a_round_waits_for_part_after_part_of_a_likely_tree(scene: Scene) -> None:
    for node in range(1, 4):
        assert scene.wait() >= PART, node
        scene.first.part(node)


def test_it_waits_no_more_where_the_tree_is_left_before_its_end(scene: Scene) -> None:
    scene.first.part(1)
    assert scene.wait() >= PART
    scene.first.part(2, score=-2.0)
    assert scene.wait() == 0


def test_a_part_that_is_overdue_is_not_waited_for(scene: Scene) -> None:
    scene.first.part(1)
    scene.clock.now += 1.2 * PART
    assert 0 < scene.wait() < 0.5 * PART
    scene.clock.now += 0.5 * PART
    assert scene.wait() == 0


def test_a_draft_that_says_all_in_an_answer_and_a_part_is_not_waited_for_afterwards() -> None:
    scene = Scene()
    for _ in range(200):
        scene.first.miss()
        scene.first.part(1)
        scene.clock.now += ROUND
    scene.first.miss()
    assert scene.wait() >= PART
    scene.first.part(1)
    assert scene.wait() == 0


def test_a_commit_ends_the_wait_for_parts(scene: Scene) -> None:
    scene.first.part(1)
    scene.first.request.tokens += [5, 6]
    follow(scene.drafts, scene.first.request, 2)
    assert scene.first.spec.wait.awaits_answer and scene.first.spec.wait.num_parts == 0


@pytest.mark.parametrize(("requests", "parts"), [(4, 2), (5, 1)])
def test_a_draft_of_many_requests_is_looked_at_for_one_part(requests: int, parts: int) -> None:
    scene = Scene(requests)
    for one in scene.all:
        one.miss()
        one.part(1)
        one.part(2)
    assert [one.spec.wait.num_parts for one in scene.all] == [parts] * requests


def test_times_of_the_first_part_and_of_later_ones_are_told_apart() -> None:
    """An n-gram answers at once, a model's burst some time later, and from then on it deepens the tree step by step."""
    scene = Scene()
    for _ in range(60):
        scene.first.miss()
        scene.clock.now += 4 * PART
        for node in range(1, 5):
            scene.first.part(node)
        scene.clock.now += ROUND
    scene.first.miss()
    scene.clock.now += 4 * PART
    assert scene.wait() >= 0.9 * PART
    scene.first.part(1)
    assert 0.9 * PART < scene.wait() < 2 * PART


@pytest.mark.parametrize(("depth", "most"), [(3, 63), (99, 2)])
def test_a_round_is_not_held_for_nodes_that_it_cannot_take(scene: Scene, depth: int, most: int) -> None:
    """Its tree is as deep as it may be, or as large."""
    scene.first.part(1)
    assert scene.wait() >= PART
    scene.first.part(2)
    forest = Forest([scene.first.spec.mirror], [depth])
    choice = Budget(CostModel([ROUND] * len(WIDTHS)), most).choose(1, 1, forest.best())
    plan = NodePlan([Entry(scene.first.request, 1)], forest, choice, [scene.first.spec.wait], 1, 0.0)
    plan.note_end_chances(most)
    assert scene.first.spec.wait.end_chance == 0


def test_a_pause_is_no_time_of_a_part(scene: Scene) -> None:
    scene.first.part(1)
    scene.drafts.pause(scene.first.request)
    scene.clock.now += 5.0
    scene.drafts.resume(scene.first.request)
    scene.first.part(2)
    assert scene.replica.health.misses.later.typical < 2 * PART


def test_a_message_without_nodes_is_no_part(scene: Scene) -> None:
    scene.first.part(1)
    scene.first.send_no_nodes()
    assert scene.first.spec.wait.num_parts == 1


def test_choices_are_not_learned_from(scene: Scene) -> None:
    """Choices are also made in dry runs while a round runs, with whatever is there."""
    scene.first.part(1)
    before = scene.wait()
    scene.plan().note_end_chances(1)
    assert scene.wait() == before >= PART


nodes = st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(-3.0, -0.01)), min_size=1, max_size=40)


@given(st.lists(nodes, min_size=1, max_size=3), st.integers(0, 60))
def test_where_trees_end(drawn: list[list[tuple[int, float]]], count: int) -> None:
    """Of the first nodes of all trees those without children, each as likely as its path."""
    mirrors, paths = [], []
    for one in drawn:
        mirror, path, parents = TreeMirror([1, 2, 3], vocab_size=100, max_nodes=50), [0.0], []
        for place, (parent, score) in enumerate(one):
            parents.append(parent % (place + 1))
            path.append(path[parents[-1]] + float(np.float32(score)))
        scores = [score for _, score in one]
        tokens = list(range(len(one)))
        mirror.insert(Grow(1, 1, 3, 3, 1, parents, tokens, scores, bytes(len(one))))
        mirrors.append(mirror)
        paths.append({place: path[place + 1] for place in range(len(one)) if place + 1 not in parents})
    forest = Forest(mirrors, [99] * len(mirrors))
    list(forest.best())
    for tree_number, (taken, leaves) in enumerate(zip(forest.take(count), paths, strict=True)):
        expected = sum(exp(leaves[token]) for token in taken.token_ids if token in leaves)
        assert forest.end_chance(tree_number, count) == pytest.approx(min(expected, 1.0))

"""Nodes that an author gets at once are those that it would have got one by one."""

from __future__ import annotations

import math
from typing import Any

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.protocol.speculation import Commit, Open
from outrider.sampling.params import SamplingParams
from outrider.tree.author import TreeAuthor

VOCAB = 6
CREDIT = 14

tokens = st.integers(0, VOCAB - 1)
picks = st.integers(0, 1 << 16)
edges = st.floats(-4, 0, width=32)
nodes = st.lists(st.tuples(picks, tokens, edges), min_size=1, max_size=6)

steps = st.one_of(
    st.tuples(st.just("extend"), nodes),
    st.tuples(st.just("extend"), nodes),
    st.tuples(st.just("add"), picks, tokens, edges),
    st.tuples(st.just("take"), st.integers(1, 5)),
    st.tuples(st.just("take"), st.just(256)),
    st.tuples(st.just("commit"), picks, st.integers(0, 4), tokens, st.integers(0, 3 * CREDIT)),
    st.tuples(st.just("reopen"), st.lists(tokens, max_size=2)),
    st.tuples(st.just("credit"), st.integers(0, CREDIT)),
    st.tuples(st.just("since"), picks),
    st.tuples(st.just("look")),
)


def opened() -> TreeAuthor:
    return TreeAuthor(Open(1, [0, 1], 1, SamplingParams(), CREDIT), VOCAB)


def path_to(author: TreeAuthor, node: int) -> list[int]:
    """Draft tokens from below the root to a node."""
    tokens = []
    while node != author.root:
        tokens.append(author.node(node).token)
        node = author.node(node).parent
    return tokens[::-1]


def state(author: TreeAuthor) -> list[tuple[Any, ...]]:
    """All that can be asked of live nodes."""
    return [
        (
            node,
            author.node(node),
            author.depth(node),
            path_to(author, node),
            author.from_start(node),
        )
        for node in author.live_ids()
    ]


class Twins:
    """An author that is extended, and one that has nodes added."""

    def __init__(self) -> None:
        self.bulk, self.single = opened(), opened()

    def extend(self, wanted: list[tuple[int, int, float]]) -> None:
        """Below live nodes, or those before in the batch; no aliases, which is what a forest sees to."""
        single, first = self.single, self.single.next_id
        live = single.live_ids()
        parents: list[int] = []
        seen: set[tuple[int, int]] = set()
        batch: list[tuple[int, float]] = []
        for pick, token, edge in wanted:
            there = [*live, *range(first, first + len(batch))]
            parent = there[pick % len(there)]
            if (parent, token) not in seen and (parent >= first or single.child(parent, token) is None):
                seen.add((parent, token))
                parents.append(parent)
                batch.append((token, edge))
        if not batch:
            return
        given_tokens, scores = [token for token, _ in batch], [edge for _, edge in batch]
        room = single.credit - single.num_live
        got = self.bulk.extend(parents, given_tokens, scores, 3)
        assert got == (first if len(batch) <= room else None)
        if got is None:
            for node in zip(parents, given_tokens, scores, strict=True):
                assert self.bulk.add(*node, 3) == self.single.add(*node, 3)
        else:
            added = [single.add(*node, 3) for node in zip(parents, given_tokens, scores, strict=True)]
            assert added == list(range(first, first + len(batch)))

    def commit(self, pick: int, depth: int, bonus: int, received: int) -> None:
        """A path that the tree holds, and a token that it may hold; whatever verify says to have."""
        single, node = self.single, self.single.root
        for _ in range(depth):
            below = list(single.children(node).values())
            if not below:
                break
            node = below[pick % len(below)]
        path = [*path_to(single, node), bonus]
        resolved = None if pick % 3 else single.root
        commit = Commit(1, single.committed_len, list(path), single.epoch, received, resolved, CREDIT)
        assert self.bulk.apply(commit) == single.apply(commit)

    def apply(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("extend", wanted):
                self.extend(wanted)
            case ("add", pick, token, edge):
                live = self.single.live_ids()
                node = (live[pick % len(live)], token, edge, 1)
                assert self.bulk.add(*node) == self.single.add(*node)
            case ("take", most):
                assert self.bulk.take(most) == self.single.take(most)
            case ("commit", pick, depth, bonus, received):
                self.commit(pick, depth, bonus, received)
            case ("reopen", more):
                message = Open(1, [*self.single.tokens, *more], 1, SamplingParams(), CREDIT)
                self.bulk.reopen(message)
                self.single.reopen(message)
            case ("credit", credit):
                self.bulk.credit = self.single.credit = credit
            case ("since", pick):
                first = pick % (self.single.next_id + 2)
                later = [node for node in self.single.live_ids() if node >= max(first, 1)]
                wanted = [(node, self.single.node(node).parent, self.single.node(node).source) for node in later]
                assert self.bulk.since(first) == self.single.since(first) == wanted
            case ("look",):
                assert state(self.bulk) == state(self.single)

    def check(self) -> None:
        """What can be seen without a look at nodes."""
        bulk, single = self.bulk, self.single
        for name in ("num_live", "next_id", "root", "epoch", "base_len", "tokens", "has_untaken", "owes_answer"):
            assert getattr(bulk, name) == getattr(single, name), name


@settings(max_examples=examples(130))
@given(st.lists(steps, max_size=40))
def test_extended_authors_are_as_those_whose_nodes_were_added(trace: list[tuple[Any, ...]]) -> None:
    twins = Twins()
    for step in trace:
        twins.apply(step)
        twins.check()
    twins.apply(("look",))
    while (grow := twins.bulk.take(3)) is not None:
        assert grow == twins.single.take(3)
    assert twins.single.take(3) is None


def refused(**changes: Any) -> bool:
    """Whether an author with node 1 refuses two nodes, and is as before."""
    author = opened()
    assert author.extend([0], [2], [-0.5], 0) == 1
    batch = {"parents": [1, 2], "tokens": [3, 4], "scores": [-1.0, -2.0]} | changes
    before = author.num_live, author.next_id
    if author.extend(**batch, source=0) is not None:
        return False
    assert (author.num_live, author.next_id) == before
    assert author.live_ids() == [0, 1] and author.child(1, 3) is None
    return True


def test_a_batch_is_refused_for_one_bad_node() -> None:
    assert not refused()
    assert refused(parents=[7, 2]), "nobody"
    assert refused(parents=[-1, 2]) and refused(parents=[1, 4]), "nobody"
    assert refused(tokens=[3, VOCAB]) and refused(tokens=[-1, 3]), "illegal"
    for score in (0.5, math.nan, -math.inf, math.inf):
        assert refused(scores=[-1.0, score]) and refused(scores=[score, -1.0]), score
    assert refused(parents=[], tokens=[], scores=[])


def test_a_look_for_one_child_leaves_what_came_in_bulk_as_it_is() -> None:
    author = opened()
    assert author.add(0, 2, -1.0, 1) == 1
    assert author.extend([1, 2], [3, 4], [-1.0] * 2, 0) == 2
    assert author.settled_child(0, 2) == 1 and author.settled_child(0, 3) is None
    assert (
        author.settled_child(1, 3) is None and author.settled_child(2, 4) is None and author.settled_child(9, 1) is None
    )
    assert author.child(1, 3) == author.settled_child(1, 3) == 2


def test_dead_parents_credit_and_guides_refuse_a_batch() -> None:
    author = opened()
    assert author.extend([0, 0, 2], [2, 3, 4], [-1.0] * 3, 0) == 1
    author.apply(Commit(1, 2, [3], author.epoch, 0, None, 3))
    assert author.root == 2 and not author.is_live(1)
    assert author.extend([1], [2], [-1.0], 0) is None, "node 1 is dead"
    assert author.extend([2, 3, 4], [2, 2, 2], [-1.0] * 3, 0) is None, "one more than the credit"
    assert author.extend([2, 3], [2, 2], [-1.0] * 2, 0) == 4

    class Guide:
        def allows(self, parent: int, token: int) -> bool:
            return True

        def forced(self, parent: int) -> int | None:
            return None

    author.credit, author.guide = CREDIT, Guide()
    assert author.extend([2], [1], [-1.0], 0) is None

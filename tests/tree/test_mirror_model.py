"""Verify's tree, node by node, against one that is kept in the plainest way."""

from __future__ import annotations

import math

import numpy as np
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror_integrity import check_mirror
from plain_mirror import PlainMirror, Row

from outrider.protocol.speculation import Grow
from outrider.tree.mirror import TreeMirror
from verify_service.speculation.budget import Forest

VOCAB = 6
MAX_NODES = 24
DEEPEST = 4

tokens = st.integers(0, 32).map(lambda pick: {31: -1, 32: VOCAB}.get(pick, pick % VOCAB))
scores = st.integers(0, 63).map(lambda pick: {61: math.nan, 62: -math.inf, 63: 0.5}.get(pick, -pick / 16))
drafted = st.tuples(st.integers(0, 10**6), tokens, scores, st.integers(0, 255))
"""What picks the parent, token, score, source: illegal now and then."""

steps = st.one_of(
    st.tuples(st.just("grow"), st.lists(drafted, min_size=1, max_size=12), st.integers(0, 2)),
    st.tuples(st.just("again"), st.integers(0, 10**6), st.just(0)),
    st.tuples(st.just("late"), st.integers(0, 10**6), st.just(0)),
    st.tuples(st.just("commit"), st.lists(st.integers(0, 10**6), min_size=1, max_size=3), st.just(0)),
)


class Pair:
    """A mirror and its model, which are told the same."""

    def __init__(self) -> None:
        self.tokens = [0]
        self.mirror = TreeMirror(self.tokens, VOCAB, MAX_NODES)
        self.plain = PlainMirror(self.tokens, VOCAB, MAX_NODES)
        self.sent: list[Grow] = []
        self.held_back: list[Grow] = []
        self.next_id = 1

    def draft(self, nodes: list[tuple[int, int, float, int]], skipped: int) -> Grow:
        """A message whose nodes hang anywhere: below live, dead and unknown nodes, and below each other."""
        first = self.next_id + skipped
        self.next_id = first + len(nodes)
        near = max(first - 12, 0)
        parents = [near + pick % (first + index + 1 - near) for index, (pick, _, _, _) in enumerate(nodes)]
        _, token_ids, edges, sources = zip(*nodes, strict=True)
        return Grow(
            *(1, 1, 1, 1, first, list(parents), list(token_ids)),
            list(edges),
            bytes(sources),
        )

    def insert(self, grow: Grow) -> None:
        self.plain.insert(grow)
        self.mirror.insert(grow)

    def commit(self, picks: list[int]) -> None:
        """Commit tokens, along the tree where a pick says so."""
        for pick in picks:
            below = [row.token for row in self.plain.rows() if row.depth == 1]
            on_path = below and pick % 4 and self.plain.root_len == len(self.tokens)
            self.tokens.append(below[pick % len(below)] if on_path else pick % VOCAB)
            if pick % 2:
                self.mirror.commit()
                self.plain.walk()
        self.mirror.commit()
        self.plain.walk()

    def check(self) -> None:
        mirror, plain = self.mirror, self.plain
        check_mirror(mirror)
        rows = {row.node_id: row for row in plain.rows()}
        live = list(mirror.descend())
        assert sorted(mirror.ids[slot] for slot in live) == sorted(rows)
        for slot in live:
            row = rows[mirror.ids[slot]]
            depth = mirror.depths[slot] - mirror.root_depth
            assert (mirror.token_ids[slot], mirror.ids[mirror.parents[slot]], depth) == (
                row.token,
                row.parent_id,
                row.depth,
            )
            assert (mirror.scores[slot], mirror.sources[slot]) == (row.score, row.source)
            assert mirror.child(mirror.parents[slot], row.token) == slot
        resolved = plain.root_len == len(self.tokens)
        assert mirror.has_nodes == (resolved and bool(rows)) and mirror.root_len == plain.root_len
        assert mirror.dropped == plain.dropped and mirror.received_through == plain.received_through
        assert mirror.resolved_root == (plain.root if resolved and mirror.epoch else None)
        if resolved:
            self.check_best(rows)

    def check_best(self, rows: dict[int, Row]) -> None:
        """A round that takes any number of nodes takes the likeliest, parents first."""
        forest = Forest([self.mirror], [DEEPEST])
        chances = list(forest.best())
        log_probs = sorted((row.log_prob for row in rows.values() if row.depth <= DEEPEST), reverse=True)
        assert np.allclose(np.log(chances), log_probs, atol=1e-9)
        for count in {0, len(chances) // 2, len(chances)}:
            (nodes,) = forest.take(count)
            taken = [rows[self.mirror.ids[slot]] for slot in nodes.slots]
            assert [(row.token, row.depth) for row in taken] == list(zip(nodes.token_ids, nodes.depths, strict=True))
            for place, (row, parent) in enumerate(zip(taken, nodes.parents, strict=True)):
                assert parent < place and row.parent_id == (taken[parent].node_id if parent >= 0 else self.plain.root)


@settings(max_examples=examples(100))
@given(st.lists(steps, max_size=30))
def test_whatever_comes_the_tree_is_the_plain_one(trace: list[tuple]) -> None:
    pair = Pair()
    for kind, what, skipped in trace:
        if kind == "commit":
            pair.commit(what)
        elif kind == "grow":
            grow = pair.draft(what, skipped)
            pair.sent.append(grow)
            if what[0][0] % 7 != 3:
                pair.insert(grow)
            else:
                pair.held_back.append(grow)
        elif kind == "again" and pair.sent:
            pair.insert(pair.sent[what % len(pair.sent)])
        elif kind == "late" and pair.held_back:
            pair.insert(pair.held_back.pop(what % len(pair.held_back)))
        pair.check()


def test_ids_at_the_end_of_their_range_take_no_more_memory_than_others() -> None:
    mirror = TreeMirror([0], VOCAB, MAX_NODES)
    first = 2**32 - 2
    columns = ([0, first], [0, 0], [0.0, 0.0], bytes(2))
    assert mirror.insert(Grow(1, 1, 1, 1, first, *columns)) == 2
    assert mirror.ids == [0, first, first + 1]
    assert mirror.received_through == 2**32 - 1


def test_what_is_dead_is_forgotten() -> None:
    committed = [0]
    mirror = TreeMirror(committed, VOCAB, MAX_NODES)
    for last in range(200):
        ids = 2 * last + 1
        columns = ([max(ids - 2, 0)] * 2, [1, 2], [-1.0, -1.0])
        assert mirror.insert(Grow(1, 1, 1, 1, ids, *columns, bytes(2))) == 2
        committed.append(1)
        mirror.commit()
        check_mirror(mirror)
        assert len(mirror.ids) <= MAX_NODES + 1


def grow_of(first: int, parents: list[int], tokens: list[int]) -> Grow:
    count = len(parents)
    columns = (list(parents), list(tokens), [-1.0] * count)
    return Grow(1, 1, 1, 1, first, *columns, bytes(count))


def chain_and_leaf(length: int) -> TreeMirror:
    """A chain below the root that dies, because a leaf beside it is committed."""
    committed = [0]
    mirror = TreeMirror(committed, VOCAB, 4 * length)
    mirror.insert(grow_of(1, [*range(length), 0], [1] * length + [2]))
    committed.append(2)
    mirror.commit()
    return mirror


def test_what_hangs_below_dead_nodes_is_climbed_once() -> None:
    """A draft that sends node after node below a long dead chain must not hold up the rounds of others."""
    mirror, length = chain_and_leaf(500), 500

    class Counting(list):
        looks = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            Counting.looks += 1
            return super().__getitem__(place)

    mirror.parents = Counting(mirror.parents)
    for number in range(50):
        mirror.insert(grow_of(length + 2 + 10 * number, [length] * 10, [3] * 10))
    assert mirror.dropped["dead_parent"] == 500
    assert Counting.looks < 2 * length


def test_a_late_chain_below_a_dead_node_is_dead_and_no_message_is_missing() -> None:
    mirror, length = chain_and_leaf(3), 3
    first = mirror.received_through + 1
    mirror.insert(grow_of(first, [length, first, first + 1], [3, 4, 5]))
    assert mirror.dropped == {"dead_parent": 3}
    mirror.insert(grow_of(first + 5, [first + 4, first + 5], [3, 4]))
    assert mirror.dropped == {"unknown_parent": 1, "dead_parent": 4}


def test_a_tree_that_is_full_of_live_nodes_is_not_swept_for_each_message() -> None:
    mirror = TreeMirror([0], VOCAB, 20)
    mirror.insert(grow_of(1, list(range(20)), [1] * 20))
    swept = []
    descend = mirror.descend
    mirror.descend = lambda: swept.append(True) or descend()  # type: ignore[method-assign, func-returns-value]
    for number in range(50):
        mirror.insert(grow_of(21 + number, [0], [2]))
    assert mirror.dropped["too_many"] == 50 and len(swept) <= 1
    check_mirror(mirror)


def test_an_answer_without_a_draft_leaves_nothing_in_its_tree() -> None:
    committed = [0]
    mirror = TreeMirror(committed, VOCAB, 20)
    for _ in range(500):
        committed.append(1)
        mirror.commit()
    assert not mirror._steps
    assert mirror.take_observations() == []


def test_a_node_that_is_as_good_as_impossible_leaves_those_below_it_their_chances() -> None:
    committed = [0]
    mirror = TreeMirror(committed, VOCAB, 20)
    grow = grow_of(1, [0, 1, 2], [1, 2, 3])
    grow.scores[0] = -1e38
    mirror.insert(grow)
    committed.append(1)
    mirror.commit()
    assert np.allclose(list(Forest([mirror], [9]).best()), np.exp([-1.0, -2.0]))

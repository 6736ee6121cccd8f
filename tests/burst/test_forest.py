"""The forest's arrays against trees of plain dicts."""

from __future__ import annotations

import math
import random

import numpy as np
from examples import examples
from growth_rig import shape
from hypothesis import given, settings
from hypothesis import strategies as st
from integrity import check_forest, check_slots

from outrider.drafting.model.burst import BurstResult
from outrider.drafting.model.entries import BurstCollector
from outrider.drafting.model.forest import DraftForest, RerootStep, reroot

ROWS, BRANCHING, FLOOR = 4, 3, math.log(0.02)
Path = tuple[int, ...]


class Naive:
    """One tree: edge scores by path, and the slots of those that were run."""

    def __init__(self) -> None:
        self.edges: dict[Path, float] = {(): 0.0}
        self.slots: dict[Path, int] = {}

    def score(self, path: Path) -> float:
        return sum(self.edges[path[:end]] for end in range(1, len(path) + 1))

    def runnable(self) -> list[Path]:
        return [path for path in self.edges if path and path not in self.slots and path[:-1] in self.slots]

    def follow(self, tokens: Path) -> None:
        below = {path[len(tokens) :]: edge for path, edge in self.edges.items() if path[: len(tokens)] == tokens}
        slots = {path[len(tokens) :]: slot for path, slot in self.slots.items() if path[: len(tokens)] == tokens}
        self.edges, self.slots = {(): 0.0}, {}
        if below:
            self.edges, self.slots = below | {(): 0.0}, slots


class Both:
    """The forest and its naive counterpart, driven alike."""

    def __init__(self, max_entries: int = 4096, quota: int = 30) -> None:
        self.forest = DraftForest(shape(num_rows=ROWS, region=64, branching=BRANCHING), FLOOR, max_entries)
        self.trees = {row: Naive() for row in range(ROWS)}
        for row in range(ROWS):
            self.forest.set_root(row, 0, 5, 0)
            self.forest.quotas[row] = quota
            self.forest.last_positions[row] = 1000
            self.run_root(row)

    def run_root(self, row: int) -> None:
        (slot,) = self.forest.slots.take(row, 1)
        self.run(np.array([self.forest.roots[row]]), [(row, ())], [slot])

    def burst(self, limit: int, draw: random.Random) -> None:
        """Run the best of all trees, one step."""
        if not self.forest.make_room(limit * BRANCHING):
            return
        chosen = self.forest.choose(limit)
        paths = [self.path(entry) for entry in chosen.tolist()]
        slots = [self.forest.slots.take(row, 1)[0] for row, _ in paths]
        if paths:
            self.run(chosen, paths, slots, draw)

    def run(
        self, seeds: np.ndarray, paths: list[tuple[int, Path]], slots: list[int], draw: random.Random | None = None
    ) -> None:
        draw = draw or random.Random(1)
        count = len(seeds)
        order = list(range(count))
        draw.shuffle(order)
        tokens = np.full((1, count, BRANCHING), -1, np.int32)
        scores = np.full((1, count, BRANCHING), -np.inf, np.float32)
        for place, index in enumerate(order):
            row, path = paths[index]
            for number, token in enumerate(draw.sample(range(6), draw.randrange(1, BRANCHING + 1))):
                edge = float(np.float32(-draw.random() * 2))
                tokens[0, place, number], scores[0, place, number] = token, edge
                self.trees[row].edges[(*path, token)] = edge
            self.trees[row].slots[path] = slots[index]
        taken = np.array([[slots[index] for index in order]], np.int32)
        collector = BurstCollector(seeds, count * (1 + BRANCHING))
        self.forest.merge(collector, BurstResult(count, np.array([order], np.int32), taken, tokens, scores))

    def follow(self, steps: dict[int, Path]) -> None:
        made = [RerootStep(row, tokens, node=0, restarted=True) for row, tokens in steps.items()]
        for step, result in zip(made, reroot(self.forest, made), strict=True):
            tree, tokens = self.trees[step.row], tuple(step.tokens)
            expected = [tree.slots.get(tokens[:end], -1) for end in range(len(tokens)) if tokens[:end] in tree.edges]
            assert result.slots == expected
            assert result.found == (tokens in tree.edges)
            for slot in result.slots:
                if slot >= 0:
                    self.forest.slots.free(np.array([step.row], np.int32), np.array([slot], np.int32))
            tree.follow(tokens)
        for row in steps:
            if () not in self.trees[row].slots:
                self.run_root(row)

    def path(self, entry: int) -> tuple[int, Path]:
        entries, path = self.forest.entries, []
        row = int(entries.rows[entry])
        while entries.parents[entry] >= 0:
            path.append(int(entries.tokens[entry]))
            entry = int(entries.parents[entry])
        return row, tuple(reversed(path))

    def check(self) -> None:
        forest, entries = self.forest, self.forest.entries
        check_forest(forest)
        check_slots(forest.slots)
        held: dict[tuple[int, Path], int] = {}
        for entry in np.flatnonzero(entries.scores[: entries.count] > -np.inf).tolist():
            held[self.path(entry)] = entry
        expected = {(row, path) for row, tree in self.trees.items() for path in tree.edges}
        assert held.keys() == expected
        for (row, path), entry in held.items():
            tree = self.trees[row]
            assert math.isclose(entries.scores[entry], tree.score(path), abs_tol=1e-5)
            assert entries.slots[entry] == tree.slots.get(path, -1)
            assert entries.positions[entry] == forest.root_positions[row] + len(path)
        for row, tree in self.trees.items():
            assert set(np.flatnonzero(forest.slots.live[row]).tolist()) == set(tree.slots.values())
            assert forest.num_run[row] == len(tree.slots)

    def check_choice(self, limit: int) -> None:
        """The chosen are the best of all, but for what a tree may not run any more."""
        forest = self.forest
        chosen = [self.path(entry) for entry in forest.choose(limit).tolist()]
        scores = [self.trees[row].score(path) for row, path in chosen]
        assert scores == sorted(scores, reverse=True) or np.allclose(scores, sorted(scores, reverse=True))
        left = {row: int(forest.quotas[row]) - len(tree.slots) for row, tree in self.trees.items()}
        for row in range(ROWS):
            assert sum(1 for owner, _ in chosen if owner == row) <= max(left[row], 0)
        best = sorted(
            (tree.score(path) for row, tree in self.trees.items() if left[row] > 0 for path in tree.runnable()),
            reverse=True,
        )
        best = [score for score in best if score >= FLOOR]
        if all(count >= limit for count in left.values()):
            assert np.allclose(scores, best[:limit])


tokens = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple)
steps = st.one_of(
    st.tuples(st.just("burst"), st.integers(1, 12)),
    st.tuples(st.just("follow"), st.dictionaries(st.integers(0, ROWS - 1), tokens, min_size=1)),
    st.tuples(st.just("best"), st.integers(0, ROWS - 1), st.integers(1, 4)),
    st.tuples(st.just("compact")),
)


@settings(max_examples=examples(60))
@given(st.integers(0, 1 << 16), st.lists(steps, max_size=25))
def test_the_forest_is_what_plain_trees_are(seed: int, trace: list[tuple]) -> None:
    both, draw = Both(), random.Random(seed)
    for step in trace:
        match step:
            case ("burst", limit):
                both.burst(limit, draw)
            case ("follow", moves):
                both.follow(moves)
            case ("best", row, depth):
                paths = [path for path in both.trees[row].edges if 0 < len(path) <= depth]
                if paths:
                    both.follow({row: max(paths, key=both.trees[row].score)})
            case ("compact",):
                both.forest._compact()
        both.check()
        both.check_choice(5)


def test_over_its_memory_the_least_promising_go_first() -> None:
    both, draw = Both(max_entries=200), random.Random(3)
    for _ in range(6):
        both.burst(8, draw)
    forest, entries = both.forest, both.forest.entries
    loose = {both.path(entry) for entry in np.flatnonzero(entries.ranks[: entries.count] > -np.inf).tolist()}
    assert len(loose) > 20
    assert forest.make_room(entries.room + 10)
    check_forest(forest)
    kept = {both.path(entry) for entry in np.flatnonzero(entries.ranks[: entries.count] > -np.inf).tolist()}
    gone = loose - kept
    assert len(gone) >= 10
    if kept:
        assert max(both.trees[row].score(path) for row, path in gone) <= min(
            both.trees[row].score(path) + 1e-5 for row, path in kept
        )
    # What was run is never dropped; more than that cannot be asked for.
    assert all(forest.num_run[row] == len(tree.slots) for row, tree in both.trees.items())
    assert not forest.make_room(200)


def test_a_closed_tree_leaves_nothing() -> None:
    both = Both()
    both.burst(10, random.Random(1))
    both.forest.close(2)
    both.forest._compact()
    assert 2 not in both.forest.entries.rows[: both.forest.entries.count]
    assert not both.forest.slots.live[2].any()
    check_slots(both.forest.slots)
    check_forest(both.forest)


def test_a_node_that_is_run_again_has_the_slot_that_it_was_run_in_last() -> None:
    """With a block head it is run below a root whose features came late, and leaves its children something else."""
    forest = DraftForest(shape(num_rows=1, region=64, branching=1), FLOOR, 4096)
    forest.has_foreign_nodes = True
    forest.set_root(0, 0, 5, 0)
    slots = forest.slots.take(0, 3)
    tokens, scores = np.array([[[7]], [[8]]], np.int32), np.full((2, 1, 1), -0.1, np.float32)
    picked = np.array([[0], [1]], np.int32)
    for second in slots[1:]:
        seeds, taken = np.array([forest.roots[0]]), np.array([[slots[0]], [second]], np.int32)
        forest.merge(BurstCollector(seeds, 3), BurstResult(1, picked, taken, tokens, scores))
        entries = forest.entries
        assert entries.slots[: entries.count].tolist() == [slots[0], second, -1]
        assert forest.slots.live[0].nonzero()[0].tolist() == sorted([slots[0], second])
        assert forest.num_run[0] == 2
        check_forest(forest)
    assert slots[1] in forest.slots.stacks[0, : forest.slots.num_free[0]]

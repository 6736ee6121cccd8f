"""Verify's tree against one that is kept in the plainest way."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from mirror_integrity import check_mirror

from outrider.protocol.speculation import Grow
from outrider.tree.mirror import TreeMirror
from verify_service.speculation.budget import Forest

VOCAB = 4


class PlainTree:
    """Paths below the root and their scores."""

    def __init__(self) -> None:
        self.scores: dict[tuple[int, ...], float] = {}
        self.path_of: dict[int, tuple[int, ...]] = {0: ()}

    def add(self, node_id: int, parent: int, token: int, score: float) -> None:
        above = self.path_of.get(parent)
        if above is not None and (*above, token) not in self.scores:
            self.path_of[node_id] = (*above, token)
            self.scores[*above, token] = score

    def commit(self, token: int) -> None:
        self.scores = {path[1:]: score for path, score in self.scores.items() if path[0] == token and len(path) > 1}
        self.path_of = {n: path[1:] for n, path in self.path_of.items() if path and path[0] == token}

    def path_scores(self) -> dict[tuple[int, ...], float]:
        return {path: sum(self.scores[path[: i + 1]] for i in range(len(path))) for path in self.scores}


def paths_of(mirror: TreeMirror) -> dict[tuple[int, ...], float]:
    """Path and path score of every node that the mirror offers."""
    forest = Forest([mirror], [1000])
    chances = list(forest.best())
    (nodes,) = forest.take(len(chances))
    paths: list[tuple[int, ...]] = []
    for token, parent, depth in zip(nodes.token_ids, nodes.parents, nodes.depths, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
        assert depth == len(paths[-1])
    return {path: math.log(chance) for path, chance in zip(paths, chances, strict=True)}


steps = st.one_of(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, VOCAB - 1), st.floats(-4, 0, width=32)), max_size=6),
    st.integers(0, VOCAB - 1),
)


@given(st.lists(steps, max_size=25))
def test_the_mirror_is_the_plain_tree(trace: list) -> None:
    tokens = [0]
    mirror, plain, next_id = TreeMirror(tokens, VOCAB, 400), PlainTree(), 1
    for step in trace:
        if isinstance(step, int):
            if (step,) not in plain.scores:
                continue  # a miss: what follows is the epochs' business
            tokens.append(step)
            mirror.commit()
            plain.commit(step)
        else:
            parents = [pick % (next_id + index) for index, (pick, _, _) in enumerate(step)]
            for index, (parent, (_, token, score)) in enumerate(zip(parents, step, strict=True)):
                plain.add(next_id + index, parent, token, score)
            token_ids = [token for _, token, _ in step]
            scores = [score for _, _, score in step]
            sources = bytes(len(step))
            mirror.insert(Grow(1, 1, 1, 1, next_id, parents, token_ids, scores, sources))
            next_id += len(step)
        check_mirror(mirror)
        expected = plain.path_scores()
        got = paths_of(mirror)
        assert got.keys() == expected.keys()
        assert all(abs(got[path] - expected[path]) < 1e-5 for path in got)


def test_every_child_of_a_committed_token_is_observed_once_also_when_it_comes_late() -> None:
    tokens = [0]
    mirror = TreeMirror(tokens, VOCAB, 16)

    def grow(first_id: int, *children: int) -> None:
        count = len(children)
        scores = [-0.5] * count
        mirror.insert(
            Grow(1, 1, 1, 1, first_id, [0] * count, list(children), scores,
                 bytes(count))
        )  # fmt: skip

    def observed() -> list[tuple[float, bool]]:
        return [(seen.score, seen.hit) for seen in mirror.take_observations()]

    grow(1, 1, 2)
    assert observed() == []
    tokens.append(3)
    mirror.commit()
    assert observed() == [(-0.5, False)] * 2 and not mirror.has_nodes
    tokens.append(1)
    mirror.commit()
    grow(3, 3)
    assert observed() == [(-0.5, True)]
    assert mirror.num_unresolved == 1
    tokens.append(2)
    mirror.commit()
    assert observed() == []


def test_a_message_without_nodes_tells_what_was_received_while_others_are_there() -> None:
    """Else the draft would not learn that nodes were lost before a commit needs them."""
    tokens = [1, 2, 3]
    mirror = TreeMirror(tokens, vocab_size=100, max_nodes=50)
    scores, sources = [-0.1, -0.1], bytes(2)
    mirror.insert(Grow(1, 1, 3, 3, 1, [0, 1], [4, 5], scores, sources))
    assert (len(list(mirror.descend())), mirror.received_through) == (2, 2)
    mirror.insert(Grow(1, 1, 3, 3, 9))
    assert mirror.received_through == 8

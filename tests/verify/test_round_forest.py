"""All trees of a round side by side."""

from __future__ import annotations

from outrider.protocol.speculation import Grow
from outrider.tree.mirror import TreeMirror
from verify_service.speculation.budget import Forest


def test_what_a_round_takes_of_a_tree_is_in_whole_numbers() -> None:
    mirror = TreeMirror([1, 2, 3], vocab_size=100, max_nodes=50)
    parents, tokens = [0, 1], [4, 5]
    mirror.insert(Grow(1, 1, 3, 3, 1, parents, tokens, [-0.1, -0.1], bytes(2)))
    forest = Forest([mirror], [5])
    assert len(list(forest.best())) == 2
    (nodes,) = forest.take(2)
    assert (nodes.token_ids, nodes.parents, nodes.depths) == ([4, 5], [-1, 0], [1, 2])
    assert {type(number) for number in (*nodes.token_ids, *nodes.parents, *nodes.depths)} == {int}

"""All trees of a round side by side."""

from __future__ import annotations

import numpy as np

from outrider.protocol.messages import Grow
from outrider.tree.mirror import TreeMirror
from verify_service.speculation.budget import Forest


def test_what_a_round_takes_of_a_tree_is_in_whole_numbers() -> None:
    mirror = TreeMirror([1, 2, 3], vocab_size=100, max_nodes=50)
    parents, tokens = np.array([0, 1], np.uint32), np.array([4, 5], np.int32)
    mirror.insert(Grow(1, 1, 3, 3, 1, parents, tokens, np.full(2, -0.1, np.float32), np.zeros(2, np.uint8)))
    forest = Forest([mirror], [5])
    assert len(list(forest.best())) == 2
    (nodes,) = forest.take(2)
    assert (nodes.token_ids, nodes.parents, nodes.depths) == ([4, 5], [-1, 0], [1, 2])
    assert {type(number) for number in (*nodes.token_ids, *nodes.parents, *nodes.depths)} == {int}

"""Trees of draft tokens for rounds that only their shape matters to."""

from __future__ import annotations

import random

from verify_service.engine.round import Nodes

MAX_DEPTH = 12


def tree_parents(num_nodes: int, spine: int = 6) -> list[int]:
    """Parents of `num_nodes` nodes, -1 for children of the root: a chain of `spine` and what grows beside it.

    Random but the same every time, and no deeper than MAX_DEPTH.
    """
    rng = random.Random(num_nodes)
    parents: list[int] = []
    depths: list[int] = []
    while len(parents) < num_nodes:
        parent = len(parents) - 1 if len(parents) < spine else rng.randrange(-1, len(parents))
        depth = 1 if parent < 0 else depths[parent] + 1
        if depth <= MAX_DEPTH:
            parents.append(parent)
            depths.append(depth)
    return parents


def tree_below(likely: list[int], num_nodes: int, vocab_size: int) -> Nodes:
    """A tree whose first chain is `likely`, as far as it goes; the other tokens are arbitrary."""
    parents = tree_parents(num_nodes)
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    rng = random.Random(num_nodes)
    token_ids = [rng.randrange(vocab_size) for _ in parents]
    chain = min(len(likely), num_nodes, 6)
    token_ids[:chain] = likely[:chain]
    # Siblings differ: a node that repeats the chain's token would make the walk's choice ambiguous.
    for index in range(chain, num_nodes):
        depth = depths[index]
        if depth <= chain and token_ids[index] == likely[depth - 1]:
            token_ids[index] = (token_ids[index] + 1) % vocab_size
    return Nodes(token_ids, parents, depths)

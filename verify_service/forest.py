"""The trees of a round side by side: the best nodes of all of them, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import exp

from outrider.tree.mirror import TreeMirror
from verify_service.round import Nodes

_NONE = Nodes()


class Forest:
    """Takes the likeliest node of all trees, then the next one, and so on: never a node before its parent.

    Only what is taken is looked at, its next sibling and its first child: children lie likeliest first.
    """

    def __init__(self, mirrors: Sequence[TreeMirror], depth_limits: Sequence[int]) -> None:
        """`depth_limits[i]`: how deep below its root nodes of mirror i may be taken."""
        self._mirrors = mirrors
        self._deepest = [mirror.root_depth + limit for mirror, limit in zip(mirrors, depth_limits, strict=True)]
        self._found: list[tuple[int, int]] = []

    def best(self) -> Iterator[float]:
        """Find node after node; how likely its path is committed, never more than before. Ties go to the older one."""
        self._found = found = []
        trees = zip(self._mirrors, self._deepest, strict=True)
        of_trees = [(mirror.below, mirror.root_cost, mirror.depths, deepest) for mirror, deepest in trees]
        heap: list[tuple[float, int, int, list[tuple[float, int]], int]] = []
        for tree, mirror in enumerate(self._mirrors):
            if mirror.has_nodes and mirror.root_depth < self._deepest[tree]:
                siblings = mirror.below[mirror.root]
                cost, slot = siblings[0]
                heap.append((cost - mirror.root_cost, tree, slot, siblings, 1))
        heapify(heap)
        while heap:
            cost, tree, slot, siblings, following = heap[0]
            below, root_cost, depths, deepest = of_trees[tree]
            if following < len(siblings):
                other, sibling = siblings[following]
                heapreplace(heap, (other - root_cost, tree, sibling, siblings, following + 1))
            else:
                heappop(heap)
            children = below[slot]
            if children and depths[slot] < deepest:
                other, child = children[0]
                heappush(heap, (other - root_cost, tree, child, children, 1))
            found.append((tree, slot))
            yield exp(-cost)

    def take(self, count: int) -> list[Nodes]:
        """The first `count` nodes that `best` found, tree by tree."""
        taken: list[dict[int, int]] = [{} for _ in self._mirrors]
        for tree, slot in self._found[:count]:
            places = taken[tree]
            places[slot] = len(places)
        return [
            _nodes(mirror, places) if places else _NONE for mirror, places in zip(self._mirrors, taken, strict=True)
        ]


def _nodes(mirror: TreeMirror, places: dict[int, int]) -> Nodes:
    """What a round takes of a tree: slots to their places in it."""
    tokens, parents, depths, root_depth = mirror.token_ids, mirror.parents, mirror.depths, mirror.root_depth
    return Nodes(
        [tokens[slot] for slot in places],
        [places.get(parents[slot], -1) for slot in places],
        [depths[slot] - root_depth for slot in places],
        list(places),
    )

"""The trees of a round side by side: the best nodes of all of them, one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from math import exp

from outrider.tree.mirror import TreeMirror
from verify_service.engine.round import Nodes

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
        of_trees: list[tuple[list[list[tuple[float, int]]], float, list[int], int]] = []
        heap: list[tuple[float, int, int, list[tuple[float, int]], int]] = []
        for tree, mirror in enumerate(self._mirrors):
            below, root_cost, deepest = mirror.below, mirror.root_cost, self._deepest[tree]
            of_trees.append((below, root_cost, mirror.depths, deepest))
            if mirror.has_nodes and mirror.root_depth < deepest:
                siblings = below[mirror.root]
                cost, slot = siblings[0]
                heap.append((cost - root_cost, tree, slot, siblings, 1))
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
        slots_of: list[list[int]] = [[] for _ in self._mirrors]
        for tree, slot in self._found[:count]:
            slots_of[tree].append(slot)
        return [
            _nodes(mirror, slots) if slots else _NONE for mirror, slots in zip(self._mirrors, slots_of, strict=True)
        ]

    def ends(self, tree: int, count: int) -> float:
        """The chance that what is committed runs past one of the first `count` nodes, of this tree, without children.

        There a round ends for no other reason than that the tree does: nodes that are as deep as may be do not count.
        """
        mirror, deepest = self._mirrors[tree], self._deepest[tree]
        slots = [slot for of, slot in self._found[:count] if of == tree and not mirror.below[slot]]
        # A draft that overrates its nodes has more than all chances.
        return min(sum(mirror.chance(slot) for slot in slots if mirror.depths[slot] < deepest), 1.0)


def _nodes(mirror: TreeMirror, slots: list[int]) -> Nodes:
    """What a round takes of a tree, in the order of `slots`.

    One loop: where many requests share a round a tree has two or three nodes, and a comprehension costs as much.
    """
    tokens, parents, depths, root_depth = mirror.token_ids, mirror.parents, mirror.depths, mirror.root_depth
    places: dict[int, int] = {}
    taken_tokens: list[int] = []
    taken_parents: list[int] = []
    taken_depths: list[int] = []
    for place, slot in enumerate(slots):
        places[slot] = place
        taken_tokens.append(tokens[slot])
        taken_parents.append(places.get(parents[slot], -1))
        taken_depths.append(depths[slot] - root_depth)
    return Nodes(taken_tokens, taken_parents, taken_depths, slots)

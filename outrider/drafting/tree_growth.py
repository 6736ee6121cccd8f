"""One request's tree as it grows: which node to ask about next, and which guess to append next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from outrider.drafting.base import Candidate, FrontierNode
from outrider.drafting.tree import Tree

_EXPAND = -1
"""In place of a token: ask the drafter for the node's children."""

_HOPELESS = float("-inf")

_Entry = tuple[float, int, int, int, float, int]
"""Minus the path score, a running number, node, token or _EXPAND, edge score, source."""


ANY_SOURCE = range(256)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one tree."""

    num_nodes: int
    """Live nodes below the root, whatever the credit."""
    depth: int
    """Draft tokens from the root."""
    path_score: float
    """Least natural-log chance, from the root, of a node worth sending."""
    sources: range = ANY_SOURCE
    """Numbers of the drafter's sources among those of all growers."""
    shared: bool = False
    """Whether another grower appends to the same trees."""


class TreeGrowth:
    """A tree's author with a heap over what could be done next, likeliest first.

    Path scores are kept from the epoch's node 0, so re-rooting shifts them all alike and the heap keeps its order.
    A node is expanded only when nothing likelier is left to append, so a used-up credit costs no guesses.
    """

    def __init__(self, tree: Tree, limits: Limits) -> None:
        self.tree = tree
        self.author = tree.author
        self.limits = limits
        self._asked: set[int] = set()  # nodes that were expanded; kept where trees are shared
        self._num_seen = 0  # ids below this were looked at for others' nodes
        self._heap: list[_Entry] = []
        self._too_deep: list[int] = []  # leaves to expand once the root has come closer
        self._number = 0
        self.restart()

    @property
    def num_live(self) -> int:
        """Nodes below the root."""
        return self.author.num_live

    def has_room(self, num_nodes: int) -> bool:
        """Whether a node may be appended, if each tree may have `num_nodes`."""
        credit = self.author.credit
        # Guesses that cost nothing leave room for those that take a model some time.
        if self.limits.shared and not self.tree.alone:
            credit = (credit + 1) // 2
        return self.num_live < min(credit, self.limits.num_nodes, num_nodes)

    def best(self) -> float:
        """Natural-log chance, from the root, of the best thing to do next; -inf if none is worth it."""
        while self._heap:
            score = -self._heap[0][0] - self._root_score
            if score < self.limits.path_score:
                return _HOPELESS
            if self.author.is_live(self._heap[0][2]):
                return score
            heappop(self._heap)
        return _HOPELESS

    def advance(self) -> FrontierNode | int | None:
        """Do the best thing next: a node to expand is returned; a guess becomes a node, whose source is returned.

        None if the guess was there already.
        """
        _, _, node_id, token, score, source = heappop(self._heap)
        if token == _EXPAND:
            return self._frontier_node(node_id)
        source += self.limits.sources.start
        added = self.author.add(node_id, token, score, source)
        if added is None:
            return None
        self._queue(added)
        return source

    def offer(self, node_id: int, candidates: Iterable[Candidate]) -> None:
        """Take in the guesses of an expanded node."""
        if not self.author.is_live(node_id):
            return
        above = self.author.from_start(node_id)[0]
        for candidate in candidates:
            self._push(above + candidate.score, node_id, candidate.token, candidate.score, candidate.source)
        if self.limits.shared and node_id not in self._asked:
            self._asked.add(node_id)
            for child in self.author.children(node_id).values():
                if child < self._num_seen and self._is_foreign(child):
                    self._queue(child)

    def catch_up(self) -> None:
        """Nodes that another grower appended are to be expanded; below nodes that were not yet, in their turn."""
        if self._num_seen == self.author.next_id:
            return
        for node_id, parent, source in self.author.since(self._num_seen):
            if parent in self._asked and source not in self.limits.sources:
                self._queue(node_id)
        self._num_seen = self.author.next_id

    def reroot(self) -> None:
        """After a hit: forget what hangs off dead nodes and ask anew about the root, of which more is known now."""
        root = self.author.root
        self._heap = [entry for entry in self._heap if entry[2] != root and self.author.is_live(entry[2])]
        heapify(self._heap)
        self._asked = {node_id for node_id in self._asked if self.author.is_live(node_id)}
        self.ask_root()
        too_deep, self._too_deep = self._too_deep, []
        for node_id in too_deep:
            if self.author.is_live(node_id) and node_id != root:
                self._queue(node_id)

    def restart(self) -> None:
        """After a miss: begin at the root."""
        self._heap = []
        self._too_deep = []
        self._asked.clear()
        self._num_seen = 0
        self.ask_root()

    def ask_root(self) -> None:
        """Have the root expanded, perhaps once more."""
        self._root_score = self.author.from_start(self.author.root)[0]
        self._push(self._root_score, self.author.root, _EXPAND, 0.0, 0)

    def _frontier_node(self, node_id: int) -> FrontierNode:
        author = self.author
        node = author.node(node_id)
        parent = -1 if node_id == author.root else node.parent
        position = author.committed_len + author.depth(node_id)
        return FrontierNode(self.tree.handle, node_id, parent, node.token, position)

    def _is_foreign(self, node_id: int) -> bool:
        return self.author.node(node_id).source not in self.limits.sources

    def _queue(self, node_id: int) -> None:
        """Have a node expanded, once it is not too deep."""
        if self.author.depth(node_id) < self.limits.depth:
            self._push(self.author.from_start(node_id)[0], node_id, _EXPAND, 0.0, 0)
        else:
            self._too_deep.append(node_id)

    def _push(self, path_score: float, node_id: int, token: int, score: float, source: int) -> None:
        self._number += 1
        heappush(self._heap, (-path_score, self._number, node_id, token, score, source))

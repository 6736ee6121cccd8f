"""Best-first growth over the trees of all requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from time import perf_counter

from draft_service.drafters.base import Candidate, Drafter, FrontierNode
from draft_service.tree_growth import TreeGrowth
from outrider.logs import get_logger

_logger = get_logger(__name__)

_HOPELESS = float("-inf")


class Growth:
    """Grows whichever tree has the likeliest node to add, as long as any has credit and the memory lasts."""

    def __init__(self, drafter: Drafter, max_nodes: int) -> None:
        self.num_live = 0
        """Live nodes in all trees."""
        self.grown: Counter[int] = Counter()
        """Nodes appended by source since someone emptied this."""
        self.untold: dict[int, TreeGrowth] = {}
        """Trees by handle that verify may have to be told about."""
        self.broken: dict[int, TreeGrowth] = {}
        """Trees by handle whose expansion failed."""
        self._drafter = drafter
        self._max_nodes = max_nodes
        self._trees: dict[int, TreeGrowth] = {}
        self._counted: dict[int, int] = {}
        self._growable: dict[int, TreeGrowth] = {}

    @property
    def has_memory(self) -> bool:
        """Whether another node fits."""
        return self.num_live < self._max_nodes

    @property
    def idle(self) -> bool:
        """Whether there is nothing worth growing."""
        return not self._growable or not self.has_memory

    def insert(self, tree: TreeGrowth) -> None:
        """Begin to grow a tree."""
        self._trees[tree.handle] = tree
        self._counted[tree.handle] = 0
        self.changed(tree)

    def remove(self, tree: TreeGrowth) -> None:
        """Forget a tree."""
        self.num_live -= self._counted.pop(tree.handle)
        del self._trees[tree.handle]
        for group in (self._growable, self.untold, self.broken):
            group.pop(tree.handle, None)

    def tree(self, handle: int) -> TreeGrowth | None:
        """The tree of a handle, if it was not removed."""
        return self._trees.get(handle)

    def changed(self, tree: TreeGrowth) -> None:
        """Look again at a tree that was re-rooted, paused, resumed, or given credit."""
        self.num_live += tree.num_live - self._counted[tree.handle]
        self._counted[tree.handle] = tree.num_live
        self.untold[tree.handle] = tree
        if tree.paused:
            self._growable.pop(tree.handle, None)
        else:
            self._growable[tree.handle] = tree

    def grow(self, deadline: float, interrupted: Callable[[], bool]) -> None:
        """Grow until `deadline` (`time.perf_counter`), until `interrupted()`, or until nothing is worth growing."""
        while not self.idle:
            self._step()
            if perf_counter() >= deadline or interrupted():
                return

    def _step(self) -> None:
        """Append what is best until the drafter must be asked, and ask it about nodes of as many trees as it takes."""
        frontier = self._collect()
        if not frontier:
            return
        for node, candidates in zip(frontier, self._ask(frontier), strict=True):
            self._trees[node.request].offer(node.node, candidates)

    def _ask(self, frontier: list[FrontierNode]) -> list[list[Candidate]]:
        """The drafter's answer; if it fails, each node is asked about alone, so that one request harms no other."""
        try:
            return self._drafter.expand(frontier)
        except Exception as error:
            if len(frontier) > 1:
                return [self._ask([node])[0] for node in frontier]
            tree = self._trees[frontier[0].request]
            _logger.error("request %d: the drafter failed", tree.author.request, exc_info=error)
            self.broken[tree.handle] = tree
            return [[]]

    def _collect(self) -> list[FrontierNode]:
        share = max(1, self._max_nodes // max(1, len(self._trees)))
        ranked = self._rank(share)
        floors: dict[int, float] = {}  # by handle: what scores less waits for the children of the tree's pending nodes
        frontier: list[FrontierNode] = []
        while ranked and len(frontier) < self._drafter.frontier_width and self.has_memory:
            score, handle = -ranked[0][0], ranked[0][1]
            tree = self._trees[handle]
            done = tree.advance()
            if isinstance(done, FrontierNode):
                frontier.append(done)
                floors.setdefault(handle, score - self._drafter.lookahead)
            elif done is not None:
                self.num_live += 1
                self._counted[handle] += 1
                self.grown[done] += 1
                self.untold[handle] = tree
            best = tree.best() if tree.has_room(share) else _HOPELESS
            if best < floors.get(handle, best) or best == _HOPELESS:
                heappop(ranked)
            else:
                heapreplace(ranked, (-best, handle))
        return frontier

    def _rank(self, share: int) -> list[tuple[float, int]]:
        """A heap of the growable trees by minus their best score; those with nothing to do drop out."""
        ranked = []
        for handle, tree in list(self._growable.items()):
            best = tree.best() if tree.has_room(share) else _HOPELESS
            if best == _HOPELESS:
                del self._growable[handle]
            else:
                ranked.append((-best, handle))
        heapify(ranked)
        return ranked

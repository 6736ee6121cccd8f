"""Best-first growth over the trees of all requests, for a drafter that expands single nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush, heapreplace
from time import perf_counter

from outrider.drafting.base import Candidate, Drafter, FrontierNode
from outrider.drafting.tree_growth import Grower, Refusal, Tree, TreeGrowth, TreeLimits
from outrider.errors import raise_device_failure
from outrider.logs import get_logger
from outrider.protocol.speculation import DeclineReason, Features

_logger = get_logger(__name__)

_EXPAND = -1
"""Stands in place of a token: ask the drafter for the node's children."""

_NOTHING = float("-inf")
"""Score where there is nothing to do."""

_FRONTIER_WIDTH = 16
"""Most nodes in one call of `Drafter.expand`."""
_MAX_ASKS = 32
"""Most nodes that a drafter beside a model expands after all trees had a commit; each tree has an even share of them.

The drafter could go on below each of the model's nodes, at some 30 us a node on the thread that keeps the model's
device busy: n-grams took 5 ms of a round of 7 where 16 requests shared it. Such a round takes few nodes per request.
"""
_MAX_LONE_ASKS = 128
"""The same limit where there is only one tree, whose text may copy long passages."""

_Entry = tuple[float, int, int, int, float, int]
"""Negated path score, a running number, node, token or _EXPAND, edge score, source."""


class GrowthQueue:
    """The heap of one tree: live nodes to expand, and guesses to append below such, likeliest first.

    Path scores start at the epoch's node 0, so re-rooting shifts them all alike and the heap keeps its order.
    A node is expanded only when nothing likelier is left to append, so no guesses are made once the credit is used up.
    """

    def __init__(self, tree: Tree, limits: TreeLimits) -> None:
        self.tree = tree
        self.author = tree.author
        self.limits = limits
        self._number = 0
        self.restart()

    def restart(self) -> None:
        """Begin at the root again, after a miss or when the drafter knows more than before."""
        self._heap: list[_Entry] = []
        self._deferred_leaves: list[int] = []  # leaves to expand once the root has come closer
        self._put_off: list[_Entry] = []  # nodes to expand after the next commit
        self._expanded: set[int] = set()  # expanded nodes; kept only if some nodes count as another grower's
        self._num_before = self.author.next_id  # smaller ids existed before: even own ones count as another grower's
        self._num_seen = self._num_before  # smaller ids were already searched for nodes of other growers
        self.ask_root()

    def best(self) -> float:
        """Return the natural-log chance, from the root, of the best entry; -inf if none is worth it."""
        score = -self._heap[0][0] - self._root_score if self._heap else _NOTHING
        return score if score >= self.limits.path_score else _NOTHING

    @property
    def is_asking(self) -> bool:
        """Whether the best entry is a node to expand. The heap must not be empty."""
        return self._heap[0][3] == _EXPAND

    def put_off(self) -> None:
        """Put the best entry off until the next commit."""
        self._put_off.append(heappop(self._heap))

    def advance(self, growth: TreeGrowth) -> FrontierNode | None:
        """Take the best entry: return a node to expand, or append a guess unless the author refuses it."""
        _, _, node_id, token, score, source = heappop(self._heap)
        if token == _EXPAND:
            return self._frontier_node(node_id)
        added = growth.append(self.tree, node_id, token, score, source + self.limits.sources.start)
        if added is not None:
            self._queue(added)
        return None

    def offer(self, node_id: int, candidates: Iterable[Candidate]) -> None:
        """Take in the guesses of an expanded node."""
        above = self.author.from_start(node_id)[0]
        for candidate in candidates:
            self._push(above + candidate.score, node_id, candidate.token, candidate.score, candidate.source)
        if (self.limits.shared or self._num_before > 1) and node_id not in self._expanded:
            self._expanded.add(node_id)
            for child in self.author.children(node_id).values():
                if child < self._num_seen and self._is_foreign(child, self.author.node(child).source):
                    self._queue(child)

    def catch_up(self) -> None:
        """Queue another grower's new nodes below expanded nodes; `offer` queues those below nodes expanded later."""
        if self._num_seen == self.author.next_id:
            return
        for node_id, parent, source in self.author.since(self._num_seen):
            if parent in self._expanded and self._is_foreign(node_id, source):
                self._queue(node_id)
        self._num_seen = self.author.next_id

    def reroot(self) -> None:
        """After a hit, drop entries of dead nodes and queue the root again, since the drafter knows more about it."""
        root = self.author.root
        entries, self._put_off = self._heap + self._put_off, []
        self._heap = [entry for entry in entries if entry[2] != root and self.author.is_live(entry[2])]
        heapify(self._heap)
        self._expanded = {node_id for node_id in self._expanded if self.author.is_live(node_id)}
        self.ask_root()
        deferred_leaves, self._deferred_leaves = self._deferred_leaves, []
        for node_id in deferred_leaves:
            if self.author.is_live(node_id) and node_id != root:
                self._queue(node_id)

    def ask_root(self) -> None:
        """Queue the root to be expanded, even if it was before."""
        self._root_score = self.author.from_start(self.author.root)[0]
        self._push(self._root_score, self.author.root, _EXPAND, 0.0, 0)

    def _frontier_node(self, node_id: int) -> FrontierNode:
        author = self.author
        node = author.node(node_id)
        parent = -1 if node_id == author.root else node.parent
        position = author.committed_len + author.depth(node_id)
        return FrontierNode(self.tree.handle, node_id, parent, node.token, position)

    def _is_foreign(self, node_id: int, source: int) -> bool:
        return node_id < self._num_before or source not in self.limits.sources

    def _queue(self, node_id: int) -> None:
        """Queue a node to be expanded; defer it while it is too deep."""
        if self.author.depth(node_id) < self.limits.depth:
            self._push(self.author.from_start(node_id)[0], node_id, _EXPAND, 0.0, 0)
        else:
            self._deferred_leaves.append(node_id)

    def _push(self, path_score: float, node_id: int, token: int, score: float, source: int) -> None:
        self._number += 1
        heappush(self._heap, (-path_score, self._number, node_id, token, score, source))


class NodeGrower(Grower):
    """Adds the likeliest node over all trees, while some tree may have more nodes and memory is left."""

    def __init__(self, drafter: Drafter, growth: TreeGrowth, limits: TreeLimits) -> None:
        super().__init__(growth, limits)
        self._drafter = drafter
        self._queues: dict[int, GrowthQueue] = {}
        self._growable: dict[int, GrowthQueue] = {}
        self._asks_left = _MAX_LONE_ASKS  # nodes that may be expanded until the next commit, where trees are shared
        self._is_spent = False  # whether only nodes to expand are left, and `_asks_left` is 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing worth growing."""
        return self._is_spent or not self._growable or not self.growth.has_memory

    def open(self, tree: Tree) -> None:
        """Begin to grow a tree; the drafter may raise an error."""
        self._drafter.open(tree)
        self._queues[tree.handle] = GrowthQueue(tree, self.limits)
        # Other requests may have spent all asks since their last commit; a new one must get guesses before its first.
        self._renew_asks()
        self.changed(tree)

    def close(self, tree: Tree) -> None:
        """Forget a tree."""
        del self._queues[tree.handle]
        self._growable.pop(tree.handle, None)
        self._drafter.close(tree.handle)

    def follow(self, tree: Tree, known: int, *, missed: bool) -> None:
        """Tell the drafter about committed tokens; after a miss, begin at the root again."""
        author, queue = tree.author, self._queues[tree.handle]
        live = [author.root] if missed else author.live_ids()
        self._renew_asks()
        self._drafter.commit(tree.handle, author.tokens[known:], author.root, set(live))
        if missed:
            queue.restart()
        else:
            queue.reroot()

    def _renew_asks(self) -> None:
        """Renew a tree's share of nodes to expand, after it was opened or had a commit."""
        count = len(self._queues)
        most, share = (_MAX_ASKS, max(_MAX_ASKS // count, 1)) if count > 1 else (_MAX_LONE_ASKS, _MAX_LONE_ASKS)
        self._asks_left, self._is_spent = min(self._asks_left + share, most), False

    def changed(self, tree: Tree) -> None:
        """Consider a tree again if nodes are granted to it."""
        if self.growth.granted(tree, self.limits):
            self._growable[tree.handle] = self._queues[tree.handle]
        else:
            self._growable.pop(tree.handle, None)

    def take_features(self, tree: Tree, features: Features) -> None:
        """Hand features to the drafter."""
        self._drafter.take_features(tree.handle, features)

    def grow(self, deadline: float, interrupted: Callable[[], bool], *, wait: bool = True) -> None:
        """Grow until `deadline` (`time.perf_counter`), until `interrupted()`, or until nothing is worth growing."""
        while not self.idle:
            self._step()
            if perf_counter() >= deadline or interrupted():
                return

    @property
    def has_work(self) -> bool:
        """Whether the drafter has something to do that can wait."""
        return self._drafter.has_work

    def work(self, deadline: float) -> None:
        """Let the drafter do what could wait, and restart the trees that it knows more about now."""
        for handle in self._drafter.work(deadline):
            queue = self._queues[handle]
            # Nodes expanded before the drafter knew the prompt have no guesses and give their children no context.
            # Nodes of its own may be there: a grammar forced them.
            queue.restart()
            self.changed(queue.tree)

    def forget_target(self) -> None:
        """Let the drafter forget the target, since the next trees have another."""
        self._drafter.forget_target()

    def _step(self) -> None:
        """Append guesses until the drafter must be asked, then have it expand nodes from all trees."""
        frontier = self._collect()
        if not frontier:
            self._is_spent = self.limits.shared and not self._asks_left
            return
        if self.limits.shared:
            self._asks_left -= len(frontier)
        for node, candidates in zip(frontier, self._ask(frontier), strict=True):
            queue = self._queues[node.request]
            queue.offer(node.node, _forced(queue, node) or candidates)

    def _ask(self, frontier: list[FrontierNode]) -> list[list[Candidate]]:
        """Return the drafter's guesses. If it fails, ask again node by node, so that one request harms no other."""
        try:
            return self._drafter.expand(frontier)
        except Exception as error:
            raise_device_failure(error)
            if len(frontier) > 1:
                return [self._ask([node])[0] for node in frontier]
            tree = self._queues[frontier[0].request].tree
            _logger.error("request %d: the drafter failed", tree.author.request, exc_info=error)
            self.growth.refuse(self, tree, Refusal(DeclineReason.UNSPECIFIED, "the drafter failed"))
            self._growable.pop(tree.handle, None)
            return [[]]

    def _collect(self) -> list[FrontierNode]:
        ranked = self._rank()
        may_ask = min(_FRONTIER_WIDTH, self._asks_left) if self.limits.shared else _FRONTIER_WIDTH
        floors: dict[int, float] = {}  # by handle: entries below wait for the children of its frontier nodes
        frontier: list[FrontierNode] = []
        while ranked and len(frontier) < _FRONTIER_WIDTH and self.growth.has_memory:
            score, handle = -ranked[0][0], ranked[0][1]
            queue = self._queues[handle]
            node = None
            if len(frontier) == may_ask and queue.is_asking:
                queue.put_off()
            else:
                node = queue.advance(self.growth)
            if node is not None:
                frontier.append(node)
                floors.setdefault(handle, score)
            best = queue.best() if self._has_room(queue) else _NOTHING
            if best < floors.get(handle, best) or best == _NOTHING:
                heappop(ranked)
            else:
                heapreplace(ranked, (-best, handle))
        return frontier

    def _rank(self) -> list[tuple[float, int]]:
        """Return a heap of the growable trees by negated best score, after dropping trees with nothing to do."""
        ranked = []
        for handle, queue in list(self._growable.items()):
            best = _NOTHING
            if self._has_room(queue):
                if self.limits.shared:
                    queue.catch_up()
                best = queue.best()
            if best == _NOTHING:
                del self._growable[handle]
            else:
                ranked.append((-best, handle))
        heapify(ranked)
        return ranked

    def _has_room(self, queue: GrowthQueue) -> bool:
        return queue.author.num_live < self.growth.most_nodes(queue.tree, self.limits)


def _forced(queue: GrowthQueue, node: FrontierNode) -> list[Candidate]:
    """Return the child that a grammar forces, if it allows just one: the target will commit that one."""
    guide = queue.author.guide
    token = None if guide is None else guide.forced(node.node)
    return [] if token is None else [Candidate(token, 0.0, 0)]

"""Best-first growth over the trees of all requests, the drafter asked node by node."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heapreplace
from time import perf_counter

from outrider.drafting.base import Candidate, Drafter, DraftRequest, FrontierNode
from outrider.drafting.tree import Grower, Ledger, Refusal, Tree
from outrider.drafting.tree_growth import Limits, TreeGrowth
from outrider.errors import raise_device_failure
from outrider.logs import get_logger
from outrider.protocol.messages import DeclineReason, Features

_logger = get_logger(__name__)

_HOPELESS = float("-inf")


class Growth(Grower):
    """Grows whichever tree has the likeliest node to add, as long as any has credit and the memory lasts."""

    def __init__(self, drafter: Drafter, limits: Limits, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._drafter = drafter
        self._limits = limits
        self._trees: dict[int, TreeGrowth] = {}
        self._growable: dict[int, TreeGrowth] = {}

    @property
    def idle(self) -> bool:
        """Whether there is nothing worth growing."""
        return not self._growable or not self.has_memory

    def open(self, tree: Tree) -> None:
        """Begin to grow a tree; the drafter may fail at that."""
        author = tree.author
        self._drafter.open(
            DraftRequest(tree.handle, author.tokens, author.prompt_len, author.sampling, tree.vocab_size, author.tenant)
        )
        self._trees[tree.handle] = TreeGrowth(tree, self._limits)
        self.changed(tree)

    def close(self, tree: Tree) -> None:
        """Forget a tree."""
        del self._trees[tree.handle]
        self._growable.pop(tree.handle, None)
        self.declined.pop(tree.handle, None)
        self._drafter.close(tree.handle)

    def follow(self, tree: Tree, known: int, *, missed: bool) -> None:
        """Let the drafter learn the committed tokens; after a miss begin at the root."""
        author, growth = tree.author, self._trees[tree.handle]
        live = [author.root] if missed else author.live_ids()
        self._drafter.commit(tree.handle, author.tokens[known:], author.root, set(live))
        if missed:
            growth.restart()
        else:
            growth.reroot()

    def changed(self, tree: Tree) -> None:
        """Look again at a tree that was re-rooted, paused, resumed, or given credit."""
        if tree.paused:
            self._growable.pop(tree.handle, None)
        else:
            self._growable[tree.handle] = self._trees[tree.handle]

    def take_features(self, tree: Tree, features: Features) -> None:
        """Hand them to the drafter."""
        self._drafter.take_features(tree.handle, features)

    def found(self, tree: Tree) -> None:
        """Go on below nodes that others appended, once there is room for more."""
        self.changed(tree)

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
        """Let the drafter do what could wait; roots that it knows more of are asked about again."""
        for handle in self._drafter.work(deadline):
            growth = self._trees.get(handle)
            if growth is not None:
                growth.ask_root()
                self.changed(growth.tree)

    def forget_target(self) -> None:
        """The next trees are of another target."""
        self._drafter.forget_target()

    def _step(self) -> None:
        """Append what is best until the drafter must be asked, and ask it about nodes of as many trees as it takes."""
        frontier = self._collect()
        if not frontier:
            return
        for node, candidates in zip(frontier, self._ask(frontier), strict=True):
            growth = self._trees[node.request]
            growth.offer(node.node, _forced(growth, node) or candidates)

    def _ask(self, frontier: list[FrontierNode]) -> list[list[Candidate]]:
        """The drafter's answer; if it fails, each node is asked about alone, so that one request harms no other."""
        try:
            return self._drafter.expand(frontier)
        except Exception as error:
            raise_device_failure(error)
            if len(frontier) > 1:
                return [self._ask([node])[0] for node in frontier]
            tree = self._trees[frontier[0].request].tree
            _logger.error("request %d: the drafter failed", tree.author.request, exc_info=error)
            self.declined[tree.handle] = Refusal(DeclineReason.UNSPECIFIED, "the drafter failed")
            return [[]]

    def _collect(self) -> list[FrontierNode]:
        ledger = self.ledger
        share = ledger.share
        ranked = self._rank(share)
        floors: dict[int, float] = {}  # by handle: what scores less waits for the children of the tree's pending nodes
        frontier: list[FrontierNode] = []
        while ranked and len(frontier) < self._drafter.frontier_width and ledger.has_memory:
            score, handle = -ranked[0][0], ranked[0][1]
            growth = self._trees[handle]
            done = growth.advance()
            if isinstance(done, FrontierNode):
                frontier.append(done)
                floors.setdefault(handle, score - self._drafter.lookahead)
            elif done is not None:
                ledger.appended(growth.tree, done)
            best = growth.best() if growth.has_room(share) else _HOPELESS
            if best < floors.get(handle, best) or best == _HOPELESS:
                heappop(ranked)
            else:
                heapreplace(ranked, (-best, handle))
        return frontier

    def _rank(self, share: int) -> list[tuple[float, int]]:
        """A heap of the growable trees by minus their best score; those with nothing to do drop out."""
        ranked = []
        for handle, tree in list(self._growable.items()):
            best = _HOPELESS
            if tree.has_room(share):
                if self._limits.shared:
                    tree.catch_up()
                best = tree.best()
            if best == _HOPELESS:
                del self._growable[handle]
            else:
                ranked.append((-best, handle))
        heapify(ranked)
        return ranked


def _forced(growth: TreeGrowth, node: FrontierNode) -> list[Candidate]:
    """The child that a grammar leaves no choice about, if there is one: what the target will commit is certain."""
    guide = growth.author.guide
    if guide is None or not growth.author.is_live(node.node):
        return []
    token = guide.forced(node.node)
    return [] if token is None else [Candidate(token, 0.0, 0)]

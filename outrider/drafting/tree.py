"""A request's tree, what its growers share, and what a grower is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from outrider.protocol.messages import DeclineReason, Features
from outrider.tree.author import TreeAuthor


@dataclass(slots=True, eq=False)
class Tree:
    """An open request as growers know it."""

    handle: int
    """Names it in the whole service; never used twice."""
    author: TreeAuthor
    vocab_size: int
    """Ids at or past this are illegal."""
    parts: frozenset[int] | None = None
    """Numbers of the growers that may serve it, where there are several; None for all."""
    alone: bool = False
    """Whether one of several growers has it for itself."""
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a grower does not serve a tree any more."""

    reason: DeclineReason
    detail: str


class Ledger:
    """Counts of the trees that all growers of a service append to."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.num_live = 0
        """Live nodes in all trees."""
        self.grown: Counter[int] = Counter()
        """Nodes appended by source since someone emptied this."""
        self.untold: dict[int, Tree] = {}
        """Trees by handle that verify may have to be told about."""
        self.withheld: set[int] = set()
        """Handles of trees that verify is told nothing of, not even of commits, until they are complete."""
        self.expecting: set[int] = set()
        """Handles of trees that get nodes in a moment: verify is not told of a commit alone until then."""
        self.trees: dict[int, Tree] = {}
        """All open trees by handle."""
        self._counted: dict[int, int] = {}

    @property
    def has_memory(self) -> bool:
        """Whether another node fits."""
        return self.num_live < self.max_nodes

    @property
    def has_news(self) -> bool:
        """Whether there is something to tell verify now."""
        return any(self._is_news(tree) for tree in self.untold.values())

    @property
    def share(self) -> int:
        """Nodes that each tree may have."""
        return max(1, self.max_nodes // max(1, len(self._counted)))

    def take_news(self) -> list[Tree]:
        """The trees that verify is to be told about now."""
        news = [tree for tree in self.untold.values() if self._is_news(tree)]
        for tree in news:
            del self.untold[tree.handle]
        return news

    def _is_news(self, tree: Tree) -> bool:
        if tree.handle in self.withheld:
            return False
        return tree.author.has_untaken or tree.handle not in self.expecting

    def open(self, tree: Tree) -> None:
        """Begin to count a tree."""
        self.trees[tree.handle] = tree
        self._counted[tree.handle] = 0
        self.recount(tree)

    def close(self, tree: Tree) -> None:
        """Forget a tree."""
        self.num_live -= self._counted.pop(tree.handle)
        del self.trees[tree.handle]
        self.untold.pop(tree.handle, None)
        self.withheld.discard(tree.handle)
        self.expecting.discard(tree.handle)

    def recount(self, tree: Tree) -> None:
        """Count a tree again that has something to tell: it was re-rooted, paused, resumed or given credit."""
        num_live = tree.author.num_live
        self.num_live += num_live - self._counted[tree.handle]
        self._counted[tree.handle] = num_live
        self.untold[tree.handle] = tree

    def appended(self, tree: Tree, source: int, count: int = 1) -> None:
        """Nodes were appended."""
        self.num_live += count
        self._counted[tree.handle] += count
        self.grown[source] += count
        self.untold[tree.handle] = tree


class Grower(ABC):
    """Appends nodes to the authors of open trees. The engine's thread calls it."""

    declined: dict[int, Refusal]
    """By handle, trees that it cannot serve; each is to be closed."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.declined = {}

    @property
    def num_live(self) -> int:
        """Live nodes in all trees, whoever appended them."""
        return self.ledger.num_live

    @property
    def has_memory(self) -> bool:
        """Whether another node fits."""
        return self.ledger.has_memory

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether there is nothing to do before a call of another method brings something."""

    @abstractmethod
    def open(self, tree: Tree) -> None:
        """Begin to grow a tree. If this raises, the tree is not open here."""

    @abstractmethod
    def follow(self, tree: Tree, known: int, *, missed: bool) -> None:
        """The author's committed tokens went past `known`; `missed` says that a new epoch began with that."""

    @abstractmethod
    def changed(self, tree: Tree) -> None:
        """Look again at a tree that was followed, paused, resumed, or given credit."""

    @abstractmethod
    def close(self, tree: Tree) -> None:
        """Free everything of a tree."""

    @abstractmethod
    def grow(self, deadline: float, interrupted: Callable[[], bool], *, wait: bool = True) -> None:
        """Grow until `deadline` (`time.perf_counter`), until `interrupted()`, or until there is nothing to do.

        Without `wait`, a grower whose next step is to wait for a device returns.
        """

    @property
    def pressed(self) -> bool:
        """Whether a device has nothing to do until `grow` is called again: what arrived should be applied, no more."""
        return False

    def found(self, tree: Tree) -> None:  # noqa: B027
        """Another grower appended to the tree's author."""

    def take_features(self, tree: Tree, features: Features) -> None:  # noqa: B027
        """The target's features of committed positions have come; their memory is free once this returns."""

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return False

    def work(self, deadline: float) -> None:  # noqa: B027
        """Do what can wait until `time.perf_counter()` reads `deadline`."""

    def forget_target(self) -> None:  # noqa: B027
        """The next trees are of another target. No tree is open."""

    def count_into(self, count: Callable[[str, float], None]) -> None:  # noqa: B027
        """Tell what was counted since the last call, by name."""

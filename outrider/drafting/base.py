"""What guesses and what grows: drafters, growers, and the trees that growers append to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

from outrider.errors import ConfigError
from outrider.protocol.speculation import DeclineReason, Features
from outrider.tree.author import TreeAuthor
from outrider.tree.projection import Projection


@dataclass(frozen=True, slots=True)
class Needs:
    """What a drafter takes from the target; zero or empty means "as the target has it" or "nothing"."""

    vocab_size: int = 0
    """Token ids that its own vocabulary has."""
    tokenizer_hash: str = ""
    """SHA-256 of its own tokenizer.json, hexadecimal."""
    hidden_size: int = 0
    """Width of the features that it takes."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states are its features, in order."""
    max_positions: int = 0
    """Longest sequence that it serves."""
    projection: Projection | None = None
    """What verify may multiply the features with before it sends them."""


@dataclass(frozen=True, slots=True)
class FrontierNode:
    """A live node whose children are asked for. Its parent was a frontier node before, or it is a root."""

    request: int
    """Handle of the request."""
    node: int
    """Id of the node in the request's epoch."""
    parent: int
    """Id of its parent; -1 for the root."""
    token: int
    """The node's token."""
    position: int
    """Absolute position of its children in the sequence."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A child that the target may commit after a frontier node."""

    token: int
    score: float
    """Estimated natural-log chance that the target commits it, given that it commits the parent; finite, at most 0."""
    source: int
    """Index into the drafter's `sources`."""


class AnyDrafter(Protocol):
    """What guesses, in whatever way, as the service sees it."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of where its nodes come from."""

    @property
    def needs(self) -> Needs:
        """Checked against the target before any request is opened."""

    def gauges(self) -> Mapping[str, int]:
        """Sizes worth watching, by name; called from any thread."""


class Drafter(ABC):
    """Guesses children of tree nodes. One thread calls it; state of nodes lives here, keyed by (handle, node id).

    `expand` takes nodes of many requests at once, because a model runs them as one batch. A handle is known from
    `open` until `close`; after a `commit` only the live nodes are asked about again.
    """

    sources: ClassVar[tuple[str, ...]]
    """Names of where candidates come from."""
    needs: Needs = Needs()
    """Checked against the target before any request is opened."""
    frontier_width: ClassVar[int] = 16
    """Nodes that one call of `expand` gets at most."""

    @abstractmethod
    def open(self, tree: Tree) -> None:
        """A request begins; node 0 is its root. A drafter that learns from text uses it for the same tenant alone."""

    @abstractmethod
    def commit(self, request: int, tokens: Sequence[int], root: int, live: Collection[int]) -> None:
        """The target committed `tokens` after those known. `root` is the new root's id, `live` all ids still alive.

        After a miss a new epoch begins: `root` is 0 and `live` holds nothing else.
        """

    def take_features(self, request: int, features: Features) -> None:  # noqa: B027
        """The target's true features of positions of a request, each position once; in order, but for what is resent.

        They may come before the commit of their tokens as well as behind it. The bytes are free afterwards.
        """

    @abstractmethod
    def expand(self, frontier: Sequence[FrontierNode]) -> list[list[Candidate]]:
        """Candidate children of each node, best first; their chances add up to at most 1."""

    @abstractmethod
    def close(self, request: int) -> None:
        """A request ended; everything about it is freed."""

    def work(self, deadline: float) -> list[int]:
        """Do work that can wait until `time.perf_counter()` reads `deadline`.

        Returns the handles whose roots may have other candidates now than when they were last expanded.
        """
        return []

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return False

    @abstractmethod
    def forget_target(self) -> None:
        """The next requests are of another target: forget what was learned from the old one. No request is open."""

    def gauges(self) -> Mapping[str, int]:
        """Sizes worth watching, by name; called from any thread."""
        return {}


_Value = TypeVar("_Value", int, str)


class CombinedDrafter:
    """What its parts have in common; their sources follow each other. Raises ConfigError where they do not fit."""

    def __init__(self, parts: Sequence[AnyDrafter]) -> None:
        self.parts = tuple(parts)
        self.sources = tuple(source for part in parts for source in part.sources)
        self.needs = _join([part.needs for part in parts])

    def gauges(self) -> Mapping[str, int]:
        """Sizes of all."""
        return {name: size for part in self.parts for name, size in part.gauges().items()}


def _join(needs: Sequence[Needs]) -> Needs:
    """What all of them need. Those that take a target as it is leave the choice to the others."""
    return Needs(
        vocab_size=min((need.vocab_size for need in needs if need.vocab_size), default=0),
        tokenizer_hash=_only("tokenizer", [need.tokenizer_hash for need in needs]),
        hidden_size=_only("hidden size", [need.hidden_size for need in needs]),
        feature_layers=next((need.feature_layers for need in needs if need.feature_layers), ()),
        projection=next((need.projection for need in needs if need.feature_layers), None),
        # One that serves shorter sequences leaves the rest to the others.
        max_positions=0 if any(not need.max_positions for need in needs) else max(need.max_positions for need in needs),
    )


def _only(what: str, values: Sequence[_Value]) -> _Value:
    given = {value for value in values if value}
    if len(given) > 1:
        raise ConfigError(f"--speculative-algorithm: its drafters differ in their {what}: {sorted(given)}")
    return given.pop() if given else values[0]


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
    has_sole_grower: bool = False
    """Whether one of several growers has it for itself."""
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a grower does not serve a tree any more."""

    reason: DeclineReason
    detail: str


ANY_SOURCE = range(256)


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Bounds of a grower's trees."""

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

    def most_nodes(self, credit: int, share: int) -> int:
        """Live nodes that a tree may have; `share`: see TreeTable."""
        return min(credit, self.num_nodes, share)


class TreeTable:
    """All open trees: how many nodes they have, and which of them have something to send to verify."""

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.num_live = 0
        """Live nodes in all trees."""
        self.grown: Counter[int] = Counter()
        """Nodes appended by source since someone emptied this."""
        self.unsent: dict[int, Tree] = {}
        """Trees by handle with nodes or an acknowledged commit that verify was not sent yet."""
        self.withheld: set[int] = set()
        """Handles of trees of which nothing is sent, no acknowledgement either, until they are complete."""
        self.expecting: set[int] = set()
        """Handles of trees that get nodes in a moment: a commit is not acknowledged without them until then."""
        self.trees: dict[int, Tree] = {}
        """All open trees by handle."""
        self._counted: dict[int, int] = {}

    @property
    def has_memory(self) -> bool:
        """Whether another node fits."""
        return self.num_live < self.max_nodes

    @property
    def has_updates(self) -> bool:
        """Whether there is something to send to verify now."""
        return any(self._is_due(tree) for tree in self.unsent.values())

    @property
    def share(self) -> int:
        """Nodes that each tree may have."""
        return max(1, self.max_nodes // max(1, len(self._counted)))

    def take_updates(self) -> list[Tree]:
        """The trees of which something is to be sent to verify now."""
        news = [tree for tree in self.unsent.values() if self._is_due(tree)]
        for tree in news:
            del self.unsent[tree.handle]
        return news

    def _is_due(self, tree: Tree) -> bool:
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
        self.unsent.pop(tree.handle, None)
        self.withheld.discard(tree.handle)
        self.expecting.discard(tree.handle)

    def recount(self, tree: Tree) -> None:
        """Count a tree again that was re-rooted, paused, resumed or given credit, and mark it as unsent."""
        num_live = tree.author.num_live
        self.num_live += num_live - self._counted[tree.handle]
        self._counted[tree.handle] = num_live
        self.unsent[tree.handle] = tree

    def appended(self, tree: Tree, source: int, count: int = 1) -> None:
        """Nodes were appended."""
        self.num_live += count
        self._counted[tree.handle] += count
        self.grown[source] += count
        self.unsent[tree.handle] = tree


class Grower(ABC):
    """Appends nodes to the authors of open trees. The engine's thread calls it."""

    declined: dict[int, Refusal]
    """By handle, trees that it cannot serve; each is to be closed."""

    def __init__(self, table: TreeTable) -> None:
        self.table = table
        self.declined = {}

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether `grow` has nothing to do."""

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
    def device_idle(self) -> bool:
        """Whether a device waits for the next call of `grow`: messages are to be applied, and nothing else done."""
        return False

    def foreign_nodes_added(self, tree: Tree) -> None:  # noqa: B027
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

    def take_counts(self) -> dict[str, float]:
        """What was counted since the last call, by name."""
        return {}

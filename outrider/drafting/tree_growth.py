"""Open trees, and the growers that append nodes to them by one policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from outrider.logs import get_logger
from outrider.protocol.speculation import DeclineReason, Features
from outrider.tree.author import TreeAuthor

_logger = get_logger(__name__)


@dataclass(slots=True, eq=False)
class Tree:
    """An open request as growers know it."""

    handle: int
    """Identifies the tree in the whole service; never used twice."""
    author: TreeAuthor
    parts: frozenset[int] | None = None
    """Numbers of the growers that may serve the tree, where there are several; None for all."""
    growers: list[Grower] = field(default_factory=list)
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a grower does not serve a tree any more."""

    reason: DeclineReason
    detail: str


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Bounds of a grower's trees."""

    num_nodes: int
    """Live nodes below the root, whatever the credit."""
    depth: int
    """Draft tokens from the root."""
    path_score: float
    """Least natural-log chance, from the root, of a node worth sending."""
    sources: range
    """Numbers of the drafter's sources among those of all growers."""
    shared: bool = False
    """Whether another grower appends to the same trees."""
    leaves_half: bool = False
    """Whether half of a tree's credit is left to the others, whose nodes come later."""


ANSWER_PHASES = ("features", "launch", "burst", "send")
"""Phases of an answer by the event that ends each: features of the request came; a burst with the request was launched;
the burst's result was taken; the answer was handed over. The times of a phase that happens again add up."""

ANSWER_SECONDS = (
    *(0.00005, 0.0001, 0.0002, 0.0003, 0.0004, 0.0005, 0.0007, 0.001, 0.0013, 0.0016, 0.002, 0.003, 0.005),
    *(0.01, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0),
)
"""Bounds, in seconds, of the buckets that count phases."""


class AnswerPhases:
    """Times the answers of all trees. A phase begins when the one before it ends, and the first with the commit."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._at: dict[int, float] = {}  # by handle, of trees that owe an answer: when the last phase ended
        self._taken: dict[int, dict[str, float]] = {}  # by handle, of the same trees: seconds by phase
        self._counts: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def begin(self, handle: int) -> None:
        """Start to time an answer when a commit is applied; if one answer follows several commits, at the first."""
        if handle not in self._at:
            self._at[handle], self._taken[handle] = self._clock(), {}

    def note(self, handle: int, phase: str) -> None:
        """End a phase of a tree's answer, if the tree owes one."""
        before = self._at.get(handle)
        if before is not None:
            self._at[handle] = now = self._clock()
            taken = self._taken[handle]
            taken[phase] = taken.get(phase, 0.0) + now - before

    def end(self, handle: int) -> None:
        """Count a tree's answer, which was handed over."""
        self.note(handle, "send")
        for phase, seconds in self.forget(handle).items():
            counts = self._counts.setdefault(phase, [0] * (len(ANSWER_SECONDS) + 1))
            counts[bisect_left(ANSWER_SECONDS, seconds)] += 1
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def forget(self, handle: int) -> dict[str, float]:
        """Drop a tree's answer uncounted; returns its seconds by phase so far."""
        self._at.pop(handle, None)
        return self._taken.pop(handle, {})

    def take(self) -> tuple[dict[str, list[int]], dict[str, float]]:
        """Return, by phase, the answers since the last call as counts by ANSWER_SECONDS, and their seconds in sum."""
        taken = self._counts, self._seconds
        self._counts, self._seconds = {}, {}
        return taken


class TreeGrowth:
    """All open trees and their growers: keeps credit, memory, pauses, refusals, and what must still be sent to verify.

    `TreeGrowth` notifies growers of what happened to a tree. They ask how many nodes a tree may have, add nodes with
    `append` or `extend`, and call `refuse` for a tree that they cannot serve. Its other growers go on with it.
    """

    def __init__(self, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self.num_live = 0
        """Live nodes in all trees."""
        self.grown: Counter[int] = Counter()
        """Nodes appended by source since the counter was last emptied."""
        self.growers: list[Grower] = []
        """Each grower adds itself when it is made."""
        self.unsent: dict[int, Tree] = {}
        """Trees by handle with nodes or acknowledgements that were not sent to verify yet."""
        self.answer_phases = AnswerPhases()
        self._share = max_nodes  # nodes that each tree may have
        self._counted: dict[int, int] = {}  # live nodes by handle of the tree
        self._refused: list[tuple[Grower, Tree, Refusal]] = []

    @property
    def has_memory(self) -> bool:
        """Whether another node fits."""
        return self.num_live < self.max_nodes

    @property
    def idle(self) -> bool:
        """Whether `grow` has nothing to do."""
        return all(grower.idle for grower in self.growers)

    @property
    def is_behind(self) -> bool:
        """Whether `grow` must compute committed tokens before some tree can grow."""
        return any(grower.is_behind for grower in self.growers)

    @property
    def device_idle(self) -> bool:
        """Whether a device waits for the next call of `grow`: before that call, only messages should be applied."""
        return any(grower.device_idle for grower in self.growers)

    @property
    def has_updates(self) -> bool:
        """Whether there is something to send to verify now."""
        return bool(self._refused) or self._has_due

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return any(grower.has_work for grower in self.growers)

    def take_updates(self) -> list[Tree]:
        """Return the trees that have something to send to verify now."""
        due = [tree for tree in self.unsent.values() if self._is_due(tree)]
        for tree in due:
            del self.unsent[tree.handle]
        return due

    def take_refused(self) -> list[tuple[Tree, Refusal]]:
        """Return the trees that lost their last grower since the last call. The caller closes them."""
        if not self._refused:
            return []
        refused, self._refused = self._refused, []
        declined: dict[int, tuple[Tree, Refusal]] = {}
        for grower, tree, refusal in refused:
            if grower not in tree.growers:  # it was closed meanwhile
                continue
            if len(tree.growers) == 1:
                declined[tree.handle] = tree, refusal
                continue
            tree.growers.remove(grower)
            grower.close(tree)
            _logger.info("request %d goes on without one drafter: %s", tree.author.request, refusal.detail)
        return list(declined.values())

    def open(self, tree: Tree) -> None:
        """Begin to grow a tree with all growers that may serve it. If this raises, the tree is not open."""
        growers, parts = self.growers, tree.parts if len(self.growers) > 1 else None
        tree.growers = [one for number, one in enumerate(growers) if parts is None or number in parts]
        opened: list[Grower] = []
        try:
            for grower in tree.growers:
                grower.open(tree)
                opened.append(grower)
        except Exception:
            for grower in opened:
                grower.close(tree)
            raise
        self._counted[tree.handle] = 0
        self._share_memory()
        self._recount(tree)

    def follow(self, tree: Tree, known: int, *, missed: bool) -> None:
        """Take note of committed tokens past `known`, if there are any; `missed` says that they began a new epoch."""
        if tree.author.committed_len > known:
            self.answer_phases.begin(tree.handle)
            for grower in tree.growers:
                grower.follow(tree, known, missed=missed)
        self._look_again(tree)

    def pause(self, tree: Tree) -> None:
        """Append nothing to a tree until it is resumed."""
        tree.is_paused = True
        self._look_again(tree)

    def resume(self, tree: Tree, credit: int) -> None:
        """Let a tree grow again, up to `credit` nodes."""
        tree.is_paused, tree.author.credit = False, credit
        self._look_again(tree)

    def close(self, tree: Tree) -> None:
        """Free everything of a tree."""
        self.num_live -= self._counted.pop(tree.handle)
        self._share_memory()
        self.unsent.pop(tree.handle, None)
        self.answer_phases.forget(tree.handle)
        for grower in tree.growers:
            grower.close(tree)
        tree.growers = []

    def take_features(self, tree: Tree, features: Features) -> None:
        """Take the target's features of committed positions; their memory is free once this returns."""
        for grower in tree.growers:
            grower.take_features(tree, features)
        self.answer_phases.note(tree.handle, "features")

    def grow(self, deadline: float, interrupted: Callable[[], bool]) -> None:
        """Grow until `deadline` (`time.perf_counter`), until `interrupted()`, or until there is nothing to do.

        With several growers, first keep devices busy and grow what needs no device, and only then wait for devices.
        """
        if len(self.growers) == 1:
            self.growers[0].grow(deadline, interrupted)
            return
        for may_wait in (False, True):
            for grower in self.growers:
                if not grower.idle:
                    grower.grow(deadline, interrupted, wait=may_wait)
                    self._notify_others(grower)
            # New nodes are sent before anything waits for a device.
            if self._has_due or interrupted():
                return

    def work(self, deadline: float) -> None:
        """Do what can wait until `time.perf_counter()` reads `deadline`."""
        for grower in self.growers:
            grower.work(deadline)

    def forget_target(self) -> None:
        """Forget the target, since the next trees have another. No tree is open."""
        for grower in self.growers:
            grower.forget_target()

    def take_counts(self) -> dict[str, float]:
        """Return what growers counted since the last call, by name; at most one of them counts bursts."""
        return {name: value for grower in self.growers for name, value in grower.take_counts().items()}

    def granted(self, tree: Tree, limits: TreeLimits) -> int:
        """Return how many live nodes verify lets a tree have, within a grower's limits; 0 while the tree is paused."""
        if tree.is_paused:
            return 0
        credit = tree.author.credit
        if limits.leaves_half and len(tree.growers) > 1:
            credit = (credit + 1) // 2
        return min(credit, limits.num_nodes)

    def most_nodes(self, tree: Tree, limits: TreeLimits) -> int:
        """Return how many live nodes a tree may have now: those granted, but no more than its share of the memory."""
        # Repeats `granted` to save a call: this runs for each tree in each turn.
        if limits.leaves_half or tree.is_paused:
            return min(self.granted(tree, limits), self._share)
        return min(tree.author.credit, limits.num_nodes, self._share)

    def append(self, tree: Tree, parent: int, token: int, score: float, source: int) -> int | None:
        """Append a node and return its id; None if the author refuses the node, see TreeAuthor.add."""
        added = tree.author.add(parent, token, score, source)
        if added is not None:
            self.appended(tree, source)
        return added

    def extend(self, tree: Tree, parents: list[int], tokens: list[int], scores: list[float], source: int) -> bool:
        """Append nodes of consecutive ids at once; return whether the author took them, see TreeAuthor.extend."""
        if tree.author.extend(parents, tokens, scores, source) is None:
            return False
        self.appended(tree, source, len(tokens))
        return True

    def appended(self, tree: Tree, source: int, count: int = 1) -> None:
        """Count appended nodes, and mark the tree to be sent."""
        self.num_live += count
        self._counted[tree.handle] += count
        self.grown[source] += count
        self.unsent[tree.handle] = tree

    def refuse(self, grower: Grower, tree: Tree, refusal: Refusal) -> None:
        """Note that a grower cannot serve a tree any more. `take_refused` handles this later."""
        self._refused.append((grower, tree, refusal))

    @property
    def _has_due(self) -> bool:
        return any(self._is_due(tree) for tree in self.unsent.values())

    def _is_due(self, tree: Tree) -> bool:
        for grower in tree.growers:  # noqa: SIM110 (runs for each tree in each turn: half the time of `any`)
            if grower.holds_back(tree):
                return False
        return True

    def _look_again(self, tree: Tree) -> None:
        self._recount(tree)
        for grower in tree.growers:
            grower.changed(tree)

    def _recount(self, tree: Tree) -> None:
        """Recount the nodes of a tree, and mark the tree to be sent: at least an acknowledgement is due."""
        num_live = tree.author.num_live
        self.num_live += num_live - self._counted[tree.handle]
        self._counted[tree.handle] = num_live
        self.unsent[tree.handle] = tree

    def _share_memory(self) -> None:
        self._share = max(1, self.max_nodes // max(1, len(self._counted)))

    def _notify_others(self, grower: Grower) -> None:
        for tree in self.unsent.values():
            for other in tree.growers:
                if other is not grower:
                    other.foreign_nodes_added(tree)


class Grower(ABC):
    """Finds nodes for open trees, on the engine's thread. `growth` has what all growers share."""

    def __init__(self, growth: TreeGrowth, limits: TreeLimits) -> None:
        self.growth = growth
        self.limits = limits
        growth.growers.append(self)

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether `grow` has nothing to do."""

    @abstractmethod
    def open(self, tree: Tree) -> None:
        """Begin to grow a tree. If this raises, the tree is not open for this grower."""

    @abstractmethod
    def follow(self, tree: Tree, known: int, *, missed: bool) -> None:
        """Follow the author, whose committed tokens went past `known`; `missed` says that a new epoch began."""

    @abstractmethod
    def changed(self, tree: Tree) -> None:
        """Look again at a tree after a commit, or when its granted number of nodes may have changed."""

    @abstractmethod
    def close(self, tree: Tree) -> None:
        """Free everything of a tree."""

    @abstractmethod
    def grow(self, deadline: float, interrupted: Callable[[], bool], *, wait: bool = True) -> None:
        """Grow until `deadline` (`time.perf_counter`), until `interrupted()`, or until there is nothing to do.

        Without `wait`, return instead of waiting for a device.
        """

    @property
    def is_behind(self) -> bool:
        """Whether committed tokens must be computed before some tree can grow."""
        return False

    @property
    def device_idle(self) -> bool:
        """Whether a device waits for the next call of `grow`."""
        return False

    def holds_back(self, tree: Tree) -> bool:
        """Whether to send nothing of a tree to verify yet, since more nodes come in a moment."""
        return False

    def foreign_nodes_added(self, tree: Tree) -> None:
        """Take note of nodes that another grower appended to a tree."""
        self.changed(tree)

    def take_features(self, tree: Tree, features: Features) -> None:  # noqa: B027
        """Take the target's features of committed positions; their memory is free once this returns."""

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return False

    def work(self, deadline: float) -> None:  # noqa: B027
        """Do what can wait until `time.perf_counter()` reads `deadline`."""

    def forget_target(self) -> None:  # noqa: B027
        """Forget the target, since the next trees have another. No tree is open."""

    def take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call, by name."""
        return {}

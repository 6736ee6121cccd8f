"""CombinedGrower made from drafters, and several of them on the same trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter, Drafter
from outrider.drafting.growth import ANY_SOURCE, Growth, Limits
from outrider.drafting.model.drafter import ModelDrafter
from outrider.drafting.model.growth import BurstGrowth
from outrider.drafting.registry import CombinedDrafter
from outrider.drafting.tree import Grower, Ledger, Tree
from outrider.logs import get_logger
from outrider.protocol.messages import Features

_logger = get_logger(__name__)

_NGRAM_NODES = 64
_NGRAM_FLOOR = 0.02
_MODEL_NODES = 1 << 16
"""As many as verify gives credit for: what lies far below the root is where the next rounds begin."""
_MODEL_FLOOR = 0.0002
"""So little, because a model runs ahead of verify by a round, and a round ends with a token that was unlikely: what
lies below it counts from there."""


def build_grower(drafter: AnyDrafter, options: DraftOptions) -> Grower:
    """What grows trees with a drafter's guesses."""
    ledger = Ledger(options.max_nodes)
    parts = drafter.parts if isinstance(drafter, CombinedDrafter) else (drafter,)
    growers: list[Grower] = []
    first_source = 0
    for part in parts:
        sources = range(first_source, first_source + len(part.sources))
        first_source = sources.stop
        limits = _limits(options, part, sources, shared=len(parts) > 1)
        if isinstance(part, ModelDrafter):
            growers.append(BurstGrowth(part.runner, limits, ledger, part.growth_options(options)))
        elif isinstance(part, Drafter):
            growers.append(Growth(part, limits, ledger))
        else:
            raise TypeError(f"{type(part).__name__} is no drafter that something could grow with")
    return growers[0] if len(growers) == 1 else CombinedGrower(growers, ledger)


def _limits(options: DraftOptions, part: AnyDrafter, sources: range, *, shared: bool) -> Limits:
    is_model = isinstance(part, ModelDrafter)
    least = options.min_path_probability
    if least is None:
        least = _MODEL_FLOOR if is_model else _NGRAM_FLOOR
    num_nodes = options.speculative_num_draft_tokens or (_MODEL_NODES if is_model else _NGRAM_NODES)
    floor = math.log(least) if least else -math.inf
    return Limits(num_nodes, options.speculative_num_steps or 48, floor, sources if shared else ANY_SOURCE, shared)


class CombinedGrower(Grower):
    """Several growers that append to the same authors, each told of what the others found.

    A tree that one of them cannot serve is left to the rest.
    """

    def __init__(self, growers: Sequence[Grower], ledger: Ledger) -> None:
        super().__init__(ledger)
        self._growers = growers
        self._serving: dict[int, list[Grower]] = {}

    @property
    def idle(self) -> bool:
        """Whether none of them has anything to do."""
        return all(grower.idle and not grower.declined for grower in self._growers)

    @property
    def pressed(self) -> bool:
        """Whether one of them is."""
        return any(grower.pressed for grower in self._growers)

    def open(self, tree: Tree) -> None:
        """All of them begin to grow a tree, or those that may."""
        opened: list[Grower] = []
        serving = [one for number, one in enumerate(self._growers) if tree.parts is None or number in tree.parts]
        tree.alone = len(serving) == 1
        try:
            for grower in serving:
                grower.open(tree)
                opened.append(grower)
        except Exception:
            for grower in opened:
                grower.close(tree)
            raise
        self._serving[tree.handle] = opened

    def follow(self, tree: Tree, known: int, *, missed: bool) -> None:
        """All follow the author."""
        for grower in self._serving[tree.handle]:
            grower.follow(tree, known, missed=missed)

    def changed(self, tree: Tree) -> None:
        """All look again."""
        for grower in self._serving[tree.handle]:
            grower.changed(tree)

    def close(self, tree: Tree) -> None:
        """All free what they hold of a tree."""
        self.declined.pop(tree.handle, None)
        for grower in self._serving.pop(tree.handle):
            grower.close(tree)

    def take_features(self, tree: Tree, features: Features) -> None:
        """All learn them."""
        for grower in self._serving[tree.handle]:
            grower.take_features(tree, features)

    def grow(self, deadline: float, interrupted: Callable[[], bool], *, wait: bool = True) -> None:
        """Keep devices busy first, then grow what costs nothing, and wait for devices last."""
        for may_wait in (False, True) if wait else (False,):
            for grower in self._growers:
                if not grower.idle:
                    grower.grow(deadline, interrupted, wait=may_wait)
                    self._tell_others(grower)
            # What was found is told before anybody waits for a device.
            if self.ledger.has_news or interrupted():
                break
        self._drop_declined()

    @property
    def has_work(self) -> bool:
        """Whether one of them has something to do that can wait."""
        return any(grower.has_work for grower in self._growers)

    def work(self, deadline: float) -> None:
        """Let them do what can wait."""
        for grower in self._growers:
            grower.work(deadline)

    def forget_target(self) -> None:
        """The next trees are of another target."""
        for grower in self._growers:
            grower.forget_target()

    def count_into(self, count: Callable[[str, float], None]) -> None:
        """Tell what all of them counted."""
        for grower in self._growers:
            grower.count_into(count)

    def _tell_others(self, grower: Grower) -> None:
        for tree in self.ledger.untold.values():
            for other in self._serving[tree.handle]:
                if other is not grower:
                    other.found(tree)

    def _drop_declined(self) -> None:
        for grower in self._growers:
            for handle, refusal in list(grower.declined.items()):
                del grower.declined[handle]
                serving = self._serving[handle]
                if len(serving) == 1:
                    self.declined[handle] = refusal
                    continue
                serving.remove(grower)
                self.ledger.trees[handle].alone = len(serving) == 1
                tree = self.ledger.trees[handle]
                grower.close(tree)
                _logger.info("request %d goes on without one drafter: %s", tree.author.request, refusal.detail)

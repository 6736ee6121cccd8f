"""Drafters by name, and growers that grow trees with them. Torch-free: draft models are imported when they are built.

This is the one place from which modules are imported by their names: import-linter keeps torch out of all that imports
this one, the doors of the draft service among them, and a draft model is loaded in the engine process alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pkgutil import resolve_name

from outrider.config.draft import AUTO, DraftOptions
from outrider.drafting.base import ANY_SOURCE, AnyDrafter, CombinedDrafter, Drafter, Grower, Tree, TreeLimits, TreeTable
from outrider.drafting.growth import NodeGrowth
from outrider.drafting.model.drafter import ModelDrafter
from outrider.drafting.model.growth import BurstGrowth
from outrider.errors import ConfigError
from outrider.logs import get_logger
from outrider.protocol.speculation import Features

_logger = get_logger(__name__)

_NGRAM_NODES = 64
_NGRAM_FLOOR = 0.02
_MODEL_NODES = 1 << 16
"""More than verify ever gives credit for: the next rounds begin far below the root."""
_MODEL_FLOOR = 0.0002
"""Least chance of a path that a model grows. A model runs a round ahead of verify, and a round ends with a token that
was unlikely, from which on the chances of nodes below count."""

DrafterFactory = Callable[[DraftOptions], AnyDrafter]

_MODELS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Drafters with a model: one of them at most."""

_DRAFTERS: dict[str, str | DrafterFactory] = {
    "NGRAM": "outrider.drafting.ngram.drafter:NgramDrafter",
    **dict.fromkeys(_MODELS, "outrider.drafting.model.build:load_model_drafter"),
}
"""What builds each drafter from the options, or the module and name of that."""


def register(name: str, factory: str | DrafterFactory) -> None:
    """Make a drafter known by `name`. `factory` may be "module:name", to be imported when the drafter is built."""
    _DRAFTERS[name] = factory


def build_drafter(options: DraftOptions) -> AnyDrafter:
    """Return what `options.speculative_algorithm` names; several grow one tree. Raises ConfigError."""
    _check(options)
    factories = [_DRAFTERS[name] for name in named_drafters(options)]
    built = [(resolve_name(found) if isinstance(found, str) else found)(options) for found in factories]
    return built[0] if len(built) == 1 else CombinedDrafter(built)


def named_drafters(options: DraftOptions) -> tuple[str, ...]:
    """The drafters that the options name: n-grams where that was left open and nobody has chosen."""
    return ("NGRAM",) if options.speculative_algorithm == AUTO else options.speculative_algorithm


def _check(options: DraftOptions) -> None:
    names = named_drafters(options)
    for name in names:
        if name not in _DRAFTERS:
            known = ", ".join(sorted(_DRAFTERS))
            raise ConfigError(f"--speculative-algorithm: {name!r} is not known; use one of {known}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--speculative-algorithm: {','.join(names)!r} must name each drafter once, and one at least")
    models = [name for name in names if name in _MODELS]
    if len(models) > 1:
        raise ConfigError(
            f"--speculative-algorithm: {','.join(models)} are models and do not run together; use one of them, with or "
            "without NGRAM"
        )
    if options.lockstep and not models:
        raise ConfigError(f"--lockstep: {','.join(names)} has no model; use it with one of {', '.join(_MODELS)}")


def build_grower(drafter: AnyDrafter, options: DraftOptions) -> Grower:
    """What grows trees with a drafter's guesses."""
    table = TreeTable(options.max_nodes)
    parts = drafter.parts if isinstance(drafter, CombinedDrafter) else (drafter,)
    growers: list[Grower] = []
    first_source = 0
    for part in parts:
        sources = range(first_source, first_source + len(part.sources))
        first_source = sources.stop
        limits = _limits(options, part, sources, shared=len(parts) > 1)
        if isinstance(part, ModelDrafter):
            growers.append(BurstGrowth(part.runner, limits, table, part.growth_options(options)))
        elif isinstance(part, Drafter):
            growers.append(NodeGrowth(part, limits, table))
        else:
            raise TypeError(f"{type(part).__name__} is no drafter that something could grow with")
    return growers[0] if len(growers) == 1 else CombinedGrower(growers, table)


def _limits(options: DraftOptions, part: AnyDrafter, sources: range, *, shared: bool) -> TreeLimits:
    is_model = isinstance(part, ModelDrafter)
    least = options.min_path_probability
    if least is None:
        least = _MODEL_FLOOR if is_model else _NGRAM_FLOOR
    num_nodes = options.speculative_num_draft_tokens or (_MODEL_NODES if is_model else _NGRAM_NODES)
    floor = math.log(least) if least else -math.inf
    return TreeLimits(num_nodes, options.speculative_num_steps or 48, floor, sources if shared else ANY_SOURCE, shared)


class CombinedGrower(Grower):
    """Several growers that append to the same authors, each told of what the others found.

    A tree that one of them cannot serve is left to the rest.
    """

    def __init__(self, growers: Sequence[Grower], table: TreeTable) -> None:
        super().__init__(table)
        self._growers = growers
        self._serving: dict[int, list[Grower]] = {}

    @property
    def idle(self) -> bool:
        """Whether none of them has anything to do."""
        return all(grower.idle and not grower.declined for grower in self._growers)

    @property
    def device_idle(self) -> bool:
        """Whether a device of one of them waits for the next call of `grow`."""
        return any(grower.device_idle for grower in self._growers)

    def open(self, tree: Tree) -> None:
        """Begin to grow a tree with all that may serve it."""
        opened: list[Grower] = []
        serving = [one for number, one in enumerate(self._growers) if tree.parts is None or number in tree.parts]
        tree.has_sole_grower = len(serving) == 1
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
        """Let all follow the author."""
        for grower in self._serving[tree.handle]:
            grower.follow(tree, known, missed=missed)

    def changed(self, tree: Tree) -> None:
        """Let all look again."""
        for grower in self._serving[tree.handle]:
            grower.changed(tree)

    def close(self, tree: Tree) -> None:
        """Free what all hold of a tree."""
        self.declined.pop(tree.handle, None)
        for grower in self._serving.pop(tree.handle):
            grower.close(tree)

    def take_features(self, tree: Tree, features: Features) -> None:
        """Pass them to all."""
        for grower in self._serving[tree.handle]:
            grower.take_features(tree, features)

    def grow(self, deadline: float, interrupted: Callable[[], bool], *, wait: bool = True) -> None:
        """Keep devices busy first, then grow what costs nothing, and wait for devices last."""
        for may_wait in (False, True) if wait else (False,):
            for grower in self._growers:
                if not grower.idle:
                    grower.grow(deadline, interrupted, wait=may_wait)
                    self._tell_others(grower)
            # New nodes are sent before anything waits for a device.
            if self.table.has_updates or interrupted():
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

    def take_counts(self) -> dict[str, float]:
        """What all of them counted; one of them at most counts bursts."""
        return {name: value for grower in self._growers for name, value in grower.take_counts().items()}

    def _tell_others(self, grower: Grower) -> None:
        for tree in self.table.unsent.values():
            for other in self._serving[tree.handle]:
                if other is not grower:
                    other.foreign_nodes_added(tree)

    def _drop_declined(self) -> None:
        for grower in self._growers:
            for handle, refusal in list(grower.declined.items()):
                del grower.declined[handle]
                serving = self._serving[handle]
                if len(serving) == 1:
                    self.declined[handle] = refusal
                    continue
                serving.remove(grower)
                tree = self.table.trees[handle]
                tree.has_sole_grower = len(serving) == 1
                grower.close(tree)
                _logger.info("request %d goes on without one drafter: %s", tree.author.request, refusal.detail)

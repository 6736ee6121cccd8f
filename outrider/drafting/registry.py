"""Builds drafters by name, and the growth that uses them. Torch-free: draft models are imported when they are built.

Only this module imports others by their names: import-linter keeps torch out of everything that imports this module,
such as the doors of the draft service, and only the engine process loads a draft model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pkgutil import resolve_name

from outrider.config.draft import ALGORITHMS, AUTO, DraftOptions
from outrider.drafting.base import AnyDrafter, CombinedDrafter, Drafter, parts_of
from outrider.drafting.model.burst_grower import BurstGrower
from outrider.drafting.model.drafter import GrowthOptions, ModelDrafter
from outrider.drafting.node_grower import NodeGrower
from outrider.drafting.tree_growth import TreeGrowth, TreeLimits

_NGRAM_NODES = 64
_NGRAM_FLOOR = 0.02
_BESIDE_ON_DEMAND_FLOOR = 0.1
"""N-gram floor beside a model that drafts on demand on verify's cores: rounds take few nodes, and wait for these."""
_MODEL_NODES = 1 << 16
"""More than verify ever gives credit for: the next rounds begin far below the root."""
_MODEL_FLOOR = 0.0002
"""Least chance of a path that a model grows. A model runs a round ahead of verify. A round ends with an unlikely token,
and from there on only the chances of nodes below it count."""

_DRAFTERS: dict[str, str] = {
    "NGRAM": "outrider.drafting.ngram.drafter:NgramDrafter",
    **dict.fromkeys(ALGORITHMS, "outrider.drafting.model.build:load_model_drafter"),
}
"""Module and name of the callable that builds each drafter from the options."""


def build_drafter(options: DraftOptions) -> AnyDrafter:
    """Return the drafter of `options.speculative_algorithm`; combine several, to grow one tree. Raises ConfigError."""
    names = named_drafters(options)
    replace(options, speculative_algorithm=names).check()
    built = [resolve_name(_DRAFTERS[name])(options) for name in names]
    return built[0] if len(built) == 1 else CombinedDrafter(built)


def named_drafters(options: DraftOptions) -> tuple[str, ...]:
    """Return the names of the drafters in the options: NGRAM if the choice is still AUTO."""
    return ("NGRAM",) if options.speculative_algorithm == AUTO else options.speculative_algorithm


def build_growth(drafter: AnyDrafter, options: DraftOptions) -> TreeGrowth:
    """Return the growth that adds a drafter's guesses to trees."""
    growth = TreeGrowth(options.max_nodes)
    parts = parts_of(drafter)
    first_source = 0
    for part in parts:
        sources = range(first_source, first_source + len(part.sources))
        first_source = sources.stop
        limits = _limits(options, part, sources, parts)
        if isinstance(part, ModelDrafter):
            BurstGrower(part.runner, growth, limits, GrowthOptions.choose(options, part.runner.shape, part.needs))
        elif isinstance(part, Drafter):
            NodeGrower(part, growth, limits)
        else:
            raise TypeError(f"{type(part).__name__} is no drafter that something could grow with")
    return growth


def drafts_on_demand(parts: Sequence[AnyDrafter], options: DraftOptions) -> bool:
    """Whether a model among these drafters grows only one tree after each commit."""
    models = (one for one in parts if isinstance(one, ModelDrafter))
    return any(GrowthOptions.choose(options, one.runner.shape, one.needs).min_chance for one in models)


def _limits(options: DraftOptions, part: AnyDrafter, sources: range, parts: Sequence[AnyDrafter]) -> TreeLimits:
    is_model, shared = isinstance(part, ModelDrafter), len(parts) > 1
    least = options.min_path_probability
    if least is None:
        least = (
            _MODEL_FLOOR if is_model else _BESIDE_ON_DEMAND_FLOOR if drafts_on_demand(parts, options) else _NGRAM_FLOOR
        )
    return TreeLimits(
        num_nodes=options.speculative_num_draft_tokens or (_MODEL_NODES if is_model else _NGRAM_NODES),
        depth=options.speculative_num_steps or 48,
        path_score=math.log(least) if least else -math.inf,
        sources=sources,
        shared=shared,
        leaves_half=shared and not is_model,
    )

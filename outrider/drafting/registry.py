"""Drafters by name, and what grows trees with them. Torch-free: draft models are imported when they are built.

This is the one place from which modules are imported by their names: import-linter keeps torch out of all that imports
this one, the doors of the draft service among them, and a draft model is loaded in the engine process alone.
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
"""The same where a model drafts between rounds on the cores that verify: rounds take few nodes, and wait for these."""
_MODEL_NODES = 1 << 16
"""More than verify ever gives credit for: the next rounds begin far below the root."""
_MODEL_FLOOR = 0.0002
"""Least chance of a path that a model grows. A model runs a round ahead of verify, and a round ends with a token that
was unlikely, from which on the chances of nodes below count."""

_DRAFTERS: dict[str, str] = {
    "NGRAM": "outrider.drafting.ngram.drafter:NgramDrafter",
    **dict.fromkeys(ALGORITHMS, "outrider.drafting.model.build:load_model_drafter"),
}
"""Module and name of what builds each drafter from the options."""


def build_drafter(options: DraftOptions) -> AnyDrafter:
    """Return what `options.speculative_algorithm` names; several grow one tree. Raises ConfigError."""
    names = named_drafters(options)
    replace(options, speculative_algorithm=names).check()
    built = [resolve_name(_DRAFTERS[name])(options) for name in names]
    return built[0] if len(built) == 1 else CombinedDrafter(built)


def named_drafters(options: DraftOptions) -> tuple[str, ...]:
    """The drafters that the options name: n-grams where that was left open and nobody has chosen."""
    return ("NGRAM",) if options.speculative_algorithm == AUTO else options.speculative_algorithm


def build_growth(drafter: AnyDrafter, options: DraftOptions) -> TreeGrowth:
    """What grows trees with a drafter's guesses."""
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
    """Whether a model among these drafters grows one tree after each commit and no more."""
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

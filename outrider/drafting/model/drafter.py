"""A draft model with what runs it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter, Needs, model_algorithm
from outrider.drafting.model.feature_ring import MemoryMapper
from outrider.drafting.model.options import GrowthOptions
from outrider.drafting.model.plan import BurstRunner
from outrider.drafting.several import SeveralDrafters


@dataclass(frozen=True)
class ModelDrafter:
    """What the service knows of a draft model."""

    runner: BurstRunner
    sources: tuple[str, ...]
    needs: Needs

    def growth_options(self, options: DraftOptions) -> GrowthOptions:
        """How it grows."""
        return GrowthOptions.choose(options, self.runner.shape, self.needs.max_positions or options.max_positions)

    def gauges(self) -> Mapping[str, int]:
        """Nothing: its growth counts for itself."""
        return {}


def load_model_drafter(options: DraftOptions) -> ModelDrafter:
    """Load the model that the options name and build its runner. Raises ConfigError naming the option at fault."""
    # By name, because the service's own modules do not import torch.
    model: Any = importlib.import_module("outrider.models.drafters.loader").load_draft_model(options)
    runner: BurstRunner = importlib.import_module("outrider.drafting.model.build").build_runner(model, options)
    offer: Any = importlib.import_module("outrider.models.drafters.offer").offered_projection
    needs = Needs(
        vocab_size=model.target_vocab_size,
        tokenizer_hash=model.tokenizer_hash,
        hidden_size=model.hidden_size,
        feature_layers=tuple(model.feature_layers),
        max_positions=min(model.max_positions, runner.shape.max_context + runner.shape.lag),
        projection=offer(model),
    )
    return ModelDrafter(runner, (model_algorithm(options).lower(),), needs)


def workplace(drafter: AnyDrafter) -> AbstractContextManager[None]:
    """What the thread is in that drafts: that of the model, if there is one."""
    model = next(_models(drafter), None)
    return nullcontext() if model is None else model.runner.at_work()


def find_mapper(drafter: AnyDrafter) -> MemoryMapper | None:
    """Maps verify's memory where a model runs that takes features; None where none does, or not on a GPU."""
    for model in _models(drafter):
        if model.needs.feature_layers:
            find: Any = importlib.import_module("outrider.drafting.model.cuda_memory").cuda_mapper
            mapper: MemoryMapper | None = find(model.runner)
            return mapper
    return None


def _models(drafter: AnyDrafter) -> Iterator[ModelDrafter]:
    parts = drafter.parts if isinstance(drafter, SeveralDrafters) else (drafter,)
    return (part for part in parts if isinstance(part, ModelDrafter))

"""The drafters by name, and several of them as one. Torch-free: what needs torch is imported when it is built.

This is the one place from which modules are imported by their names: import-linter keeps torch out of all that imports
this one, the doors of the draft service among them, and a draft model is loaded in the engine process alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from typing import TypeVar

from outrider.config.draft import AUTO, DraftOptions
from outrider.drafting.base import AnyDrafter, Needs
from outrider.errors import ConfigError

DrafterFactory = Callable[[DraftOptions], AnyDrafter]

_MODELS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Drafters with a model: one of them at most."""

_DRAFTERS: dict[str, str | DrafterFactory] = {
    "NGRAM": "outrider.drafting.ngram.drafter:NgramDrafter",
    **dict.fromkeys(_MODELS, "outrider.drafting.model.build:load_model_drafter"),
}
"""What builds each drafter from the options, or the module and name of that."""

_Value = TypeVar("_Value", int, str)


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
    if models == ["NEXTN"]:
        if not (options.speculative_draft_model_path or options.target_model_path):
            raise ConfigError("--speculative-draft-model-path: NEXTN needs it, or --target-model-path for its modules")
    elif models and not options.speculative_draft_model_path:
        raise ConfigError(f"--speculative-draft-model-path: {models[0]} needs a draft model; name its folder or hub id")


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

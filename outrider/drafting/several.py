"""Several drafters that grow one tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from outrider.drafting.base import AnyDrafter, Needs
from outrider.errors import ConfigError

_Value = TypeVar("_Value", int, str)


class SeveralDrafters:
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

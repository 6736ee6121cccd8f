"""What the door says and checks of a drafter, which lives in the engine process. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafting.base import AnyDrafter, Needs
from outrider.drafting.registry import CombinedDrafter


@dataclass(frozen=True, slots=True)
class Profile:
    """A drafter in words and numbers; zero or empty means "as the target has it" or "nothing"."""

    sources: tuple[str, ...]
    """Names of where its nodes come from."""
    vocab_size: int = 0
    tokenizer_hash: str = ""
    hidden_size: int = 0
    feature_layers: tuple[int, ...] = ()
    max_positions: int = 0
    """See Needs."""
    projection_columns: int = 0
    projection_hash: str = ""
    """Of the matrix that it offers, if it does."""
    modest: frozenset[int] = frozenset()
    """Those of several drafters that take any target as it is, such as n-grams, by their numbers."""
    maps_memory: bool = False
    """Whether features may lie in memory of verify's."""
    gauges: tuple[str, ...] = ()
    """Names of the sizes that it tells."""


def describe(drafter: AnyDrafter, *, maps_memory: bool = False) -> Profile:
    """The profile of a drafter."""
    needs = drafter.needs
    return Profile(
        sources=tuple(drafter.sources),
        vocab_size=needs.vocab_size,
        tokenizer_hash=needs.tokenizer_hash,
        hidden_size=needs.hidden_size,
        feature_layers=tuple(needs.feature_layers),
        max_positions=needs.max_positions,
        projection_columns=needs.projection.num_columns if needs.projection is not None else 0,
        projection_hash=needs.projection.name if needs.projection is not None else "",
        modest=_modest_parts(drafter),
        maps_memory=maps_memory,
        gauges=tuple(drafter.gauges()),
    )


def _modest_parts(drafter: AnyDrafter) -> frozenset[int]:
    parts = drafter.parts if isinstance(drafter, CombinedDrafter) else ()
    return frozenset(number for number, part in enumerate(parts) if part.needs == Needs())

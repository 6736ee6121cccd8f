"""What is stored of the target's hidden states for each token."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.tree.projection import PROJECTED, Projection


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """Layers that are stored as they are, and the matrix whose product with some is stored, if any is."""

    layers: tuple[int, ...] = ()
    """Ascending."""
    projection: Projection | None = None

    @property
    def parts(self) -> tuple[int, ...]:
        """Of a stored row, in order."""
        return self.layers if self.projection is None else (*self.layers, PROJECTED)

    @property
    def inputs(self) -> tuple[int, ...]:
        """Layers that a forward must give, ascending."""
        return tuple(sorted({*self.layers, *(self.projection.layers if self.projection is not None else ())}))

    def with_layers(self, layers: tuple[int, ...]) -> FeaturePlan:
        """The same with these layers, too."""
        return replace(self, layers=tuple(sorted({*self.layers, *layers})))

    def holds(self, parts: tuple[int, ...], projection_name: str) -> bool:
        """Whether these parts are stored, and the product, if it is among them, is of this projection."""
        if PROJECTED in parts and (self.projection is None or self.projection.name != projection_name):
            return False
        return set(parts) <= set(self.parts)

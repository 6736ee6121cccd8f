"""What the feature sender needs of others: what to store, and a stream that carries it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outrider.tree.projection import PROJECTED, Projection
from verify_service.features.staging import Ring, StagedRows


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """Layers that are stored as they are, and the matrix whose product with some is stored, if any is."""

    layers: tuple[int, ...] = ()
    """Ascending."""
    projection: Projection | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """Layers that a forward must give, ascending."""
        return tuple(sorted({*self.layers, *(self.projection.layers if self.projection is not None else ())}))

    def holds(self, parts: tuple[int, ...], projection_name: str) -> bool:
        """Whether these parts are stored, and the product, if it is among them, is of this projection."""
        if PROJECTED in parts and (self.projection is None or self.projection.name != projection_name):
            return False
        return set(parts) <= {*self.layers, PROJECTED}


@dataclass(eq=False, slots=True)
class FeatureLine:
    """The features stream of a draft: what is sent and not released is bounded."""

    row_bytes: int
    """Bytes of the features of one position."""
    dtype: str
    ring: Ring | None = None
    """Where its features are put; None where they are in the messages, or until the draft has said that it reads it."""
    window: int = 0
    """Bytes that may be under way."""
    accepted: bool = False
    """Whether the draft is there to read it."""
    open: bool = False
    """Whether that is so, and what it takes is stored."""
    sequence: int = 0
    """Number of the last message."""
    under_way: deque[tuple[int, int]] = field(default_factory=deque)
    """Number and bytes of messages that were not released."""
    num_bytes: int = 0
    lent: deque[tuple[int, StagedRows]] = field(default_factory=deque)
    """Rows in the ring, and the last message that speaks of them."""

    @property
    def room(self) -> int:
        """Bytes that may be sent now; a window that is smaller than one position lets one through at a time."""
        return max(self.window - self.num_bytes, 0 if self.under_way else self.row_bytes)

    def take(self, num_bytes: int) -> int:
        """The number of a new message of so many bytes."""
        self.sequence += 1
        self.under_way.append((self.sequence, num_bytes))
        self.num_bytes += num_bytes
        return self.sequence

    def release(self, through: int) -> None:
        """The draft is done with messages up to this number."""
        while self.under_way and self.under_way[0][0] <= through:
            self.num_bytes -= self.under_way.popleft()[1]
        while self.lent and self.lent[0][0] <= through:
            self.lent.popleft()[1].free()

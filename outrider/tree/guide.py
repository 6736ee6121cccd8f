"""What a grammar says of a tree's nodes."""

from __future__ import annotations

from typing import Protocol


class Guide(Protocol):
    """Which tokens may come behind nodes."""

    def allows(self, parent: int, token: int) -> bool:
        """Whether `token` may come behind a live node."""

    def forced(self, parent: int) -> int | None:
        """The one token that may come behind a live node; None if there are several, or if that is not known."""

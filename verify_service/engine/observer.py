"""Who is told of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from verify_service.engine.figures import RoundFigures
from verify_service.engine.round import Entry
from verify_service.frames.submission import Update


class Observer(Protocol):
    """Is told of every round, on the engine's thread, while the next one runs."""

    def round(self, entries: Sequence[Entry], updates: Sequence[Update], figures: RoundFigures) -> None:
        """`updates` are what the round brought each request."""

    def flush(self) -> None:
        """All updates of a round were given out, or nothing is left to do."""

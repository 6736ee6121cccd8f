"""Who is told of rounds, and in which figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from verify_service.round import Entry
from verify_service.submission import Update


class RoundFigures(NamedTuple):
    """How a round went; times in seconds."""

    seconds: float
    held: float
    """How long it was held for drafts before."""
    gap: float | None = None
    """How long the device had nothing to do before it, holding aside; None after a pause."""
    gpu: float | None = None
    """How long the device worked on it; None where nobody measures."""
    ready: int | None = None
    """Nodes that it would have taken without any hold; None if no draft serves its requests."""
    answers: Sequence[float] = ()
    """How long each of the drafts' answers took since the round before."""


class Observer(Protocol):
    """Is told of every round, on the engine's thread, while the next one runs."""

    def round(self, entries: Sequence[Entry], updates: Sequence[Update], figures: RoundFigures) -> None:
        """`updates` are what the round brought each request."""

    def flush(self) -> None:
        """All updates of a round were given out, or nothing is left to do."""

"""What is measured of a round. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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

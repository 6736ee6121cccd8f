"""Who is told of rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from verify_service.round import Entry
from verify_service.submission import Update


class Observer(Protocol):
    """Is told of every round, on the engine's thread, while the next one runs."""

    def round(
        self,
        entries: Sequence[Entry],
        updates: Sequence[Update],
        seconds: float,
        held: float,
        gap: float | None = None,
        gpu: float | None = None,
        ready: int | None = None,
        answers: Sequence[float] = (),
    ) -> None:
        """A round took `seconds`, after holding for `held` seconds. `updates` are what it brought each request.

        `gap`: seconds that the device had nothing to do before it, holding aside; None after a pause. `gpu`: seconds
        that the device worked on it; None where nobody measures. `ready`: nodes that it would have taken without any
        hold; None if no draft serves its requests. `answers`: seconds of the drafts' answers since the round before.
        """

    def flush(self) -> None:
        """All updates of a round were given out, or nothing is left to do."""

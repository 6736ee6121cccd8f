"""Keeps the code between two rounds warm."""

from __future__ import annotations

import time
from collections.abc import Sequence

from verify_service.round import Entry, Executor
from verify_service.scheduler import Scheduler

_SECONDS = 2.5e-4
_PAUSE = 8
"""How many times as long as a rehearsal takes lies between two: a round that ends meanwhile is seen late."""


class Rehearsal:
    """Chooses nodes and lays a round out for nothing, now and then, while the engine waits for the device.

    After 5 ms without it that code took 5 to 8 times as long on an H200's host.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._due_at = 0.0

    def begin(self, at: float) -> None:
        """A wait has begun; nothing is rehearsed before the time `at`, on the monotonic clock."""
        self._due_at = at

    def rehearse(self, entries: Sequence[Entry]) -> None:
        """Rehearse a round of these entries, if it is time to."""
        now = time.monotonic()
        if now >= self._due_at:
            self._scheduler.rehearse(entries)
            self._executor.rehearse(entries)
            self._due_at = now + max(_SECONDS, _PAUSE * (time.monotonic() - now))

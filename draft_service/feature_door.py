"""The draft's end of a features stream: what is held for the engine, and what was released."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from contextlib import suppress

MAX_HELD_BYTES = 16 << 20
"""Features of one stream that may wait for the engine; the stream is read no further while there are more."""


class FeatureInflow:
    """What came on one features stream, between its reader and the engine. The event loop makes it.

    Features are released in their order, whatever the order in which the engine is done with them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._held: dict[int, int] = {}
        self._num_bytes = 0
        self._newest = 0
        self._through = 0
        self._told = 0
        self._has_news = asyncio.Event()
        self._may_read = asyncio.Event()
        self._may_read.set()

    async def admit(self, sequence: int, num_bytes: int) -> bool:
        """Hold features once there is room; False, and nothing is held, if their number does not rise."""
        return (await self.admit_all([(sequence, num_bytes)]))[0]

    async def admit_all(self, pieces: Sequence[tuple[int, int]]) -> list[bool]:
        """The same for numbers and bytes of all that came in one message."""
        await self._may_read.wait()
        with self._lock:
            admitted = [self._hold(sequence, num_bytes) for sequence, num_bytes in pieces]
            if self._num_bytes > MAX_HELD_BYTES:
                self._may_read.clear()
        return admitted

    def _hold(self, sequence: int, num_bytes: int) -> bool:
        if sequence <= self._newest:
            return False
        self._newest = sequence
        self._held[sequence] = num_bytes
        self._num_bytes += num_bytes
        return True

    def release(self, *sequences: int) -> None:
        """Held features are done with; from any thread."""
        with self._lock:
            for sequence in sequences:
                self._num_bytes -= self._held.pop(sequence)
            # They are held in their order.
            self._through = next(iter(self._held), self._newest + 1) - 1
        with suppress(RuntimeError):  # the loop has closed: the service is ending
            self._loop.call_soon_threadsafe(self._wake)

    async def next_release(self) -> int:
        """Wait for releases; returns the number of the last features that are done with together with all before."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            with self._lock:
                if self._through > self._told:
                    self._told = self._through
                    return self._told

    def _wake(self) -> None:
        self._has_news.set()
        with self._lock:
            if self._num_bytes <= MAX_HELD_BYTES:
                self._may_read.set()

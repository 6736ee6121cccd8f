"""The door's end of a features stream: what is held for the engine, and what was released."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

MAX_HELD_BYTES = 16 << 20
"""Features of one stream that may wait for the engine; the stream is read no further while there are more."""


class FeatureInflow:
    """What came on one features stream, between its reader and the engine. Everything happens on the event loop.

    Features are released in their order, whatever the order in which the engine is done with them.
    """

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._handed_over: deque[Sequence[int]] = deque()
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
        admitted = [self._hold(sequence, num_bytes) for sequence, num_bytes in pieces]
        if self._num_bytes > MAX_HELD_BYTES:
            self._may_read.clear()
        return admitted

    def hand_over(self, sequences: Sequence[int]) -> None:
        """The engine has them now: the next `taken` is of these."""
        self._handed_over.append(sequences)

    def taken(self) -> None:
        """The engine is done with those that it has had longest."""
        self.release(*self._handed_over.popleft())

    def release(self, *sequences: int) -> None:
        """Held features are done with."""
        for sequence in sequences:
            self._num_bytes -= self._held.pop(sequence)
        # They are held in their order.
        self._through = next(iter(self._held), self._newest + 1) - 1
        self._has_news.set()
        if self._num_bytes <= MAX_HELD_BYTES:
            self._may_read.set()

    async def next_release(self) -> int:
        """Wait for releases; returns the number of the last features that are done with together with all before."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            if self._through > self._told:
                self._told = self._through
                return self._told

    def _hold(self, sequence: int, num_bytes: int) -> bool:
        if sequence <= self._newest:
            return False
        self._newest = sequence
        self._held[sequence] = num_bytes
        self._num_bytes += num_bytes
        return True

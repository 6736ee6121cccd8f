"""A DNS server for PeerAddresses that gives one answer after the other, when a test wants it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from outrider.rpc.peers import PeerAddresses


class Names:
    """Answers in order, the last one for ever."""

    def __init__(self, *answers: Sequence[str] | Exception) -> None:
        self._answers = answers
        self.asked: list[tuple[str, int]] = []
        self._sleeps: asyncio.Queue[None] = asyncio.Queue()
        self._woken: asyncio.Queue[None] = asyncio.Queue()

    def of(self, given: Sequence[str], option: str) -> PeerAddresses:
        """Addresses that ask here, and sleep until `next`."""
        addresses = PeerAddresses(given, option, seconds=5)
        addresses.lookup, addresses.sleep = self.lookup, self.sleep
        return addresses

    async def lookup(self, host: str, port: int) -> Collection[str]:
        self.asked.append((host, port))
        answer = self._answers[min(len(self.asked), len(self._answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(self, seconds: float) -> None:
        self._sleeps.put_nowait(None)
        await self._woken.get()

    async def next(self) -> None:
        """Let it look once more; returns when whoever follows the addresses has heard of it."""
        if self.asked:
            self._woken.put_nowait(None)
        await asyncio.wait_for(self._sleeps.get(), 20)

"""Drives a load: closed loop (so many at once) or open loop (so many a second), for a count or for a time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider_tools.bench.clients import Client
from outrider_tools.bench.requests import Prompt, RequestRecord, arrivals


@dataclass(frozen=True)
class LoadPoint:
    """One load to measure."""

    concurrency: int = 0
    """Most requests at once; 0 for any number, which needs a rate."""
    rate: float = math.inf
    """Mean requests a second; infinite for a closed loop."""
    burstiness: float = 1.0
    num_prompts: int = 0
    """Requests in all; 0 goes on until `seconds` are over."""
    seconds: float = 0.0
    """No request begins later than this, and tokens that come later do not count for throughput; 0 for no end."""
    timeout: float = 600.0
    """Seconds that a request may take."""
    seed: int = 0


@dataclass
class LoadRun:
    """What a load gave."""

    point: LoadPoint
    records: list[RequestRecord] = field(default_factory=list)
    window: float = 0.0
    """Seconds that count for throughput."""
    cpu_seconds: float = 0.0
    """Processor time of the load generator itself."""


async def run_point(
    client: Client, prompts: Sequence[Prompt], point: LoadPoint, tell: Callable[[LoadRun], None] = lambda run: None
) -> LoadRun:
    """Send `prompts`, round and round, until the point's count or time is reached; then wait for what is under way.

    `tell` is called once a second with the run so far.
    """
    return await _LoadDriver(client, prompts, point).run(tell)


class _LoadDriver:
    def __init__(self, client: Client, prompts: Sequence[Prompt], point: LoadPoint) -> None:
        self._client = client
        self._prompts = prompts
        self._point = point
        self._run = LoadRun(point)
        self._next = 0
        self._begin = 0.0

    async def run(self, tell: Callable[[LoadRun], None]) -> LoadRun:
        self._begin = time.perf_counter()
        before = time.process_time()
        teller = asyncio.create_task(self._tell(tell))
        try:
            await (self._closed() if math.isinf(self._point.rate) else self._open())
        finally:
            teller.cancel()
            await asyncio.gather(teller, return_exceptions=True)
        run = self._run
        run.cpu_seconds = time.process_time() - before
        ended = max((record.end for record in run.records), default=self._clock())
        run.window = min(self._point.seconds, ended) if self._point.seconds else ended
        return run

    def _clock(self) -> float:
        return time.perf_counter() - self._begin

    async def _tell(self, tell: Callable[[LoadRun], None]) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._run.window = self._clock()
            tell(self._run)

    def _take(self, now: float) -> Prompt | None:
        """The next prompt; None when no more requests shall begin."""
        point = self._point
        if (point.num_prompts and self._next >= point.num_prompts) or (point.seconds and now >= point.seconds):
            return None
        self._next += 1
        return self._prompts[(self._next - 1) % len(self._prompts)]

    async def _closed(self) -> None:
        """As many workers as requests may be under way, each of which sends when its last one ended."""
        most = self._point.concurrency or self._point.num_prompts
        await asyncio.gather(*(self._worker() for _ in range(most)))

    async def _worker(self) -> None:
        while (prompt := self._take(self._clock())) is not None:
            record = await self._send(prompt, self._clock())
            if record.error:
                await asyncio.sleep(0.05)  # a door that refuses at once must not be hammered

    async def _open(self) -> None:
        """Requests are sent when they are due, however long the others take."""
        point = self._point
        places = asyncio.Semaphore(point.concurrency or 1 << 30)
        tasks = []
        for due in arrivals(point.rate, point.burstiness, point.seed):
            prompt = self._take(due)
            if prompt is None:
                break
            await asyncio.sleep(max(0.0, due - self._clock()))
            tasks.append(asyncio.create_task(self._send_when_free(places, prompt, due)))
        await asyncio.gather(*tasks)

    async def _send_when_free(self, places: asyncio.Semaphore, prompt: Prompt, due: float) -> None:
        async with places:
            await self._send(prompt, due)

    async def _send(self, prompt: Prompt, due: float) -> RequestRecord:
        record = RequestRecord(due)
        self._run.records.append(record)
        try:
            async with asyncio.timeout(self._point.timeout):
                await self._client.send(prompt, record, self._clock)
        except TimeoutError:
            record.finish(self._clock(), "client_timeout", f"not complete after {self._point.timeout:g} s")
        return record

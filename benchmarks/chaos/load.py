"""Steady load for the chaos benchmark: every token of its streams is compared with plain decoding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from outrider.cli.client import Sampling, encode
from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

RETRY_SECONDS = 0.2
UNTIL_SECONDS = 60.0
AT_ONCE = 4

Request = gateway_pb2.GatewayServiceGenerateRequest

TOPICS = ("red apples", "brown eggs", "rye bread", "fresh milk", "honey", "salt", "green tea", "butter", "plums")


@dataclass(frozen=True)
class KnownAnswer:
    """A request, and its answer by plain decoding."""

    request: Request
    token_ids: tuple[int, ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message of a stream. Times are seconds of the monotonic clock."""

    at: float
    gap: float
    """Seconds since the message before, or since the request was sent."""
    tokens: int
    accepted: int
    """Number of accepted draft tokens among the tokens."""


@dataclass
class Record:
    """What clients saw."""

    arrivals: list[Arrival] = field(default_factory=list)
    complete: int = 0
    failed: int = 0
    """Streams that ended with an error after their first token."""
    refused: int = 0
    """Requests that got an error before any token; they may be sent again."""
    wrong: int = 0
    """Tokens that differ from plain decoding: changed, repeated or missing ones."""
    wrong_texts: int = 0
    errors: list[str] = field(default_factory=list)

    def speed(self, start: float, end: float) -> float:
        """Return the tokens per second between two times."""
        tokens = sum(arrival.tokens for arrival in self.arrivals if start <= arrival.at < end)
        return tokens / (end - start) if end > start else 0.0

    def longest_gap(self, start: float, end: float) -> float:
        """Return the longest wait of a stream that ended between two times, in seconds."""
        return max((arrival.gap for arrival in self.arrivals if start <= arrival.at < end), default=0.0)

    def first_accepted(self, start: float) -> float | None:
        """Return when the first accepted draft token after `start` came."""
        return next((one.at for one in self.arrivals if one.at >= start and one.accepted), None)


def questions(count: int, max_tokens: int) -> list[KnownAnswer]:
    """Return chats about lists to repeat, so that drafts find something; every other one is sampled with a seed."""
    made = []
    for number in range(count):
        wanted = [TOPICS[(number + step * (1 + number % 3)) % len(TOPICS)] for step in range(4)]
        text = f"Repeat list {number} three times:\n" + "\n".join(f"- {item}" for item in wanted)
        sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        if number % 2:
            sampling = replace(sampling, temperature=0.7, top_p=0.95, seed=number)
        made.append(KnownAnswer(encode(sampling, [("user", text)])))
    return made


async def answered_plainly(address: str, asked: Sequence[KnownAnswer]) -> list[KnownAnswer]:
    """Return the questions with their answers, decoded without a draft."""
    channel = open_channel(address)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(question: KnownAnswer) -> KnownAnswer:
        request = Request()
        request.CopyFrom(question.request)
        request.speculation = gateway_pb2.SPECULATION_OFF
        tokens: list[int] = []
        text = ""
        async with places:
            async for response in gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request):
                tokens += response.token_ids
                text += response.text
        return KnownAnswer(question.request, tuple(tokens), text)

    try:
        return list(await asyncio.gather(*(one(question) for question in asked)))
    finally:
        await channel.close()


class ChaosLoad:
    """Clients that ask one question after the other until stopped. Use it with `async with`."""

    def __init__(
        self,
        address: str,
        asked: Sequence[KnownAnswer],
        clients: int,
        dial: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self.record = Record()
        self._dial = dial
        self._address = address
        self._asked = asked
        self._clients = clients
        self._next = 0
        self._stopping = False
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ChaosLoad:
        self._channel = self._dial(self._address)
        stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        self._tasks = [asyncio.create_task(self._client(stub)) for _ in range(self._clients)]
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Ask no more, and wait for the last answer to complete."""
        self._stopping = True
        try:
            if exception[0] is None:
                await asyncio.wait_for(asyncio.gather(*self._tasks), UNTIL_SECONDS)
        finally:
            for task in self._tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._channel.close()

    async def until(self, happened: Callable[[], object], seconds: float = UNTIL_SECONDS) -> None:
        """Wait until `happened()`, which is checked after each message. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not happened():
                self._changed.clear()
                await self._changed.wait()

    async def answers(self, count: int) -> None:
        """Wait for `count` more complete answers."""
        wanted = self.record.complete + count
        await self.until(lambda: self.record.complete >= wanted)

    async def accepted(self, seconds: float = UNTIL_SECONDS) -> float:
        """Wait for a draft token that is accepted from now on. Return when it came."""
        since = time.monotonic()
        await self.until(lambda: self.record.first_accepted(since), seconds)
        return self.record.first_accepted(since) or since

    async def _client(self, stub: Any) -> None:
        while not self._stopping:
            question = self._asked[self._next % len(self._asked)]
            self._next += 1
            if not await self._ask(stub, question) and not self._stopping:
                await asyncio.sleep(RETRY_SECONDS)

    async def _ask(self, stub: Any, question: KnownAnswer) -> bool:
        """Ask once. Return whether an answer came, right or wrong."""
        record, last = self.record, time.monotonic()
        got, text, finished = 0, "", False
        try:
            async for response in stub.Generate(question.request):
                now = time.monotonic()
                tokens = response.token_ids
                if tokens:
                    wanted = question.token_ids[got : got + len(tokens)]
                    right = sum(a == b for a, b in zip(tokens, wanted, strict=False))
                    record.wrong += len(tokens) - right
                    got += len(tokens)
                    accepted = list(response.origins).count(common_pb2.TOKEN_ORIGIN_ACCEPTED)
                    record.arrivals.append(Arrival(now, now - last, len(tokens), accepted))
                    last = now
                text += response.text
                finished = finished or response.HasField("usage")
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            record.errors.append(f"{error.code().name}: {error.details()}")
            if got:
                record.failed += 1
            else:
                record.refused += 1
            return False
        finally:
            self._changed.set()
        # An end without usage is not the end of an answer.
        record.wrong += abs(len(question.token_ids) - got) + (not finished)
        record.wrong_texts += text != question.text
        record.complete += 1
        return True

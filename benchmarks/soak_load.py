"""Mixed load for `soak.py`: requests of all kinds, many of them cancelled half-way."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.rpc.channel import open_channel
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

CANCELLED_SHARE = 0.3
PLAIN_SHARE = 0.15
MANY_SHARE = 0.1
"""Requests that ask for two answers."""


@dataclass
class Load:
    """Clients that ask for answers until told to stop."""

    address: str
    prompts: list[str]
    clients: int
    max_tokens: int
    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Requests by how they ended, and tokens."""
    failures: list[str] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        """Ask for `seconds`; returns when the last answer is complete."""
        channel = open_channel(self.address)
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        end = time.monotonic() + seconds
        generators = [random.Random(f"{self.seed} {place}") for place in range(self.clients)]
        self.seed += 1
        await asyncio.gather(*(self._client(stub, generator, end) for generator in generators))
        await channel.close()

    async def _client(self, stub: Any, generator: random.Random, end: float) -> None:
        while time.monotonic() < end:
            message = self._request(generator)
            patience = generator.randrange(8) if generator.random() < CANCELLED_SHARE else -1
            call = stub.Generate(message)
            try:
                finished = await self._read(call, patience)
            except grpc.aio.AioRpcError as error:
                self.failures.append(f"{error.code().name}: {error.details()}")
                self.counts["failed"] += 1
                continue
            if patience < 0 and not finished:
                self.failures.append("a stream ended before its answer was complete")
            self.counts["complete" if finished else "cancelled"] += 1

    async def _read(self, call: Any, patience: int) -> bool:
        """Read an answer, or cancel it after so many messages; whether it came to its end."""
        seen = 0
        async for response in call:
            self.counts["tokens"] += len(response.token_ids)
            if response.HasField("usage"):
                return True
            if seen == patience:
                call.cancel()
                return False
            seen += 1
        return False

    def _request(self, generator: random.Random) -> gateway_pb2.GatewayServiceGenerateRequest:
        words = generator.choice(self.prompts).split()
        prompt = " ".join(words[: generator.randint(1, len(words))])
        sampling = common_pb2.SamplingParams(temperature=generator.choice((0.0, 0.0, 0.8, 1.2)))
        if generator.random() < 0.3:
            sampling.top_p = 0.9
        if generator.random() < 0.2:
            sampling.frequency_penalty = 0.5
        return gateway_pb2.GatewayServiceGenerateRequest(
            chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user", content=prompt)]),
            sampling=sampling,
            n=2 if generator.random() < MANY_SHARE else 1,
            max_tokens=generator.randint(1, self.max_tokens),
            ignore_eos=generator.random() < 0.5,
            speculation=gateway_pb2.SPECULATION_OFF if generator.random() < PLAIN_SHARE else gateway_pb2.SPECULATION_ON,
        )

"""A draft service that cannot be trusted: a real one, and a door that changes its messages."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from outrider.rpc.transport import DEFAULT_MAX_MESSAGE_BYTES, channel_options, server_options
from outrider.v1 import draft_pb2

Response = draft_pb2.DraftServiceSpeculateResponse

REMEMBERED = 64
HELD_BACK = 4
MAX_NODES = 64


@dataclass
class Corruption:
    """Changes the messages of one stream; `name` is a key of `CORRUPTIONS`.

    Each message comes from the real draft service, so most of what it names exists.
    """

    name: str
    random: random.Random
    vocab_size: int
    past: deque[bytes] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    held: list[bytes] = field(default_factory=list)

    def __call__(self, message: bytes) -> list[bytes]:
        """Return the messages to send instead of `message`."""
        out = CORRUPTIONS[self.name](self, message)
        self.past.append(message)
        return out


def lost(corruption: Corruption, message: bytes) -> list[bytes]:
    """Lose a third of the messages, at random."""
    return [] if corruption.random.random() < 0.33 else [message]


def truncated(corruption: Corruption, message: bytes) -> list[bytes]:
    """Shorten half of the messages, in their bytes or in their arrays."""
    draw = corruption.random
    if draw.random() < 0.5 or not message:
        return [message]
    if draw.random() < 0.5:
        return [message[: draw.randrange(len(message))]]
    batch = Response.FromString(message)
    for event in batch.events:
        if event.WhichOneof("event") == "grow":
            name = draw.choice(("parents", "token_ids", "scores", "sources"))
            data = getattr(event.grow, name)
            setattr(event.grow, name, data[: draw.randrange(len(data) + 1)])
    return [batch.SerializeToString()]


def duplicated(corruption: Corruption, message: bytes) -> list[bytes]:
    """Send each message two to four times."""
    return [message] * corruption.random.randint(2, 4)


def reordered(corruption: Corruption, message: bytes) -> list[bytes]:
    """Hold messages back, and send them together in random order."""
    corruption.held.append(message)
    if len(corruption.held) < HELD_BACK:
        return []
    out, corruption.held = corruption.held, []
    corruption.random.shuffle(out)
    return out


def stale(corruption: Corruption, message: bytes) -> list[bytes]:
    """Add an earlier message to each one: about an earlier tree, or a request that has ended."""
    return [message, corruption.random.choice(corruption.past)] if corruption.past else [message]


def flipped(corruption: Corruption, message: bytes) -> list[bytes]:
    """Flip some bits of each message."""
    data = bytearray(message)
    for _ in range(corruption.random.randint(1, 4)):
        if data:
            data[corruption.random.randrange(len(data))] ^= 1 << corruption.random.randrange(8)
    return [bytes(data)]


def garbage(corruption: Corruption, message: bytes) -> list[bytes]:
    """Add noise, or well-formed trees of nonsense for open requests."""
    draw = corruption.random
    if draw.random() < 0.3:
        return [message, draw.randbytes(draw.randrange(200))]
    batch = Response()
    for event in Response.FromString(message).events:
        if event.WhichOneof("event") == "grow":
            batch.events.add().grow.CopyFrom(_nonsense(corruption, event.grow))
    return [batch.SerializeToString(), message]


def foreign(corruption: Corruption, message: bytes) -> list[bytes]:
    """Replace token ids as if by another tokenizer, some beyond the end of the target's vocabulary."""
    batch = Response.FromString(message)
    for event in batch.events:
        if event.WhichOneof("event") == "grow":
            ids = np.frombuffer(event.grow.token_ids, "<i4").astype(np.int64)
            event.grow.token_ids = ((ids * 7 + 3) % (corruption.vocab_size * 9 // 8)).astype("<i4").tobytes()
    return [batch.SerializeToString()]


def hostile(corruption: Corruption, message: bytes) -> list[bytes]:
    """Apply one of the other corruptions, chosen at random."""
    kinds = [kind for name, kind in CORRUPTIONS.items() if name not in ("hostile", "passed")]
    return corruption.random.choice(kinds)(corruption, message)


CORRUPTIONS: dict[str, Callable[[Corruption, bytes], list[bytes]]] = {
    "passed": lambda corruption, message: [message],
    "lost": lost,
    "truncated": truncated,
    "duplicated": duplicated,
    "reordered": reordered,
    "stale": stale,
    "flipped": flipped,
    "garbage": garbage,
    "foreign": foreign,
    "hostile": hostile,
}


def _nonsense(corruption: Corruption, real: draft_pb2.Grow) -> draft_pb2.Grow:
    """Return a tree that was never grown, for an open request or for none."""
    draw = corruption.random
    count = draw.randrange(MAX_NODES)
    noise = np.random.default_rng(draw.randrange(2**32))
    parents = noise.integers(0, draw.choice((4, 2**32)), count)
    scores = noise.choice([-0.1, -5.0, 3.0, np.nan, -np.inf, np.inf], count)
    return draft_pb2.Grow(
        request=draw.choice((real.request, real.request, draw.randrange(2**64))),
        epoch=draw.choice((real.epoch, real.epoch, real.epoch + 1, 0, 2**64 - 1)),
        base_len=draw.choice((real.base_len, real.base_len, 0, 1, 2**32 - 1)),
        acked_len=draw.choice((real.acked_len, 2**32 - 1)),
        first_id=draw.choice((real.first_id, 1, 0, 2**32 - 1)),
        parents=parents.astype("<u4").tobytes(),
        token_ids=noise.integers(-5, corruption.vocab_size + 5, count).astype("<i4").tobytes(),
        scores=scores.astype("<f4").tobytes(),
        sources=noise.integers(0, 256, count).astype("u1").tobytes(),
    )


SERVICE = "outrider.v1.DraftService"

Context = grpc.aio.ServicerContext[bytes, bytes]


class Relay:
    """Serves DraftService on `listen` with the messages of the service at `target`. Use it with `async with`.

    `corrupt` and `disguise` may be called at any time.
    """

    def __init__(self, listen: str, target: str, vocab_size: int, seed: int = 0) -> None:
        self.num_harmed = 0
        """Number of messages that passed a corruption, and of changed hellos."""
        self._listen = listen
        self._target = target
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._kind = "passed"
        self._hello: dict[str, Any] = {}
        self._sessions: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = grpc.aio.server(options=server_options(DEFAULT_MAX_MESSAGE_BYTES))
        methods = {"Speculate": self._speculate, "Features": self._features}
        handlers = {name: grpc.stream_stream_rpc_method_handler(method) for name, method in methods.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._server.add_insecure_port(self._listen)
        await self._server.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.stop(0)

    def corrupt(self, kind: str) -> None:
        """Change messages by `CORRUPTIONS[kind]` from now on."""
        self._kind = kind

    def disguise(self, **fields: Any) -> None:
        """Change these fields of the hello from the next session on. Current sessions end."""
        self._hello = fields
        for session in tuple(self._sessions):
            session.cancel()

    async def _speculate(self, requests: AsyncIterator[bytes], context: Context) -> None:
        await self._relay("Speculate", requests, context, speaks=True)

    async def _features(self, requests: AsyncIterator[bytes], context: Context) -> None:
        await self._relay("Features", requests, context, speaks=False)

    async def _relay(self, method: str, requests: AsyncIterator[bytes], context: Context, speaks: bool) -> None:
        """Pass one stream on, both ways, until either end is over."""
        async with grpc.aio.insecure_channel(self._target, options=channel_options(DEFAULT_MAX_MESSAGE_BYTES)) as far:
            call = far.stream_stream(f"/{SERVICE}/{method}")()
            back = self._answer if speaks else self._echo
            ways = [asyncio.create_task(one) for one in (_forward(requests, call), back(call, context))]
            self._sessions.update(ways)
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                ended = await asyncio.gather(*ways, return_exceptions=True)
                call.cancel()  # closing the channel does not end a call that nobody reads
                self._sessions.difference_update(ways)
        error = next((one for one in ended if isinstance(one, grpc.aio.AioRpcError)), None)
        if error is not None:
            await context.abort(error.code(), error.details() or "")

    async def _answer(self, call: Any, context: Context) -> None:
        corruption = Corruption("passed", self._random, self._vocab_size)
        first = True
        async for message in call:
            if first:
                out, first = [self._greeting(message)], False
            else:
                out = self._changed(corruption, message)
            for one in out:
                await context.write(one)

    async def _echo(self, call: Any, context: Context) -> None:
        async for message in call:
            await context.write(message)

    def _changed(self, corruption: Corruption, message: bytes) -> list[bytes]:
        corruption.name = self._kind
        self.num_harmed += self._kind != "passed"
        held = []
        if corruption.held and self._kind not in ("reordered", "hostile"):
            held, corruption.held = corruption.held, []
        return [*held, *corruption(message)]

    def _greeting(self, message: bytes) -> bytes:
        if not self._hello:
            return message
        batch = Response.FromString(message)
        for name, value in self._hello.items():
            setattr(batch.events[0].hello, name, value)
        self.num_harmed += 1
        changed: bytes = batch.SerializeToString()
        return changed


async def _forward(requests: AsyncIterator[bytes], call: Any) -> None:
    async for message in requests:
        await call.write(message)
    await call.done_writing()

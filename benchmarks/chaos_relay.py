"""A draft service that cannot be trusted: a real one behind a door that changes what it says."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
from chaos_messages import Corruption, Response

from outrider.rpc.transport import DEFAULT_MAX_MESSAGE_BYTES, channel_options, server_options

SERVICE = "outrider.v1.DraftService"

Context = grpc.aio.ServicerContext[bytes, bytes]


class Relay:
    """Serves DraftService on `listen` with what the service at `target` says. Use it with `async with`.

    `corrupt` and `disguise` may be called at any time.
    """

    def __init__(self, listen: str, target: str, vocab_size: int, seed: int = 0) -> None:
        self.num_harmed = 0
        """Messages that went through a corruption, and hellos that were changed."""
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
        """From now on, messages become what `CORRUPTIONS[kind]` makes of them."""
        self._kind = kind

    def disguise(self, **fields: Any) -> None:
        """From the next session on, these fields of the hello are others; ends the sessions that there are."""
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
                call.cancel()  # closing the channel forgets a call that nobody reads from
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

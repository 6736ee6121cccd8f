"""A link between two services that fails as networks do, in user space: slow, thin, broken, cut within a frame."""

from __future__ import annotations

import asyncio
import random
import socket
from contextlib import suppress
from dataclasses import dataclass

CHUNK_BYTES = 16384
RESEND_SECONDS = 0.2
"""Least cost of a lost packet to its connection: TCP's first retransmission."""


@dataclass(frozen=True)
class Weather:
    """What happens to passing bytes."""

    delay: float = 0.0
    """Seconds, each way."""
    jitter: float = 0.0
    """Most additional seconds."""
    loss: float = 0.0
    """Chance that a chunk must be sent again, which delays all chunks behind it."""
    rate: float = 0.0
    """Bytes per second, each way; 0 for no limit."""
    cut: float = 0.0
    """Chance that a connection ends within a chunk: a part of it passes, the rest is lost."""


class Proxy:
    """Listens on one unix socket and passes bytes on to another; `weather` may change at any time.

    Use it with `async with`, inside the event loop that it will run on.
    """

    def __init__(self, listen: str, target: str, seed: int = 0) -> None:
        self.weather = Weather()
        self.num_harmed = 0
        """Number of chunks that were delayed or cut, and of connections that were reset."""
        self._listen = listen.removeprefix("unix:")
        self._target = target.removeprefix("unix:")
        self._random = random.Random(seed)
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_unix_server(self._connected, self._listen)
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()
        self.disconnect()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def disconnect(self) -> None:
        """Reset all connections."""
        self.num_harmed += len(self._open)
        for writer in tuple(self._open):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._open |= both
        ways = [asyncio.create_task(self._pass_on(*ends)) for ends in ((reader, far_writer), (far_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            self._open -= both
            for end in both:
                end.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on, one way. Delayed chunks keep their order, and their delays overlap."""
        clock = asyncio.get_running_loop().time
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)

        async def deliver() -> None:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(max(due - clock(), 0.0))
                weather = self.weather
                if weather.rate:
                    await asyncio.sleep(len(data) / weather.rate)
                if self._random.random() < weather.cut:
                    writer.write(data[: self._random.randrange(len(data))])
                    return
                writer.write(data)
                await writer.drain()

        async def take() -> None:
            while data := await reader.read(CHUNK_BYTES):
                weather = self.weather
                self.num_harmed += weather != Weather()
                due = clock() + weather.delay + weather.jitter * self._random.random()
                due += RESEND_SECONDS * (self._random.random() < weather.loss)
                await waiting.put((due, data))

        parts = [asyncio.create_task(part) for part in (deliver(), take())]
        try:
            with suppress(OSError):
                done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for part in done:
                    part.result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)


def vanish(connection: socket.socket) -> None:
    """Close a connection with a reset, as if the machine had lost power."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    connection.close()

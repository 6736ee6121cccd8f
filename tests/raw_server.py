"""A server that speaks whatever a test lets it speak, and leaves no connection behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(handle: Handler, path: Path | None = None) -> AsyncIterator[str]:
    """Serves `handle` on the unix socket `path`, else on a free port of 127.0.0.1, and gives its address.

    It ends when all connections have been handled and closed: one that is left to a loop that closes fails
    whatever test runs when it is collected.
    """

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client went away
            try:
                await handle(reader, writer)
            finally:
                writer.close()
                await writer.wait_closed()

    async with asyncio.timeout(30), asyncio.TaskGroup() as connections:

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.create_task(connection(reader, writer))

        if path is not None:
            server, address = await asyncio.start_unix_server(connected, path), str(path)
        else:
            server = await asyncio.start_server(connected, "127.0.0.1", 0)
            address = "{}:{}".format(*server.sockets[0].getsockname())
        async with server:
            yield address

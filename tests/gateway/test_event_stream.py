from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from gateway.http.responses import ClientStalled, EventStream, run_while_connected
from gateway.http.server import bind


async def test_answers_do_not_wait_for_acknowledgements() -> None:
    no_delay: asyncio.Queue[int] = asyncio.Queue()

    async def look(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        no_delay.put_nowait(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind("127.0.0.1", 0, "127.0.0.1:0", "--rest-address")
    async with await asyncio.start_server(look, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await no_delay.get() == 1
        writer.close()
        await writer.wait_closed()


async def connected() -> Any:
    await asyncio.Event().wait()


async def test_a_client_that_does_not_read_is_given_up() -> None:
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    stream = EventStream(send, stall_seconds=0.01)
    with pytest.raises(ClientStalled):
        await stream.write(b"data: 1\n\n")
    await run_while_connected(connected, stream.write(b"data: 2\n\n"))  # an event in the log, no error


async def test_a_client_that_goes_ends_the_work_and_errors_pass_through() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    await run_while_connected(gone, work())
    assert ended.is_set()

    async def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_while_connected(connected, broken())

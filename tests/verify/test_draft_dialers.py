"""Drafts behind a name are dialled as they come, and left alone as they go."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from dialled_draft import HELLO, Context, Events, greet, stay
from names_shown import Names

from verify_service.door.dialer import DraftDialer, DraftDialers

pytestmark = pytest.mark.usefixtures("dialled_soon")


async def draft_at(address: str) -> grpc.aio.Server:
    async def speculate(requests: object, context: Context) -> None:
        await greet(context)
        await stay(context)

    server = grpc.aio.server()
    handlers: Any = {"Speculate": grpc.stream_stream_rpc_method_handler(speculate)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("outrider.v1.DraftService", handlers),))
    server.add_insecure_port(address)
    await server.start()
    return server


async def test_drafts_follow_a_name_and_a_session_outlives_its_address(tmp_path: Path) -> None:
    first, second, nobody = (f"unix:{tmp_path}/{name}" for name in "abc")
    servers = [await draft_at(first), await draft_at(second)]
    names = Names([first, nobody], [first, second], [second], [second])
    addresses = names.of(["dns:///draft:1"], "--draft")
    events = Events()
    dialers = DraftDialers(addresses, lambda address: DraftDialer(address, HELLO, events))  # type: ignore[arg-type]
    assert dialers and not list(dialers)
    task = asyncio.create_task(dialers.run())
    try:
        await names.next()
        await events.until(lambda: len(events.sessions) == 1)
        await names.next()
        await events.until(lambda: len(events.sessions) == 2)
        assert {dialer.address for dialer in dialers} == {first, second}, "nobody was there to take leave of"
        await names.next()
        assert events.num_ended == 0 and len(list(dialers)) == 2
        await servers[0].stop(0)  # it has drained
        await events.until(lambda: events.num_ended == 1)
        while len(list(dialers)) > 1:
            await asyncio.sleep(0)
        assert [dialer.address for dialer in dialers] == [second]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert events.num_ended == 2 and not list(dialers)
    for server in servers:
        await server.stop(0)


async def test_an_address_that_comes_back_while_its_dialer_ends_is_dialled_again(tmp_path: Path) -> None:
    address, nobody = f"unix:{tmp_path}/a", f"unix:{tmp_path}/b"
    may_end, dialled = asyncio.Event(), asyncio.Queue[None]()

    class Dialer(DraftDialer):
        """Is not reached, and takes its time to end."""

        async def run(self) -> None:
            if self.address == address:
                dialled.put_nowait(None)
            try:
                await asyncio.Event().wait()
            finally:
                await may_end.wait()

    names = Names([address], [nobody], [address, nobody])
    made = names.of(["dns:///draft:1"], "--draft")
    dialers = DraftDialers(made, lambda one: Dialer(one, HELLO, Events()))  # type: ignore[arg-type]
    task = asyncio.create_task(dialers.run())
    try:
        async with asyncio.timeout(20):
            await names.next()
            await dialled.get()
            await names.next()
            await names.next()
            await dialled.get()
    finally:
        may_end.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not list(dialers)

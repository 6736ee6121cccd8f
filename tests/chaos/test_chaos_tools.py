"""The tools that do harm do it, else the cases would show nothing; the page has all cases."""

from __future__ import annotations

import asyncio
import random
import socket
from pathlib import Path

import numpy as np
import pytest
from raw_server import raw_server

from benchmarks.chaos.proxy import Proxy, Weather, vanish
from benchmarks.chaos.relay import CORRUPTIONS, Corruption, Response
from outrider.v1 import draft_pb2

VOCAB = 61


def grow(number: int) -> bytes:
    count = 4
    message = draft_pb2.Grow(
        request=1,
        epoch=1,
        base_len=3,
        acked_len=3,
        first_id=1 + number * count,
        parents=np.zeros(count, "<u4").tobytes(),
        token_ids=np.arange(count, dtype="<i4").tobytes(),
        scores=np.full(count, -0.1, "<f4").tobytes(),
        sources=np.zeros(count, "u1").tobytes(),
    )
    return bytes(Response(events=[draft_pb2.DraftEvent(grow=message)]).SerializeToString())


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_corruption_changes_what_goes_through_and_repeats_under_its_seed(kind: str) -> None:
    messages = [grow(number) for number in range(60)]

    def through() -> list[bytes]:
        corruption = Corruption(kind, random.Random(3), VOCAB)
        return [out for message in messages for out in corruption(message)]

    assert through() == through()
    assert (through() == messages) == (kind == "passed")


async def test_a_proxy_passes_bytes_on_and_cuts_them_when_told(tmp_path: Path) -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)

    near = tmp_path / "near"
    async with raw_server(echo, tmp_path / "far") as far, Proxy(str(near), far, seed=1) as proxy:
        reader, writer = await asyncio.open_unix_connection(near)
        writer.write(b"a" * 1000)
        assert await reader.readexactly(1000) == b"a" * 1000 and not proxy.num_harmed
        proxy.weather = Weather(cut=1.0)
        writer.write(b"b" * 1000)
        assert len(await reader.read()) < 1000 and proxy.num_harmed
        writer.close()


def test_a_reset_is_what_vanishing_looks_like() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        vanish(near)
        with far, pytest.raises(ConnectionResetError):
            far.recv(1)

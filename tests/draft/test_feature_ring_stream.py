"""A ring that verify offers is read where that works, within its bounds, and done without where it does not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
import torch
from draft_door import Door, Stream
from msgspec.structs import replace
from shared_file import MappedFile, SharedFile
from test_feature_stream import ROW, TARGET, FeaturesEnd, NotingDrafter, OfferingDrafter, greet, opened

from outrider.drafting.model.features import map_ring
from outrider.host.line import DraftBatch, FeatureBatch, Line, dial, host_id
from outrider.protocol.speculation import (
    MAGIC_BYTES,
    Decline,
    DraftMessage,
    FeatureRing,
    Features,
    Hello,
    LineOffer,
)

Serve = Callable[..., Awaitable[Door]]
SIZE = 4096
MAGIC = bytes(range(MAGIC_BYTES))


class Mapper:
    """Maps files and keeps what it mapped."""

    def __init__(self) -> None:
        self.mapped: list[MappedFile] = []

    def __call__(self, handle: bytes, num_bytes: int) -> MappedFile:
        self.mapped.append(MappedFile(handle, num_bytes))
        return self.mapped[-1]


def make_ring(folder: Path) -> tuple[SharedFile, FeatureRing]:
    memory = SharedFile(folder / "ring", SIZE)
    for place in (0, SIZE - MAGIC_BYTES):
        memory.rows[place : place + MAGIC_BYTES] = torch.tensor(list(MAGIC), dtype=torch.uint8)
    return memory, FeatureRing(host_id(), "cpu", memory.handle, SIZE, MAGIC)


async def greet_with_line(door: Door) -> tuple[Stream, str, LineOffer]:
    """A session with the token of its features, and where its line is to be had."""
    stream = door.stream()
    await stream.send(TARGET)
    hello = await stream.receive()
    assert isinstance(hello, Hello) and hello.line is not None
    return stream, hello.features_token, hello.line


def call(offer: LineOffer) -> Line[DraftBatch]:
    line = dial(offer.host, offer.path, offer.token)
    assert line is not None
    return line


async def in_ring(end: FeaturesEnd, start: int, sequence: int, offset: int, count: int = 1) -> None:
    await end.send(start, sequence, count, data=b"", ring_offset=offset)


async def test_features_are_read_from_the_ring_and_it_is_unmapped_in_the_end(serve: Serve, tmp_path: Path) -> None:
    memory, ring = make_ring(tmp_path)
    mapper, drafter = Mapper(), NotingDrafter()
    door = await serve(drafter, mapper=mapper)
    stream, token = await greet(door)
    await opened(stream, 1)
    end = FeaturesEnd(door)
    assert (await end.begin(token, ring=ring)).uses_ring is True
    memory.rows[256 : 256 + 3 * ROW] = torch.arange(3 * ROW, dtype=torch.uint8)
    await in_ring(end, 0, 1, 256, 2)
    await in_ring(end, 2, 2, 256 + 2 * ROW)
    # Both ways may be used in turn.
    await end.send(3, 3)
    await end.released(3)
    rows = [part.rows for _, part in drafter.features]
    expected = bytes(number % 256 for number in range(3 * ROW))
    assert rows == [expected[: 2 * ROW], expected[2 * ROW :], None]
    assert [len(part.data) for _, part in drafter.features] == [0, 0, ROW]
    memory.rows[256 : 256 + 3 * ROW] = 0
    assert rows[0] == expected[: 2 * ROW], "what was read is a copy"
    stream.call.cancel()
    async with asyncio.timeout(20):
        assert await end.call.read() is grpc.aio.EOF
        while not mapper.mapped[0].closed:  # the door learns of it on its own time
            await asyncio.sleep(0)


class SlowMapper(Mapper):
    """Maps once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.may = threading.Event(), threading.Event()

    def __call__(self, handle: bytes, num_bytes: int) -> MappedFile:
        self.asked.set()
        self.may.wait(20)
        return super().__call__(handle, num_bytes)


async def test_a_ring_that_is_mapped_when_its_stream_has_ended_is_unmapped_at_once(
    serve: Serve, tmp_path: Path
) -> None:
    _, ring = make_ring(tmp_path)
    mapper = SlowMapper()
    door = await serve(NotingDrafter(), mapper=mapper)
    _, token = await greet(door)
    end = FeaturesEnd(door)
    begun = asyncio.create_task(end.begin(token, ring=ring))
    assert await asyncio.to_thread(mapper.asked.wait, 20)
    end.call.cancel()
    await asyncio.wait([begun])
    async with asyncio.timeout(20):
        while door.thread.features.streams:  # the door learns of it on its own time
            await asyncio.sleep(0)
    # What the engine receives of another session's features it receives after that.
    stream, token = await greet(door)
    await opened(stream, 1)
    other = FeaturesEnd(door)
    assert (await other.begin(token)).uses_ring is False
    await other.send(0, 1)
    await other.released(1)
    assert not mapper.mapped
    mapper.may.set()
    async with asyncio.timeout(20):
        while not (mapper.mapped and mapper.mapped[0].closed):
            await asyncio.sleep(0)
    await other.send(1, 2)
    await other.released(2)


async def test_a_line_tells_of_features_in_the_ring_and_hears_of_releases(serve: Serve, tmp_path: Path) -> None:
    memory, ring = make_ring(tmp_path)
    drafter = NotingDrafter()
    door = await serve(drafter, mapper=Mapper())
    stream, token, offer = await greet_with_line(door)
    await opened(stream, 1)
    end = FeaturesEnd(door)
    await end.begin(token, ring=ring)
    memory.rows[256 : 256 + 3 * ROW] = torch.arange(3 * ROW, dtype=torch.uint8)
    line = call(offer)
    first, outside = (
        Features(1, start, 2, True, b"", "float32", sequence, ring_offset=offset)
        for start, sequence, offset in ((0, 7, 256), (2, 8, 2**64 - 1))
    )
    line.send(FeatureBatch([first]))
    async with asyncio.timeout(20):
        while 7 not in (through := [batch.released for batch in line.receive()]):
            assert not any(through)
            await asyncio.sleep(0)
    expected = bytes(number % 256 for number in range(2 * ROW))
    assert [part.rows for _, part in drafter.features] == [expected]
    # A place outside costs the request that it is of, and nobody the session.
    line.send(FeatureBatch([outside]))
    received: list[DraftMessage] = []
    async with asyncio.timeout(20):
        while not any(isinstance(one, Decline) for one in received):
            received += [one for batch in line.receive() for one in batch.messages]
            await asyncio.sleep(0)
    assert len(drafter.features) == 1 and not line.closed
    line.close()


async def test_features_on_a_line_are_products_where_their_stream_began_with_products(
    serve: Serve, tmp_path: Path
) -> None:
    _, ring = make_ring(tmp_path)
    drafter = OfferingDrafter()
    door = await serve(drafter, mapper=Mapper())
    stream, token, offer = await greet_with_line(door)
    await opened(stream, 1)
    end = FeaturesEnd(door)
    assert (await end.begin(token, ring=ring, width=4, projected=True)).uses_ring
    line = call(offer)
    line.send(FeatureBatch([Features(1, 0, 2, True, b"", "float32", 7, ring_offset=256)]))
    async with asyncio.timeout(20):
        while 7 not in [batch.released for batch in line.receive()]:
            await asyncio.sleep(0)
    assert [(part.projected, part.dtype) for _, part in drafter.features] == [(True, "float32")]
    line.close()


@pytest.mark.parametrize("offset", [SIZE - ROW + 1, SIZE, 2**63, 2**64 - 1])
async def test_places_outside_the_ring_are_malformed_and_nothing_is_read(
    serve: Serve, tmp_path: Path, offset: int
) -> None:
    _, ring = make_ring(tmp_path)
    drafter = NotingDrafter()
    door = await serve(drafter, mapper=Mapper())
    stream, token = await greet(door)
    await opened(stream, 1)
    end = FeaturesEnd(door)
    await end.begin(token, ring=ring)
    await in_ring(end, 0, 1, offset)
    await end.send(0, 2, data=bytes(ROW), ring_offset=256)
    await in_ring(end, 0, 3, SIZE - ROW)
    await end.released(3)
    assert [part.sequence for _, part in drafter.features] == [3]
    assert await door.count("messages_dropped_total", reason="malformed") == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "elsewhere"},
        {"host": ""},
        {"handle": b"/no/such/file"},
        {"handle": b""},
        {"handle": b"\xff" * 64},
        {"handle": b"x" * 5000},
        {"num_bytes": SIZE - 1},
        {"num_bytes": SIZE + 1},
        {"num_bytes": 2**40},
        {"num_bytes": 0},
        {"magic": bytes(MAGIC_BYTES)},
        {"magic": b""},
    ],
)
async def test_a_ring_that_cannot_be_used_is_declined_and_features_come_in_messages(
    serve: Serve, tmp_path: Path, changes: dict[str, object]
) -> None:
    _, ring = make_ring(tmp_path)
    mapper, drafter = Mapper(), NotingDrafter()
    door = await serve(drafter, mapper=mapper)
    stream, token = await greet(door)
    await opened(stream, 1)
    end = FeaturesEnd(door)
    accept = await end.begin(token, ring=replace(ring, **changes))  # type: ignore[arg-type]
    assert accept.uses_ring is False
    await in_ring(end, 0, 1, 256)
    await end.send(0, 2)
    await end.released(2)
    assert [part.sequence for _, part in drafter.features] == [2]
    assert all(memory.closed for memory in mapper.mapped)


@pytest.mark.parametrize("on_line", [False, True])
async def test_a_ring_that_cannot_be_read_any_more_ends_the_stream_and_the_next_goes_without(
    serve: Serve, tmp_path: Path, on_line: bool
) -> None:
    _, ring = make_ring(tmp_path)
    mapper, drafter = Mapper(), NotingDrafter()
    door = await serve(drafter, mapper=mapper)
    stream, token, offer = await greet_with_line(door)
    await opened(stream, 1, 2)
    end = FeaturesEnd(door)
    await end.begin(token, ring=ring)
    mapper.mapped[0].fails = True
    line = call(offer)
    if on_line:
        line.send(FeatureBatch([Features(1, 0, 1, True, b"", "float32", 1, ring_offset=256)]))
    else:
        await in_ring(end, 0, 1, 256)
    code, _ = await end.ended()
    assert code is grpc.StatusCode.INTERNAL and not drafter.features
    other, token = await greet(door)
    await opened(other, 7)
    second = FeaturesEnd(door)
    assert (await second.begin(token, ring=ring)).uses_ring is False
    await second.send(0, 1, request=7)
    await second.released(1)
    assert [part.request for _, part in drafter.features] == [7]
    line.close()
    # Of another verify service's ring nothing is known.
    third, token = await greet(door)
    await opened(third, 8)
    (tmp_path / "other").mkdir()
    _, healthy = make_ring(tmp_path / "other")
    assert (await FeaturesEnd(door).begin(token, ring=healthy)).uses_ring is True


def test_what_is_read_lies_in_the_ring_whoever_asks(tmp_path: Path) -> None:
    _, ring = make_ring(tmp_path)
    reader = map_ring(ring, MappedFile)
    assert reader is not None and reader.read(0, MAGIC_BYTES) == MAGIC
    for offset, size in ((-1, 4), (SIZE - 3, 4), (0, 0), (2**64, 4)):
        with pytest.raises(ValueError, match="do not lie"):
            reader.read(offset, size)
    assert not reader.broken
    reader.close()
    reader.close()
    with pytest.raises(ValueError, match="do not lie"):
        reader.read(0, 4)

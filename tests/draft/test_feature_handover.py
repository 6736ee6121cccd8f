"""Features are held within bounds and released in their order."""

from __future__ import annotations

import asyncio

from draft_service.door.remote import FeatureStream
from draft_service.frames import FeaturesFromDoor, FeaturesTaken
from outrider.host.frames import FeaturePieces
from outrider.protocol.speculation import Features


class Remote:
    """Keeps what is sent to the engine."""

    def __init__(self) -> None:
        self.sent: list[FeaturesFromDoor] = []
        self.has_room = asyncio.Event()
        self.has_room.set()

    def send(self, frame: FeaturesFromDoor) -> None:
        self.sent.append(frame)

    async def writable(self) -> None:
        await self.has_room.wait()


class Stream(FeatureStream):
    """A stream to an engine that takes when it is told to."""

    def __init__(self) -> None:
        self.remote = Remote()
        super().__init__(self.remote, 1)  # type: ignore[arg-type]

    async def put(self, *sequences: int, num_bytes: int = 10) -> int:
        """A message of good pieces; how many were dropped."""
        pieces = [(at, Features(1, at, 1, False, memoryview(bytes(num_bytes)), "float32", at)) for at in sequences]
        return await self.submit(pieces)

    def take(self) -> None:
        self.receive(FeaturesTaken(1))

    @property
    def handed_over(self) -> list[list[int]]:
        return [
            [piece.sequence for piece in frame.features]
            for frame in self.remote.sent
            if isinstance(frame, FeaturePieces)
        ]


async def test_what_was_handed_over_is_released_message_by_message() -> None:
    stream = Stream()
    assert await stream.put(1, 2) == await stream.put(3) == await stream.put(4, 5) == 0
    assert stream.handed_over == [[1, 2], [3], [4, 5]]
    stream.take()
    assert await stream.next_release() == 2
    stream.take()
    stream.take()
    assert await stream.next_release() == 5, "releases that nobody has heard of yet are one"


async def test_what_is_not_done_is_not_released() -> None:
    stream = Stream()
    await stream.put(1)
    waiting = asyncio.create_task(stream.next_release())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    stream.take()
    assert await asyncio.wait_for(waiting, 10) == 1


async def test_a_number_that_does_not_rise_is_refused_and_one_may_be_missing() -> None:
    stream = Stream()
    assert await stream.put(0) == 1
    assert await stream.put(2, 2, 1, 4) == 2
    assert await stream.put(3) == 1
    assert await stream.put(7) == 0
    assert stream.handed_over == [[2, 4], [7]]


async def test_malformed_pieces_are_dropped_and_released_in_their_turn() -> None:
    stream = Stream()
    await stream.put(1)
    assert await stream.submit([(2, None), (3, None)]) == 2
    stream.take()
    assert await stream.next_release() == 1
    stream.take()
    assert await stream.next_release() == 3


async def test_the_reader_waits_while_the_engine_takes_nothing() -> None:
    stream = Stream()
    stream.remote.has_room.clear()
    first = asyncio.create_task(stream.put(1))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not first.done() and stream.handed_over == [[1]]
    stream.remote.has_room.set()
    assert await asyncio.wait_for(first, 10) == 0

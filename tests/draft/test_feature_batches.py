"""Features of several requests in one message: each gets its own, they are read at once, and harm stays where it is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from draft_door import Door, Stream
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from shared_file import MappedFile
from test_feature_ring_stream import Mapper, make_ring
from test_feature_stream import ROW, FeaturesEnd, NotingDrafter, greet, opened

from outrider.drafting.model.features import PartOfRows, with_rows
from outrider.protocol.speculation import MAX_FEATURE_PIECES, Features
from outrider.protocol.speculation_codec import encode_features

Serve = Callable[..., Awaitable[Door]]


def piece(request: int, sequence: int, start: int = 0, count: int = 1, **changes: object) -> Features:
    data = bytes([sequence % 256]) * (count * ROW)
    made = Features(request, start, count, True, data, "float32", sequence)
    return replace(made, **changes)  # type: ignore[arg-type]


def bytes_of(features: Features) -> bytes:
    """The values of a piece, wherever they are."""
    given = features.rows
    if isinstance(given, PartOfRows):
        whole = given.joined.rows
        assert isinstance(whole, bytes) and len(whole) == given.joined.count * ROW
        return whole[given.start * ROW : (given.start + features.count) * ROW]
    return bytes(features.data) if given is None else given  # type: ignore[return-value]


async def begun(serve: Serve, drafter: NotingDrafter, *requests: int) -> tuple[Door, FeaturesEnd, Stream]:
    """The session lives as long as somebody holds its stream."""
    door = await serve(drafter)
    stream, token = await greet(door)
    await opened(stream, *requests)
    end = FeaturesEnd(door)
    assert (await end.begin(token)).takes_batches
    return door, end, stream


async def test_each_request_gets_its_own_and_the_message_is_released_as_a_whole(serve: Serve) -> None:
    drafter = NotingDrafter()
    _, end, _session = await begun(serve, drafter, 5, 9)
    await end.call.write(encode_features([piece(5, 1, 0, 2), piece(9, 2), piece(5, 3, 2, 30)]))
    await end.send(1, 4, request=9)
    await end.call.write(encode_features([piece(9, 5, 2)]))
    await end.released(5)
    seen = [(part.request, part.start, part.count, part.sequence) for _, part in drafter.features]
    assert seen == [(5, 0, 2, 1), (9, 0, 1, 2), (5, 2, 30, 3), (9, 1, 1, 4), (9, 2, 1, 5)]
    assert all(bytes_of(part) == bytes([part.sequence]) * (part.count * ROW) for _, part in drafter.features)


@pytest.mark.parametrize(
    "changes", [{"count": 0, "data": b""}, {"data": bytes(ROW + 1)}, {"sequence": 1}, {"ring_offset": 0}]
)
async def test_a_piece_of_nonsense_is_dropped_and_the_others_are_taken(
    serve: Serve, changes: dict[str, object]
) -> None:
    drafter = NotingDrafter()
    door, end, _session = await begun(serve, drafter, 1, 2, 3)
    await end.call.write(encode_features([piece(1, 1), replace(piece(2, 2), **changes), piece(3, 3)]))  # type: ignore[arg-type]
    await end.released(3)
    assert [part.request for _, part in drafter.features] == [1, 3]
    assert await door.count("messages_dropped_total", reason="malformed") == 1
    assert (await door.info()).num_requests == 3


async def test_a_message_of_too_many_pieces_is_dropped_and_the_stream_goes_on(serve: Serve) -> None:
    drafter = NotingDrafter()
    door, end, _session = await begun(serve, drafter, 1)
    most = MAX_FEATURE_PIECES
    await end.call.write(encode_features([piece(1, 1 + place, place) for place in range(most + 1)]))
    await end.call.write(encode_features([]))
    await end.released(most + 1)
    await end.call.write(encode_features([piece(1, 2 + most + place, place) for place in range(most)]))
    await end.released(1 + 2 * most)
    assert [part.start for _, part in drafter.features] == list(range(most))
    assert await door.count("messages_dropped_total", reason="malformed") == 2


async def test_a_request_at_which_the_drafter_fails_is_given_up_alone(serve: Serve) -> None:
    class Failing(NotingDrafter):
        def take_features(self, request: int, features: Features) -> None:
            super().take_features(request, features)
            if features.request == 2:
                raise RuntimeError("no")

    drafter = Failing()
    door, end, _session = await begun(serve, drafter, 1, 2, 3)
    await end.call.write(encode_features([piece(1, 1), piece(2, 2), piece(77, 3), piece(3, 4)]))
    await end.released(4)
    assert [part.request for _, part in drafter.features] == [1, 2, 3]
    assert (await door.info()).num_requests == 2


class Counting(MappedFile):
    """Notes what is read of it."""

    def __init__(self, handle: bytes, num_bytes: int) -> None:
        super().__init__(handle, num_bytes)
        self.reads: list[tuple[int, int]] = []

    def read(self, offset: int, num_bytes: int) -> bytes:
        self.reads.append((offset, num_bytes))
        return super().read(offset, num_bytes)


class CountingMapper(Mapper):
    def __call__(self, handle: bytes, num_bytes: int) -> MappedFile:
        self.mapped.append(Counting(handle, num_bytes))
        return self.mapped[-1]


async def test_what_lies_side_by_side_in_the_ring_is_read_at_once(serve: Serve, tmp_path: Path) -> None:
    memory, ring = make_ring(tmp_path)
    mapper, drafter = CountingMapper(), NotingDrafter()
    door = await serve(drafter, mapper=mapper)
    stream, token = await greet(door)
    await opened(stream, 1, 2, 3)
    end = FeaturesEnd(door)
    assert (await end.begin(token, ring=ring)).uses_ring
    mapped = mapper.mapped[0]
    assert isinstance(mapped, Counting)
    mapped.reads.clear()
    places = [(1, 256, 1), (2, 256 + ROW, 2), (3, 256 + 3 * ROW, 1), (1, 1024, 1)]
    for sequence, (_, offset, count) in enumerate(places, 1):
        memory.rows[offset : offset + count * ROW] = sequence
    pieces = [
        piece(request, sequence, sequence, count, data=b"", ring_offset=offset)
        for sequence, (request, offset, count) in enumerate(places, 1)
    ]
    # Data in between is no part of a run.
    await end.call.write(encode_features([*pieces, piece(2, 5), piece(3, 6)]))
    await end.released(6)
    assert mapped.reads == [(256, 4 * ROW), (1024, ROW)]
    assert [part.sequence for _, part in drafter.features] == [1, 2, 3, 4, 5, 6]
    assert all(bytes_of(part) == bytes([part.sequence]) * (part.count * ROW) for _, part in drafter.features)


async def test_a_ring_that_cannot_be_read_costs_those_whose_features_were_in_it(serve: Serve, tmp_path: Path) -> None:
    _, ring = make_ring(tmp_path)
    mapper, drafter = Mapper(), NotingDrafter()
    door = await serve(drafter, mapper=mapper)
    stream, token = await greet(door)
    await opened(stream, 1, 2, 3)
    end = FeaturesEnd(door)
    await end.begin(token, ring=ring)
    mapper.mapped[0].fails = True
    places = ((1, 1), (2, 2))
    pieces = [piece(number, turn, data=b"", ring_offset=256 * turn) for number, turn in places]
    await end.call.write(encode_features(pieces))
    assert (await end.ended())[0] is grpc.StatusCode.INTERNAL
    assert not drafter.features and (await door.info()).num_requests == 1


@given(st.lists(st.tuples(st.integers(1, 4), st.none() | st.integers(0, 30)), max_size=12))
def test_pieces_keep_their_values_and_their_order_however_they_lie(sizes: list[tuple[int, int | None]]) -> None:
    ring = bytes(number % 251 for number in range(12 * 4 * ROW + 24))
    pieces, expected, end = [], [], 0
    for number, (count, gap) in enumerate(sizes):
        data = bytes([number]) * (count * ROW)
        if gap is None:
            pieces.append(piece(number, number, count=count, data=data))
        else:
            # Without a gap it follows what lay in the ring before it.
            place = end + gap // 20
            data = ring[place : place + count * ROW]
            pieces.append(piece(number, number, count=count, data=b"", ring_offset=place))
            end = place + count * ROW
        expected.append(data)
    found = with_rows(pieces, ROW, lambda offset, size: ring[offset : offset + size])
    assert [bytes_of(part) for part in found] == expected
    assert [(part.request, part.count) for part in found] == [(part.request, part.count) for part in pieces]


def test_features_in_a_ring_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="not mapped"):
        with_rows([piece(1, 1, data=b"", ring_offset=0)], ROW, None)

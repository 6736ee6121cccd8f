"""Features that wait share messages, within bounds, where the draft takes them so; elsewhere they travel alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from dialled_draft import BEGIN, Context, Events, dialled, offer_layers, stay

from outrider.protocol.speculation import (
    MAX_FEATURE_BYTES,
    MAX_FEATURE_PIECES,
    FeatureRing,
    Features,
    FeaturesAccept,
    FeaturesBegin,
    FeaturesReleased,
)
from outrider.protocol.speculation_codec import decode_pieces, encode_response
from outrider.v1 import draft_pb2

pytestmark = pytest.mark.usefixtures("dialled_soon")

Received = draft_pb2.DraftServiceFeaturesRequest
ROW = BEGIN.width * 4


async def deliver(
    folder: Path, begin: FeaturesBegin, pieces: list[Features], accept: FeaturesAccept
) -> tuple[list[Received], Events]:
    """What a draft gets that accepts like this, when all pieces wait for it to do so."""
    received: list[Received] = []

    async def features(context: Context, number: int) -> None:
        await context.read()
        await context.write(encode_response(accept).SerializeToString())
        newest = 0
        while newest < pieces[-1].sequence:
            received.append(Received.FromString(await context.read()))
            newest = decode_pieces(received[-1], begin, 1 << 24)[-1][0]
            # As soon as a draft has something it may let go of it, and of no more.
            await context.write(encode_response(FeaturesReleased(newest)).SerializeToString())
        await stay(context)

    async with dialled(folder, offer_layers, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        session = events.sessions[0]
        session.begin_features(begin)
        session.send_features(pieces[:2])
        session.send_features(pieces[2:])
        await events.until(lambda: events.releases[-1:] == [pieces[-1].sequence])
        assert events.num_ended == 0
    return received, events


def small(count: int) -> list[Features]:
    return [
        Features(place % 7, place, 1, place % 2 == 0, bytes([place % 256]) * ROW, "float32", place + 1)
        for place in range(count)
    ]


def found_in(received: list[Received], begin: FeaturesBegin = BEGIN, ring_bytes: int = 0) -> list[list[Features]]:
    """The pieces of each message, which all make sense."""
    found = [[piece for _, piece in decode_pieces(message, begin, ring_bytes)] for message in received]
    assert all(piece is not None for pieces in found for piece in pieces)
    return found  # type: ignore[return-value]


async def test_what_waits_shares_a_message_and_is_released_with_it(tmp_path: Path) -> None:
    pieces = small(16)
    received, events = await deliver(tmp_path, BEGIN, pieces, FeaturesAccept(takes_batches=True))
    assert found_in(received) == [pieces]
    assert events.releases == [16]


async def test_a_draft_that_does_not_take_batches_gets_the_same_one_by_one(tmp_path: Path) -> None:
    pieces = small(5)
    received, _ = await deliver(tmp_path, BEGIN, pieces, FeaturesAccept())
    assert found_in(received) == [[piece] for piece in pieces]
    assert all(message.WhichOneof("event") == "features" for message in received)


async def test_one_that_waits_alone_travels_as_it_always_did(tmp_path: Path) -> None:
    received, _ = await deliver(tmp_path, BEGIN, small(1), FeaturesAccept(takes_batches=True))
    assert [message.WhichOneof("event") for message in received] == ["features"]


async def test_a_message_has_no_more_pieces_than_it_may(tmp_path: Path) -> None:
    pieces = small(2 * MAX_FEATURE_PIECES + 3)
    received, _ = await deliver(tmp_path, BEGIN, pieces, FeaturesAccept(takes_batches=True))
    assert [len(found) for found in found_in(received)] == [MAX_FEATURE_PIECES, MAX_FEATURE_PIECES, 3]
    assert [piece for found in found_in(received) for piece in found] == pieces


@pytest.mark.parametrize("in_ring", [False, True])
async def test_a_message_has_no_more_bytes_than_it_may_wherever_they_lie(tmp_path: Path, in_ring: bool) -> None:
    most = MAX_FEATURE_BYTES // ROW
    ring_bytes = 1 << 20
    ring = FeatureRing("here", "gpu", bytes(64), ring_bytes, bytes(32)) if in_ring else None
    begin = FeaturesBegin("", BEGIN.layers, BEGIN.width, BEGIN.dtype, ring)
    counts = [most // 2, most // 2, 1, most, 1, 1]
    pieces = [
        Features(
            *(1, sum(counts[:place]), count, False, b"" if in_ring else bytes(count * ROW), "float32", place + 1),
            ring_offset=256 if in_ring else None,
        )
        for place, count in enumerate(counts)
    ]
    accept = FeaturesAccept(uses_ring=in_ring, takes_batches=True)
    received, _ = await deliver(tmp_path, begin, pieces, accept)
    found = found_in(received, begin, ring_bytes)
    assert [[piece.count for piece in one] for one in found] == [[most // 2, most // 2], [1], [most], [1, 1]]

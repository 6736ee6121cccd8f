"""Features alone and in batches: what is sent comes back, within bounds, and nonsense harms nothing beside it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from proto_fuzz import fuzz, messages

from outrider.protocol.speculation import (
    MAX_FEATURE_BYTES,
    MAX_FEATURE_PIECES,
    Features,
    FeaturesAccept,
    FeaturesBegin,
)
from outrider.protocol.speculation_codec import (
    decode_pieces,
    decode_response,
    encode_features,
    encode_response,
)
from outrider.v1 import draft_pb2

BEGIN = FeaturesBegin("secret", (1,), 3, "float16")
ROW = 6
RING = 1 << 20
Message = draft_pb2.DraftServiceFeaturesRequest


@st.composite
def features(draw: st.DrawFn) -> Features:
    count = draw(st.integers(1, 9))
    offset = draw(st.none() | st.integers(0, RING - 9 * ROW))
    data = draw(st.binary(min_size=count * ROW, max_size=count * ROW)) if offset is None else b""
    start, final = draw(st.integers(0, 1 << 30)), draw(st.booleans())
    request, sequence = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**64 - 1))
    return Features(request, start, count, final, data, "float16", sequence, ring_offset=offset)


def over_the_wire(message: Message) -> Message:
    return Message.FromString(message.SerializeToString())


@given(st.lists(features(), min_size=1, max_size=20), st.booleans())
def test_what_is_sent_together_comes_as_what_is_sent_alone(pieces: list[Features], projected: bool) -> None:
    begin = replace(BEGIN, projected=projected)
    together = decode_pieces(over_the_wire(encode_features(pieces)), begin, RING)
    assert [piece for _, piece in together] == [replace(piece, projected=projected) for piece in pieces]
    assert [number for number, _ in together] == [piece.sequence for piece in pieces]
    for piece, found in zip(pieces, together, strict=True):
        assert decode_pieces(over_the_wire(encode_features([piece])), begin, RING) == [found]


@given(st.lists(features(), min_size=1, max_size=8), st.data())
def test_a_piece_that_makes_no_sense_harms_no_other(pieces: list[Features], data: st.DataObject) -> None:
    spoiled = data.draw(st.integers(0, len(pieces) - 1))
    change = data.draw(
        st.sampled_from([{"count": 0}, {"start": 2**32 - 1}, {"data": bytes(ROW - 1)}, {"ring_offset": 2**64 - 1}])
    )
    sent = list(pieces)
    sent[spoiled] = replace(sent[spoiled], **change)
    found = decode_pieces(over_the_wire(encode_features(sent)), BEGIN, RING)
    expected = [None if place == spoiled else piece for place, piece in enumerate(pieces)]
    assert [piece for _, piece in found] == expected
    assert [number for number, _ in found] == [piece.sequence for piece in pieces]


@fuzz
@given(messages(Message))
def test_whatever_a_message_says_its_pieces_are_whole_and_bounded(message: Message) -> None:
    found = [piece for _, piece in decode_pieces(message, BEGIN, RING) if piece is not None]
    assert sum(piece.count for piece in found) * ROW <= MAX_FEATURE_BYTES and len(found) <= MAX_FEATURE_PIECES
    for piece in found:
        size = piece.count * ROW
        assert len(piece.data) == size if piece.ring_offset is None else piece.ring_offset + size <= RING


@pytest.mark.parametrize(("count", "fits"), [(MAX_FEATURE_PIECES, True), (MAX_FEATURE_PIECES + 1, False)])
def test_a_message_has_so_many_pieces_at_most(count: int, fits: bool) -> None:
    pieces = [Features(1, place, 1, False, bytes(ROW), "float16", place + 1) for place in range(count)]
    found = decode_pieces(encode_features(pieces), BEGIN, 0)
    assert [piece is not None for _, piece in found] == [fits] * (count if fits else 1)
    assert found[-1][0] == count


@pytest.mark.parametrize(("more", "fits"), [(0, True), (1, False)])
def test_pieces_have_so_many_bytes_together_wherever_they_lie(more: int, fits: bool) -> None:
    most = MAX_FEATURE_BYTES // ROW
    pieces = [
        Features(1, 0, most // 2, False, b"", "float16", 1, ring_offset=0),
        Features(2, 0, most - most // 2 + more, False, b"", "float16", 2, ring_offset=RING // 2),
    ]
    found = decode_pieces(encode_features(pieces), BEGIN, RING)
    assert (found[0][1] is not None) is fits and found[-1][0] == 2


def test_a_message_of_no_kind_and_an_empty_batch_have_no_pieces() -> None:
    for message in (Message(), encode_features([]), Message(begin=draft_pb2.FeaturesBegin(width=3))):
        assert decode_pieces(message, BEGIN, RING) == [(0, None)]


@given(st.builds(FeaturesAccept, st.booleans(), st.integers(0, 2**64 - 1), st.booleans(), st.booleans()))
def test_what_a_draft_accepts_arrives(accept: FeaturesAccept) -> None:
    assert decode_response(encode_response(accept)) == accept


def test_a_draft_that_does_not_know_of_batches_takes_none() -> None:
    old = draft_pb2.DraftServiceFeaturesResponse(accept=draft_pb2.FeaturesAccept(uses_ring=True))
    assert decode_response(old) == FeaturesAccept(uses_ring=True, takes_batches=False)

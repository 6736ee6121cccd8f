"""The features stream as verify dials it: what it carries, and what a session does when it goes wrong."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from dialled_draft import BEGIN, THEIRS, Context, dialled, offer_layers, stay
from msgspec.structs import replace

from outrider.protocol.speculation import (
    FeatureRing,
    Features,
    FeaturesAccept,
    FeaturesReleased,
    ProjectionPart,
)
from outrider.protocol.speculation_codec import (
    decode_begin,
    decode_pieces,
    encode_draft,
    encode_response,
)
from outrider.tree.handshake import Projection, name_projection
from outrider.v1 import draft_pb2

pytestmark = pytest.mark.usefixtures("dialled_soon")


async def test_what_a_draft_takes_is_told_and_features_travel(tmp_path: Path) -> None:
    received: list[draft_pb2.DraftServiceFeaturesRequest] = []

    async def features(context: Context, number: int) -> None:
        for _ in range(3):
            received.append(draft_pb2.DraftServiceFeaturesRequest.FromString(await context.read()))
            if len(received) == 1:
                await context.write(encode_response(FeaturesAccept(window=77)).SerializeToString())
        await context.write(encode_response(FeaturesReleased(2)).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, offer_layers, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        assert events.terms[0].feature_layers == (4, 1) and events.terms[0].max_positions == 50
        session = events.sessions[0]
        session.begin_features(BEGIN)
        session.send_features([Features(3, start, 1, start == 6, bytes(64), "float32", start - 4) for start in (5, 6)])
        await events.until(lambda: events.releases == [2])
    begin = decode_begin(received[0])
    assert (begin.token, begin.layers, begin.width, begin.dtype) == ("secret", (4, 1), 16, "float32")
    pieces = [piece for message in received[1:] for _, piece in decode_pieces(message, begin, 0)]
    assert [piece and piece.final for piece in pieces] == [False, True]
    assert events.windows == [77]


@pytest.mark.parametrize("how", ["refuses", "ends", "garbles", "accepts twice", "wants a ring", "releases too much"])
async def test_a_features_stream_that_goes_wrong_ends_the_session_which_is_dialled_again(
    tmp_path: Path, how: str
) -> None:
    async def features(context: Context, number: int) -> None:
        await context.read()
        if number == 1 and how == "refuses":
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such stream")
        await context.write(encode_response(FeaturesAccept(number == 1 and how == "wants a ring")).SerializeToString())
        if number == 1 and how == "garbles":
            await context.write(b"\xff\xff\xff")
        if number == 1 and how == "accepts twice":
            await context.write(encode_response(FeaturesAccept()).SerializeToString())
        if number == 1 and how == "releases too much":
            await context.read()
            await context.write(encode_response(FeaturesReleased(2)).SerializeToString())
        if number == 1 and how == "ends":
            return
        await stay(context)

    async with dialled(tmp_path, offer_layers, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].begin_features(BEGIN)
        if how == "releases too much":
            await events.until(lambda: len(events.windows) == 1)
            events.sessions[0].send_features([Features(3, 5, 1, False, bytes(64), "float32", 1)])
        await events.until(lambda: len(events.sessions) == 2)
        assert not events.releases
        num_opened = len(events.windows)
        events.sessions[1].begin_features(BEGIN)
        await events.until(lambda: len(events.windows) == num_opened + 1)
        assert len(events.sessions) == 2


async def test_features_that_cannot_be_written_are_told_and_the_session_is_dialled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def features(context: Context, number: int) -> None:
        await context.read()
        await context.write(encode_response(FeaturesAccept()).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, offer_layers, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].begin_features(BEGIN)
        events.sessions[0].send_features([Features(3, 2**32, 1, False, bytes(64), "float32", 1)])
        await events.until(lambda: len(events.sessions) == 2)
    (fault,) = [record for record in caplog.records if record.exc_info and record.name.startswith("verify_service")]
    assert "the features stream to draft" in fault.message and "4294967296" in caplog.text


MATRIX = bytes(number % 250 for number in range(6 * 16 * 4))
PROJECTION = Projection((4, 1), 6, "float32", MATRIX, name_projection((4, 1), 6, "float32", MATRIX))
PROJECTED = replace(BEGIN, width=6, projected=True, wants_projection=True)


async def greet_with_projection(context: Context, number: int) -> None:
    await context.read()
    theirs = replace(THEIRS, hidden_size=8, feature_layers=(4, 1), features_token="secret")
    theirs = replace(theirs, projection_columns=6, projection_hash=PROJECTION.name)
    await context.write(encode_draft([theirs]).SerializeToString())
    await stay(context)


async def test_a_projection_that_is_wanted_arrives_before_the_stream_is_open(tmp_path: Path) -> None:
    received: list[bytes] = []

    async def features(context: Context, number: int) -> None:
        received.append(await context.read())
        await context.write(encode_response(FeaturesAccept(projects=True)).SerializeToString())
        for offset in range(0, len(MATRIX), 100):
            part = ProjectionPart(6, "float32", offset, MATRIX[offset : offset + 100])
            await context.write(encode_response(part).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, greet_with_projection, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        assert (events.terms[0].projection_columns, events.terms[0].projection_hash) == (6, PROJECTION.name)
        events.may_go_on.clear()
        events.sessions[0].begin_features(PROJECTED)
        await events.until(lambda: len(events.parts) == 1)
        assert not events.opened, "whoever takes the parts says when the next may come"
        events.may_go_on.set()
        await events.until(lambda: events.opened == [False])
    assert b"".join(part.data for part in events.parts) == MATRIX and len(events.parts) == 4
    begin = decode_begin(draft_pb2.DraftServiceFeaturesRequest.FromString(received[0]))
    assert begin == replace(PROJECTED, token="secret")


@pytest.mark.parametrize("how", ["keeps it", "another", "too long", "gap", "not asked"])
async def test_a_projection_that_is_not_the_one_offered_ends_the_session(tmp_path: Path, how: str) -> None:
    async def features(context: Context, number: int) -> None:
        await context.read()
        await context.write(encode_response(FeaturesAccept(projects=how != "keeps it")).SerializeToString())
        data = {"another": b"\xff" + MATRIX[1:], "too long": MATRIX + b"x"}.get(how, MATRIX)
        part = ProjectionPart(6, "float32", 4 if how == "gap" else 0, data)
        await context.write(encode_response(part).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, greet_with_projection, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        begin = replace(PROJECTED, wants_projection=how != "not asked")
        events.sessions[0].begin_features(begin)
        await events.until(lambda: len(events.sessions) == 2)
        assert not events.opened


async def test_a_ring_that_was_offered_may_be_taken(tmp_path: Path) -> None:
    received: list[bytes] = []

    async def features(context: Context, number: int) -> None:
        received.append(await context.read())
        await context.write(encode_response(FeaturesAccept(uses_ring=True)).SerializeToString())
        received.append(await context.read())
        await context.write(encode_response(FeaturesReleased(1)).SerializeToString())
        await stay(context)

    ring = FeatureRing("here", "gpu", bytes(64), 4096, bytes(32))
    async with dialled(tmp_path, offer_layers, features) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].begin_features(replace(BEGIN, ring=ring))
        events.sessions[0].send_features([Features(3, 0, 2, True, b"", "float32", 1, ring_offset=640)])
        await events.until(lambda: events.releases == [1])
    assert events.opened == [True]
    begin = decode_begin(draft_pb2.DraftServiceFeaturesRequest.FromString(received[0]))
    assert begin.ring == ring
    message = draft_pb2.DraftServiceFeaturesRequest.FromString(received[1])
    ((_, sent),) = decode_pieces(message, begin, ring.num_bytes)
    assert sent is not None
    assert (sent.ring_offset, sent.count, sent.data) == (640, 2, b"")


@pytest.mark.parametrize("how", ["ends", "cancels"])
async def test_a_draft_whose_features_stream_fails_at_once_is_dialled_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.undo()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def features(context: Context, number: int) -> None:
        await context.read()
        if how == "cancels":
            await context.abort(grpc.StatusCode.CANCELLED, "going away")

    async with dialled(tmp_path, offer_layers, features, sleep) as events:
        for count in range(1, 10):
            await events.until(lambda count=count: len(events.sessions) == count)  # type: ignore[misc]
            events.sessions[-1].begin_features(BEGIN)
        await events.until(lambda: len(events.sessions) == 10)
        events.sessions[-1].reset()
        await events.until(lambda: len(events.sessions) == 11)
    assert pauses[:9] == sorted(pauses[:9]) and pauses[0] < pauses[8]
    assert pauses[8] < 2.5, "the draft may have been mended meanwhile, and is to be in use within 5 seconds"
    assert pauses[9] == pauses[0], "a session that ends otherwise is back soon"

"""A dialer outlives whatever its draft does, and dials again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from dialled_draft import THEIRS, Context, dialled, greet, stay
from msgspec.structs import replace

from outrider.grammar.spec import Grammar, GrammarKind
from outrider.protocol.speculation import (
    Commit,
    FeaturesBegin,
    Grow,
    Open,
    Pause,
    Resume,
)
from outrider.protocol.speculation_codec import MAX_EVENTS_AT_ONCE, decode_verify, encode_draft
from outrider.rpc.lifecycle import new_event_loop
from outrider.rpc.transport import DEFAULT_MAX_MESSAGE_BYTES
from outrider.sampling.params import SamplingParams
from outrider.tree.handshake import Terms
from outrider.v1 import draft_pb2
from verify_service.door import dialer
from verify_service.door.session import DraftSession

pytestmark = pytest.mark.usefixtures("dialled_soon")


@pytest.mark.parametrize("first", ["cancels", "garbles", "ends"])
async def test_a_handshake_that_goes_wrong_is_tried_again(tmp_path: Path, first: str) -> None:
    async def behave(context: Context, number: int) -> None:
        if number == 1 and first == "cancels":
            await context.abort(grpc.StatusCode.CANCELLED, "going away")
        if number == 1 and first == "garbles":
            await context.write(b"\xff\xff\xff")
        if number > 1:
            await greet(context)
            await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)


async def test_bytes_that_are_no_message_are_dropped_and_the_session_goes_on(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        await context.write(b"\xff\xff\xff")
        await context.write(encode_draft([Grow(5, 1, 1, 1, 1)]).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.batches) == 1)
        (grow,) = events.batches[0]
        assert isinstance(grow, Grow) and grow.request == 5
        assert len(events.sessions) == 1


async def test_a_session_that_cannot_write_ends_at_once_and_is_dialled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].send([Commit(1, 2, [0], 1, 2**32, None, 8)])
        await events.until(lambda: events.num_ended == 1 and len(events.sessions) == 2)
    (fault,) = [record for record in caplog.records if record.exc_info and record.name.startswith("verify_service")]
    assert "the session with draft" in fault.message and "4294967296" in caplog.text


async def test_a_session_that_is_reset_is_dialled_again(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)
        events.sessions[0].reset()
        await events.until(lambda: len(events.sessions) == 2)


async def test_a_batch_of_very_many_events_is_taken_in_parts(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        batch = draft_pb2.DraftServiceSpeculateResponse(events=[encode_draft([Grow(5, 1, 1, 1, 1)]).events[0]] * 1000)
        await context.write(batch.SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: sum(map(len, events.batches)) == 1000)
        assert max(map(len, events.batches)) <= MAX_EVENTS_AT_ONCE


async def test_what_is_left_of_a_batch_that_ended_its_session_is_not_taken(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await greet(context)
        batch = draft_pb2.DraftServiceSpeculateResponse(events=[encode_draft([Grow(5, 1, 1, 1, 1)]).events[0]] * 1000)
        await context.write(batch.SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        events.resets = True
        await events.until(lambda: events.num_ended == 3)
        assert len(events.batches) <= events.num_ended + 1


async def test_a_draft_that_does_not_fit_is_refused_and_asked_again_later(tmp_path: Path) -> None:
    async def behave(context: Context, number: int) -> None:
        await context.read()
        theirs = THEIRS if number > 1 else replace(THEIRS, token_ids_hash="beef")
        await context.write(encode_draft([theirs]).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)
        assert events.num_ended == 0


@pytest.mark.parametrize("fault", ["differs", "finds that we differ", "ends", "garbles", "wants another token"])
async def test_a_draft_that_was_refused_again_and_again_is_soon_asked_anew_and_its_fault_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    monkeypatch.undo()  # pauses are as they are
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def behave(context: Context, number: int) -> None:
        if number > 10:
            await greet(context)
            await stay(context)
            return
        await context.read()  # a stream that ends before is a lost connection to some dials
        if fault == "differs":
            await context.write(encode_draft([replace(THEIRS, token_ids_hash="beef")]).SerializeToString())
        elif fault == "garbles":
            await context.write(b"\xff\xff\xff")
        elif fault == "finds that we differ":
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "hello.token_ids_hash: verify has 'a', not 'b'")
        elif fault == "wants another token":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong bearer token")

    async with dialled(tmp_path, behave, sleep=sleep) as events:
        await events.until(lambda: len(events.sessions) == 1)
    assert len(pauses) == 10 and 1.0 < max(pauses) < 2.5, "it is to be in use within 5 seconds"
    warnings = [
        record.msg
        for record in caplog.records
        if "is refused" in record.msg or "refuses this verify service" in record.msg
    ]
    assert len(warnings) == 1 and ("refuses this verify service" in warnings[0]) == (
        fault in ("finds that we differ", "wants another token")
    )


@pytest.mark.parametrize(("patience", "num_warnings"), [(0.0, 1), (60.0, 0)])
async def test_why_a_draft_cannot_be_reached_is_logged_after_a_while_and_seldom(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    patience: float,
    num_warnings: int,
) -> None:
    monkeypatch.setattr(dialer, "UNREACHABLE_LOG_SECONDS", patience)

    async def behave(context: Context, number: int) -> None:
        if number < 6:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"no room, {number % 2}")  # as gRPC's own words change
        await greet(context)
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)
    found = [record.getMessage() for record in caplog.records if "is not usable: no room" in record.getMessage()]
    assert len(found) == num_warnings and all(text.endswith("; trying again") for text in found)


async def test_another_reason_why_a_draft_cannot_be_reached_is_logged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dialer, "UNREACHABLE_LOG_SECONDS", 0.0)

    async def behave(context: Context, number: int) -> None:
        if number < 8:
            await context.read()  # a stream that ends before has gRPC's own words for it
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone" if number < 4 else "a certificate fails")
        await greet(context)
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        await events.until(lambda: len(events.sessions) == 1)
    reasons = [record.getMessage().partition(" is ")[2] for record in caplog.records if record.levelname == "WARNING"]
    assert reasons == ["not usable: gone; trying again", "not usable: a certificate fails; trying again"]


async def test_nonsense_is_logged_once_in_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nothing = draft_pb2.DraftServiceSpeculateResponse(events=[draft_pb2.DraftEvent()])

    async def behave(context: Context, number: int) -> None:
        await greet(context)
        for _ in range(50):
            await context.write(b"\xff\xff\xff")
            await context.write(nothing.SerializeToString())
        await context.write(encode_draft([Grow(5, 1, 1, 1, 1)]).SerializeToString())
        await stay(context)

    async with dialled(tmp_path, behave) as events:
        for count in (1, 2):
            await events.until(lambda count=count: len(events.batches) == count)  # type: ignore[misc]
            events.sessions[-1].reset()
            await events.until(lambda count=count: len(events.sessions) == count + 1)  # type: ignore[misc]
    assert sum("dropped" in record.getMessage() for record in caplog.records) == 1


async def test_commits_become_one_unless_something_else_of_their_request_is_between() -> None:
    session = DraftSession("draft", None, Terms(), None, None)  # type: ignore[arg-type]
    first, second, third = (Commit(1, length, [length], 0, 0, None, credit=length) for length in (5, 6, 7))
    session.send([first, Pause(2), second, Resume(1, 4), third])
    both = Commit(1, 5, [5, 6], 0, 0, None, credit=6)
    assert session._queue == [both, Pause(2), Resume(1, 4), third]


def test_the_log_has_neither_the_token_nor_prompts_of_a_session_whose_callback_fails() -> None:
    """uvloop, on which services run, logs such a callback with the repr of what it belongs to."""

    class Call:
        def cancel(self) -> None:
            raise RuntimeError("cannot be cancelled")

    async def end_features() -> str:
        loop, errors = asyncio.get_running_loop(), asyncio.Queue[str]()
        loop.set_exception_handler(lambda _, about: errors.put_nowait(about["message"]))
        session = DraftSession("draft", Call(), Terms(features_token="secret"), None, None)  # type: ignore[arg-type]
        session.send([Open(1, [4711], 1, SamplingParams(), 8)])
        session.begin_features(FeaturesBegin("", (1,), 8, "float32"))
        await session.close()
        return await errors.get()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        text = runner.run(end_features())
    assert "_features_ended" in text and "secret" not in text and "4711" not in text


async def test_all_requests_of_a_large_service_can_be_opened_anew() -> None:
    """With all tokens of each they are more than a message may be."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, "{}" + " " * 60000)
    opens = [Open(i, [i] * 65536, 9, SamplingParams(grammar=grammar), 8) for i in range(100)]
    written: list[draft_pb2.DraftServiceSpeculateRequest] = []

    class Call:
        async def write(self, message: draft_pb2.DraftServiceSpeculateRequest) -> None:
            written.append(message)

    session = DraftSession("draft", Call(), Terms(), None, None)  # type: ignore[arg-type]
    session.send([*opens, Pause(3)])
    writer = asyncio.create_task(session.write())
    while sum(len(message.events) for message in written) < 101:
        await asyncio.sleep(0)
    writer.cancel()
    assert max(message.ByteSize() for message in written) < DEFAULT_MAX_MESSAGE_BYTES // 4
    received = [one for message in written for one in decode_verify(message)]
    assert [one.request for one in received] == [*range(100), 3]  # type: ignore[union-attr]

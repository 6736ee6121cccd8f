"""The speculation stream over a real server, with peers that behave and peers that do not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc
import pytest
from draft_door import HELLO, Door, Stream
from draft_fakes import VOCAB, SignallingDrafter, commit_message, open_message
from msgspec.structs import replace

from draft_service.door.servicer import DraftServicer
from draft_service.engine.worker import describe
from outrider.config.draft import DraftOptions
from outrider.drafting.base import Needs
from outrider.drafting.ngram.drafter import NgramDrafter
from outrider.errors import OutriderError, OverloadedError
from outrider.protocol.speculation import Close, Decline, DeclineReason, Grow, Hello
from outrider.protocol.speculation_codec import encode_verify
from outrider.rpc.status import error_from_rpc
from outrider.v1 import draft_pb2

Serve = Callable[..., Awaitable[Door]]


async def acknowledged(stream: Stream, length: int, request: int = 1) -> Grow:
    """The first message that acknowledges `length` committed tokens."""
    while True:
        message = await stream.receive()
        if isinstance(message, Grow) and (message.request, message.acked_len) == (request, length):
            return message


async def ended(stream: Stream) -> tuple[grpc.StatusCode, OutriderError]:
    """Status and meaning of a stream that the service ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while True:
            await stream.receive()
    return caught.value.code(), error_from_rpc(caught.value)


async def freed(drafter: SignallingDrafter) -> bool:
    """Whether the last open request was closed, within ten seconds."""
    return await asyncio.to_thread(drafter.empty.wait, 10)


async def test_hello_tells_both_sides_who_is_there(serve: Serve) -> None:
    door = await serve(NgramDrafter(DraftOptions()), max_positions=500)
    hello = await door.stream().hello()
    assert isinstance(hello, Hello)
    assert hello.sources == ("ngram", "ngram_shared")
    assert (hello.protocol_version, hello.noise_version) == (HELLO.protocol_version, HELLO.noise_version)
    assert (hello.model, hello.max_positions) == ("NGRAM", 500)


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (replace(HELLO, protocol_version=77), ("protocol_version", "77", str(HELLO.protocol_version))),
        (replace(HELLO, noise_version=99), ("noise_version", "99", str(HELLO.noise_version))),
        (replace(HELLO, hidden_size=32), ("hidden_size", "32", "64")),
        (replace(HELLO, hidden_size=64, num_layers=3), ("feature_layers", "3 layers", "(2, 5)")),
        (replace(HELLO, token_ids_hash="beef"), ("token_ids_hash", "beef", "cafe")),
    ],
)
async def test_what_does_not_fit_is_refused_naming_both_values(
    serve: Serve, hello: Hello, words: tuple[str, ...]
) -> None:
    drafter = SignallingDrafter()
    if "hash" in words[0]:
        drafter.needs = Needs(token_ids_hash="cafe")
    elif "version" not in words[0]:
        drafter.needs = Needs(hidden_size=64, feature_layers=(2, 5))
    stream = (await serve(drafter)).stream()
    await stream.send(hello)
    code, error = await ended(stream)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert all(word in error.message for word in words)


async def test_a_stream_that_does_not_begin_with_hello_is_refused(serve: Serve) -> None:
    stream = (await serve()).stream()
    await stream.send(open_message([1]))
    code, error = await ended(stream)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "hello" in error.message


async def test_an_empty_vocabulary_is_refused(serve: Serve) -> None:
    stream = (await serve()).stream()
    await stream.send(replace(HELLO, vocab_size=0))
    code, error = await ended(stream)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "vocab_size" in error.message


async def test_sessions_of_two_targets_do_not_mix_but_may_follow_each_other(serve: Serve) -> None:
    drafter = SignallingDrafter()
    door = await serve(drafter)
    first, second = door.stream(), door.stream()
    await first.hello()
    await first.send(open_message([1]))
    await acknowledged(first, 1)
    await second.send(replace(HELLO, vocab_size=200))
    code, error = await ended(second)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "100" in error.message and "200" in error.message
    first.call.cancel()
    assert await freed(drafter)
    third = door.stream()
    await third.send(replace(HELLO, vocab_size=200))
    assert isinstance(await third.receive(), Hello)


async def test_guesses_come_and_commits_are_acknowledged(serve: Serve) -> None:
    door = await serve(NgramDrafter(DraftOptions()))
    stream = door.stream()
    await stream.hello()
    text = list(range(20, 50))
    await stream.send(open_message([*text, *text[:3]]))
    grown = (await acknowledged(stream, 33)).token_ids
    while len(grown) < 5:  # a slow machine grows it in several messages
        grown += (await acknowledged(stream, 33)).token_ids
    assert grown[:5] == text[3:8]
    await stream.send(commit_message(33, [99]))
    assert (await acknowledged(stream, 34)).epoch == 2
    await stream.send(Close(1))
    info = await door.info()
    assert list(info.sources) == ["ngram", "ngram_shared"]
    assert info.num_sessions == 1


async def test_events_beside_hello_are_heard(serve: Serve) -> None:
    stream = (await serve()).stream()
    await stream.send(HELLO, open_message([1, 2]))
    assert isinstance(await stream.receive(), Hello)
    await acknowledged(stream, 2)


def broken_events() -> list[tuple[str, draft_pb2.VerifyEvent]]:
    return [
        ("no whole number", draft_pb2.VerifyEvent(open=draft_pb2.Open(request=5, token_ids=b"abc", prompt_len=1))),
        ("no tokens", draft_pb2.VerifyEvent(open=draft_pb2.Open(request=5, prompt_len=1))),
        ("prompt too long", draft_pb2.VerifyEvent(open=draft_pb2.Open(request=5, token_ids=b"\1\0\0\0", prompt_len=9))),
        ("commit of nothing", draft_pb2.VerifyEvent(commit=draft_pb2.Commit(request=5, length_before=1))),
        ("bad token", draft_pb2.VerifyEvent(open=draft_pb2.Open(request=5, token_ids=b"\xff" * 4, prompt_len=1))),
    ]


@pytest.mark.parametrize(("name", "event"), broken_events())
async def test_a_malformed_event_is_declined_and_its_neighbours_are_served(
    serve: Serve, name: str, event: draft_pb2.VerifyEvent
) -> None:
    door = await serve()
    stream = door.stream()
    await stream.hello()
    good = encode_verify([open_message([1, 2]), commit_message(2, [3])])
    batch = draft_pb2.DraftServiceSpeculateRequest(events=[good.events[0], event, good.events[1]])
    await stream.send_raw(batch)
    await stream.send(commit_message(3, [4]))
    received = [await stream.receive()]
    while not (isinstance(received[-1], Grow) and received[-1].acked_len == 4):
        received.append(await stream.receive())
    declines = [message for message in received if isinstance(message, Decline)]
    assert [(decline.request, decline.reason.name, decline.retryable) for decline in declines] == [
        (5, "INVALID", False)
    ]
    assert await door.count("messages_dropped_total", reason="malformed") == 1
    assert (await door.info()).num_requests == 1


async def test_bytes_that_are_no_message_are_dropped_and_the_stream_goes_on(serve: Serve) -> None:
    door = await serve()
    call = door.channel.stream_stream(
        "/outrider.v1.DraftService/Speculate",
        request_serializer=bytes,
        response_deserializer=draft_pb2.DraftServiceSpeculateResponse.FromString,
    )()
    await call.write(encode_verify([HELLO]).SerializeToString())
    await call.read()
    await call.write(b"\xff\xff\xff")
    await call.write(encode_verify([open_message([1, 2])]).SerializeToString())
    assert (await call.read()).events[0].grow.acked_len == 2
    assert await door.count("messages_dropped_total", reason="malformed") == 1
    call.cancel()


async def test_further_hellos_are_dropped_and_counted_and_the_stream_goes_on(serve: Serve) -> None:
    door = await serve()
    stream = door.stream()
    await stream.hello()
    await stream.send(HELLO, open_message([1, 2]), replace(HELLO, model="another", vocab_size=VOCAB + 1))
    await acknowledged(stream, 2)
    await stream.send(commit_message(2, [VOCAB - 1]))
    await acknowledged(stream, 3)
    assert await door.count("messages_dropped_total", reason="unexpected") == 2


async def test_absurd_numbers_harm_nobody(serve: Serve) -> None:
    door = await serve()
    stream = door.stream()
    await stream.hello()
    await stream.send(open_message([1, 2], credit=2**32 - 1), open_message([3], request=2**64 - 1))
    huge = draft_pb2.Commit(
        request=1, length_before=2**32 - 1, token_ids=b"\1\0\0\0", epoch=2**64 - 1, received_through=2**32 - 1
    )
    wild = draft_pb2.Commit(
        request=1,
        length_before=2,
        token_ids=b"\3\0\0\0",
        epoch=2**64 - 1,
        received_through=2**32 - 1,
        resolved_root=2**32 - 1,
        credit=2**32 - 1,
    )
    events = [draft_pb2.VerifyEvent(commit=huge), draft_pb2.VerifyEvent(commit=wild)]
    await stream.send_raw(draft_pb2.DraftServiceSpeculateRequest(events=events))
    await acknowledged(stream, 3)
    assert (await door.info()).num_nodes <= 128


async def test_a_peer_that_does_not_read_loses_its_session_and_no_other_does(serve: Serve) -> None:
    door = await serve(max_queued=16)
    healthy, slow = door.stream(), door.stream()
    await healthy.hello()
    await slow.hello()
    await healthy.send(open_message([1, 2]))
    await acknowledged(healthy, 2)
    await slow.send(*[open_message([1, 2], request=number) for number in range(40)])
    length = 2
    while (await door.info()).num_sessions == 2:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it may have ended meanwhile
            # Each is a miss, answered with a whole tree.
            await slow.send(*[commit_message(length, [90], request=number) for number in range(40)])
        length += 1
    await healthy.send(commit_message(2, [3]))
    await acknowledged(healthy, 3)
    assert (await door.info()).num_requests == 1


@pytest.mark.parametrize("how", ["cancel", "half_close"])
async def test_the_end_of_a_stream_frees_everything_of_it(serve: Serve, how: str) -> None:
    drafter = SignallingDrafter()
    door = await serve(drafter)
    stream = door.stream()
    await stream.hello()
    await stream.send(*[open_message([1, 2, number], request=number) for number in range(10)])
    for number in range(10):
        await acknowledged(stream, 3, request=number)
    if how == "cancel":
        stream.call.cancel()
    else:
        await stream.call.done_writing()
    assert await freed(drafter)
    info = await door.info()
    assert (info.num_requests, info.num_nodes) == (0, 0)


async def test_after_a_reconnect_everything_is_opened_anew(serve: Serve) -> None:
    drafter = SignallingDrafter()
    door = await serve(drafter)
    old = door.stream()
    await old.hello()
    await old.send(open_message([1, 2]), commit_message(2, [50]))
    assert (await acknowledged(old, 3)).epoch == 2
    old.call.cancel()
    assert await freed(drafter)
    new = door.stream()
    await new.hello()
    await new.send(commit_message(3, [51]))
    declined = await new.receive()
    assert isinstance(declined, Decline) and declined.retryable
    await new.send(open_message([1, 2, 50, 51]))
    grow = await acknowledged(new, 4)
    assert (grow.epoch, grow.base_len) == (1, 4)


async def test_too_many_sessions_are_refused(serve: Serve) -> None:
    door = await serve(max_sessions=1)
    await (first := door.stream()).hello()
    second = door.stream()
    await second.send(HELLO)
    code, error = await ended(second)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-sessions" in error.message
    await first.send(open_message([1]))
    await acknowledged(first, 1)


async def test_draining_waits_for_open_requests_and_opens_no_more(serve: Serve) -> None:
    door = await serve()
    stream = door.stream()
    await stream.hello()
    await stream.send(open_message([1, 2]))
    await acknowledged(stream, 2)
    draining = asyncio.create_task(door.engine.drain())
    await asyncio.sleep(0)
    await stream.send(open_message([7], request=2))
    declined = await stream.receive()
    while not isinstance(declined, Decline):
        declined = await stream.receive()
    assert declined.reason.name == "DRAINING"
    assert not draining.done()
    await stream.send(commit_message(2, [3]))
    await acknowledged(stream, 3)
    await stream.send(Close(1))
    await draining


async def test_draining_waits_as_long_as_a_request_is_open(serve: Serve) -> None:
    door = await serve()
    stream = door.stream()
    await stream.hello()
    await stream.send(open_message([1, 2]))
    await acknowledged(stream, 2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(door.engine.drain(), 0.2)
    assert (await door.info()).num_requests == 1


async def test_what_happens_is_counted(serve: Serve) -> None:
    door = await serve()
    stream = door.stream()
    await stream.hello()
    await stream.send(open_message([1, 2]))
    await acknowledged(stream, 2)
    await stream.send(commit_message(2, [VOCAB - 1]), commit_message(9, [1]), commit_message(1, [1], request=8))
    await acknowledged(stream, 3)
    await stream.send(commit_message(3, [5]))
    await acknowledged(stream, 4)
    assert await door.count("commits_total", outcome="miss") >= 1
    assert await door.count("commits_total", outcome="gap") == 1
    assert await door.count("declines_total", reason="gap") == 1
    assert await door.count("declines_total", reason="unknown_request") == 1
    assert await door.count("messages_dropped_total", reason="unknown_request") == 1
    assert await door.count("nodes_grown_total", source="scripted") > 0
    assert await door.count("growth_seconds_count") > 0
    assert await door.count("answer_seconds_count", phase="send") == 2
    assert await door.count("answer_seconds_count", phase="burst") == 0


async def test_a_peer_that_reads_nothing_at_all_is_let_go(serve: Serve) -> None:
    door = await serve(max_queued=16)

    class Deaf:
        """A stream on which every write but hello's waits for good."""

        def __init__(self) -> None:
            self.batches = [encode_verify([HELLO]), encode_verify([open_message([1, 2])])]
            self.written = 0

        async def read(self) -> object:
            return self.batches.pop(0) if self.batches else await asyncio.Event().wait()

        async def write(self, message: object) -> None:
            self.written += 1
            if self.written > 1:
                unread.set()
                await asyncio.Event().wait()

    unread = asyncio.Event()
    options = DraftOptions(max_queued=16)
    profile = describe(door.drafter, options)
    servicer = DraftServicer(door.engine, door.thread.features, profile, options, door.metrics)
    deaf = Deaf()
    serving = asyncio.create_task(servicer.Speculate(None, deaf))  # type: ignore[arg-type]
    await unread.wait()
    for session in servicer._sessions:
        session.send([Decline(1, DeclineReason.GAP, True)] * 17)
        session.send([Decline(1, DeclineReason.GAP, True)])
    with pytest.raises(OverloadedError, match="16"):
        await serving
    assert servicer.num_sessions == 0


async def test_a_message_of_countless_events_leaves_the_others_their_turn(serve: Serve) -> None:
    door = await serve()
    stream, other = door.stream(), door.stream()
    await stream.hello()
    await other.hello()
    turns = 0
    hand_over = door.engine.submit

    def counting(session: object, messages: object) -> None:
        nonlocal turns
        turns += 1
        hand_over(session, messages)  # type: ignore[arg-type]

    door.engine.submit = counting  # type: ignore[method-assign]
    pause = draft_pb2.VerifyEvent(pause=draft_pb2.Pause(request=1))
    await stream.send(open_message([1, 2]))
    await stream.send_raw(draft_pb2.DraftServiceSpeculateRequest(events=[pause] * 10_000))
    await stream.send(commit_message(2, [3]))
    await acknowledged(stream, 3)
    assert turns > 10_000 // 256

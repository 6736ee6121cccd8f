"""Lines: verify engines of the same host, which speak to the draft's engine past its door. A real service process."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import select
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

import grpc
import msgspec
import pytest
from draft_door import HELLO, Stream
from draft_fakes import open_message
from msgspec.structs import replace
from service_process import start_door, wait_until

from draft_service.engine.inbox import VerifyLines
from outrider.config.draft import DraftOptions
from outrider.host.frames import FromVerify
from outrider.host.line import (
    MAX_LINE_FRAME_BYTES,
    MAX_STALL_SECONDS,
    MAX_UNSENT_BYTES,
    DraftBatch,
    FeatureBatch,
    Line,
    LineHello,
    Listener,
    VerifyBatch,
    dial,
    host_id,
    line_host,
    packing_digest,
    to_draft,
    to_verify,
)
from outrider.protocol.speculation import (
    Close,
    Decline,
    DeclineReason,
    DraftMessage,
    Grow,
    Hello,
    LineOffer,
    VerifyMessage,
)
from outrider.rpc.channel import open_channel


@asynccontextmanager
async def service(folder: Path, *options: str) -> AsyncIterator[grpc.aio.Channel]:
    """A draft service of n-grams."""
    ready = folder / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "draft_service", "--address", f"unix:{folder / 'draft.sock'}"),
        *("--speculative-algorithm=NGRAM", "--metrics-address=", "--ready-file", str(ready), *options),
    )
    try:
        async with asyncio.timeout(60):
            while not ready.exists():
                assert process.returncode is None
                await asyncio.sleep(0.01)
        async with open_channel(json.loads(ready.read_text())["address"]) as channel:
            yield channel
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 30) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a draft service of n-grams, whose sessions know nothing of each other."""
    folder = tmp_path_factory.mktemp("draft")
    options = DraftOptions(
        address=f"unix:{folder / 'draft.sock'}",
        speculative_algorithm=("NGRAM",),
        metrics_address="",
        ready_file=str(folder / "ready.json"),
    )
    with start_door("draft_service", options) as door:
        wait_until(Path(options.ready_file).exists)
        yield options.address
        door.terminate()
        assert door.wait(30) == 0


async def offer_of(stream: Stream) -> LineOffer:
    hello = await stream.hello()
    assert isinstance(hello, Hello)
    assert hello.line is not None
    return hello.line


_open: list[Line[DraftBatch]] = []


@pytest.fixture(autouse=True)
def hang_up() -> Iterator[None]:
    """End the calls of a test."""
    yield
    while _open:
        _open.pop().close()


def call(offer: LineOffer) -> Line[DraftBatch]:
    line = dial(offer.host, offer.path, offer.token)
    assert line is not None
    _open.append(line)
    return line


def send(line: Line[DraftBatch], *messages: VerifyMessage) -> None:
    line.send(VerifyBatch(list(messages)))


async def receive(line: Line[DraftBatch]) -> list[DraftMessage]:
    """The next messages; none if the line is closed."""
    async with asyncio.timeout(20):
        while not line.closed:
            if batches := line.receive():
                return [message for batch in batches for message in batch.messages]
            await asyncio.sleep(0)
    return []


async def receive_first_token(line: Line[DraftBatch], request: int) -> int:
    """The first token that grows for a request: messages of others, or an acknowledgement, may come before."""
    while messages := await receive(line):
        for message in messages:
            if isinstance(message, Grow) and message.request == request and len(message.token_ids):
                return int(message.token_ids[0])
    raise AssertionError("the line was closed")


async def drain(line: Line[DraftBatch]) -> None:
    """Until the line is closed: what the draft sent before may still come in."""
    while await receive(line):
        pass


async def ends(stream: Stream) -> grpc.StatusCode:
    async with asyncio.timeout(20):
        return await stream.ended()


async def test_trees_grow_on_a_line_and_the_stream_stays_silent(address: str) -> None:
    async with open_channel(address) as channel:
        stream = Stream(channel)
        line = call(await offer_of(stream))
        send(line, open_message([1, 2, 3, 1, 2]))
        assert await receive_first_token(line, request=1) == 3
        send(line, Close(1))
        # What comes through the stream is answered, too, and the answer takes the line.
        await stream.send(open_message([5, 6, 7, 5, 6], request=2))
        assert await receive_first_token(line, request=2) == 7
        stream.call.cancel()
        await drain(line)


async def test_a_batch_of_no_features_harms_nobody(tmp_path: Path) -> None:
    async with service(tmp_path) as channel:
        stream = Stream(channel)
        line = call(await offer_of(stream))
        for _ in range(40):  # an engine whose turns fail so often ends
            line.send(FeatureBatch([]))
        send(line, open_message([1, 2, 3, 1, 2]))
        assert await receive_first_token(line, request=1) == 3


async def test_sessions_have_lines_of_their_own(address: str) -> None:
    async with open_channel(address) as channel:
        streams = [Stream(channel) for _ in range(3)]
        lines = [call(await offer_of(stream)) for stream in streams]
        for number, line in enumerate(lines):
            send(line, open_message([40 + number, 20, 9 + number, 40 + number, 20]))
        for number, line in enumerate(lines):
            assert await receive_first_token(line, request=1) == 9 + number


async def test_a_line_that_is_lost_ends_its_session_and_no_other(address: str) -> None:
    async with open_channel(address) as channel:
        lost, other = Stream(channel), Stream(channel)
        first, second = call(await offer_of(lost)), call(await offer_of(other))
        send(first, open_message([1, 2, 3, 1, 2]))
        await receive(first)
        first.close()
        assert await ends(lost) is grpc.StatusCode.UNAVAILABLE
        send(second, open_message([1, 2, 3, 1, 2]))
        assert await receive(second)
        # The session can be had again.
        renewed = Stream(channel)
        third = call(await offer_of(renewed))
        send(third, open_message([1, 2, 3, 1, 2]))
        assert await receive(third)


@pytest.mark.parametrize("kind", ["garbage", "absurd length", "another hello", "wrong message"])
async def test_what_makes_no_sense_ends_the_session(kind: str, address: str) -> None:
    async with open_channel(address) as channel:
        stream = Stream(channel)
        line = call(await offer_of(stream))
        send(line, open_message([1, 2, 3, 1, 2]))
        assert await receive(line)
        match kind:
            case "garbage":
                os.write(line.fileno(), b"\x03\x00\x00\x00abc")
            case "absurd length":
                os.write(line.fileno(), b"\xff\xff\xff\xff")
            case "another hello":
                line.send(LineHello("again"))
            case _:
                line.send(DraftBatch([Grow(1, 0, 5, 5, 1)]))
        await drain(line)
        assert await ends(stream) is grpc.StatusCode.UNAVAILABLE


async def test_who_names_no_session_is_sent_away(address: str) -> None:
    async with open_channel(address) as channel:
        stream = Stream(channel)
        offer = await offer_of(stream)
        assert await receive(call(replace(offer, token="0" * 32))) == []
        silent = call(replace(offer, token="1" * 32))
        silent.send(VerifyBatch([Close(1)]))
        assert await receive(silent) == []
        line = call(offer)
        send(line, open_message([1, 2, 3, 1, 2]))
        assert await receive(line)
        # A token is good for one call.
        assert await receive(call(offer)) == []


async def test_lines_can_be_turned_off(tmp_path: Path) -> None:
    async with service(tmp_path, "--local-line=off") as channel:
        hello = await Stream(channel).hello()
        assert isinstance(hello, Hello)
        assert hello.line is None


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A socket's path has room for 107 bytes, and `tmp_path` may take most of them."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="lines-") as name:
        yield Path(name)


async def test_a_socket_may_lie_in_a_folder_and_goes_with_the_service(tmp_path: Path, short_folder: Path) -> None:
    folder = short_folder
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "outrider-dead"))
    async with service(tmp_path, f"--local-line={folder}") as channel:
        stream = Stream(channel)
        offer = await offer_of(stream)
        assert [path.name for path in folder.iterdir()] == [Path(offer.path).name]
        line = call(offer)
        send(line, open_message([1, 2, 3, 1, 2]))
        assert await receive(line)
    assert not list(folder.iterdir())


def test_drafts_that_start_together_leave_each_others_sockets_alone(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [lambda: Listener(str(short_folder)).close()]

    class Slow(socket.socket):
        def listen(self, *pending: int) -> None:
            while others:
                others.pop()()
            super().listen(*pending)

    monkeypatch.setattr(socket, "socket", Slow)
    listener = Listener(str(short_folder))
    line = dial(listener.host, listener.path, "token")
    assert line is not None
    line.close()
    listener.close()
    assert not list(short_folder.iterdir())


def test_a_caller_without_a_descriptor_for_it_is_turned_away_and_the_next_is_taken() -> None:
    listener, poll = Listener(), select.poll()
    poll.register(listener.fileno(), select.POLLIN)
    first = dial(listener.host, listener.path, "token")
    assert first is not None and poll.poll(0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull, "rb") as lowest:
        free = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        assert listener.accept() == []
        assert not poll.poll(0), "an engine that waits for the listener would spin"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    first.receive()
    assert first.closed
    second = dial(listener.host, listener.path, "token")
    (line,) = listener.accept()
    assert second is not None
    for one in (first, second, line, listener):
        one.close()


def test_only_this_host_is_called(tmp_path: Path) -> None:
    assert dial("another host", str(tmp_path / "line"), "token") is None
    assert dial(line_host(), str(tmp_path / "line"), "token") is None
    assert dial(line_host(), "", "token") is None
    assert dial(line_host(), "x" * 400, "token") is None
    assert dial(line_host(), "a\0b", "token") is None
    assert dial(line_host(), "@outrider-nobody", "token") is None


def test_a_draft_of_a_release_that_packs_messages_otherwise_is_not_called(short_folder: Path) -> None:
    listener = Listener(str(short_folder))
    for host in (host_id(), f"{host_id()}/0123456789abcdef"):  # what the first releases sent, and what others may send
        assert dial(host, listener.path, "token") is None
    assert listener.accept() == []
    listener.close()


def test_a_value_more_of_an_enumeration_is_another_way_to_pack() -> None:
    def packed(*names: str) -> str:
        reason = IntEnum("Reason", names)  # type: ignore[misc]
        return packing_digest((msgspec.defstruct("Said", [("reason", reason)], array_like=True),))

    assert packed("GAP", "DRAINING") == packed("GAP", "DRAINING") != packed("GAP", "DRAINING", "TIRED")


def test_a_hello_without_its_line_is_as_before() -> None:
    assert HELLO.line is None


def test_more_than_may_wait_is_sent_while_it_is_read_and_loses_the_line_while_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("outrider.host.line.time", SimpleNamespace(monotonic=lambda: now))
    here, there = socket.socketpair()
    line, reader = Line(here, to_verify), Line(there, to_draft)
    prompts = [open_message(list(range(100_000, 400_000)), request=number) for number in range(24)]
    line.send(VerifyBatch(list(prompts)))
    assert line.backlog > MAX_LINE_FRAME_BYTES and not line.closed
    seen: list[int] = []
    while len(seen) < len(prompts):
        now += 0.9 * MAX_STALL_SECONDS
        line.flush()
        batches = [frame for frame in reader.receive() if isinstance(frame, VerifyBatch)]
        seen += [message.request for batch in batches for message in batch.messages]
    assert seen == [message.request for message in prompts] and not line.closed and not reader.closed
    line.send(VerifyBatch(prompts[:12]))
    now += 1.1 * MAX_STALL_SECONDS
    line.send(VerifyBatch([]))
    assert line.closed and not line.backlog
    reader.close()


def test_a_line_that_stalls_leaves_its_place_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.host.line.MAX_STALL_SECONDS", 0.0)
    listener, poll = Listener(), select.poll()
    lines = VerifyLines(listener, poll)

    def named(session: int, token: str) -> None:
        lines.expect(session, token)
        lines.take(lines.accept())

    call(LineOffer(listener.host, listener.path, "one"))
    named(1, "one")
    lines.send(1, [Decline(1, DeclineReason.OVERLOADED, True, "x" * 2 * MAX_UNSENT_BYTES)])
    other = call(LineOffer(listener.host, listener.path, "two"))
    lines.flush()
    assert lines.lost == [1]
    # The new line's socket may have the number of the lost one's.
    named(2, "two")
    assert not poll.poll(0)
    send(other, Close(7))
    assert poll.poll(0)
    assert lines.take([]) == [FromVerify(2, [Close(7)])]
    lines.close()

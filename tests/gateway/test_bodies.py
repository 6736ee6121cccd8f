"""What a body costs before it is understood: time, places and memory."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_world import World, open_world, until
from hypothesis import given
from hypothesis import strategies as st
from scripted_verify import ScriptedVerify
from starlette.requests import Request

import gateway.http.body as body_module
from gateway.core.json_size import count_json
from gateway.http.body import BodyReader
from outrider.errors import OverloadedError

TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}


@asynccontextmanager
async def unfinished_body(world: World, path: str = TEXT, sent: bytes = b"{") -> AsyncIterator[asyncio.StreamReader]:
    """A client that has sent the head, a part of the body, and nothing more."""
    reader, writer = await asyncio.open_connection(*world.rest.removeprefix("http://").split(":"))
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 900000\r\n"
    writer.write(f"{head}expect: 100-continue\r\n\r\n".encode())
    await reader.readuntil(b"100 Continue")  # its body is being waited for
    await reader.readline()
    writer.write(sent)
    try:
        yield reader
    finally:
        writer.close()


@pytest.mark.parametrize("path", [TEXT, "/v1/chat/completions", "/generate", "/tokenize"])
async def test_who_still_sends_its_body_holds_no_place(verify: ScriptedVerify, tmp_path: Path, path: str) -> None:
    verify.set_answer("ok")
    async with open_world(verify, tmp_path, max_answers=1) as world, unfinished_body(world, path):
        assert (await world.http.post(TEXT, json={"prompt": "x"})).status_code == 200
        assert "outrider_gateway_answers_in_flight 0.0" in (await world.http.get("/metrics")).text


async def test_when_all_places_are_taken_no_body_is_waited_for(verify: ScriptedVerify, tmp_path: Path) -> None:
    verify.set_answer("one two three")
    verify.gate = asyncio.Event()
    async with open_world(verify, tmp_path, max_answers=1) as world:
        first = asyncio.create_task(world.http.post(TEXT, json={"prompt": "x"}))
        await until(lambda: verify.num_open)
        reader, writer = await asyncio.open_connection(*world.rest.removeprefix("http://").split(":"))
        head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 900000\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 429")
        writer.close()
        verify.gate.set()
        assert (await first).status_code == 200


def request(parts: list[bytes], end: asyncio.Event | None = None) -> Request:
    """A request whose body comes in parts; with `end` its client leaves before the last one, when that is set."""
    left = list(parts)

    async def receive() -> dict[str, Any]:
        if not left and end is not None:
            await end.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or end is not None}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


async def read(bodies: BodyReader, request: Request, check: Any) -> Any:
    async with bodies.open(request, check) as made:
        return made


async def test_long_bodies_under_way_shut_out_long_ones_alone() -> None:
    bodies = BodyReader(max_bytes=200_000, seconds=600)
    long, end = json.dumps({"a": "y" * 198_000}).encode(), asyncio.Event()
    assert await read(bodies, request([long]), len) == 1
    # 32 of the greatest length, but for the first 64 KiB of each.
    held = [
        asyncio.create_task(read(bodies, request([b" " * 150_000, b" " * 49_000], end), len))
        for _ in range(32 * 200_000 // (199_000 - 65536))
    ]
    while True:  # until all have been read as far as they go
        await asyncio.sleep(0)
        try:
            await read(bodies, request([long]), len)
        except OverloadedError as error:
            assert "6400000 bytes" in error.message
            break
    assert await read(bodies, request([b'{"a": 1}']), len) == 1
    end.set()
    left = await asyncio.gather(*held, return_exceptions=True)
    assert {getattr(error, "code", None) for error in left} == {"client_closed"}
    assert await read(bodies, request([long]), len) == 1


async def test_a_long_body_is_read_and_checked_beside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    plain = body_module.from_json

    def watched(data: bytes, **options: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return plain(data, **options)

    monkeypatch.setattr(body_module, "from_json", watched)
    world.verify.set_answer("ok")
    for note, inline in (("x", True), ("x" * 300_000, False)):
        asked = {"prompt": "x", "metadata": {"note": note}}
        assert (await world.http.post(TEXT, json=asked)).status_code == 200
        assert threads.pop() is inline


async def test_a_byte_order_mark_before_a_body_is_passed_over(world: World) -> None:
    world.verify.set_answer("ok")
    for note in ("x", "x" * 300_000):
        body = b"\xef\xbb\xbf" + json.dumps({"prompt": "x", "metadata": {"note": note}}).encode()
        assert (await world.http.post(TEXT, content=body, headers=JSON)).status_code == 200
    twice = await world.http.post(TEXT, content=b"\xef\xbb\xbf" * 2 + b"{}", headers=JSON)
    assert twice.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("[]", "lists and objects, over the limit of 65536"),
        ("{}", "lists and objects, over the limit of 65536"),
        ("1", "values, over the limit of 1114112"),
        ('"a"', "values, over the limit of 1114112"),
    ],
)
async def test_a_body_of_millions_of_values_is_refused_before_they_are_made(
    world: World, part: str, words: str
) -> None:
    content = f'{{"prompt": "x", "metadata": {{"a": [{",".join([part] * 1_500_000)}]}}}}'.encode()
    refused = await world.http.post(TEXT, content=content, headers=JSON)
    assert refused.status_code == 400 and words in refused.json()["error"]["message"]


async def test_a_body_of_too_many_members_is_refused_and_one_of_many_marks_in_a_text_is_not(world: World) -> None:
    members = {"prompt": "x", "metadata": {str(i): 1 for i in range(140_000)}}
    refused = await world.http.post(TEXT, json=members)
    assert refused.status_code == 400 and "members of objects" in refused.json()["error"]["message"]
    world.verify.set_answer("ok")
    text = {"prompt": "x", "metadata": {"code": '{"a": [1, "b\\\\"]},' * 100_000}}
    assert (await world.http.post(TEXT, json=text)).status_code == 200


values = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\[]{}:,\n') | st.booleans(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\:,{['), inner),
    max_leaves=30,
)


@given(values)
def test_values_are_counted_as_a_parser_would_make_them(value: Any) -> None:
    def count(part: Any) -> tuple[int, int, int]:
        if not isinstance(part, list | dict):
            return 0, 0, 0
        inner = [count(one) for one in (part.values() if isinstance(part, dict) else part)]
        members = len(part) if isinstance(part, dict) else 0
        sums = [sum(column) for column in zip(*inner, strict=True)] or [0, 0, 0]
        return sums[0] + 1, sums[1] + members, sums[2] + max(0, len(part) - 1)

    assert count_json(json.dumps(value).encode()) == count(value)

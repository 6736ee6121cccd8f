"""What OpenAPI promises, tried with bodies that keep to it and bodies that do not: never a failure of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from gateway_world import World, open_world
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from proto_fuzz import EXAMPLES, INTERNALS, fuzz
from schemathesis.generation import GenerationMode
from scripted_verify import ScriptedVerify

pytestmark = pytest.mark.usefixtures("nothing_fails")

few = settings(fuzz, max_examples=EXAMPLES // 5)


@pytest.fixture
async def world(verify: ScriptedVerify, tmp_path: Path) -> AsyncIterator[World]:
    # Making up cases keeps this process so busy that a look at verify might come too late.
    async with open_world(verify, tmp_path, probe_seconds=600.0) as running:
        yield running


def check(status: int, text: str, place: str) -> None:
    assert status < 500, f"{place}: {status} {text[:500]}"
    if status >= 400:
        error = json.loads(text)["error"]
        assert error["message"] and error["code"] and error["type"], f"{place}: {text[:500]}"
        assert not INTERNALS.search(error["message"]), error["message"]


async def still_serves(world: World) -> None:
    response = await world.http.post("/v1/completions", json={"prompt": "x"})
    assert response.json()["choices"][0]["text"] == "ok"


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
async def test_every_operation_of_the_document(world: World, mode: GenerationMode) -> None:
    world.verify.set_answer("ok")
    document = (await world.http.get("/openapi.json")).json()
    schema = schemathesis.openapi.from_dict(document)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 6
    loop = asyncio.get_running_loop()

    def attack(operation: Any) -> None:
        @few
        @given(operation.as_strategy(generation_mode=mode))
        def one(case: Any) -> None:
            request = case.as_transport_kwargs(base_url=world.rest)
            arguments = {name: request[name] for name in ("method", "url", "params") if request.get(name) is not None}
            headers = {str(name): str(value) for name, value in (request.get("headers") or {}).items()}
            arguments |= {name: request[name] for name in ("json",) if name in request}
            if request.get("data") is not None and "json" not in arguments:
                data = request["data"]
                arguments["content"] = data if isinstance(data, (bytes, str)) else json.dumps(data)
            call = world.http.request(**arguments, headers=headers)
            response = asyncio.run_coroutine_threadsafe(call, loop).result(60)
            check(response.status_code, response.text, operation.label)

        one()

    for operation in operations:
        # Nothing wrong can be sent where nothing is taken.
        if mode is GenerationMode.POSITIVE or operation.label.startswith("POST"):
            await asyncio.to_thread(attack, operation)
    await still_serves(world)


bodies = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
names = (
    "prompt",
    "messages",
    "stop",
    "logit_bias",
    "stream",
    "n",
    "max_tokens",
    "priority",
    "user",
    "seed",
    "logprobs",
)
named = st.dictionaries(st.sampled_from(names), bodies, max_size=5)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"])
async def test_any_body_at_all(world: World, path: str) -> None:
    world.verify.set_answer("ok")
    loop = asyncio.get_running_loop()

    @fuzz
    @seed(1)
    @given(st.one_of(named.map(json.dumps).map(str.encode), bodies.map(json.dumps).map(str.encode), st.binary()))
    def one(data: bytes) -> None:
        call = world.http.post(path, content=data, headers={"content-type": "application/json"})
        response = asyncio.run_coroutine_threadsafe(call, loop).result(60)
        check(response.status_code, response.text, path)

    await asyncio.to_thread(one)
    await still_serves(world)


paths = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
headers = st.dictionaries(
    st.sampled_from(["authorization", "x-request-id", "content-type", "accept", "content-encoding", "x-odd"]),
    st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40).map(str.strip),
)


@fuzz
@given(st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH", "X"]), paths, headers)
async def test_any_method_path_and_headers(world: World, method: str, path: str, given: dict[str, str]) -> None:
    from urllib.parse import quote

    response = await world.http.request(method, "/" + quote(path), headers=given)
    if method != "HEAD":
        check(response.status_code, response.text, f"{method} {path!r}")
    assert response.headers["x-request-id"]

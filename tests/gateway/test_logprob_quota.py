"""Log-probabilities and traces of whole answers are bounded, by request and in all."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gateway_world import World, open_world, until
from hypothesis import given
from hypothesis import strategies as st
from scripted_verify import ScriptedVerify, VerifyHost

from gateway.core.gate import LogprobQuota
from gateway.http.body import BodyReader
from gateway.main import build_gateway
from gateway.openai.completions import CompletionBuilder, CompletionRequest
from gateway.openai.generation import GenerationRoute
from outrider.config.gateway import GatewayOptions
from outrider.errors import InvalidRequestError, OverloadedError

CHAT = {"messages": [{"role": "user", "content": "x"}]}
LONG = {"text": "x", "sampling_params": {"max_new_tokens": 200}}
ROUTES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("/v1/chat/completions", CHAT, {"logprobs": True, "top_logprobs": 20}, "top_logprobs"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 200}, {"logprobs": 20}, "logprobs"),
    ("/generate", LONG, {"return_logprob": True, "top_logprobs_num": 20}, "top_logprobs_num"),
    ("/v1/chat/completions", CHAT, {"trace": True}, "trace"),
    ("/generate", LONG, {"trace": True}, "trace"),
]


async def post(world: World, path: str, body: dict[str, Any]) -> Any:
    return await world.http.post(path, json=body)


def speak(verify: ScriptedVerify, num_tokens: int) -> None:
    verify.script = [20 + i % 60 for i in range(num_tokens)]


@pytest.mark.parametrize(("path", "body", "more", "field"), ROUTES)
async def test_a_request_that_wants_too_much_told_is_refused_by_the_fields_name(
    verify: ScriptedVerify, tmp_path: Path, path: str, body: dict[str, Any], more: dict[str, Any], field: str
) -> None:
    speak(verify, 200)
    async with open_world(verify, tmp_path, max_logprobs=2048) as world:
        plain = await post(world, path, body)
        assert plain.status_code == 200  # text alone is no matter of this
        refused = await post(world, path, body | more)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, field, "invalid_value")
        assert "over the limit of 512" in error["message"] and "fewer" in error["message"]
        await until(lambda: verify.num_open == 0)
        speak(verify, 10)
        # What was taken has come back.
        for _ in range(10):
            assert (await post(world, path, body | more)).status_code == 200


@pytest.mark.parametrize(("path", "body", "more", "field"), ROUTES[:2])
async def test_a_stream_that_keeps_nothing_tells_as_much_as_it_likes(
    verify: ScriptedVerify, tmp_path: Path, path: str, body: dict[str, Any], more: dict[str, Any], field: str
) -> None:
    speak(verify, 200)
    async with open_world(verify, tmp_path, max_logprobs=2048) as world:
        answer = await post(world, path, body | more | {"stream": True})
        assert answer.text.endswith("data: [DONE]\n\n") and len(answer.text) > 200 * 20 * 10


async def test_when_all_is_taken_others_are_told_to_come_later(verify: ScriptedVerify, tmp_path: Path) -> None:
    speak(verify, 24)
    verify.round_size = 20
    verify.gate = asyncio.Event()
    async with open_world(verify, tmp_path, max_logprobs=2048) as world:
        body = {"prompt": "x", "logprobs": 20, "max_tokens": 24}
        waiting = [asyncio.create_task(post(world, "/v1/completions", body)) for _ in range(5)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        await until(lambda: verify.num_open == 4)
        (refused,) = (task.result() for task in done)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "logprobs_used_up")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await post(world, "/v1/completions", body)).status_code == 429  # at the door
        verify.gate.set()
        plain = await post(world, "/v1/completions", {"prompt": "x"})
        assert plain.status_code == 200
        await asyncio.gather(*waiting)
        await until(lambda: verify.num_open == 0)
        speak(verify, 5)
        assert (await post(world, "/v1/completions", body)).status_code == 200


async def test_what_a_client_has_not_read_yet_counts_and_takes_no_place(verify: ScriptedVerify, tmp_path: Path) -> None:
    speak(verify, 200)
    host = VerifyHost(verify, tmp_path / "verify.sock")
    options = GatewayOptions(verify=(host.address,))
    gateway = build_gateway(options)
    bodies = BodyReader(max_bytes=options.max_body_bytes, seconds=options.body_seconds)
    route = GenerationRoute(gateway, options, bodies, CompletionRequest, CompletionBuilder)
    to_come = [json.dumps({"prompt": "x", "logprobs": 20, "max_tokens": 200}).encode()]
    may_read, answer = asyncio.Event(), bytearray()

    async def receive() -> Any:
        if not to_come:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": to_come.pop()}

    async def send(message: Any) -> None:
        if answer:  # a server keeps what it is given first
            await may_read.wait()
        answer.extend(message.get("body", b""))

    await host.start()
    gateway.router.start()
    try:
        await until(lambda: gateway.ready)
        scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "state": {}}
        task = asyncio.create_task(route(scope, receive, send))
        await until(lambda: answer or task.done())
        assert (gateway.logprob_quota.num_values, gateway.gate.num_answers) == (200 * 22, 0)
        may_read.set()
        await task
        assert len(json.loads(answer)["choices"][0]["logprobs"]["tokens"]) == 200
        assert gateway.logprob_quota.num_values == 0
    finally:
        await gateway.router.close()
        await host.stop()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60)), max_size=60), st.integers(4, 100))
def test_never_more_than_the_limit_is_held_and_all_comes_back(steps: list[tuple[int, int]], most: int) -> None:
    logprob_quota = LogprobQuota(most)
    open_ones: dict[int, tuple[Any, Any]] = {}
    held: dict[int, int] = {}
    for which, number in steps:
        try:
            if which not in open_ones:
                context = logprob_quota.open()
                open_ones[which] = (context, context.__enter__())
            open_ones[which][1](number, "logprobs")
            held[which] = number
        except (InvalidRequestError, OverloadedError):
            if which in open_ones:
                open_ones.pop(which)[0].__exit__(None, None, None)
                held.pop(which, None)
        assert logprob_quota.num_values == sum(held.values()) <= most
        assert all(number <= logprob_quota.most_of_one for number in held.values())
    for context, _ in open_ones.values():
        context.__exit__(None, None, None)
    assert logprob_quota.num_values == 0

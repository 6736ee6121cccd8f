"""How an answer came about, as both doors tell it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_world import World
from scripted_verify import MODEL

from outrider.v1 import gateway_pb2

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ("/v1/completions", {"prompt": "x"}),
    ("/generate", {"text": "x"}),
]


def check(trace: Any, token_ids: list[int]) -> None:
    assert [token["id"] for token in trace["tokens"]] == token_ids
    assert sum(entry["num_tokens"] for entry in trace["rounds"]) >= len(token_ids)
    by_round = iter(trace["tokens"])
    for entry in trace["rounds"]:
        nodes = {name: len(entry[name]) for name in ("parents", "token_ids", "texts", "drafters", "scores")}
        assert set(nodes.values()) == {4}
        for depth, node in enumerate(entry["accepted"], start=1):
            token = next(by_round)
            assert (token["origin"], token["depth"]) == ("accepted", depth)
            assert (
                (token["id"], token["drafter"])
                == (entry["token_ids"][node], entry["drafters"][node])
                == (
                    token["id"],
                    "ngram",
                )
            )
        bonus = next(by_round)
        assert (bonus["origin"], bonus["depth"], bonus["drafter"]) == ("bonus", entry["num_tokens"], None)


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_a_whole_answer_is_traced_on_request_only(world: World, path: str, body: dict[str, Any]) -> None:
    ids = world.verify.set_answer("one two three four")
    world.verify.round_size = 3
    plain = (await world.http.post(path, json=body)).json()
    assert "trace" not in json.dumps(plain) and not world.verify.requests[-1].trace
    traced = (await world.http.post(path, json=body | {"trace": True})).json()
    choice = traced["choices"][0] if "choices" in traced else traced
    check(choice["trace"], [*ids, 2])


@pytest.mark.parametrize(("path", "body"), ROUTES[:2])
async def test_events_trace_their_own_tokens(world: World, path: str, body: dict[str, Any]) -> None:
    ids = world.verify.set_answer("one two three four")
    world.verify.round_size = 3
    response = await world.http.post(path, json=body | {"trace": True, "stream": True})
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    pieces = [piece["trace"] for line in data[:-1] for piece in json.loads(line)["choices"] if "trace" in piece]
    assert len(pieces) > 1
    whole = {name: [part for piece in pieces for part in piece[name]] for name in ("tokens", "rounds")}
    check(whole, [*ids, 2])


async def test_sglangs_events_trace_what_is_new(world: World) -> None:
    ids = world.verify.set_answer("one two three four")
    world.verify.round_size = 3
    response = await world.http.post("/generate", json={"text": "x", "trace": True, "stream": True})
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    pieces = [json.loads(line)["trace"] for line in data[:-1]]
    check({name: [part for piece in pieces for part in piece[name]] for name in ("tokens", "rounds")}, [*ids, 2])


async def test_openais_client_reads_the_trace_as_an_extra_field(world: World) -> None:
    ids = world.verify.set_answer("one two")
    stream = await world.openai().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True, extra_body={"trace": True}
    )
    tokens = []
    async for chunk in stream:
        for choice in chunk.choices:
            tokens += (choice.model_extra or {}).get("trace", {}).get("tokens", [])
    assert [token["id"] for token in tokens] == [*ids, 2]


async def test_a_stop_string_cuts_the_traced_tokens(world: World) -> None:
    world.verify.set_answer("one two three four")
    world.verify.round_size = 8
    answer = (await world.http.post("/v1/completions", json={"prompt": "x", "stop": "three", "trace": True})).json()
    choice = answer["choices"][0]
    assert choice["text"] == "one two "
    assert len(choice["trace"]["tokens"]) == answer["usage"]["completion_tokens"]
    assert choice["trace"]["rounds"][-1]["num_tokens"] > len(choice["trace"]["tokens"]) % 8


async def test_grpc_tells_trees_and_prompt_logprobs(world: World) -> None:
    ids = world.verify.set_answer("one two")
    request = gateway_pb2.GatewayServiceGenerateRequest(
        prompt_token_ids=gateway_pb2.TokenIds(ids=[9, 8, 7, 6]), trace=True, num_prompt_logprobs=2
    )
    messages = [message async for message in world.stub.Generate(request)]
    trees = [tree for message in messages for tree in message.rounds]
    assert sum(tree.num_tokens for tree in trees) == len(ids) + 1
    assert [tree.position for tree in trees] == list(range(4, 4 + 2 * len(trees), 2))
    assert all(list(tree.drafter_names) == ["ngram", "eagle3"] for tree in trees)
    parts = [part for message in messages for part in message.prompt_logprobs]
    assert [part.start for part in parts] == [1, 2]
    assert [value for part in parts for value in part.logprobs] == [-1.75, -0.25, -1.75]
    assert all(len(part.top_token_ids) == 2 * len(part.logprobs) for part in parts)
    plain = [m async for m in world.stub.Generate(gateway_pb2.GatewayServiceGenerateRequest(prompt="x"))]
    assert not any(message.rounds or message.prompt_logprobs for message in plain)


async def test_speculation_is_switched_by_request_at_both_doors(world: World) -> None:
    world.verify.set_answer("ok")
    for path, body in ROUTES:
        for value, disabled in (("off", True), ("on", False), (None, False)):
            assert (await world.http.post(path, json=body | {"speculation": value})).status_code == 200
            assert world.verify.requests[-1].disable_speculation is disabled
    for switch, disabled in (
        (gateway_pb2.SPECULATION_OFF, True),
        (gateway_pb2.SPECULATION_ON, False),
        (gateway_pb2.SPECULATION_UNSPECIFIED, False),
    ):
        request = gateway_pb2.GatewayServiceGenerateRequest(prompt="x", speculation=switch)
        assert [message async for message in world.stub.Generate(request)]
        assert world.verify.requests[-1].disable_speculation is disabled

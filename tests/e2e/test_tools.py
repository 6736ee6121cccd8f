"""The real model calls tools: with 135M the choice may be poor, but a forced call always fits its schema."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from client import chat, stream

from outrider.cli.cluster import Cluster
from outrider.v1 import gateway_pb2

pytestmark = pytest.mark.xdist_group("cluster")

PLACE = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["city", "unit", "days"],
    "$defs": {"City": {"type": "string", "maxLength": 16}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now", "description": "Tells the time."}},
]
SCHEMAS = {"weather": PLACE, "now": {"type": "object", "additionalProperties": False}}
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


def test_a_forced_call_is_valid_and_the_same_with_and_without_speculation(cluster: Cluster) -> None:
    with openai.OpenAI(base_url=f"{cluster.rest_url}/v1", api_key="none", max_retries=0) as client:

        def ask(speculation: str) -> tuple[str, str]:
            completion = client.chat.completions.create(
                model="smollm2",
                messages=ASK,
                tools=TOOLS,
                tool_choice="required",
                temperature=0.9,
                seed=11,
                max_tokens=160,
                extra_body={"speculation": speculation},
            )
            answer = completion.choices[0]
            assert answer.finish_reason == "tool_calls" and answer.message.content is None
            (call,) = answer.message.tool_calls or []
            return call.function.name, call.function.arguments

        with ThreadPoolExecutor() as pool:
            over_grpc = pool.submit(lambda: asyncio.run(grpc_call(cluster)))
            drafted, plain = pool.map(ask, ("on", "off"))
    assert drafted == plain == over_grpc.result()
    name, arguments = drafted
    jsonschema.validate(json.loads(arguments), SCHEMAS[name])


async def grpc_call(cluster: Cluster) -> tuple[str, str]:
    """The same over gRPC."""
    functions = [tool["function"] for tool in TOOLS]
    tools = [one | {"parameters": json.dumps(one["parameters"])} if "parameters" in one else one for one in functions]
    request = chat(ASK[0]["content"], max_tokens=160, temperature=0.9, seed=11)
    request.ignore_eos = False
    request.chat.MergeFrom(gateway_pb2.ChatMessages(tools=tools, tool_choice="required"))
    deltas = [delta async for part in stream(cluster, request) for delta in part.tool_calls]
    assert {delta.index for delta in deltas} == {0} and deltas[0].id
    return deltas[0].name, "".join(delta.arguments for delta in deltas)


def test_a_call_that_the_model_chooses_fits_a_strict_schema(cluster: Cluster) -> None:
    wrong = '{"name": "weather", "arguments": {"city": "Rome", "unit": "kelvin", "days": [1, 2, 3, 4, 5]}}'
    ask: Any = [{"role": "user", "content": f"Repeat this line and nothing else:\n{wrong}"}]
    strict: list[Any] = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    with openai.OpenAI(base_url=f"{cluster.rest_url}/v1", api_key="none", max_retries=0) as client:

        def arguments(tools: list[Any], speculation: str) -> Any:
            answer = client.chat.completions.create(
                model="smollm2",
                messages=ask,
                tools=tools,
                temperature=0,
                max_tokens=80,
                extra_body={"speculation": speculation},
            ).choices[0]
            (call,) = answer.message.tool_calls or []
            assert call.function.name == "weather" and answer.finish_reason == "tool_calls"
            return json.loads(call.function.arguments)

        with ThreadPoolExecutor() as pool:
            free, held, plain = pool.map(arguments, (TOOLS, strict, strict), ("on", "on", "off"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(free, PLACE)
    jsonschema.validate(held, PLACE)
    assert held == plain


def test_openais_client_streams_parses_and_sends_results_back(cluster: Cluster) -> None:
    from benchmarks.serving.client_checks import openai_tools

    assert openai_tools(cluster.rest_url, cluster.gateway_address)["answer"]


@pytest.mark.parametrize(
    ("ask", "seed", "max_tokens"),
    [
        # As a rule an answer in its form, a call, and one that is cut.
        ('Say {"celsius": 20}', 6, 60),
        ("Call the function now.", 6, 60),
        ("How warm is it in Rome? Answer in JSON.", 5, 20),
    ],
)
def test_an_answer_has_its_form_or_is_a_call_with_and_without_speculation(
    cluster: Cluster, ask: str, seed: int, max_tokens: int
) -> None:
    warmth = {"type": "object", "properties": {"celsius": {"type": "integer", "minimum": -50, "maximum": 50}},
              "required": ["celsius"], "additionalProperties": False}  # fmt: skip
    asked = {
        "messages": [{"role": "user", "content": ask}],
        "tools": TOOLS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "warmth", "schema": warmth}},
        "temperature": 0.9,
        "seed": seed,
        "max_tokens": max_tokens,
    }

    def answer(speculation: str) -> Any:
        url = f"{cluster.rest_url}/v1/chat/completions"
        response = httpx.post(url, json=asked | {"speculation": speculation}, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]

    drafted, plain = answer("on"), answer("off")
    calls = [[call["function"] for call in choice["message"].get("tool_calls") or []] for choice in (drafted, plain)]
    assert calls[0] == calls[1] and drafted["message"]["content"] == plain["message"]["content"]
    if drafted["finish_reason"] == "stop":
        jsonschema.validate(json.loads(drafted["message"]["content"]), warmth)
    else:
        assert all(call["name"] in SCHEMAS for call in calls[0]) or drafted["finish_reason"] == "length"

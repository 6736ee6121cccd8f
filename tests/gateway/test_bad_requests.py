"""What is wrong gets an error that names field, limit and fix, in OpenAI's shape; nothing else notices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_world import World, open_world
from pydantic import BaseModel, ValidationError
from scripted_verify import CONTEXT, ScriptedVerify

from gateway.openai.chat import ChatCompletionRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.responses_request import ResponsesRequest
from outrider.errors import OverloadedError

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}
HELLO = [{"role": "user", "content": "x"}]
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "a", "arguments": "{}"}}
DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"items": DEEP}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | fields}


FIELDS: list[tuple[str, dict[str, Any], str, str, str]] = [
    (TEXT, {"prompt": 7}, "prompt", "invalid_type", "a string or a list, got an integer"),
    (TEXT, {"prompt": ["x", 7]}, "prompt[1]", "invalid_type", "expected a string, got an integer"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "invalid_type", "a string or a list"),
    (TEXT, {"prompt": "x", "temperature": 2.5}, "temperature", "invalid_value", "2"),
    (TEXT, {"prompt": "x", "temperature": "0.5"}, "temperature", "invalid_type", "a number"),
    (TEXT, {"prompt": "x", "temperature": True}, "temperature", "invalid_type", "a number"),
    (TEXT, {"prompt": "x", "top_p": -0.1}, "top_p", "invalid_value", "0"),
    (TEXT, {"prompt": "x", "top_k": -2}, "top_k", "invalid_value", "-1"),
    (TEXT, {"prompt": "x", "min_p": 1.5}, "min_p", "invalid_value", "1"),
    (TEXT, {"prompt": "x", "presence_penalty": 3}, "presence_penalty", "invalid_value", "2"),
    (TEXT, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "invalid_value", "0"),
    (TEXT, {"prompt": "x", "n": 17}, "n", "invalid_value", "16"),
    (TEXT, {"prompt": "x", "n": True}, "n", "invalid_type", "an integer"),
    (TEXT, {"prompt": "x", "n": 1.0}, "n", "invalid_type", "an integer"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_value", "1"),
    (TEXT, {"prompt": "x", "max_tokens": 10**400}, "max_tokens", "invalid_value", "less than"),
    (TEXT, {"prompt": "x", "seed": 2**64}, "seed", "invalid_value", "less than"),
    (TEXT, {"prompt": "x", "stop": ["a"] * 65}, "stop", "invalid_value", "64"),
    (TEXT, {"prompt": "x", "stop": 7}, "stop", "invalid_type", "expected a string or a list, got an integer"),
    (TEXT, {"prompt": "x", "stop": [7]}, "stop[0]", "invalid_type", "expected a string, got an integer"),
    (TEXT, {"prompt": "x", "stop": ""}, "stop[0]", "invalid_value", "at least one"),
    (TEXT, {"prompt": "x", "stop": "s" * 257}, "stop[0]", "invalid_value", "256"),
    (TEXT, {"prompt": "x", "stop_token_ids": [99999]}, "stop_token_ids[0]", "invalid_value", "vocabulary"),
    (TEXT, {"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias[99999]", "invalid_value", "vocabulary"),
    (TEXT, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias[1]", "invalid_value", "100"),
    (TEXT, {"prompt": "x", "logit_bias": {"one": 1}}, "logit_bias.one", "invalid_type", "no token id"),
    (TEXT, {"prompt": "x", "logit_bias": {"-1": 1}}, "logit_bias.-1", "invalid_type", "no token id"),
    (TEXT, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value", "1024"),
    (TEXT, {"prompt": "x", "logprobs": 21}, "logprobs", "invalid_value", "20"),
    (TEXT, {"prompt": "x", "logprobs": True}, "logprobs", "invalid_type", "an integer"),
    (TEXT, {"prompt": "x", "speculation": "maybe"}, "speculation", "invalid_value", "'on' or 'off'"),
    (TEXT, {"prompt": "x", "echo": 1}, "echo", "invalid_type", "boolean"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens", "invalid_value", "echo"),
    (TEXT, {"prompt": "x", "max_completion_tokens": 0}, "max_completion_tokens", "invalid_value", "echo"),
    (TEXT, {"prompt": "x", "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value", "differs"),
    (TEXT, {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs", "invalid_value", "20"),
    (TEXT, {"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value", "stream"),
    (TEXT, {"prompt": "x", "trace": "yes"}, "trace", "invalid_type", "boolean"),
    ("/generate", {}, "text", "invalid_value", "text and input_ids"),
    ("/generate", {"text": "x", "input_ids": [1]}, "text", "invalid_value", "text and input_ids"),
    ("/generate", {"input_ids": [[1], [2**31]]}, "input_ids[1][0]", "invalid_value", "2147483648"),
    ("/generate", {"input_ids": [[1], [7000]]}, "input_ids[1][0]", "invalid_value", "vocabulary"),
    ("/generate", {"text": "x", "sampling_params": {"top_k": 1.5}}, "sampling_params.top_k", "invalid_type", "integer"),
    ("/generate", {"text": "x", "sampling_params": {"topk": 1}}, "sampling_params.topk", "unknown_parameter", ""),
    ("/generate", {"text": "x", "speculation": "maybe"}, "speculation", "unsupported_parameter", "off"),
    ("/tokenize", {}, "prompt", "invalid_value", "prompt and messages"),
    ("/tokenize", {"prompt": "x", "model": "other"}, "model", "model_not_found", "other"),
    ("/tokenize", {"messages": []}, "messages", "invalid_value", "at least one"),
    ("/detokenize", {}, "tokens", "missing_required_parameter", "required"),
    ("/detokenize", {"tokens": [1, 7000]}, "tokens[1]", "invalid_value", "vocabulary"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]", "invalid_value", "0"),
    (TEXT, {"prompt": "x", "suffix": "y"}, "suffix", "unsupported_parameter", "leave it out"),
    (TEXT, {"prompt": "x", "@x": 1}, "@x", "unknown_parameter", "remove it"),
    (TEXT, {"prompt": "x", "[key]": 1}, "[key]", "unknown_parameter", "remove it"),
    (TEXT, {"prompt": "x", "": 1}, '""', "unknown_parameter", "remove it"),
    (TEXT, {"prompt": "x", "logit_bias": {"": 1}}, 'logit_bias.""', "invalid_type", "no token id"),
    (TEXT, {"prompt": ["x"] * 5000}, "prompt", "invalid_value", "4096"),
    (TEXT, {"prompt": [[1]] * 5000}, "prompt", "invalid_value", "4096"),
    (TEXT, {"prompt": "x", "tempertaure": 1}, "tempertaure", "unknown_parameter", "did you mean temperature"),
    (TEXT, {}, "prompt", "missing_required_parameter", "required"),
    (TEXT, {"prompt": ""}, "prompt", "invalid_value", "at least one"),
    (TEXT, {"prompt": []}, "prompt", "invalid_value", "at least one"),
    (TEXT, {"prompt": ["a", ""]}, "prompt[1]", "invalid_value", "at least one"),
    (TEXT, {"prompt": [1, -1]}, "prompt[1]", "invalid_value", "0"),
    (TEXT, {"prompt": [1, 99999]}, "prompt[1]", "invalid_value", "vocabulary"),
    (TEXT, {"prompt": [[1], [2, 99999]]}, "prompt[1][1]", "invalid_value", "vocabulary"),
    (TEXT, {"prompt": [1, "x"]}, "prompt[1]", "invalid_type", "an integer"),
    (TEXT, {"prompt": ["x"] * 129}, "prompt", "invalid_value", "128"),
    (TEXT, {"prompt": [5] * CONTEXT}, "prompt", "context_length_exceeded", str(CONTEXT - 1)),
    (TEXT, {"prompt": "word " * 100_000}, "prompt", "context_length_exceeded", str(CONTEXT)),
    (TEXT, {"prompt": [5] * 10, "max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded", str(CONTEXT - 10)),
    (TEXT, {"prompt": "x", "model": "gpt-9"}, "model", "model_not_found", "tiny"),
    (CHAT, {"messages": []}, "messages", "invalid_value", "at least one"),
    (CHAT, {"messages": "hello"}, "messages", "invalid_type", "a list"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter", "required"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "invalid_type", "a string"),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "invalid_value", "'user'"),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "invalid_value", "role tool"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls",
     "invalid_value", "assistant"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {}}]}]},
     "messages[0].tool_calls[0].function.name", "missing_required_parameter", "required"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "invalid_value",
        "'text'",
    ),
    (CHAT, {"messages": HELLO, "tools": [{}]}, "tools[0].type", "missing_required_parameter", "required"),
    (CHAT, {"messages": HELLO, "tools": [tool("a b")]}, "tools[0].function.name", "invalid_value", "rename"),
    (CHAT, {"messages": HELLO, "tools": [tool("a"), tool("a")]}, "tools[1].function.name", "invalid_value", "twice"),
    (CHAT, {"messages": HELLO, "tools": [tool("a")] * 129}, "tools", "invalid_value", "128"),
    (CHAT, {"messages": HELLO, "tools": [tool("a", parameters=DEEP)]}, "tools[0].function.parameters",
     "invalid_value", "64 levels"),
    (CHAT, {"messages": HELLO, "tools": [tool("a", parameters={"title": "x" * 70_000}, strict=True)]},
     "tools[0].function.parameters", "invalid_grammar", "65536"),
    (CHAT, {"messages": HELLO, "tools": [tool("a", parameters={"not": {}}, strict=True)], "tool_choice": "required"},
     "tools[0].function.parameters.not", "invalid_grammar", "say what is allowed"),
    (CHAT, {"messages": HELLO, "tools": [tool("a")], "tool_choice": "always"}, "tool_choice", "invalid_value",
     "'required'"),
    (CHAT, {"messages": HELLO, "tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}},
     "tool_choice.function.name", "invalid_value", "not one of the tools"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, "tools", "invalid_value", "tool_choice to auto"),
    (CHAT, {"messages": HELLO, "tools": [tool("a")], "guided_regex": "a"}, "guided_regex", "invalid_value",
     "only JSON"),
    (CHAT, {"messages": HELLO, "tools": [tool("a")], "tool_choice": {"type": "allowed_tools", "allowed_tools":
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": name}} for name in "ab"]}}},
     "tool_choice.allowed_tools.tools[1].function.name", "invalid_value", "not one of the tools"),
    (CHAT, {"messages": HELLO, "tools": [tool("a")], "tool_choice": {"type": "allowed_tools", "allowed_tools":
        {"mode": "none", "tools": []}}}, "tool_choice.allowed_tools.mode", "invalid_value", "'required'"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "messages[0].refusal",
     "invalid_value", "only an assistant's"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}]}, "messages[0].refusal",
     "invalid_value", "only an assistant's"),
    (CHAT, {"messages": [{"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}]},
     "messages[0].content[0].refusal", "missing_required_parameter", "required"),
    (CHAT, {"messages": [{"role": "user", "content": ["no"]}]}, "messages[0].content[0]", "invalid_type", "an object"),
    (CHAT, {"messages": HELLO, "functions": [{}]}, "functions", "unsupported_parameter", "use tools"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "yaml"}}, "response_format.type", "invalid_value",
     "'json_schema'"),
    (TEXT, {"prompt": "x", "guided_json": {"const": 10**30}}, "guided_json.const", "invalid_grammar", "2^64"),
    (TEXT, {"prompt": "x", "guided_regex": ""}, "guided_regex", "invalid_grammar", "regular expression"),
    ("/generate", {"text": "x", "sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema",
     "invalid_grammar", "valid JSON"),
    (CHAT, {"messages": HELLO, "response_format": {"type": "json_schema"}}, "response_format.json_schema",
     "missing_required_parameter", "send the schema"),
    (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "invalid_value", "logprobs"),
    (CHAT, {"messages": HELLO, "stream_options": {}}, "stream_options", "invalid_value", "stream"),
    (CHAT, {"messages": HELLO, "store": True}, "store", "unsupported_parameter", "false"),
    (CHAT, {"messages": HELLO, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens", "invalid_value", "one of"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 999}, "max_completion_tokens", "context_length_exceeded", "2"),
]  # fmt: skip


async def test_every_wrong_field_is_named_with_limit_and_fix(world: World) -> None:
    for path, body, field, code, words in FIELDS:
        response = await world.http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (
            404 if code == "model_not_found" else 400,
            field,
            code,
        ), error
        assert error["message"].startswith(f"{field}: ") and words in error["message"], error
        assert len(error["message"]) < 500 and error["type"] == "invalid_request_error"
    assert world.verify.requests == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "not an object"),
        (b'{"prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b'{"prompt": "x", "temperature": Infinity}', "not valid JSON"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\xff\xfe"}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": "x", "seed": ' + b"9" * 6000 + b"}", "not valid JSON"),
        (b'{"prompt": "x"} trailing', "not valid JSON"),
    ],
)
async def test_a_body_that_is_not_strict_json_is_refused(world: World, content: bytes, words: str) -> None:
    response = await world.http.post(TEXT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


async def test_http_mistakes_have_the_same_shape(world: World, verify: ScriptedVerify) -> None:
    json_type = {"content-type": "application/json"}
    checks: list[tuple[str, str, dict[str, str], bytes, int, str]] = [
        ("GET", "/v1/nothing", {}, b"", 404, "path_not_found"),
        ("GET", TEXT, {}, b"", 405, "method_not_allowed"),
        ("POST", "/health", json_type, b"{}", 405, "method_not_allowed"),
        ("POST", TEXT, {"content-type": "text/plain"}, b"{}", 415, "unsupported_content_type"),
        ("POST", TEXT, {}, b"{}", 415, "unsupported_content_type"),
        ("POST", TEXT, json_type | {"content-encoding": "gzip"}, b"{}", 415, "unsupported_content_encoding"),
    ]
    for method, path, headers, content, status, code in checks:
        response = await world.http.request(method, path, headers=headers, content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert (await world.http.get(TEXT)).headers["allow"] == "POST"


async def test_no_field_of_the_body_is_suggested_for_one_within(world: World) -> None:
    part = {"type": "text", "text": "x", "prompt_cache": {"type": "ephemeral"}}
    response = await world.http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
    field = "messages[0].content[0].prompt_cache"
    assert response.json()["error"]["message"] == f"{field}: unknown field; remove it"


async def test_a_request_that_states_its_end_in_two_ways_is_refused_and_nothing_behind_it_is_read(world: World) -> None:
    reader, writer = await asyncio.open_connection(*world.rest.removeprefix("http://").split(":"))
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 5\r\n"
    writer.write(f"{head}transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: a\r\n\r\n".encode())
    answer = await reader.read()  # to the end: the connection is closed
    writer.close()
    assert answer.startswith(b"HTTP/1.1 400") and b"invalid_http" in answer and answer.count(b"HTTP/1.1 ") == 1


async def test_a_body_over_the_limit_gets_413(verify: ScriptedVerify, tmp_path: Any) -> None:
    async with open_world(verify, tmp_path, max_body_bytes=2048) as world:
        for content in (json.dumps({"prompt": "x" * 4000}).encode(), b"x" * 200_000):
            response = await world.http.post(TEXT, content=content, headers={"content-type": "application/json"})
            assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
            assert "2048" in response.json()["error"]["message"]


async def test_who_sends_a_far_too_long_body_reads_the_answer(verify: ScriptedVerify, tmp_path: Any) -> None:
    async with open_world(verify, tmp_path, max_body_bytes=2048) as world:
        for _ in range(3):
            response = await world.http.post(
                TEXT, content=b"x" * 8_000_000, headers={"content-type": "application/json"}
            )
            assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(("length", "more"), [(2048 * 8 + 1, ""), (2049, "expect: 100-continue\r\n")])
async def test_a_body_that_says_it_is_too_long_gets_413_at_once(
    verify: ScriptedVerify, tmp_path: Any, length: int, more: str
) -> None:
    async with open_world(verify, tmp_path, max_body_bytes=2048) as world:
        reader, writer = await asyncio.open_connection(*world.rest.removeprefix("http://").split(":"))
        head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {length}\r\n{more}\r\n".encode())
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 30)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 413") and b"request_too_large" in answer


async def test_a_slow_body_gets_408(verify: ScriptedVerify, tmp_path: Any) -> None:
    async with open_world(verify, tmp_path, body_seconds=0.1) as world:
        reader, writer = await asyncio.open_connection(*world.rest.removeprefix("http://").split(":"))
        head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
        writer.write(head.encode() + b"{")
        answer = await reader.read()  # to the end: the connection is closed
        writer.close()
        assert answer.startswith(b"HTTP/1.1 408") and b"request_timeout" in answer


async def test_harmless_fields_are_taken(world: World) -> None:
    world.verify.set_answer("ok")
    part = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    part["cache_control"] = {"type": "ephemeral"}
    body = {
        "messages": [{"role": "user", "content": [part]}],
        "reasoning_effort": "max",
        "user": "me",
        "store": False,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "service_tier": "auto",
        "top_k": -1,
        "logit_bias": None,
        "stop": None,
        "seed": None,
        "temperature": None,
        "n": None,
        "stream": None,
        "logprobs": False,
        "top_logprobs": 0,
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"ttl": "30m"},
    }
    response = await world.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    items = [{"role": "user", "content": [part | {"type": "input_text"}]}]
    response = await world.http.post("/v1/responses", json={"input": items, "reasoning": {"effort": "max"}})
    assert response.status_code == 200, response.text


async def test_a_full_verify_service_is_429_with_retry_after(world: World) -> None:
    world.verify.failures = [OverloadedError("the queue holds 64 requests", retry_after=3)]
    response = await world.http.post(TEXT, json={"prompt": "x"})
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("arguments", ["[" + "[]," * 70000 + "[]]", "[" + "1," * 140000 + "1]"])
async def test_arguments_of_a_call_that_hold_very_many_values_are_not_parsed(world: World, arguments: str) -> None:
    function = {"name": "a", "arguments": arguments}
    messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL | {"function": function}]}]
    for path in (CHAT, "/tokenize"):
        response = await world.http.post(path, json={"messages": messages})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "messages[1].tool_calls[0].function.arguments"), error
        assert "over the limit of" in error["message"]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": "x"} | dict.fromkeys(map(str, range(5000)), 1)),
        (ChatCompletionRequest, {"messages": [HELLO[0] | dict.fromkeys(map(str, range(5000)), 1)]}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {f"a{i}": "x" for i in range(5000)}}),
        (CompletionRequest, {"prompt": [[]] * 5000}),
        (ChatCompletionRequest, {"messages": [{}] * 5000}),
        (ResponsesRequest, {"input": "x", "include": ["x"] * 5000}),
        (ResponsesRequest, {"input": "x", "metadata": dict.fromkeys(map(str, range(5000)), 1)}),
    ],
)
def test_a_flood_of_mistakes_costs_no_more_than_a_few(model: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 4


async def test_a_short_body_limit_does_not_bound_what_verify_is_told_or_says(
    verify: ScriptedVerify, tmp_path: Any
) -> None:
    verify.set_answer("one two three four five six")
    verify.round_size = 8
    verify.context_length = 4000
    async with open_world(verify, tmp_path, max_body_bytes=1024) as world:
        for body in ({"prompt": "x", "logprobs": 20}, {"prompt": "Ä" * 300}):
            response = await world.http.post(TEXT, content=json.dumps(body, ensure_ascii=False).encode(), headers=JSON)
            assert response.status_code == 200, response.text

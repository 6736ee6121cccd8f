"""/v1/responses with openai-python's client."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from gateway_world import World, open_world
from pydantic import BaseModel
from scripted_verify import MODEL, ScriptedVerify

THINKING = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% endfor %}[assistant]{{ reasoning_effort }}{# <think></think> #}"
)


@pytest.fixture
async def thinker(tokenizer_folder: Path, tmp_path: Path) -> AsyncIterator[World]:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(THINKING, encoding="utf-8")
    verify = ScriptedVerify(folder)
    verify.set_answer("<think>\nGreet 東京.\n</think>\n\nHello!")
    async with open_world(verify, tmp_path) as running:
        yield running


class Person(BaseModel):
    name: str


def prompt(world: World) -> str:
    request = world.verify.requests[-1]
    return world.verify.tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)


async def test_a_text_is_answered_by_a_message(world: World) -> None:
    token_ids = world.verify.set_answer("Paris 🙂.")
    answer = await world.openai().responses.create(
        model=MODEL, input="Where?", instructions="Be brief.", temperature=0.5, max_output_tokens=50, store=False
    )
    assert (answer.output_text, answer.status, answer.model) == ("Paris 🙂.", "completed", MODEL)
    assert answer.id.startswith("resp-") and answer.temperature == 0.5 and answer.error is None
    assert [(item.type, item.status) for item in answer.output] == [("message", "completed")]
    usage = answer.usage
    assert usage is not None and usage.output_tokens == len(token_ids) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert (usage.input_tokens_details.cached_tokens, usage.output_tokens_details.reasoning_tokens) == (3, 0)
    assert prompt(world).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere?<|im_end|>")
    assert world.verify.requests[-1].max_tokens == 50


async def test_a_stream_is_the_sequence_that_the_client_expects(world: World) -> None:
    world.verify.set_answer("Grüße aus 東京")
    async with world.openai().responses.stream(model=MODEL, input="x") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert final.output_text == "Grüße aus 東京" and final.usage is not None
    names = [event.type.removeprefix("response.") for event in events]
    numbers = [event.sequence_number for event in events]
    assert numbers == list(range(len(events)))
    deltas = names.count("output_text.delta")
    assert deltas > 2
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text


async def test_raw_events_are_named_and_end_without_done(world: World) -> None:
    world.verify.set_answer("one")
    response = await world.http.post("/v1/responses", json={"input": "x", "stream": True, "trace": True})
    events = [part.split("\n") for part in response.text.strip().split("\n\n")]
    for name, data in events:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    last = json.loads(events[-1][1].removeprefix("data: "))
    assert last["type"] == "response.completed" and last["response"]["trace"]["tokens"]
    assert last["response"]["usage"]["outrider"]["rounds"] > 0


async def test_an_answer_that_fails_ends_with_an_event_that_says_so(world: World) -> None:
    world.verify.set_answer("one two three four")
    world.verify.fail_after = 2
    response = await world.http.post("/v1/responses", json={"input": "x", "stream": True})
    events = [part.split("\n") for part in response.text.strip().split("\n\n")]
    name, data = events[-1]
    body = json.loads(data.removeprefix("data: "))
    assert (name, body["type"], body["sequence_number"]) == ("event: error", "error", len(events) - 1)
    assert (body["code"], body["param"]) == ("internal_error", None)
    assert body["error"] == {"type": "server_error"} | {key: body[key] for key in ("message", "param", "code")}
    with pytest.raises(openai.APIError, match="internal error"):
        [event async for event in await world.openai().responses.create(model=MODEL, input="x", stream=True)]


async def test_reasoning_is_an_item_of_its_own_and_may_be_sent_back(thinker: World) -> None:
    client = thinker.openai()
    answer = await client.responses.create(
        model=MODEL, input="Hi", reasoning={"effort": "low"}, include=["reasoning.encrypted_content"]
    )
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    thought: Any = answer.output[0]
    assert (thought.content[0].text, answer.output_text) == ("Greet 東京.", "Hello!")
    assert answer.usage is not None and answer.usage.output_tokens_details.reasoning_tokens > 2
    assert prompt(thinker) == "[user]Hi[assistant]low"
    again: Any = [{"role": "user", "content": "Hi"}, *answer.output, {"role": "user", "content": "And?"}]
    await client.responses.create(model=MODEL, input=again)
    assert prompt(thinker) == "[user]Hi[assistant](Greet 東京.)Hello![user]And?[assistant]"


async def test_reasoning_is_streamed_before_the_message(thinker: World) -> None:
    async with thinker.openai().responses.stream(model=MODEL, input="Hi") as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    names = [event.type for event in events]
    added = [event.item.type for event in events if event.type == "response.output_item.added"]
    assert added == ["reasoning", "message"]
    assert names.index("response.reasoning_text.done") < names.index("response.output_text.delta")
    reasoning = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(reasoning) == "Greet 東京." and final.output_text == "Hello!"
    whole: Any = await thinker.openai().responses.create(model=MODEL, input="Hi")
    assert [item.content[0].text for item in whole.output] == [item.content[0].text for item in final.output]  # type: ignore[union-attr]


def spelled(logprobs: Any) -> str:
    return b"".join(bytes(one.bytes) for one in logprobs).decode()


async def test_log_probabilities_of_the_text_are_told_where_included(thinker: World) -> None:
    """As Codex asks, too, with its `client_metadata`."""
    client = thinker.openai().responses
    asked: Any = {"model": MODEL, "input": "x", "extra_body": {"client_metadata": {"x-codex-installation-id": "1"}}}
    include = ["reasoning.encrypted_content", "message.output_text.logprobs"]
    included: Any = asked | {"include": include, "top_logprobs": 2}
    for thought, text in (("", "Grüße aus 東京"), ("<think>\nGreet.\n</think>", "Hello!")):
        thinker.verify.set_answer(thought + text)
        part: Any = (await client.create(**included)).output[-1].content[0]
        assert (spelled(part.logprobs), part.text) == (text, text)
        assert all(len(one.top_logprobs) == 2 and one.logprob == one.top_logprobs[0].logprob for one in part.logprobs)
        events: list[Any] = [event async for event in await client.create(**included, stream=True)]
        streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        done = next(event for event in events if event.type == "response.output_text.done")
        last = events[-1].response.output[-1].content[0]
        assert last == part
        assert all([one.to_dict() for one in same] == part.to_dict()["logprobs"] for same in (streamed, done.logprobs))
        plain: Any = await client.create(**asked)
        assert plain.output[-1].content[0].logprobs == []
    thinker.verify.set_answer("one two three")
    cut: Any = await client.create(**included | {"extra_body": {"stop": [" three"]}})
    assert cut.output_text == "one two" and spelled(cut.output[0].content[0].logprobs) == "one two three"


@pytest.mark.parametrize("thought", ["", "<think>a</think>"])
async def test_log_probabilities_begin_with_the_text_though_a_stop_string_holds_some_back(
    thinker: World, thought: str
) -> None:
    thinker.verify.set_answer(f"{thought}a a a")
    thinker.verify.round_size = 2
    include: Any = ["message.output_text.logprobs"]
    asked: Any = {"input": "x", "include": include, "extra_body": {"stop": ["a banana!"]}}
    answer: Any = await thinker.openai().responses.create(model=MODEL, **asked)
    assert answer.output_text == spelled(answer.output[-1].content[0].logprobs) == "a a a"


async def test_an_answer_that_a_limit_ends_is_incomplete(world: World) -> None:
    world.verify.set_answer("one two three four")
    client = world.openai()
    answer = await client.responses.create(model=MODEL, input="x", max_output_tokens=2)
    assert answer.status == "incomplete" and answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    stream = await client.responses.create(model=MODEL, input="x", max_output_tokens=2, stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == answer.output_text


async def test_what_ends_an_answer_is_as_in_chat(world: World) -> None:
    world.verify.set_answer("one two three four five six")
    # As guidellm asks, so that each answer has as many tokens as it wants.
    steady = {"input": "x", "max_output_tokens": 4, "ignore_eos": True, "stream": True}
    response = await world.http.post("/v1/responses", json=steady)
    assert response.status_code == 200 and world.verify.requests[-1].ignore_eos
    stopped = {"input": "x", "stop": [" four"], "n": 1, "min_tokens": 1}
    body = (await world.http.post("/v1/responses", json=stopped)).json()
    assert (body["status"], body["output"][0]["content"][0]["text"]) == ("completed", "one two three")


async def test_a_form_is_parsed_by_the_client(world: World) -> None:
    world.verify.set_answer('{"name": "Ada"}')
    answer = await world.openai().responses.parse(model=MODEL, input="x", text_format=Person)
    assert answer.output_parsed == Person(name="Ada")
    assert '"name"' in world.verify.requests[-1].grammar.json_schema
    await world.openai().responses.create(model=MODEL, input="x", text={"format": {"type": "json_object"}})
    assert world.verify.requests[-1].grammar.json_object


async def test_an_answer_without_text_is_an_empty_message(world: World) -> None:
    world.verify.set_answer("")
    client = world.openai()
    assert (await client.responses.create(model=MODEL, input="x")).output[0].type == "message"
    events = [event async for event in await client.responses.create(model=MODEL, input="x", stream=True)]
    assert events[-1].type == "response.completed" and events[-1].response.output_text == ""


CALLING = (
    "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{# <tool_call> <think></think> #}"
    "{% for m in messages %}[{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}]"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<{{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}>"
    "{% endfor %}{% endfor %}[assistant]"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS: Any = [
    {"type": "function", "name": "weather", "description": "Tells it.", "parameters": CITY, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
ROME = '{"name": "weather", "arguments": {"city": "Rome é"}}'
NOON = '{"name": "now", "arguments": {}}'


@pytest.fixture
async def caller(tokenizer_folder: Path, tmp_path: Path) -> AsyncIterator[World]:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(CALLING, encoding="utf-8")
    async with open_world(ScriptedVerify(folder), tmp_path) as running:
        yield running


def summary(item: Any) -> tuple[str, str, str]:
    if item.type == "function_call":
        return item.type, item.name, item.arguments
    return item.type, item.status, "".join(part.text for part in item.content)


async def test_calls_are_items_whole_and_streamed_and_their_outputs_go_back(caller: World) -> None:
    calls = f"<tool_call>{ROME}</tool_call>\n<tool_call>{NOON}</tool_call>"
    caller.verify.set_answer(f"<think>Both.</think>Let me see.\n{calls} Done.")
    client = caller.openai().responses
    asked: Any = {"model": MODEL, "tools": FUNCTIONS}
    whole = await client.create(input="x", **asked)
    items = [
        ("reasoning", "completed", "Both."),
        ("message", "completed", "Let me see."),
        ("function_call", "weather", '{"city": "Rome é"}'),
        ("function_call", "now", "{}"),
        ("message", "completed", "\n\n Done."),
    ]
    assert list(map(summary, whole.output)) == items and whole.status == "completed"
    assert len({item.id for item in whole.output}) == 5 and prompt(caller) == "weather now [user]x[assistant]"
    assert [(tool.type, tool.name, tool.strict) for tool in whole.tools] == [  # type: ignore[union-attr]
        ("function", "weather", True),
        ("function", "now", None),
    ]
    async with client.stream(input="x", **asked) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    assert list(map(summary, final.output)) == items
    done: dict[int, Any] = {event.output_index: event.item for event in events if "item.done" in event.type}
    news = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(news) > 3 and {event.output_index for event in news} == {2, 3}
    for index, item in enumerate(final.output[2:4], start=2):
        about: list[Any] = [event for event in events if getattr(event, "output_index", None) == index]
        names = [event.type.removeprefix("response.") for event in about]
        deltas = names.count("function_call_arguments.delta")
        assert names[:1] == ["output_item.added"] and about[0].item.arguments == ""
        assert names[1:] == ["function_call_arguments.delta"] * deltas + [
            "function_call_arguments.done",
            "output_item.done",
        ]
        assert "".join(event.delta for event in about[1:-2]) == about[-2].arguments == item.arguments  # type: ignore[union-attr]
        assert done[index].call_id == about[0].item.call_id != whole.output[index].call_id  # type: ignore[union-attr]
        assert {event.item_id for event in about[1:-1]} == {item.id}
    parts = [{"type": "input_text", "text": "noon"}]
    found: list[Any] = [
        {"type": "function_call_output", "call_id": name, "output": output}
        for name, output in (("c1", "21"), ("c2", parts))
    ]
    made: list[Any] = [
        item.model_copy(update={"call_id": name}) for item, name in zip(whole.output[2:4], ("c1", "c2"), strict=True)
    ]
    history: Any = [{"role": "user", "content": "x"}, *whole.output[:2], *made, *found]
    await client.create(input=history, **asked)
    assert prompt(caller) == (
        'weather now [user]x[assistant](Both.)Let me see.<c1 weather {"city": "Rome é"}><c2 now {}>'
        "[tool c1]21[tool c2]noon[assistant]"
    )
    history = [*whole.output[:1], *made[:1], *found[:1]]
    await client.create(input=history, **asked)
    assert '[assistant](Both.)<c1 weather {"city"' in prompt(caller)


@pytest.mark.parametrize("round_size", [2, 20, 24, 28, 30, 100])
async def test_items_are_the_same_wherever_rounds_end(caller: World, round_size: int) -> None:
    caller.verify.set_answer(f"One. <tool_call>{ROME}</tool_call> Two. <tool_call>{NOON}</tool_call> Three.")
    caller.verify.round_size = round_size
    client = caller.openai().responses
    asked: Any = {"model": MODEL, "input": "x", "tools": FUNCTIONS, "include": ["message.output_text.logprobs"]}
    whole = await client.create(**asked)
    async with client.stream(**asked) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    for answer in (whole, final):
        assert list(map(summary, answer.output)) == [
            ("message", "completed", "One."),
            ("function_call", "weather", '{"city": "Rome é"}'),
            ("message", "completed", "  Two."),
            ("function_call", "now", "{}"),
            ("message", "completed", "  Three."),
        ]
        assert all(item.call_id for item in answer.output if item.type == "function_call")
        messages: list[Any] = [item for item in answer.output if item.type == "message"]
        assert [spelled(one.content[0].logprobs).strip() for one in messages] == ["One.", "Two.", "Three."]


async def test_log_probabilities_of_a_message_behind_a_call_begin_with_it(caller: World) -> None:
    caller.verify.set_answer(f"<tool_call>{NOON}</tool_call>a a a")
    caller.verify.round_size = 2
    asked: Any = {"model": MODEL, "input": "x", "tools": FUNCTIONS, "include": ["message.output_text.logprobs"]}
    answer: Any = await caller.openai().responses.create(**asked, extra_body={"stop": ["a banana!"]})
    assert answer.output_text == spelled(answer.output[-1].content[0].logprobs) == "a a a"
    caller.verify.set_answer(
        f"<tool_call>{NOON}</tool_call>one<tool_call>{NOON}</tool_call>two<tool_call>{NOON}</tool_call>"
    )
    answer = await caller.openai().responses.create(**asked, parallel_tool_calls=False)
    assert answer.output_text == spelled(answer.output[-1].content[0].logprobs) == "onetwo"


@pytest.mark.parametrize(
    ("thought", "scored"), [("<think>", ""), ("<think></think>", ""), ("<think></think>two", "two")]
)
async def test_an_empty_message_has_no_log_probabilities_of_reasoning(caller: World, thought: str, scored: str) -> None:
    caller.verify.set_answer(thought)
    asked: Any = {"model": MODEL, "input": "x", "include": ["message.output_text.logprobs"]}
    answer: Any = await caller.openai().responses.create(**asked, extra_body={"stop": ["two"]})
    assert (answer.output_text, spelled(answer.output[-1].content[0].logprobs)) == ("", scored)


async def test_calls_are_forced_allowed_forbidden_and_cut(caller: World) -> None:
    client = caller.openai().responses
    asked: Any = {"model": MODEL, "input": "x", "tools": FUNCTIONS}
    caller.verify.set_answer(ROME)
    named = {"type": "function", "name": "weather"}
    choices: list[Any] = ["required", named, {"type": "allowed_tools", "mode": "required", "tools": [named]}]
    for choice in choices:
        answer = await client.create(tool_choice=choice, **asked)  # type: ignore[call-overload]
        assert list(map(summary, answer.output)) == [("function_call", "weather", '{"city": "Rome é"}')]
        assert prompt(caller).endswith("<tool_call>\n")
        sent = answer.tool_choice if isinstance(choice, str) else answer.tool_choice.to_dict()
        assert sent == choice and "city" in caller.verify.requests[-1].grammar.json_schema
    cut = await client.create(tool_choice="required", max_output_tokens=40, **asked)
    assert (cut.status, cut.output[0].type, cut.output[0].status) == ("incomplete", "function_call", "incomplete")
    caller.verify.set_answer(f"<tool_call>{NOON}</tool_call>" * 2)
    one = await client.create(parallel_tool_calls=False, **asked)
    assert len(one.output) == 1 and caller.verify.requests[-1].grammar.ebnf  # one of them is strict
    none = await client.create(tool_choice="none", **asked)
    assert "<tool_call>" in none.output_text and "weather" not in prompt(caller)


async def test_the_client_parses_arguments_of_responses(caller: World) -> None:
    caller.verify.set_answer('<tool_call>{"name": "Person", "arguments": {"name": "Ada"}}</tool_call>')
    tool = openai.pydantic_function_tool(Person)["function"]
    answer = await caller.openai().responses.parse(
        model=MODEL,
        input="x",
        tools=[{"type": "function", "name": "Person", "parameters": tool["parameters"], "strict": True}],
    )
    (call,) = answer.output
    assert call.type == "function_call" and call.parsed_arguments == {"name": "Ada"}


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"store": True}, "store", "stored"),
        ({"previous_response_id": "resp-1"}, "previous_response_id", "whole conversation"),
        ({"background": True}, "background", "stored"),
        ({"tools": [{"type": "web_search", "filters": {}}]}, "tools[0].type", "not supported; send 'function'"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "missing"),
        ({"tools": [{"type": "function", "name": "a"}] * 2}, "tools[1].name", "twice"),
        (
            {"tools": [{"type": "function", "name": "a", "strict": True, "parameters": {"not": {}}}]},
            "tools[0].parameters.not",
            "say what is allowed",
        ),
        ({"tool_choice": "required"}, "tools", "missing"),
        (
            {"tool_choice": {"type": "function", "name": "b"}, "tools": [{"type": "function", "name": "a"}]},
            "tool_choice.name",
            "not one of the tools",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "b"}]}},
            "tool_choice.tools[0].name",
            "not one of the tools",
        ),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "not supported"),
        ({"tool_choice": 7}, "tool_choice", "'required'"),
        ({"max_tool_calls": 3}, "max_tool_calls", "leave it out"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "missing"),
        (
            {
                "instructions": "x",
                "input": [{"type": "function_call", "call_id": "a", "name": "a", "arguments": "{}"}] * 129,
            },
            "input[128]",
            "follows 128 calls",
        ),
        ({"input": [{"type": "function_call", "call_id": "c", "name": ""}]}, "input[0].name", "at least one"),
        ({"truncation": "auto"}, "truncation", "left out"),
        ({"include": ["web_search_call.results"]}, "include[0]", "send 'message.output_text.logprobs'"),
        ({"top_logprobs": 2}, "top_logprobs", "add message.output_text.logprobs to include"),
        ({"input": []}, "input", "at least one entry"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "text": "x"}]}]}, "input", "input_text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "message"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "missing"),
        ({"max_output_tokens": 100000}, "max_output_tokens", "context"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "none"),
        ({"n": 2}, "n", "one answer"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    world: World, fields: dict[str, Any], param: str, word: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await world.openai().responses.create(model=MODEL, **{"input": "x"}, extra_body=fields)
    assert str(caught.value.param).startswith(param) and "@" not in str(caught.value.param)
    assert word in caught.value.message
    assert not world.verify.requests


@pytest.mark.parametrize(
    ("metadata", "field", "limit"),
    [
        ({f"k{number}": "v" for number in range(17)}, "metadata", "17 entries, over the limit of 16"),
        ({"k" * 65: "v"}, f"metadata.{'k' * 64}", "65 characters, over the limit of 64"),
        ({"k": "v" * 513}, "metadata.k", "513 characters, over the limit of 512"),
        ({"k": {"nested": "v" * 9}}, "metadata.k", "string"),
    ],
)
async def test_metadata_beyond_openai_s_limits_is_refused(world: World, metadata: Any, field: str, limit: str) -> None:
    with pytest.raises(openai.BadRequestError, match=limit) as refused:
        await world.openai().responses.create(model=MODEL, input="x", metadata=metadata)
    assert refused.value.param == field
    assert world.verify.requests == []


async def test_metadata_within_openai_s_limits_is_told_again(world: World) -> None:
    world.verify.set_answer("Hello!")
    metadata = {f"{number:064}": "\N{WORLD MAP}" * 512 for number in range(16)}
    answer = await world.openai().responses.create(model=MODEL, input="x", metadata=metadata)
    assert answer.metadata == metadata

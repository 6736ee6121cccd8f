"""Tools from a request through the template to verify, and calls back from the answer, over REST and gRPC."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_world import World, open_world
from pydantic import BaseModel
from scripted_verify import MODEL, ScriptedVerify
from tiny_tokenizers import byte_level_tokenizer

from gateway.core.gemma_calls import QUOTE
from outrider.errors import InvalidRequestError
from outrider.grammar.spec import GrammarKind
from outrider.protocol.generation_codec import decode_grammar
from outrider.v1 import common_pb2, gateway_pb2

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "How warm is it in Rome?"}]
PLACE = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
         "$defs": {"City": {"type": "string"}}}  # fmt: skip
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PLACE}},
    {"type": "function", "function": {"name": "now"}},
]
WEATHER = '{"name": "weather", "arguments": {"city": "Rome é"}}'
WEATHER_GEMMA = 'call:weather{city:<|"|>Rome é<|"|>}'
NOW = '{"name": "now", "arguments": {}}'
TEMPLATES = {
    "hermes": "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{# <tool_call> #}",
    "mistral": "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{# [TOOL_CALLS] #}",
    "llama3": "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{# <|python_tag|> #}",
    "gemma4": "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}{# <|tool_call>call: <tool_call|> #}",
    "json": "",
}
MESSAGES = (
    "{% for m in messages %}[{{ m.role }}{% if m.tool_call_id %} {{ m.tool_call_id }}{% endif %}] {{ m['content'] }}"
    "{% for c in m.tool_calls or [] %} call {{ c.id }} {{ c.function.name }} {{ c.function.arguments | tojson }}"
    "{% endfor %}{{ '\n' }}{% endfor %}>"
)
WRITTEN = {
    "hermes": f"Let me see.\n<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{NOW}\n</tool_call>",
    "mistral": f"Let me see.[TOOL_CALLS][{WEATHER}, {NOW}]",
    "llama3": f"<|python_tag|>{WEATHER.replace('arguments', 'parameters')}; {NOW}",
    "gemma4": f"Let me see.\n<|tool_call>{WEATHER_GEMMA}<tool_call|><|tool_call>call:now{{}}<tool_call|>",
    "json": f"[{WEATHER}, {NOW}]",
}


def make_verify(folder: Path, form: str) -> ScriptedVerify:
    """A model whose template is of a format, and whose openers are special tokens where models have them so."""
    inner = byte_level_tokenizer()
    inner.add_special_tokens(["[TOOL_CALLS]", "<|python_tag|>", "<|tool_call>", "<tool_call|>", QUOTE])
    inner.save(str(folder / "tokenizer.json"))
    # As templates without tools are, it would put calls that it is given nowhere.
    template = TEMPLATES[form] + (MESSAGES if form != "json" else MESSAGES.replace("m.tool_calls", "m.nothing"))
    config = {"chat_template": template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    verify = ScriptedVerify(folder)
    verify.context_length = 1024
    return verify


def prompt(world: World) -> str:
    """What verify was asked last, as text."""
    return world.verify.tokenizer.decode(list(world.verify.requests[-1].prompt_token_ids), skip_special_tokens=False)


@pytest.mark.parametrize("form", list(WRITTEN))
async def test_calls_of_every_format_come_back_whole_and_streamed(tmp_path: Path, form: str) -> None:
    verify = make_verify(tmp_path, form)
    async with open_world(verify, tmp_path) as world:
        verify.set_answer(WRITTEN[form])
        client = world.openai().chat.completions
        asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": TOOLS}
        whole = (await client.create(**asked)).choices[0]
        calls = whole.message.tool_calls or []
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == ("Let me see." if form in ("hermes", "mistral", "gemma4") else None)
        found = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in calls]
        assert found == [("function", "weather", {"city": "Rome é"}), ("function", "now", {})]
        assert len({call.id for call in calls}) == 2
        assert form != "mistral" or all(len(call.id) == 9 and call.id.isalnum() for call in calls)
        assert "weather" in prompt(world) and not decoded_grammar(world)

        stream = await client.create(stream=True, **asked)
        choices = [chunk.choices[0] async for chunk in stream]
        deltas = [call for choice in choices for call in choice.delta.tool_calls or []]
        for index, call in enumerate(calls):
            first, *others = [delta for delta in deltas if delta.index == index]
            assert first.id and first.type == "function" and first.function.name == call.function.name
            assert all((d.id, d.type, d.function.name) == (None, None, None) for d in others)
            assert "".join(d.function.arguments for d in (first, *others)) == call.function.arguments
        assert len([delta for delta in deltas if delta.index == 0]) > 3
        assert [choice.finish_reason for choice in choices][-1] == "tool_calls"

        alone = await client.create(parallel_tool_calls=False, **asked)
        assert [call.function.name for call in alone.choices[0].message.tool_calls or []] == ["weather"]
        none = await client.create(tool_choice="none", **asked)
        assert none.choices[0].message.tool_calls is None and "weather" not in prompt(world)


def decoded_grammar(world: World) -> Any:
    """A schema; of gemma4 rules."""
    request = world.verify.requests[-1]
    if not request.HasField("grammar"):
        return None
    grammar = decode_grammar(request.grammar)
    return grammar.source if grammar.kind is GrammarKind.EBNF else json.loads(grammar.source)


OPENINGS = {"hermes": "<tool_call>\n", "mistral": "[TOOL_CALLS]", "llama3": "<|python_tag|>",
            "gemma4": "<|tool_call>", "json": ""}  # fmt: skip


@pytest.mark.parametrize("form", list(WRITTEN))
async def test_a_forced_call_begins_behind_its_opener_and_is_held_to_its_schema(tmp_path: Path, form: str) -> None:
    verify = make_verify(tmp_path, form)
    async with open_world(verify, tmp_path) as world:
        body = WEATHER.replace("arguments", "parameters") if form == "llama3" else WEATHER
        verify.set_answer(f"[{body}]" if form == "mistral" else WEATHER_GEMMA if form == "gemma4" else body)
        for choice, num_tools in (("required", 2), ({"type": "function", "function": {"name": "weather"}}, 1)):
            fields = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice}
            response = await world.http.post(CHAT, json=fields)
            answer = response.json()["choices"][0]
            assert answer["finish_reason"] == "tool_calls" and answer["message"]["content"] is None
            arguments = answer["message"]["tool_calls"][0]["function"]["arguments"]
            assert json.loads(arguments) == {"city": "Rome é"}
            assert prompt(world).endswith(">" + OPENINGS[form])
            if form == "gemma4":
                rules = decoded_grammar(world)
                assert f"<[{verify.tokenizer.added_id(QUOTE)}]>" in rules and rules.count('"call:') == num_tools
                continue
            schema = decoded_grammar(world)
            assert len(schema["$defs"]) == num_tools
            held = schema["$defs"]["tool0"]
            assert held["properties"]["city"]["$ref"] == "#/$defs/tool0/$defs/City" and not held["additionalProperties"]


NO_GRAMMAR = InvalidRequestError("grammar.json_schema", "too complex", "split it", code="invalid_grammar")


async def test_a_forced_call_of_a_tool_that_is_not_strict_needs_no_schema_that_can_be_held_to(tmp_path: Path) -> None:
    exotic = {"type": "object", "properties": {"a": {"not": {}}}}
    tools = [
        *TOOLS,
        {"type": "function", "function": {"name": "exotic", "parameters": exotic}},
        {"type": "function", "function": {"name": "plain", "strict": True, "parameters": PLACE}},
    ]
    asked = {"messages": HELLO, "tools": tools, "tool_choice": "required", "n": 2}
    verify = make_verify(tmp_path, "hermes")
    verify.set_answer('{"name": "exotic", "arguments": {"b": 1}}')
    async with open_world(verify, tmp_path) as world:
        answer = (await world.http.post(CHAT, json=asked)).json()["choices"][0]["message"]
        assert answer["tool_calls"][0]["function"] == {"name": "exotic", "arguments": '{"b": 1}'}
        schemas = list(decoded_grammar(world)["$defs"].values())
        assert [one.get("required") for one in schemas] == [["city"], None, None, ["city"]]
        assert schemas[2] == {"type": "object"} and "additionalProperties" in schemas[1]
        # What only compiling finds.
        world.verify.failures, num_asked = [NO_GRAMMAR] * 2, len(world.verify.requests)
        assert (await world.http.post(CHAT, json=asked)).status_code == 200
        assert len(world.verify.requests) == num_asked + 4
        schemas = list(decoded_grammar(world)["$defs"].values())
        assert schemas[:3] == [{"type": "object"}] * 3 and schemas[3]["required"] == ["city"]
        for refused, failures in ((asked, [NO_GRAMMAR] * 4), (asked | {"tools": tools[3:]}, [NO_GRAMMAR] * 2)):
            world.verify.failures = failures
            error = (await world.http.post(CHAT, json=refused | {"n": 1})).json()["error"]
            assert (error["code"], error["param"]) == ("invalid_grammar", "tools")


@pytest.mark.parametrize("form", list(WRITTEN))
async def test_a_strict_tool_holds_calls_that_the_model_chooses(tmp_path: Path, form: str) -> None:
    verify = make_verify(tmp_path, form)
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}, TOOLS[1]]
    async with open_world(verify, tmp_path) as world:
        for tools, choice, is_held in ((TOOLS, "auto", False), (strict, "none", False), (strict, "auto", True)):
            verify.set_answer(WRITTEN[form])
            body = {"messages": HELLO, "tools": tools, "tool_choice": choice}
            answer = (await world.http.post(CHAT, json=body)).json()["choices"][0]
            assert answer["finish_reason"] == ("stop" if choice == "none" else "tool_calls")
            assert verify.requests[-1].HasField("grammar") is (is_held and form in ("hermes", "gemma4", "json"))
        schema = {"type": "object", "properties": {"a": {"not": {}}}}
        bad = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
        body = {"messages": HELLO, "tools": bad}
        error = (await world.http.post(CHAT, json=body)).json()["error"]
        assert error["param"] == "tools[0].function.parameters.properties.a.not" and error["code"] == "invalid_grammar"
        body["tool_choice"] = "none"
        assert (await world.http.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_of_the_tools_those_that_are_allowed_are_offered(tmp_path: Path, mode: str) -> None:
    async with open_world(make_verify(tmp_path, "hermes"), tmp_path) as world:
        world.verify.set_answer(NOW if mode == "required" else f"<tool_call>{NOW}</tool_call>")
        answer = await world.openai().chat.completions.create(
            model=MODEL,
            messages=HELLO,
            tools=TOOLS,
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "now"}}]},
            },
        )
        assert [call.function.name for call in answer.choices[0].message.tool_calls or []] == ["now"]
        assert '"now"' in prompt(world) and '"weather"' not in prompt(world)
        assert prompt(world).endswith("<tool_call>\n") is (mode == "required")


@pytest.mark.parametrize("form", list(WRITTEN))
async def test_tools_count_among_the_tokens_of_a_conversation(tmp_path: Path, form: str) -> None:
    async with open_world(make_verify(tmp_path, form), tmp_path) as world:
        world.verify.set_answer("ok")
        asked = {"messages": HELLO, "tools": TOOLS}
        assert (await world.http.post(CHAT, json=asked)).status_code == 200
        counted = (await world.http.post("/tokenize", json=asked)).json()
        assert counted["tokens"] == list(world.verify.requests[-1].prompt_token_ids)
        refused = await world.http.post("/tokenize", json={"prompt": "x", "tools": TOOLS})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("form", list(WRITTEN))
async def test_an_answer_has_its_form_or_calls_tools(tmp_path: Path, form: str) -> None:
    schema = {"type": "object", "properties": {"celsius": {"type": "integer"}}, "required": ["celsius"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"messages": HELLO, "tools": TOOLS, "response_format": wanted}
    async with open_world(make_verify(tmp_path, form), tmp_path) as world:
        world.verify.set_answer('{"celsius": 21}')
        (choice,) = (await world.http.post(CHAT, json=asked)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ('{"celsius": 21}', "stop")
        assert world.verify.requests[-1].grammar.WhichOneof("kind") == "ebnf"
        world.verify.set_answer(WRITTEN[form].removeprefix("Let me see.\n"))
        (called,) = (await world.http.post(CHAT, json=asked)).json()["choices"]
        assert called["finish_reason"] == "tool_calls" and len(called["message"]["tool_calls"]) == 2
        found = InvalidRequestError("grammar.ebnf", "Invalid type", "send Lark", code="invalid_grammar")
        world.verify.failures = [found]
        error = (await world.http.post(CHAT, json=asked)).json()["error"]
        assert error["param"] == "response_format.json_schema.schema" and "leave out what is not" in error["message"]
        # A call that is forced leaves no room for the form.
        world.verify.set_answer(WEATHER)
        forced = await world.http.post(CHAT, json=asked | {"tool_choice": "required"})
        assert forced.status_code == 200 and "celsius" not in json.dumps(decoded_grammar(world))


async def answered(tmp_path: Path, form: str, messages: list[Any]) -> tuple[Any, str]:
    """The message that answers a conversation with tools, and the prompt that was made of it."""
    folder = tmp_path / form
    folder.mkdir()
    verify = make_verify(folder, form)
    async with open_world(verify, folder) as world:
        verify.set_answer("21 degrees")
        response = await world.http.post(CHAT, json={"messages": messages, "tools": TOOLS})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"], prompt(world)


async def test_calls_and_results_in_the_history_reach_the_template(tmp_path: Path) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
             {"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{broken"}}]  # fmt: skip
    messages = [*HELLO, {"role": "assistant", "tool_calls": calls},
                {"role": "tool", "tool_call_id": "c1", "content": "21"}]  # fmt: skip
    for form, wanted in (
        ("hermes", '[assistant]  call c1 weather {"city": "Rome"} call c2 now "{broken"\n[tool c1] 21\n>'),
        ("json", '[assistant] {"name": "weather", "arguments": {"city": "Rome"}}\n{"name": "now", "arguments": '
                 '"{broken"}\n[user] Result of weather: 21\n>'),
    ):  # fmt: skip
        message, shown = await answered(tmp_path, form, messages)
        assert message == {"role": "assistant", "content": "21 degrees", "refusal": None}
        assert shown.endswith(wanted)
        assert shown.startswith("{" if form == "hermes" else "[system] You may call functions.")


@pytest.mark.parametrize("parser", list(WRITTEN))
async def test_calls_as_a_template_without_tools_shows_them_are_calls_to_the_parser(
    tmp_path: Path, parser: str
) -> None:
    arguments = {"city": 'Rome "é"', "days": [1, 2.5, None, True], "of a": {"b": f"x{QUOTE}", "c": ""}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "21"}]  # fmt: skip
    verify = make_verify(tmp_path, "json")
    async with open_world(verify, tmp_path, tool_call_parser=parser) as world:
        verify.set_answer("21 degrees")
        asked = {"messages": messages, "tools": TOOLS}
        assert (await world.http.post(CHAT, json=asked)).status_code == 200
        instructions, _, shown = prompt(world).partition("[assistant] ")
        written = shown.partition("\n[user] Result of weather: 21")[0]
        opening = written[: written.index("weather")].removesuffix('"')
        assert f"{opening}its name" in instructions
        verify.set_answer(written)
        choice = (await world.http.post(CHAT, json=asked)).json()["choices"][0]
        (read,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and read["function"]["name"] == "weather"
        assert json.loads(read["function"]["arguments"]) == arguments


async def test_arguments_of_many_levels_are_shown_in_every_format(tmp_path: Path) -> None:
    verify = make_verify(tmp_path, "json")
    verify.context_length = 8192
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a":' * 450 + "1" + "}" * 450}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, *HELLO]
    async with open_world(verify, tmp_path, tool_call_parser="gemma4") as world:
        verify.set_answer("21 degrees")
        response = await world.http.post(CHAT, json={"messages": messages, "tools": TOOLS})
        assert response.status_code == 200, response.text
        assert "<|tool_call>call:now{" in prompt(world)


async def test_a_parser_may_be_named_or_left_out(tmp_path: Path) -> None:
    verify = make_verify(tmp_path, "hermes")
    verify.set_answer(WRITTEN["json"])
    async with open_world(verify, tmp_path, tool_call_parser="json") as world:
        answer = (await world.http.post(CHAT, json={"messages": HELLO, "tools": TOOLS})).json()["choices"][0]
        assert len(answer["message"]["tool_calls"]) == 2
    other = tmp_path / "none"
    other.mkdir()
    async with open_world(verify, other, tool_call_parser="none") as world:
        asked = {"messages": HELLO, "tools": TOOLS}
        answer = (await world.http.post(CHAT, json=asked)).json()["choices"][0]
        assert answer["message"]["content"] == WRITTEN["json"] and answer["finish_reason"] == "stop"
        response = await world.http.post(CHAT, json=asked | {"tool_choice": "required"})
        assert response.status_code == 400 and response.json()["error"]["param"] == "tool_choice"


async def test_a_call_that_is_cut_says_length(tmp_path: Path) -> None:
    verify = make_verify(tmp_path, "hermes")
    verify.set_answer(WRITTEN["hermes"])
    async with open_world(verify, tmp_path) as world:
        fields = {"messages": HELLO, "tools": TOOLS, "max_tokens": 30, "n": 2}
        for choice in (await world.http.post(CHAT, json=fields)).json()["choices"]:
            assert choice["finish_reason"] == "length"


class Weather(BaseModel):
    """Tells the weather."""

    city: str


async def test_the_openai_client_parses_arguments_into_its_model(tmp_path: Path) -> None:
    import openai

    verify = make_verify(tmp_path, "hermes")
    verify.set_answer('{"name": "Weather", "arguments": {"city": "Rome"}}')
    async with open_world(verify, tmp_path) as world:
        completion = await world.openai().chat.completions.parse(
            model=MODEL,
            messages=HELLO,
            tools=[openai.pydantic_function_tool(Weather)],
            tool_choice={"type": "function", "function": {"name": "Weather"}},
        )
        (call,) = completion.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == Weather(city="Rome")


GRPC_TOOLS = [
    gateway_pb2.Tool(name="weather", description="Tells it.", parameters=json.dumps(PLACE)),
    gateway_pb2.Tool(name="now"),
]


def grpc_request(*messages: gateway_pb2.ChatMessage, **fields: Any) -> gateway_pb2.GatewayServiceGenerateRequest:
    turns = messages or [gateway_pb2.ChatMessage(role="user", content=HELLO[0]["content"])]
    chat = gateway_pb2.ChatMessages(**{"messages": turns, "tools": GRPC_TOOLS} | fields)
    return gateway_pb2.GatewayServiceGenerateRequest(chat=chat)


@pytest.mark.parametrize("form", list(WRITTEN))
async def test_grpc_has_the_prompts_and_calls_that_rest_has(tmp_path: Path, form: str) -> None:
    verify = make_verify(tmp_path, form)
    history = [
        gateway_pb2.ChatMessage(role="user", content="x"),
        gateway_pb2.ChatMessage(role="assistant", tool_calls=[{"id": "c1", "name": "now", "arguments": "{}"}]),
        gateway_pb2.ChatMessage(role="tool", tool_call_id="c1", content="noon"),
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "noon"}]  # fmt: skip
    async with open_world(verify, tmp_path) as world:
        for fields, choice in (({}, "auto"), ({"tool_choice": "none"}, "none"),
                               ({"tool_choice": "required", "tool_name": "weather"},
                                {"type": "function", "function": {"name": "weather"}})):  # fmt: skip
            forced = f"[{WEATHER}]" if form == "mistral" else WEATHER_GEMMA if form == "gemma4" else WEATHER
            verify.set_answer(WRITTEN[form] if choice in ("auto", "none") else forced)
            body = {"messages": messages, "tools": TOOLS, "tool_choice": choice}
            wanted = (await world.http.post(CHAT, json=body)).json()["choices"][0]["message"]
            asked = prompt(world), decoded_grammar(world)
            answer = [part async for part in world.stub.Generate(grpc_request(*history, **fields))]
            assert (prompt(world), decoded_grammar(world)) == asked
            assert "".join(part.text for part in answer) == (wanted["content"] or "")
            assert answer[-1].finish_reason == common_pb2.FINISH_REASON_STOP
            deltas = [delta for part in answer for delta in part.tool_calls]
            calls = wanted.get("tool_calls", [])
            assert len({delta.index for delta in deltas}) == len(calls)
            for index, made in enumerate(calls):
                first, *more = [delta for delta in deltas if delta.index == index]
                assert first.id and first.name == made["function"]["name"]
                assert not any(delta.id or delta.name for delta in more)
                assert "".join(delta.arguments for delta in (first, *more)) == made["function"]["arguments"]
        verify.set_answer(WRITTEN[form])
        answer = [part async for part in world.stub.Generate(grpc_request(parallel_tool_calls=False))]
        assert {delta.index for part in answer for delta in part.tool_calls} == {0}


async def test_half_an_emoji_in_the_history_stays_as_it_was_written(tmp_path: Path) -> None:
    written = [r'{"a": "\ud83d"}', r'{"\udc00": 1}']
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "weather", "arguments": text}}
        for n, text in enumerate(written)
    ]
    messages = [*HELLO, {"role": "assistant", "tool_calls": calls}]
    for form in ("hermes", "json"):
        _, shown = await answered(tmp_path, form, messages)
        assert all(json.dumps(text) in shown for text in written)


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"tools": [{"name": "f", "parameters": "{"}]}, r"chat\.tools\[0\]\.parameters: is no JSON"),
        ({"tools": [{"name": "f", "parameters": "[]"}]}, r"chat\.tools\[0\]\.parameters: .*object"),
        ({"tools": [{"name": "f", "parameters": " " * 70000}]}, r"chat\.tools\[0\]\.parameters: .*limit of 65536"),
        ({"tools": [{"name": f"f{i}", "parameters": json.dumps({"title": "x" * 40_000}), "strict": True}
          for i in range(2)]}, r"chat\.tools: .*together.*limit of 65536"),
        ({"tools": [{"name": "f", "parameters": '{"title": "\\ud83d"}'}]},
         r"chat\.tools\[0\]\.parameters: holds a lone surrogate.*send"),
        ({"tools": [{"name": "f g"}]}, r"chat\.tools\[0\]\.name: holds more than letters"),
        ({"tools": [{"name": "f"}, {"name": "f"}]}, r"chat\.tools\[1\]\.name: 'f' is defined twice"),
        ({"tools": [{}] * 129}, r"chat\.tools: 129 entries, over the limit of 128"),
        ({"tools": [], "tool_choice": "required"}, r"chat\.tools: missing"),
        ({"tool_choice": "any"}, r"chat\.tool_choice: "),
        ({"tool_name": "now"}, r"chat\.tool_name: needs a tool_choice of required"),
        ({"tool_choice": "required", "tool_name": "then"}, r"chat\.tool_name: 'then' is not one of the tools"),
        ({"tool_choice": "required", "tools": [{"name": "f", "parameters": '{"type": "string"}'}]},
         r"chat\.tools\[0\]\.parameters\.type: arguments are an object"),
        ({"tool_choice": "required",
          "tools": [{"name": "f", "strict": True, "parameters": '{"properties": {"a": {"not": {}}}}'}]},
         r"chat\.tools\[0\]\.parameters\.properties\.a\.not"),
        ({"messages": [{"role": "user", "tool_calls": [{"name": "f"}]}]}, r"chat\.messages\[0\]\.tool_calls: only an"),
        ({"messages": [{"role": "tool"}]}, r"chat\.messages\[0\]\.tool_call_id: is required in messages of role tool"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * 129}]}, r"chat\.messages\[0\]\.tool_calls: 129"),
    ],
)  # fmt: skip
async def test_grpc_refuses_tools_that_cannot_be_by_their_place(
    world: World, fields: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=refusal):
        [part async for part in world.stub.Generate(grpc_request(**fields))]
    request = grpc_request()
    request.grammar.regex = "a"
    with pytest.raises(grpc.aio.AioRpcError, match="grammar: only JSON goes with tools"):
        [part async for part in world.stub.Generate(request)]


async def test_token_ids_are_told_of_all_tokens_of_a_chat_answer(tmp_path: Path) -> None:
    verify = make_verify(tmp_path, "hermes")
    async with open_world(verify, tmp_path) as world:
        ids = [*verify.set_answer(WRITTEN["hermes"]), 2]
        body: Any = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "extra_body": {"return_token_ids": True}}
        named = body | {"extra_body": {"return_token_ids": True, "return_tokens_as_token_ids": True}}
        answer: Any = await world.openai().chat.completions.create(**named, logprobs=True, top_logprobs=1)
        asked = list(verify.requests[-1].prompt_token_ids)
        assert (answer.prompt_token_ids, answer.choices[0].token_ids) == (asked, ids)
        assert len(answer.choices[0].message.tool_calls) == 2
        content = answer.choices[0].logprobs.content
        assert [one.token for one in content] == [f"token_id:{one}" for one in ids[:-1]]
        assert all(one.top_logprobs[0].token.startswith("token_id:") for one in content)
        assert bytes(byte for one in content for byte in one.bytes).decode() == WRITTEN["hermes"]
        stream: Any = await world.openai().chat.completions.create(**body, stream=True)
        role, *chunks = [chunk async for chunk in stream]
        assert (role.prompt_token_ids, role.choices[0].delta.role) == (asked, "assistant")
        token_ids = [chunk.choices[0].model_extra.get("token_ids", []) for chunk in chunks]
        assert [one for part in token_ids for one in part] == ids
        assert not any("prompt_token_ids" in chunk.model_extra for chunk in chunks)

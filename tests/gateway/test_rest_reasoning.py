"""Chat answers of models that think first, with openai-python's client."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
import tokenizers
from gateway_world import World, open_world
from scripted_verify import MODEL, ScriptedVerify
from tiny_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

from outrider.errors import InvalidRequestError
from outrider.v1 import gateway_pb2

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% endfor %}[assistant]{% if reasoning_effort %}effort={{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif prefix %}{{ prefix }}{% endif %}"
)
ANSWER = "<think>\nThe user says hello. 🙂\n</think>\n\nHello!"
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def thinking_folder(tokenizer_folder: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tokenizer_folder, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture
async def thinker(thinking_folder: Path, tmp_path: Path) -> AsyncIterator[World]:
    verify = ScriptedVerify(thinking_folder)
    verify.set_answer(ANSWER)
    async with open_world(verify, tmp_path) as running:
        yield running


async def ask(world: World, **more: Any) -> Any:
    return await world.openai().chat.completions.create(model=MODEL, messages=HELLO, **more)


def prompt(world: World) -> str:
    request = world.verify.requests[-1]
    return world.verify.tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)


async def test_reasoning_is_told_apart_and_counted(thinker: World) -> None:
    answer = await ask(thinker)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("The user says hello. 🙂", "Hello!")
    assert message.reasoning == message.reasoning_content
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    plain = await ask(thinker, extra_body={"separate_reasoning": False})
    assert plain.choices[0].message.content == ANSWER
    assert not hasattr(plain.choices[0].message, "reasoning_content")


async def test_deltas_of_a_stream_are_of_the_one_or_the_other(thinker: World) -> None:
    deltas = [chunk.choices[0].delta async for chunk in await ask(thinker, stream=True, logprobs=True)]
    reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(reasoning) == "The user says hello. 🙂" and sum(map(bool, reasoning)) > 3
    assert [getattr(delta, "reasoning", None) or "" for delta in deltas] == reasoning
    content = [delta.content or "" for delta in deltas]
    assert "".join(content) == "Hello!"
    last = max(index for index, text in enumerate(reasoning) if text)
    assert not any(content[:last])


async def test_reasoning_can_be_left_out(thinker: World) -> None:
    less: dict[str, Any] = {"extra_body": {"include_reasoning": False}}
    answer = await ask(thinker, **less)
    assert answer.choices[0].message.content == "Hello!"
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    deltas = [chunk.choices[0].delta async for chunk in await ask(thinker, stream=True, **less)]
    assert "".join(delta.content or "" for delta in deltas) == "Hello!"
    assert not any(hasattr(part, "reasoning") for part in (answer.choices[0].message, *deltas))


async def test_an_answer_cut_off_while_it_thinks_has_no_content(thinker: World) -> None:
    answer = await ask(thinker, max_tokens=14)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "length" and message.content == ""
    assert message.reasoning_content and "The user".startswith(message.reasoning_content[:8])
    assert answer.usage.completion_tokens_details.reasoning_tokens <= 14


async def test_values_go_to_the_template_and_say_where_the_answer_begins(thinker: World) -> None:
    thinker.verify.set_answer("short</think> Yes")
    answer = await ask(thinker, extra_body={"chat_template_kwargs": {"prefix": "<think>\n"}}, reasoning_effort="high")
    assert prompt(thinker).endswith("[assistant]effort=high<think>\n")
    assert (answer.choices[0].message.reasoning_content, answer.choices[0].message.content) == ("short", "Yes")
    for more in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        answer = await ask(thinker, **more)
        assert prompt(thinker).endswith("<think>\n\n</think>\n\n")
        assert answer.choices[0].message.content == "short</think> Yes"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_earlier_reasoning_goes_to_the_template(thinker: World, name: str) -> None:
    earlier = {"role": "assistant", "content": "Hi", name: "greet"}
    await thinker.openai().chat.completions.create(model=MODEL, messages=[*HELLO, earlier, *HELLO])
    assert prompt(thinker) == "[user]Hello[assistant](greet)Hi[user]Hello[assistant]"
    body = {"messages": HELLO, "chat_template_kwargs": {"prefix": "now: "}}
    tokenized = (await thinker.http.post("/tokenize", json=body)).json()["tokens"]
    assert thinker.verify.tokenizer.decode(tokenized) == "[user]Hello[assistant]now: "


@pytest.mark.parametrize("prefix", ["", "<think>\n"])
async def test_a_form_comes_behind_the_reasoning(thinker: World, prefix: str) -> None:
    thinker.verify.set_answer(f'{"" if prefix else "<think>"}short</think>\n\n{{"a": 1}}')
    template = {"chat_template_kwargs": {"prefix": prefix}}
    answer = await ask(thinker, response_format={"type": "json_object"}, extra_body=template)
    assert (answer.choices[0].message.reasoning_content, answer.choices[0].message.content) == ("short", '{"a": 1}')
    response = await thinker.openai().responses.create(
        model=MODEL, input="x", text={"format": {"type": "json_object"}}, extra_body=template
    )
    assert [item.type for item in response.output] == ["reasoning", "message"] and response.output_text == '{"a": 1}'
    assert all(request.grammar.WhichOneof("kind") == "ebnf" for request in thinker.verify.requests)


@pytest.mark.parametrize("more", [{"separate_reasoning": False}, {"chat_template_kwargs": {"enable_thinking": False}}])
async def test_without_reasoning_a_form_holds_from_the_first_token(thinker: World, more: dict[str, Any]) -> None:
    thinker.verify.set_answer('{"a": 1}')
    answer = await ask(thinker, response_format={"type": "json_object"}, extra_body=more)
    assert answer.choices[0].message.content == '{"a": 1}' and thinker.verify.requests[-1].grammar.json_object


async def test_a_large_schema_may_come_behind_reasoning(thinker: World) -> None:
    schema = {"type": "object", "description": "é" * 30_000}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = await ask(thinker, response_format=form)
    assert answer.choices[0].finish_reason == "stop"
    schema["title"] = "x" * (65_536 - len(json.dumps(schema, ensure_ascii=False).encode()) - 13)
    with pytest.raises(openai.BadRequestError, match=r"response_format\.json_schema\.schema: .*the limit of 65536"):
        await ask(thinker, response_format=form)


@pytest.mark.parametrize(
    ("form", "found"),
    [({"guided_regex": "(ab"}, "use a regular expression"), ({"ebnf": "start: a"}, "send Lark with a rule start")],
)
async def test_all_forms_come_behind_the_reasoning(thinker: World, form: dict[str, Any], found: str) -> None:
    message = (await ask(thinker, extra_body=form)).choices[0].message
    assert (message.reasoning_content, message.content) == ("The user says hello. 🙂", "Hello!")
    source = thinker.verify.requests[-1].grammar.ebnf
    assert source.startswith("start: ") and next(iter(form.values())) in source
    refusal = InvalidRequestError("grammar.ebnf", "is wrong", found, code="invalid_grammar")
    thinker.verify.failures = [refusal]
    with pytest.raises(openai.BadRequestError, match=f"{next(iter(form))}: is wrong; {found}"):
        await ask(thinker, extra_body=form)


async def test_other_doors_tell_all(thinker: World) -> None:
    completion = await thinker.openai().completions.create(model=MODEL, prompt="x", max_tokens=100)
    assert completion.choices[0].text == ANSWER
    request = gateway_pb2.GatewayServiceGenerateRequest(prompt="x")
    assert "".join([message.text async for message in thinker.stub.Generate(request)]) == ANSWER


async def test_grpc_has_it_where_it_is_asked_for(thinker: World) -> None:
    messages = [
        gateway_pb2.ChatMessage(role="assistant", content="Hi", reasoning_content="greet"),
        gateway_pb2.ChatMessage(role="user", content="Hello"),
        gateway_pb2.ChatMessage(role="user", content=""),
    ]
    chat = gateway_pb2.ChatMessages(messages=messages, template_values='{"prefix": "now: "}')
    request = gateway_pb2.GatewayServiceGenerateRequest(chat=chat, separate_reasoning=True)
    answer = [message async for message in thinker.stub.Generate(request)]
    assert "".join(message.reasoning for message in answer) == "The user says hello. 🙂"
    assert "".join(message.text for message in answer) == "Hello!"
    assert answer[-1].usage.num_reasoning_tokens > 5
    assert prompt(thinker) == "[assistant](greet)Hi[user]Hello[user][assistant]now: "
    for values, problem in (("{", "is no JSON"), ("[" * 16000, "no JSON"), ("1", "an object"), (" " * 17000, "limit")):
        request.chat.template_values = values
        with pytest.raises(grpc.aio.AioRpcError, match=f"chat.template_values.*{problem}"):
            [message async for message in thinker.stub.Generate(request)]


async def test_without_a_parser_or_a_template_that_thinks_all_is_content(
    thinking_folder: Path, tmp_path: Path, world: World
) -> None:
    world.verify.set_answer(ANSWER)
    assert (await ask(world)).choices[0].message.content == ANSWER
    verify = ScriptedVerify(thinking_folder)
    verify.set_answer(ANSWER)
    (tmp_path / "none").mkdir()
    async with open_world(verify, tmp_path / "none", reasoning_parser="none") as none:
        assert (await ask(none)).choices[0].message.content == ANSWER


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
async def test_special_tokens_as_markers_are_seen(
    make: Callable[[], tokenizers.Tokenizer], thinking_folder: Path, tmp_path: Path
) -> None:
    path = thinking_folder / "tokenizer.json"
    make().save(str(path))
    tokenizer = json.loads(path.read_text())
    for number, text in enumerate(("[THINK]", "[/THINK]"), start=len(tokenizer["model"]["vocab"]) + 1):
        entry = dict(tokenizer["added_tokens"][0], id=number, content=text, special=True)
        tokenizer["added_tokens"].append(entry)
    path.write_text(json.dumps(tokenizer))
    verify = ScriptedVerify(thinking_folder)
    verify.set_answer("[THINK]hm[/THINK]Yes")
    async with open_world(verify, tmp_path, reasoning_parser="mistral") as running:
        message = (await ask(running)).choices[0].message
        assert (message.reasoning_content, message.content) == ("hm", "Yes")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"messages": []}, "is not a valid name for a template's value"),
        ({"a b": 1}, "is not a valid name for a template's value"),
        ({"x": "y" * 20000}, "over the limit of 16384"),
        ({f"x{i}": 1 for i in range(65)}, "64"),
        ([], "chat_template_kwargs"),
    ],
)
async def test_bad_values_for_the_template_are_refused_by_name(world: World, values: Any, problem: str) -> None:
    body = json.dumps({"messages": HELLO, "chat_template_kwargs": values})
    response = await world.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"].startswith("chat_template_kwargs")
    assert problem in error["message"]
    with pytest.raises(openai.BadRequestError, match="reasoning_effort"):
        await ask(world, reasoning_effort="immense")  # type: ignore[arg-type]

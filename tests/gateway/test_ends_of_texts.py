"""Where prompts and answers end, and what of special tokens is told."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from gateway_world import World
from scripted_verify import EOS

from gateway.core.admission import render_chat
from gateway.core.request import Chat, RequestMessage
from gateway.core.tokenizer import StopMatcher
from outrider.chat_template import ChatTemplate
from outrider.protocol.generation_codec import USAGE
from outrider.v1 import gateway_pb2


async def completion(world: World, **fields: Any) -> str:
    response = await world.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 40} | fields)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_stop_string_may_be_let_through_however_the_text_is_cut(size: int) -> None:
    text, matcher = "one two three two", StopMatcher(["two", "wo"], keep=True)
    pieces = [matcher.push(text[at : at + size]) for at in range(0, len(text), size)]
    assert "".join(pieces) == "one two" and matcher.matched == "two"


async def test_the_stop_string_is_part_of_the_text_where_asked_for(world: World) -> None:
    world.verify.set_answer("one two three")
    assert await completion(world, stop=["two"]) == "one "
    assert await completion(world, stop=["two"], include_stop_str_in_output=True) == "one two"
    assert await completion(world, stop=["two"], no_stop_trim=True) == "one two"
    params = {"stop": ["two"], "no_stop_trim": True}
    answer = (await world.http.post("/generate", json={"text": "x", "sampling_params": params})).json()
    assert answer["text"] == "one two" and answer["meta_info"]["finish_reason"]["matched"] == "two"
    asked = gateway_pb2.GatewayServiceGenerateRequest(prompt="x", stop=["two"], include_stop_str_in_output=True)
    assert "".join([message.text async for message in world.stub.Generate(asked)]) == "one two"


async def test_every_door_says_what_ended_an_answer(world: World) -> None:
    """vLLM's stop_reason is null at the end-of-sequence token, unless the request names it; SGLang's is its id."""
    ids = world.verify.set_answer("one two three")
    cases: list[tuple[dict[str, Any], int | str | None, int | str | None]] = [
        ({"stop": ["three", "two", *(f"stop {number}" for number in range(62))]}, "two", "two"),
        ({"stop_token_ids": [ids[-1]]}, ids[-1], ids[-1]),
        ({"max_tokens": 30, "stop": ["four"]}, None, EOS),
        ({"max_tokens": 1, "stop": ["four"]}, None, None),
    ]
    for fields, reason, matched in cases:
        want = {"stop_reason": reason, "matched_stop": matched}
        for path, asked in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ):
            body = asked | {"max_tokens": 40} | fields
            whole = (await world.http.post(path, json=body)).json()["choices"][0]
            assert whole | want == whole, (path, whole)
            events = (await world.http.post(path, json=body | {"stream": True})).text.split("\n\n")
            *before, last = [json.loads(one[6:])["choices"][0] for one in events if one.startswith("data: {")]
            assert last | want == last and not any(want.keys() & choice.keys() for choice in before)
        message = gateway_pb2.GatewayServiceGenerateRequest(prompt="x", **({"max_tokens": 40} | fields))
        *early, end = [one async for one in world.stub.Generate(message)]
        name = end.WhichOneof("matched_stop")
        assert (name and getattr(end, name)) == matched and not any(one.WhichOneof("matched_stop") for one in early)


async def test_tokens_behind_a_stop_string_count_for_the_accept_length(world: World) -> None:
    world.verify.set_answer("one two three four five")
    world.verify.round_size = 100
    answer = (await world.http.post("/v1/completions", json={"prompt": "x", "stop": "two"})).json()
    usage = answer["usage"]
    committed = len(world.verify.script)
    assert usage["completion_tokens"] < usage["outrider"]["accept_length"] == committed
    params = {"stop": "two"}
    meta = (await world.http.post("/generate", json={"text": "x", "sampling_params": params})).json()["meta_info"]
    assert (meta["completion_tokens"], meta["spec_accept_length"]) == (usage["completion_tokens"], committed)
    asked = gateway_pb2.GatewayServiceGenerateRequest(prompt="x", stop=["two"])
    last = [message async for message in world.stub.Generate(asked)][-1]
    assert USAGE.decode(last.usage).accept_length == committed


async def test_special_tokens_are_spelled_out_where_asked_for(world: World) -> None:
    ids = world.verify.set_answer("one")
    world.verify.script = [*ids, EOS, *ids, EOS]
    special = world.verify.tokenizer.token_bytes(EOS).decode()
    assert await completion(world, ignore_eos=True) == "oneone"
    assert await completion(world, ignore_eos=True, skip_special_tokens=False) == f"one{special}one{special}"
    assert await completion(world, skip_special_tokens=False) == "one", "the token that ends it is no part of it"


async def prompt(world: World, content: str, **fields: Any) -> list[int]:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    world.verify.set_answer("ok")
    response = await world.http.post("/v1/chat/completions", json={"messages": messages} | fields)
    assert response.status_code == 200, response.text
    tokens = (await world.http.post("/tokenize", json={"messages": messages} | fields)).json()["tokens"]
    assert tokens == list(world.verify.requests[-1].prompt_token_ids)
    return [int(token) for token in tokens]


async def test_a_prompt_ends_where_it_is_told_to(world: World) -> None:
    decode = world.verify.tokenizer.decode
    texts = [
        decode(await prompt(world, "The sky is", **fields), skip_special_tokens=False)
        for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True})
    ]
    assert texts[0].startswith(texts[1]) and texts[0] != texts[1]
    assert texts[1].startswith(texts[2]) and texts[1] != texts[2] and texts[2].endswith("The sky is")


@pytest.mark.parametrize("content", ["|", "im", "<", "The sky ", "The sky is"])
@pytest.mark.parametrize(
    ("written", "strips"),
    [
        ("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", False),
        ("<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n", True),
        ("[{{ m.role }}] {{ m.content.strip() }} </s>", True),
    ],
)
def test_a_message_is_continued_where_its_own_text_ends(content: str, written: str, strips: bool) -> None:
    template = ChatTemplate(f"{{% for m in messages %}}{written}{{% endfor %}}")
    model: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=template), tool_format=None)
    messages = [RequestMessage(role="user", content="Hi"), RequestMessage(role="assistant", content=content)]
    text = render_chat(Chat(messages=messages, continue_final_message=True), model, "messages")
    assert text == template.render([m.model_dump() for m in messages[:1]], add_generation_prompt=False) + (
        written.partition("{{ m.content")[0].replace("{{ m.role }}", "assistant")
        + (content.strip() if strips else content)
    )


@pytest.mark.parametrize(
    ("content", "fields", "param"),
    [
        ("The", {"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
        (" ", {"continue_final_message": True}, "messages[0].content"),
    ],
)
async def test_what_cannot_be_continued_is_refused(
    world: World, content: str, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": [{"role": "assistant", "content": content}]} | fields
    response = await world.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param

from __future__ import annotations

from typing import Any

import pytest
from gateway_world import World
from scripted_verify import MODEL

from gateway.core.answer import Delta
from gateway.http.info import ModelList
from gateway.http.responses import ErrorBody
from gateway.openai import generation
from gateway.openai.chat import ChatCompletion
from gateway.openai.completions import Completion, CompletionBuilder


async def test_every_form_of_prompt_is_taken(world: World) -> None:
    verify = world.verify
    verify.set_answer("ok")
    client = world.openai()
    ids = verify.tokenizer.encode("one two", add_special_tokens=True)
    forms: list[tuple[Any, list[list[int]]]] = [
        ("one two", [ids]),
        (["one two", "three"], [ids, verify.tokenizer.encode("three", add_special_tokens=True)]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ]
    for prompt, expected in forms:
        verify.requests.clear()
        answer = await client.completions.create(model=MODEL, prompt=prompt)
        assert sorted(list(r.prompt_token_ids) for r in verify.requests) == sorted(expected)
        assert [c.index for c in answer.choices] == list(range(len(expected)))
        assert all(c.text == "ok" for c in answer.choices)
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, expected))


async def test_several_prompts_with_n_are_numbered_through(world: World) -> None:
    verify = world.verify
    verify.scripts = {i: [*verify.set_answer(f"answer {i}"), 2] for i in range(2)}
    answer = await world.openai().completions.create(model=MODEL, prompt=["a", "b"], n=2)
    assert [(c.index, c.text) for c in answer.choices] == [
        (0, "answer 0"),
        (1, "answer 1"),
        (2, "answer 0"),
        (3, "answer 1"),
    ]


async def test_a_stream_ends_with_reason_usage_and_done(world: World) -> None:
    world.verify.set_answer("one two three")
    stream = await world.openai().completions.create(
        model=MODEL, prompt="count", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].text for c in chunks[:-1]) == "one two three"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_are_four_lists_of_one_length(world: World, stream: bool) -> None:
    world.verify.set_answer("Hi 🦜 there")
    client = world.openai()
    if stream:
        chunks = [c async for c in await client.completions.create(model=MODEL, prompt="x", logprobs=2, stream=True)]
        parts = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs is not None]
    else:
        answer = await client.completions.create(model=MODEL, prompt="x", logprobs=2)
        parts = [answer.choices[0].logprobs]  # type: ignore[list-item]
    tokens = [token for part in parts for token in part.tokens or []]
    values = [value for part in parts for value in part.token_logprobs or []]
    tops = [top for part in parts for top in part.top_logprobs or []]
    offsets = [offset for part in parts for offset in part.text_offset or []]
    assert len(tokens) == len(values) == len(tops) == len(offsets) > 3
    # What lm-eval compares: the token's own value, to the last bit, is the greatest one.
    assert all(max(top.values()) == top[token] == value for token, value, top in zip(tokens, values, tops, strict=True))
    assert offsets == sorted(offsets) and offsets[0] == 0
    assert any(token.startswith("bytes:\\x") for token in tokens)


@pytest.mark.parametrize("echo", [False, True])
async def test_completions_tell_token_ids(world: World, echo: bool) -> None:
    ids = [*world.verify.set_answer("Hi 🦜 there"), 2]
    prompt = [[5, 6, 7], [8, 9]]
    names = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    body: Any = {"model": MODEL, "prompt": prompt, "n": 2, "echo": echo, "logprobs": 1, "extra_body": names}
    answer: Any = await world.openai().completions.create(**body)
    assert [choice.token_ids for choice in answer.choices] == [ids] * 4
    assert [choice.prompt_token_ids for choice in answer.choices] == [prompt[0], prompt[0], prompt[1], prompt[1]]
    shown = [*prompt[0], *ids] if echo else ids[:-1]
    assert answer.choices[0].logprobs.tokens == [f"token_id:{one}" for one in shown]
    assert answer.choices[0].logprobs.tokens[-1] in answer.choices[0].logprobs.top_logprobs[-1]
    parts: dict[int, list[Any]] = {}
    async for chunk in await world.openai().completions.create(**body, stream=True):
        parts.setdefault(chunk.choices[0].index, []).append(chunk.choices[0])
    for index, choices in parts.items():
        assert [one for choice in choices for one in choice.token_ids] == ids
        assert choices[0].prompt_token_ids == prompt[index // 2]
        assert not any("prompt_token_ids" in choice.model_extra for choice in choices[1:])
        assert [name for choice in choices for name in choice.logprobs.tokens][-1] == f"token_id:{shown[-1]}"


async def test_a_thread_writes_only_those_events_that_show_a_long_prompt(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.verify.set_answer("one two three four")
    world.verify.round_size = 1
    in_thread: list[bool] = []
    is_large = CompletionBuilder.is_large

    def noted(builder: CompletionBuilder, delta: Delta | None = None) -> bool:
        in_thread.append(is_large(builder, delta))
        return in_thread[-1]

    monkeypatch.setattr(CompletionBuilder, "is_large", noted)
    monkeypatch.setattr(generation, "_INLINE_PROMPT_TOKENS", 8)
    body = {"prompt": [5] * 9, "return_token_ids": True, "stream": True}
    text = (await world.http.post("/v1/completions", json=body)).text
    assert text.count("prompt_token_ids") == 1 and len(in_thread) > 3
    assert in_thread == [True] + [False] * (len(in_thread) - 1)


async def test_responses_are_what_openapi_says(world: World) -> None:
    world.verify.set_answer("ok")
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, "model": None}
    ChatCompletion.model_validate((await world.http.post("/v1/chat/completions", json=chat)).json())
    Completion.model_validate((await world.http.post("/v1/completions", json={"prompt": "x", "logprobs": 1})).json())
    ErrorBody.model_validate((await world.http.post("/v1/completions", json={})).json())
    ModelList.model_validate((await world.http.get("/v1/models")).json())
    document = (await world.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]
    assert schemas["ChatCompletionRequest"]["additionalProperties"] is False
    temperature = schemas["CompletionRequest"]["properties"]["temperature"]["anyOf"][0]
    assert temperature == {"type": "number", "minimum": 0, "maximum": 2}
    for path in document["paths"]:
        method = "GET" if "get" in document["paths"][path] else "POST"
        response = await world.http.request(method, path.replace("{model}", MODEL))
        assert response.status_code not in (404, 405)


async def test_models_are_listed_and_described(world: World) -> None:
    models = [model async for model in world.openai().models.list()]
    assert [model.id for model in models] == [MODEL]
    assert (await world.http.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == 256
    missing = await world.http.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")

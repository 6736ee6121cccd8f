from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from gateway_world import World
from scripted_verify import MODEL

from outrider.v1 import common_pb2

HELLO: list[Any] = [{"role": "user", "content": "Say hello"}]


async def test_an_answer_is_the_script_and_usage_counts_what_verify_said(world: World) -> None:
    token_ids = world.verify.set_answer("The capital of France is Paris 🙂.")
    answer = await world.openai().chat.completions.create(model=MODEL, messages=HELLO)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", "The capital of France is Paris 🙂.")
    assert choice.finish_reason == "stop"
    assert answer.system_fingerprint and answer.id.startswith("chatcmpl-") and answer.model == MODEL
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.completion_tokens == len(token_ids) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 3
    speculation = usage.model_dump()["outrider"]
    assert speculation["rounds"] == (usage.completion_tokens + 1) // 2
    assert speculation["accept_length"] == pytest.approx(usage.completion_tokens / speculation["rounds"], abs=1e-3)


async def test_the_prompt_is_the_rendered_conversation(world: World) -> None:
    world.verify.set_answer("ok")
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    ]
    await world.openai().chat.completions.create(model=MODEL, messages=messages, temperature=0, seed=7, stop=["x"])
    request = world.verify.requests[0]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert list(request.prompt_token_ids) == world.verify.tokenizer.encode(text, add_special_tokens=False)
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 7)
    assert request.max_tokens == world.verify.context_length - len(request.prompt_token_ids)


async def test_a_stream_is_role_deltas_reason_usage_done(world: World) -> None:
    world.verify.set_answer("Grüße aus 東京")
    stream = await world.openai().chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == ("assistant", "")
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Grüße aus 東京"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 2
    assert len({c.id for c in chunks}) == 1
    assert all(c.usage is None and "usage" in c.model_fields_set for c in chunks[:-1]), "null, as OpenAI sends it"
    assert not any("\ufffd" in (c.choices[0].delta.content or "") for c in chunks[:-1])


async def test_a_raw_stream_is_well_formed_and_ends_with_done(world: World) -> None:
    world.verify.set_answer("one two")
    body = {
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    response = await world.http.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    counts = [p["usage"]["completion_tokens"] for p in parsed]
    assert counts == sorted(counts) and counts[-1] == counts[-2] > 0
    assert counts[0] == 0, "the role is no token"
    assert parsed[-1]["usage"]["outrider"]["rounds"] > 0


async def test_n_answers_share_a_seed_and_differ_by_choice_index(world: World) -> None:
    verify = world.verify
    verify.scripts = {i: [*verify.set_answer(f"answer {i}"), 2] for i in range(3)}
    answer = await world.openai().chat.completions.create(model=MODEL, messages=HELLO, n=3)
    assert [c.message.content for c in answer.choices] == ["answer 0", "answer 1", "answer 2"]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    assert sorted(r.choice_index for r in verify.requests) == [0, 1, 2]
    assert len({r.sampling.seed for r in verify.requests}) == 1
    assert len({r.request_id for r in verify.requests}) == 3
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens == len(verify.requests[0].prompt_token_ids)
    assert usage.completion_tokens == sum(len(s) for s in verify.scripts.values())


async def test_n_answers_stream_side_by_side(world: World) -> None:
    verify = world.verify
    verify.scripts = {0: [*verify.set_answer("short"), 2], 1: [*verify.set_answer("a much longer answer, this one"), 2]}
    stream = await world.openai().chat.completions.create(model=MODEL, messages=HELLO, n=2, stream=True)
    texts, reasons = ["", ""], {}
    async for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in reasons
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == ["short", "a much longer answer, this one"]
    assert reasons == {0: "stop", 1: "stop"}


async def test_a_stop_string_across_tokens_cuts_text_and_cancels_verify(world: World) -> None:
    verify = world.verify
    verify.round_size = 1
    token_ids = verify.set_answer("one two STOP three four five six seven eight")
    answer = await world.openai().chat.completions.create(model=MODEL, messages=HELLO, stop=["STOP", "zzz"])
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens < len(token_ids)
    shown = verify.tokenizer.decode(token_ids[: answer.usage.completion_tokens])
    assert shown.startswith("one two STOP") and "three four" not in shown


async def test_max_tokens_ends_with_length(world: World) -> None:
    world.verify.set_answer("one two three four five")
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        answer = await world.openai().chat.completions.create(model=MODEL, messages=HELLO, **limit)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 3


async def test_logprobs_have_an_entry_for_each_token_of_the_text(world: World) -> None:
    world.verify.set_answer("Hi 🙂")
    answer = await world.openai().chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == "Hi 🙂"
    assert all(len(e.top_logprobs) == 2 and e.logprob == e.top_logprobs[0].logprob for e in logprobs.content)
    stream = await world.openai().chat.completions.create(model=MODEL, messages=HELLO, logprobs=True, stream=True)
    streamed = [e async for c in stream for e in ((c.choices[0].logprobs and c.choices[0].logprobs.content) or [])]
    assert [e.token for e in streamed] == [e.token for e in logprobs.content]


async def test_sampling_fields_reach_verify_as_they_were_sent(world: World) -> None:
    world.verify.set_answer("ok")
    extra = {
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "stop_token_ids": [9, 10],
        "speculation": "off",
    }
    await world.openai().chat.completions.create(
        model=MODEL,
        messages=HELLO,
        temperature=0.8,
        top_p=0.95,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"11": 3},
        seed=-1,
        max_tokens=2,
        extra_body=extra,
    )
    request = world.verify.requests[0]
    expected = common_pb2.SamplingParams(
        temperature=0.8,
        top_k=5,
        top_p=0.95,
        min_p=0.1,
        seed=2**64 - 1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={11: 3.0},
    )
    assert request.sampling == expected
    assert (request.ignore_eos, list(request.stop_token_ids), request.disable_speculation) == (True, [9, 10], True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/generate"])
async def test_top_p_of_zero_keeps_the_likeliest_token(world: World, path: str) -> None:
    world.verify.set_answer("ok")
    body = {"/generate": {"text": "x", "sampling_params": {"top_p": 0}}, "/v1/responses": {"input": "x", "top_p": 0}}
    answer = await world.http.post(path, json=body.get(path, {"messages": HELLO, "top_p": 0}))
    assert answer.status_code == 200 and answer.json().get("top_p", 0) == 0
    assert (world.verify.requests[0].sampling.top_k, world.verify.requests[0].sampling.top_p) == (1, 1)


async def test_refusals_of_earlier_answers_are_text_for_the_template(world: World) -> None:
    world.verify.set_answer("ok")
    parts = [{"type": "text", "text": "No, "}, {"type": "refusal", "refusal": "I may not."}]
    answers = [{"role": "assistant", "content": parts}, {"role": "assistant", "content": None, "refusal": "Never."}]
    client = world.openai()
    await client.chat.completions.create(model=MODEL, messages=[*HELLO, *answers, *HELLO])
    item = {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": parts[1:]}
    await client.responses.create(model=MODEL, input=[*HELLO, item, *HELLO])
    prompts = [world.verify.tokenizer.decode(list(asked.prompt_token_ids)) for asked in world.verify.requests]
    assert "No, I may not." in prompts[0] and "Never." in prompts[0] and "I may not." in prompts[1]


async def test_content_without_parts_is_an_empty_text(world: World) -> None:
    # What LangChain sends of a tool that found nothing, and of an answer that was calls alone.
    call = {"type": "function", "id": "1", "function": {"name": "look", "arguments": "{}"}}
    made = {"role": "assistant", "content": None, "tool_calls": [call]}
    found = {"role": "tool", "content": [], "tool_call_id": "1"}
    for content in ([], ""):
        world.verify.set_answer("ok")
        reply = {"role": "assistant", "content": content}
        messages = [*HELLO, made, found | {"content": content}, reply, *HELLO]
        answer = await world.http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 200, answer.text
    with_list, with_text = world.verify.requests
    assert with_list.prompt_token_ids == with_text.prompt_token_ids


async def test_a_message_of_an_answer_may_be_sent_back(world: World) -> None:
    world.verify.set_answer("first")
    client = world.openai()
    answer = await client.chat.completions.create(model=MODEL, messages=HELLO)
    messages = [*HELLO, answer.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    again = await client.chat.completions.create(model=MODEL, messages=messages)
    assert again.choices[0].message.content == "first"


async def test_a_part_of_an_answer_may_repeat_its_message(world: World) -> None:
    # As OpenAI's agents for JavaScript send an answer back.
    call = {"type": "function", "id": "1", "function": {"name": "look", "arguments": "{}"}}
    rest = {"role": "assistant", "refusal": None, "reasoning_content": "Let me see.", "tool_calls": [call]}
    content = [{"type": "text", "text": "I look.", **rest}]
    found = {"role": "tool", "content": "x", "tool_call_id": "1"}
    for fields in ({"content": content}, {"content": "I look."}):
        world.verify.set_answer("ok")
        messages = [*HELLO, {"role": "assistant", "tool_calls": [call], **fields}, found]
        answer = await world.http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 200, answer.text
    repeated, plain = world.verify.requests
    assert repeated.prompt_token_ids == plain.prompt_token_ids


async def test_a_failed_request_is_an_error_of_the_client_library(world: World) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await world.openai().chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    error = caught.value
    assert (error.code, error.param, error.type) == ("invalid_value", "temperature", "invalid_request_error")
    assert "temperature: -1 is below the limit of 0; send at least 0" in error.message
    with pytest.raises(openai.NotFoundError) as missing:
        await world.openai().chat.completions.create(model="gpt-9", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        await world.openai().chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1000)
    assert (too_long.value.code, too_long.value.param) == ("context_length_exceeded", "max_tokens")

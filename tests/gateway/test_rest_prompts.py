"""What clients are told of their own prompt: echo, log-probabilities, token ids."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_world import World, open_world
from scripted_verify import MODEL, ScriptedVerify

from gateway.core.catalogue import GatewayModel
from gateway.core.gate import Gate, LogprobQuota
from gateway.core.metrics import GatewayMetrics
from gateway.core.service import Gateway
from gateway.core.tokenizer import Tokenizer
from gateway.http.body import BodyReader
from gateway.http.info import TokenizerRoute, prepare_tokenize
from outrider.chat_template import ChatTemplate
from outrider.config.gateway import GatewayOptions
from outrider.errors import OverloadedError

PROMPT = "Grüße aus 東京 🙂"


@dataclass
class _Known:
    """A catalogue whose model is known."""

    model: GatewayModel


def lm_eval_score(choice: Any, num_context: int) -> tuple[float, bool]:
    """As lm-eval reads a completion of one token: the sum over the continuation, and whether it is greedy."""
    values = choice["logprobs"]["token_logprobs"][num_context:-1]
    tops = choice["logprobs"]["top_logprobs"][num_context:-1]
    return sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))


async def complete(world: World, **body: Any) -> dict[str, Any]:
    response = await world.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("as_ids", [False, True])
async def test_an_echo_begins_with_the_prompt_and_its_logprobs(world: World, as_ids: bool) -> None:
    world.verify.set_answer("Hi")
    ids = world.verify.tokenizer.encode(PROMPT, add_special_tokens=False)
    answer = await complete(world, prompt=ids if as_ids else PROMPT, echo=True, logprobs=2, max_tokens=4)
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT + "Hi"
    lists = choice["logprobs"]
    count = len(ids) + answer["usage"]["completion_tokens"]
    assert {len(value) for value in lists.values()} == {count}
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    assert lists["token_logprobs"][1:5] == [-1.75, -0.25, -1.75, -0.25]
    assert lists["text_offset"] == sorted(lists["text_offset"]) and lists["text_offset"][-1] == len(choice["text"])
    whole = [i for i, name in enumerate(lists["tokens"]) if not name.startswith(("bytes:", "<|"))]
    assert all(choice["text"][lists["text_offset"][i] :].startswith(lists["tokens"][i]) for i in whole)


async def test_a_client_that_scores_finds_the_continuation_and_whether_it_is_greedy(world: World) -> None:
    # The one token that it has generated may be the end of the sequence: it has an entry all the same.
    world.verify.script = [2]
    answer = await complete(
        world, prompt=[[9, 8, 7, 6], [5, 6, 7]], echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    one, other = answer["choices"]
    assert lm_eval_score(one, 3) == (-1.75, False)
    assert lm_eval_score(one, 2) == (-2.0, False)
    assert lm_eval_score(other, 2) == (-0.25, True)
    assert len(other["logprobs"]["tokens"]) == 4


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
async def test_a_prompt_alone_is_scored_with_a_limit_of_0(world: World, limit: str) -> None:
    world.verify.set_answer("never shown")
    answer = await complete(world, prompt=[9, 8, 7], echo=True, logprobs=1, **{limit: 0})
    choice = answer["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 3 and choice["finish_reason"] == "length"
    assert choice["text"] == world.verify.tokenizer.decode([9, 8, 7])
    assert answer["usage"]["completion_tokens"] == 0
    plain = await complete(world, prompt="ab", echo=True, **{limit: 0})
    assert plain["choices"][0] | {"logprobs": None} == plain["choices"][0]
    assert plain["choices"][0]["text"] == "ab"


async def test_a_streamed_echo_is_the_whole_one_in_pieces(world: World) -> None:
    world.verify.set_answer("one two three")
    asked: dict[str, Any] = {"prompt": ["a b", "c"], "echo": True, "logprobs": 1, "n": 2}
    whole = await complete(world, **asked)
    stream = await world.openai().completions.create(model=MODEL, stream=True, **asked)
    texts: dict[int, str] = {}
    values: dict[int, list[Any]] = {}
    offsets: dict[int, list[int]] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                values.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs or [])
                offsets.setdefault(choice.index, []).extend(choice.logprobs.text_offset or [])
    for choice in whole["choices"]:
        assert texts[choice["index"]] == choice["text"]
        assert values[choice["index"]] == choice["logprobs"]["token_logprobs"]
        assert offsets[choice["index"]] == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize("stream", [False, True])
async def test_other_requests_are_served_while_a_long_prompt_is_described(
    verify: ScriptedVerify, tmp_path: Path, stream: bool
) -> None:
    verify.context_length = 40_000
    async with open_world(verify, tmp_path) as world:
        verify.set_answer("ok")
        answered_meanwhile = 0
        body = {"prompt": [5] * 20_000, "echo": True, "logprobs": 5, "max_tokens": 1, "stream": stream}
        long = asyncio.create_task(world.http.post("/v1/completions", json=body))
        while not long.done():
            assert (await world.http.get("/health")).status_code == 200
            answered_meanwhile += 1
        assert (await long).text.count("null") >= 2 and len((await long).content) > 1_000_000
        assert answered_meanwhile > 1


async def test_more_than_fits_memory_is_refused_before_anything_is_computed(
    verify: ScriptedVerify, tmp_path: Path
) -> None:
    verify.context_length = 40_000
    async with open_world(verify, tmp_path) as world:
        body = {"prompt": [[5] * 30_000] * 8, "prompt_logprobs": 20, "max_tokens": 0}
        refused = await world.http.post("/v1/completions", json=body)
        assert refused.status_code == 400 and "over the limit of 1048576" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "prompt_logprobs"
        assert verify.requests == []


async def test_long_texts_are_tokenized_and_told_beside_the_event_loop(verify: ScriptedVerify) -> None:
    threads: set[str] = set()

    class Watched(Tokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            threads.add(threading.current_thread().name)
            return super().token_bytes(token_id)

    verify.tokenizer = Watched.load(verify.folder)
    model = GatewayModel(MODEL, 256, verify.vocab_size, verify.tokenizer, created=0, fingerprint="")
    gateway = Gateway(_Known(model), None, Gate(4), GatewayMetrics(), LogprobQuota(4096))  # type: ignore[arg-type]
    application = TokenizerRoute(gateway, GatewayOptions(), BodyReader(max_bytes=1 << 20, seconds=5), prepare_tokenize)
    transport = httpx.ASGITransport(app=application)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answer = await http.post("/tokenize", json={"prompt": PROMPT * 1000, "return_token_strs": True})
    assert answer.json()["count"] == len(answer.json()["token_strs"]) > 1000
    assert threads and threading.current_thread().name not in threads


async def test_an_echo_without_logprobs_asks_verify_for_none(world: World) -> None:
    world.verify.set_answer("b")
    answer = await complete(world, prompt="a", echo=True)
    assert answer["choices"][0]["text"] == "ab" and answer["choices"][0]["logprobs"] is None
    assert not world.verify.requests[-1].HasField("num_prompt_logprobs")


async def test_prompt_logprobs_have_vllms_shape_on_both_routes(world: World) -> None:
    world.verify.set_answer("ok")
    answer = await complete(world, prompt=[9, 8, 7], prompt_logprobs=1)
    first, second, third = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    names = [world.verify.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in (8, 9)]
    assert second == {
        "8": {"logprob": -1.75, "rank": 2, "decoded_token": names[0]},
        "9": {"logprob": -0.25, "rank": 1, "decoded_token": names[1]},
    }
    assert list(third) == ["7"] and third["7"]["rank"] == 1
    body = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 0}
    chat = (await world.http.post("/v1/chat/completions", json=body)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in chat["prompt_logprobs"][1:])


async def test_echo_and_prompt_logprobs_each_tell_as_many_as_they_were_asked_for(world: World) -> None:
    world.verify.set_answer("ok")
    answer = await complete(world, prompt=[9, 8, 7], echo=True, logprobs=1, prompt_logprobs=3)
    assert world.verify.requests[-1].num_prompt_logprobs == 3
    choice = answer["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"][2]) == 1 and len(choice["prompt_logprobs"][2]) == 3


async def test_texts_and_tokens_go_both_ways_in_vllms_shapes(world: World) -> None:
    got = (await world.http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True})).json()
    ids = world.verify.tokenizer.encode(PROMPT, add_special_tokens=True)
    assert (got["count"], got["tokens"], got["max_model_len"]) == (len(ids), ids, 256)
    assert len(got["token_strs"]) == len(ids)
    back = (await world.http.post("/detokenize", json={"tokens": ids, "model": MODEL})).json()
    assert back == {"prompt": PROMPT}
    long = PROMPT * 1000
    many = (await world.http.post("/tokenize", json={"prompt": long, "add_special_tokens": False})).json()["tokens"]
    assert (await world.http.post("/detokenize", json={"tokens": many})).json() == {"prompt": long}
    assert (await world.http.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    special = world.verify.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert (await world.http.post("/detokenize", json={"tokens": special})).json() == {"prompt": "<|im_end|>"}
    assert world.verify.requests == []


async def test_messages_are_tokenized_as_chat_would_read_them(world: World) -> None:
    world.verify.set_answer("ok")
    messages = [{"role": "user", "content": "Hi"}]
    await world.http.post("/v1/chat/completions", json={"messages": messages})
    read = list(world.verify.requests[-1].prompt_token_ids)
    assert (await world.http.post("/tokenize", json={"messages": messages})).json()["tokens"] == read
    closed = await world.http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})
    assert closed.json()["tokens"] == read[: closed.json()["count"]] and closed.json()["count"] < len(read)


@pytest.mark.parametrize(
    "message", [{"content": "x" * 5000}, {"content": "", "role": "assistant", "reasoning_content": "x" * 5000}, {}]
)
async def test_long_conversations_are_rendered_beside_the_event_loop(
    world: World, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    inline: list[bool] = []

    def render(*_: Any, **__: Any) -> str:
        inline.append(threading.current_thread() is threading.main_thread())
        return "x"

    world.verify.set_answer("ok")
    monkeypatch.setattr(ChatTemplate, "render", render)
    body = {"messages": [{"role": "user", "content": ""} | message] * (1 if message else 200)}
    for path in ("/v1/chat/completions", "/tokenize"):
        assert (await world.http.post(path, json=body)).status_code == 200
    short = {"messages": [{"role": "user", "content": "x"}]}
    assert (await world.http.post("/tokenize", json=short)).status_code == 200
    assert inline == [False, False, True]


async def test_others_run_between_the_prompts_of_one_request(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, seen = 0, []

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    world.verify.set_answer("ok")
    encode = Tokenizer.encode

    def counted(tokenizer: Tokenizer, text: str, **options: Any) -> list[int]:
        seen.append(turns)
        return encode(tokenizer, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    task = asyncio.create_task(other())
    await complete(world, prompt=["x"] * 16)
    task.cancel()
    assert len(seen) == len(set(seen)) == 16


async def test_the_tokenizers_configuration_is_told_with_special_tokens_as_text(world: World) -> None:
    info = (await world.http.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|im_end|>" and info["bos_token"] == "<|im_start|>"
    assert "messages" in info["chat_template"] and isinstance(info["tokenizer_class"], str)
    json.dumps(info)


OVERFLOWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "word " * 300}]},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 300},
    {"prompt": [5] * 300},
    {"prompt": "word " * 100_000},
]


@pytest.mark.parametrize("body", OVERFLOWS)
async def test_an_overflow_is_known_by_its_code_and_by_the_text_of_the_exception(
    world: World, body: dict[str, Any]
) -> None:
    client = world.openai()
    create: Any = client.chat.completions.create if "messages" in body else client.completions.create
    with pytest.raises(openai.BadRequestError) as refused:
        await create(model=MODEL, **body)
    # LangChain searches the text for the code, LiteLLM and Inspect for words that OpenAI, vLLM and SGLang share;
    # everybody else compares the code.
    text = str(refused.value)
    assert refused.value.code == "context_length_exceeded" and "context_length_exceeded" in text
    assert "this model's maximum context length is 256 tokens" in text


async def test_openais_client_tries_again_when_told_to(world: World) -> None:
    world.verify.set_answer("ok")
    world.verify.failures = [OverloadedError("the queue holds 64 requests", retry_after=0.1)]
    answer = await world.openai(max_retries=1).completions.create(model=MODEL, prompt="x")
    assert answer.choices[0].text == "ok" and len(world.verify.requests) == 2

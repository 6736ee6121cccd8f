"""Texts of megabytes: their tokens take no memory without bound, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import weakref
from functools import cache, partial
from typing import Any

import httpx
import pytest
from examples import examples
from gateway_world import until
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_verify import MODEL, ScriptedVerify
from test_detokenizer import KINDS, tokenizer

from gateway.core.admission import admit
from gateway.core.catalogue import GatewayModel
from gateway.core.gate import Gate, LogprobQuota, Turns
from gateway.core.metrics import GatewayMetrics
from gateway.core.request import ClientRequest
from gateway.core.service import Gateway
from gateway.core.tokenizer import Tokenizer
from gateway.http import info
from gateway.http.body import BodyReader
from gateway.http.info import TokenizerRoute, prepare_detokenize, prepare_tokenize
from gateway.openai.completions import CompletionBuilder, CompletionRequest
from gateway.openai.generation import GenerationRoute
from outrider.config.gateway import GatewayOptions
from outrider.errors import ContextLengthError, InvalidRequestError, OverloadedError
from outrider.rpc.call import client, name_client, tenant


class Watched(Tokenizer):
    """Notes the longest text that it is given, and lets large ones wait; the library gets each text once."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.longest = self.num_large = 0
        self.may_go_on = threading.Event()
        self._encode = cache(super().encode)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.longest = max(self.longest, len(text))
        if len(text) > 100_000:
            self.num_large += 1
            assert self.may_go_on.wait(60)
        return list(self._encode(text, add_special_tokens=add_special_tokens))


class Known:
    """A catalogue whose model is known."""

    def __init__(self, model: GatewayModel) -> None:
        self.model = model


class Ready:
    """A router that knows a verify service."""

    ready = True


def tokenize_door(verify: ScriptedVerify, watched: Tokenizer, max_bytes: int = 1 << 22) -> httpx.AsyncClient:
    model = GatewayModel(MODEL, 256, verify.vocab_size, watched, created=0, fingerprint="")
    gateway = Gateway(Known(model), None, Gate(64), GatewayMetrics(), LogprobQuota(4096))  # type: ignore[arg-type]
    application = TokenizerRoute(
        gateway, GatewayOptions(), BodyReader(max_bytes=max_bytes, seconds=60), prepare_tokenize
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=application), base_url="http://gateway")


async def test_large_texts_are_tokenized_one_at_a_time_and_keep_no_other_one_waiting(verify: ScriptedVerify) -> None:
    watched = Watched.load(verify.folder)
    async with tokenize_door(verify, watched) as http:
        try:
            large = [asyncio.create_task(http.post("/tokenize", json={"prompt": "1" * 150_000})) for _ in range(40)]
            while not watched.num_large:
                await asyncio.wait(large, timeout=0.01)
            other = await asyncio.wait_for(http.post("/tokenize", json={"prompt": "1" * 10_000}), 30)
            assert other.json()["count"] > 1000 and watched.num_large == 1
        finally:
            watched.may_go_on.set()
        answers = await asyncio.gather(*large)
    assert {answer.json()["count"] for answer in answers} == {
        len(watched.encode("1" * 150_000, add_special_tokens=True))
    }


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_the_text_of_a_client_that_has_gone_waits_for_no_turn(verify: ScriptedVerify, path: str) -> None:
    watched = Watched.load(verify.folder)
    model = GatewayModel(MODEL, 40_000, verify.vocab_size, watched, created=0, fingerprint="")
    gate, options, bodies = Gate(64), GatewayOptions(), BodyReader(max_bytes=1 << 22, seconds=60)
    gateway = Gateway(Known(model), Ready(), gate, GatewayMetrics(), LogprobQuota(4096))  # type: ignore[arg-type]
    application = (
        TokenizerRoute(gateway, options, bodies, prepare_tokenize)
        if path == "/tokenize"
        else GenerationRoute(gateway, options, bodies, CompletionRequest, CompletionBuilder)
    )
    bodies_to_come = [json.dumps({"prompt": "1" * 250_000}).encode()]
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "state": {}}
    sent: list[Any] = []

    async def receive() -> Any:
        if bodies_to_come:
            return {"type": "http.request", "body": bodies_to_come.pop()}
        await until(lambda: gate.num_requests)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    before = asyncio.create_task(watched.in_thread(1 << 20, watched.may_go_on.wait))
    try:
        await asyncio.wait_for(application(scope, receive, send), 30)
        assert not sent and not gate.num_requests
    finally:
        watched.may_go_on.set()
        await before
    assert not watched.num_large


async def test_a_large_text_is_let_go_of_at_once_where_nobody_waits_for_it_any_more(verify: ScriptedVerify) -> None:
    watched = Watched.load(verify.folder)
    before = asyncio.create_task(watched.in_thread(1 << 20, watched.may_go_on.wait))
    work = partial(len, "1" * 100_000)
    is_kept, task = weakref.ref(work), asyncio.create_task(watched.in_thread(1 << 20, work))
    await asyncio.sleep(0)
    del work
    try:
        task.cancel()
        await asyncio.wait([task])
        del task
        gc.collect()
        assert is_kept() is None
    finally:
        watched.may_go_on.set()
        await before


async def test_long_answers_that_nobody_reads_are_bounded_and_keep_no_short_one_out(
    verify: ScriptedVerify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(info, "_MAX_UNSENT_BYTES", 400_000)
    model = GatewayModel(MODEL, 256, verify.vocab_size, Tokenizer.load(verify.folder), created=0, fingerprint="")
    gateway = Gateway(Known(model), Ready(), Gate(64), GatewayMetrics(), LogprobQuota(4096))  # type: ignore[arg-type]
    bodies = BodyReader(max_bytes=1 << 22, seconds=60)
    application = TokenizerRoute(gateway, GatewayOptions(), bodies, prepare_detokenize)
    may_read, answers = asyncio.Event(), [bytearray() for _ in range(4)]

    async def ask(index: int, num_tokens: int) -> None:
        to_come = [json.dumps({"tokens": [40] * num_tokens}).encode()]

        async def receive() -> Any:
            if not to_come:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": to_come.pop()}

        async def send(message: Any) -> None:
            if answers[index]:  # a server keeps what it is given first
                await may_read.wait()
            answers[index] += message.get("body", b"")

        scope = {"type": "http", "headers": [(b"content-type", b"application/json")], "state": {}}
        await application(scope, receive, send)

    deaf = [asyncio.create_task(ask(index, 150_000)) for index in range(2)]
    await until(lambda: all(answers[:2]) or any(task.done() for task in deaf))
    assert max(map(len, answers)) <= 1 << 16
    with pytest.raises(OverloadedError, match="clients have not read yet hold"):
        await ask(2, 150_000)
    await ask(3, 10)
    may_read.set()
    await asyncio.gather(*deaf)
    await ask(2, 150_000)
    assert len(json.loads(answers[2])["prompt"]) == 150_000 and answers[0] == answers[1] == answers[2]


async def test_texts_that_wait_for_their_turn_count_among_the_bodies_in_memory(verify: ScriptedVerify) -> None:
    watched = Watched.load(verify.folder)
    async with tokenize_door(verify, watched, max_bytes=1 << 18) as http:
        large = [asyncio.create_task(http.post("/tokenize", json={"prompt": "1" * 250_000})) for _ in range(60)]
        refused, _ = await asyncio.wait(large, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        watched.may_go_on.set()
        answers = await asyncio.gather(*large, return_exceptions=True)
    assert refused and all(isinstance(task.exception(), OverloadedError) for task in refused)
    assert sum(isinstance(answer, httpx.Response) for answer in answers) >= 32


async def test_a_text_of_more_tokens_than_can_be_told_is_refused_before_it_is_tokenized_whole(
    verify: ScriptedVerify,
) -> None:
    watched = Watched.load(verify.folder)
    async with tokenize_door(verify, watched) as http:
        for body, field in (
            ({"prompt": "1" * 3_000_000}, "prompt"),
            ({"messages": [{"role": "user", "content": "1" * 3_000_000}]}, "messages"),
        ):
            with pytest.raises(InvalidRequestError, match=f"^{field}: .* limit of 1048576; send the text in parts$"):
                await http.post("/tokenize", json=body)
    assert 0 < watched.longest <= 1 << 16


def test_calls_of_tools_count_where_the_event_loop_takes_short_texts_itself(verify: ScriptedVerify) -> None:
    model = GatewayModel(MODEL, 256, verify.vocab_size, Tokenizer.load(verify.folder), created=0, fingerprint="")
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "1" * 100_000}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    size, _ = prepare_tokenize({"messages": [{"role": "user", "content": "?"}, message]}, model, False)
    assert size > 100_000


async def test_so_is_a_prompt_that_the_context_has_no_room_for(verify: ScriptedVerify) -> None:
    watched = Watched.load(verify.folder)
    model = GatewayModel(MODEL, 40_000, verify.vocab_size, watched, created=0, fingerprint="")
    with pytest.raises(ContextLengthError, match=r"^prompt: .* is 40000 tokens, and 300000 characters cannot"):
        await admit(ClientRequest(prompt="1" * 300_000), model, "r")
    assert 0 < watched.longest <= 1 << 16


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(10))
@given(text=st.text(min_size=1, max_size=60), add=st.integers(0, 100))
def test_what_is_cut_to_be_counted_has_about_as_many_tokens(kind: str, text: str, add: int) -> None:
    subject = tokenizer(kind)
    whole = (text * (70_000 // len(text) + 1))[: 66_000 + add]
    num_tokens = len(subject.encode(whole, add_special_tokens=False))
    assert not subject.is_longer(whole, num_tokens + 10)
    assert subject.is_longer(whole, num_tokens - 11)
    assert not subject.is_longer(text, 0)


async def test_large_texts_of_one_api_key_do_not_all_go_before_those_of_another(verify: ScriptedVerify) -> None:
    watched, done = Watched.load(verify.folder), []

    def work(name: str) -> None:
        assert watched.may_go_on.wait(60)
        done.append(name)

    def begin(key: str, number: int) -> asyncio.Task[None]:
        name_client(key, "")
        return asyncio.create_task(watched.in_thread(1 << 20, partial(work, f"{key}{number}")))

    before = client.get(), tenant.get()
    try:
        tasks = [begin("a", number) for number in range(6)]
        await asyncio.sleep(0)
        tasks += [begin("b", number) for number in range(2)]
        tasks += [begin("c", 0)]
        await asyncio.sleep(0)
        watched.may_go_on.set()
        await asyncio.wait(tasks)
    finally:
        watched.may_go_on.set()
        client.set(before[0])
        tenant.set(before[1])
    assert done == ["a0", "b0", "a1", "c0", "b1", "a2", "a3", "a4", "a5"]


async def test_a_turn_that_comes_to_one_who_leaves_is_passed_on() -> None:
    turns, entered = Turns(), []

    async def enter(name: str) -> None:
        async with turns:
            entered.append(name)

    async with turns:
        early, late, staying = (asyncio.create_task(enter(name)) for name in ("early", "late", "staying"))
        await asyncio.sleep(0)
        early.cancel()
        await asyncio.sleep(0)
    late.cancel()  # its turn has come, and it has not run yet
    await asyncio.wait([early, late, staying])
    assert entered == ["staying"]
    async with asyncio.timeout(60), turns:
        pass

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from typing import Any

import grpc
import pytest
from gateway_world import World, open_world, until
from raw_http2 import DATA, END_HEADERS, END_STREAM, HEADERS, HTTP2, RST_STREAM, SETTINGS, call_head, frame
from scripted_verify import MODEL, ScriptedVerify

from gateway.servicer import decode_request
from outrider.errors import ContextLengthError, InvalidRequestError, NotFoundError, OutriderError, UnavailableError
from outrider.rpc.status import error_from_rpc
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

Request = gateway_pb2.GatewayServiceGenerateRequest


async def collect(world: World, request: Any) -> list[Any]:
    try:
        return [message async for message in world.stub.Generate(request)]
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from None


async def test_text_tokens_origins_and_usage_come_together(world: World) -> None:
    token_ids = world.verify.set_answer("Grüße, 🙂 Paris")
    messages = await collect(world, Request(prompt="x", sampling=common_pb2.SamplingParams(num_logprobs=1)))
    assert "".join(m.text for m in messages) == "Grüße, 🙂 Paris"
    assert [t for m in messages for t in m.token_ids] == [*token_ids, 2]
    for message in messages:
        assert len(message.origins) == len(message.text_lengths) == len(message.logprobs) == len(message.token_ids)
    assert sum(n for m in messages for n in m.text_lengths) == len("Grüße, 🙂 Paris".encode())
    assert [m.finish_reason for m in messages] == [0] * (len(messages) - 1) + [common_pb2.FINISH_REASON_STOP]
    assert [m.HasField("usage") for m in messages] == [False] * (len(messages) - 1) + [True]
    usage = messages[-1].usage
    assert (usage.completion_tokens, usage.cached_prompt_tokens) == (len(token_ids) + 1, 3)
    assert usage.num_rounds == len(messages) and usage.num_draft_tokens == 4 * len(messages)


async def test_chat_token_ids_and_n_are_taken(world: World) -> None:
    verify = world.verify
    verify.scripts = {0: [*verify.set_answer("zero"), 2], 1: [*verify.set_answer("one"), 2]}
    chat = gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user", content="Hi")])
    messages = await collect(world, Request(chat=chat, n=2, model=MODEL))
    texts = {i: "".join(m.text for m in messages if m.choice_index == i) for i in range(2)}
    assert texts == {0: "zero", 1: "one"}
    assert [m.HasField("usage") for m in messages].count(True) == 1
    await collect(world, Request(prompt_token_ids=gateway_pb2.TokenIds(ids=[7, 8]), ignore_eos=True, max_tokens=1))
    assert list(verify.requests[-1].prompt_token_ids) == [7, 8]
    assert verify.requests[-1].ignore_eos and verify.requests[-1].max_tokens == 1


async def test_both_doors_know_the_same_roles(world: World) -> None:
    answer = await world.http.post("/v1/chat/completions", json={"messages": [{"role": "robot", "content": "x"}]})
    with pytest.raises(InvalidRequestError) as caught:
        await collect(world, Request(chat={"messages": [{"role": "robot", "content": "x"}]}))
    assert answer.json()["error"]["message"].endswith(caught.value.fix) and "'developer'" in caught.value.fix
    world.verify.set_answer("ok")
    roles = ["developer", "system"]
    for role in roles:
        chat = {"messages": [{"role": role, "content": "Be brief."}, {"role": "user", "content": "x"}]}
        await collect(world, Request(chat=chat))
    first, second = (list(request.prompt_token_ids) for request in world.verify.requests)
    assert first == second, "a developer's message is a system's"


async def test_models_are_listed(world: World) -> None:
    response = await world.stub.ListModels(gateway_pb2.GatewayServiceListModelsRequest())
    assert [(m.id, m.context_length) for m in response.models] == [(MODEL, 256)]


@pytest.mark.parametrize(
    ("request_", "kind", "field"),
    [
        (Request(), InvalidRequestError, "prompt"),
        (Request(prompt=""), InvalidRequestError, "prompt"),
        (Request(prompt="x", n=0), InvalidRequestError, "n"),
        (Request(prompt="x", speculation=9), InvalidRequestError, "speculation"),
        (Request(prompt="x", n=10**6), InvalidRequestError, "n"),
        (Request(prompt="x", max_tokens=0), InvalidRequestError, "max_tokens"),
        (Request(prompt="x", sampling={"temperature": -1}), InvalidRequestError, "sampling.temperature"),
        (Request(prompt="x", sampling={"top_p": float("nan")}), InvalidRequestError, "sampling.top_p"),
        (Request(prompt="x", sampling={"logit_bias": {99999: 1}}), InvalidRequestError, "sampling.logit_bias[99999]"),
        (Request(prompt="x", stop=[""]), InvalidRequestError, "stop[0]"),
        (Request(prompt="x", speculation=7), InvalidRequestError, "speculation"),
        (Request(prompt="x", model="other"), NotFoundError, "model"),
        (Request(prompt="x", max_tokens=1000), ContextLengthError, "max_tokens"),
        (Request(prompt_token_ids={"ids": [1, 99999]}), InvalidRequestError, "prompt_token_ids[1]"),
        (Request(chat={"messages": []}), InvalidRequestError, "chat.messages"),
        (
            Request(chat={"messages": [{"role": "robot", "content": "x"}]}),
            InvalidRequestError,
            "chat.messages[0].role",
        ),
    ],
)
async def test_every_wrong_field_is_named(world: World, request_: Any, kind: type[OutriderError], field: str) -> None:
    with pytest.raises(kind) as caught:
        await collect(world, request_)
    assert caught.value.field == field  # type: ignore[attr-defined]


async def test_an_answer_without_its_end_is_unavailable(world: World) -> None:
    world.verify.set_answer("one two three", eos=False)
    world.verify.ends_silently = True
    with pytest.raises(UnavailableError, match="without finishing"):
        await collect(world, Request(prompt="x"))


async def test_cancelling_the_call_cancels_every_answer_at_once(world: World) -> None:
    verify = world.verify
    verify.set_answer("one two three four")
    verify.gate = asyncio.Event()
    call = world.stub.Generate(Request(prompt="x", n=3))
    await call.read()
    await until(lambda: verify.num_open == 3)
    call.cancel()
    await until(lambda: verify.num_open == 0)
    assert verify.num_cancelled == 3


@pytest.mark.parametrize(
    ("request_", "field", "limit"),
    [
        ({"prompt": "x", "stop": [""] * 5000}, "stop", "64"),
        ({"prompt": "x", "stop_token_ids": [1] * 5000}, "stop_token_ids", "64"),
        ({"prompt": "x", "sampling": {"logit_bias": dict.fromkeys(range(5000), 1.0)}}, "sampling.logit_bias", "1024"),
        ({"chat": {"messages": [{}] * 5000}}, "chat.messages", "4096"),
    ],
)
def test_countless_entries_are_refused_by_their_number(request_: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field}: 5000 entries, over the limit of {limit}"):
        decode_request(gateway_pb2.GatewayServiceGenerateRequest(**request_))


async def test_a_short_limit_of_messages_does_not_bound_answers(verify: ScriptedVerify, tmp_path: Path) -> None:
    verify.script = [10] * 64
    verify.round_size = 64
    async with open_world(verify, tmp_path, max_body_bytes=1024) as world:
        messages = await collect(world, Request(prompt="x", max_tokens=64, sampling={"num_logprobs": 20}))
        assert sum(len(m.token_ids) for m in messages) == 64 and max(m.ByteSize() for m in messages) > 1024
        with pytest.raises(OutriderError):
            await collect(world, Request(prompt="x" * 2000))


async def test_a_client_that_reads_nothing_loses_its_place(verify: ScriptedVerify, tmp_path: Path) -> None:
    verify.context_length = 1_000_000
    verify.script = [10] * 150_000
    verify.round_size = 500
    async with (
        open_world(verify, tmp_path, stall_seconds=0.2) as world,
        # A window that does not grow is full after fewer messages.
        grpc.aio.insecure_channel(world.address, [("grpc.http2.bdp_probe", 0)]) as channel,
    ):
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        call = stub.Generate(gateway_pb2.GatewayServiceGenerateRequest(prompt="x", sampling={"num_logprobs": 20}))
        await call.read()
        await until(lambda: verify.num_open == 0)
        call.cancel()
    assert verify.num_cancelled == 1


async def test_streams_that_are_reset_with_no_room_for_an_answer_are_no_failures_of_ours(world: World) -> None:
    world.verify.set_answer("word " * 400)
    message = Request(prompt="x").SerializeToString()
    head, body = call_head(b"/outrider.v1.GatewayService/Generate"), struct.pack("!BI", 0, len(message)) + message
    _, writer = await asyncio.open_connection(*world.address.split(":"))
    try:
        # Of SETTINGS the fourth is the room that each stream has at first.
        writer.write(HTTP2 + frame(SETTINGS, 0, 0, struct.pack("!HI", 4, 0)))
        for stream in range(1, 41, 2):
            writer.write(frame(HEADERS, END_HEADERS, stream, head) + frame(DATA, END_STREAM, stream, body))
        page = ""
        while "outrider_gateway_requests_in_flight 20.0" not in page:
            page = (await world.http.get("/metrics")).text
        for stream in range(1, 41, 2):
            writer.write(frame(RST_STREAM, 0, stream, struct.pack("!I", 8)))
        while "outrider_gateway_requests_in_flight 0.0" not in page:
            page = (await world.http.get("/metrics")).text
    finally:
        writer.close()
    assert "internal_error" not in page

"""Requests that protobuf cannot read or does not understand are refused with a reason, and harm nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.errors import InvalidRequestError
from outrider.rpc.channel import open_channel
from outrider.rpc.interceptors import check_known, strict
from outrider.rpc.server import GrpcServer
from outrider.rpc.status import error_from_rpc
from outrider.v1 import common_pb2, draft_pb2, gateway_pb2, verify_pb2

GET_LOAD = "/outrider.v1.VerifyService/GetLoad"
GENERATE = "/outrider.v1.VerifyService/Generate"
SPECULATE = "/outrider.v1.DraftService/Speculate"

TRUNCATED = b"\x0a\x7f"
UNKNOWN = b"\xc8\x06\x01"  # field 105, varint 1


async def refusal(call: Any) -> InvalidRequestError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    decoded = error_from_rpc(caught.value)
    assert isinstance(decoded, InvalidRequestError)
    return decoded


async def test_malformed_bytes_are_refused_in_a_unary_call(start: Any) -> None:
    running = await start()
    error = await refusal(running.channel.unary_unary(GET_LOAD)(TRUNCATED))
    assert error.code == "malformed_message"
    assert "outrider.v1.VerifyServiceGetLoadRequest" in error.message
    assert (await running.stub.GetLoad(verify_pb2.VerifyServiceGetLoadRequest())).num_running == 7


async def test_malformed_bytes_are_refused_before_a_stream_of_responses(start: Any) -> None:
    running = await start()
    error = await refusal(running.channel.unary_stream(GENERATE)(TRUNCATED))
    assert error.code == "malformed_message"
    assert not running.verify.entered.is_set()


async def test_a_malformed_message_ends_a_bidirectional_stream_after_the_good_ones(start: Any) -> None:
    running = await start(allow_unknown_fields=[SPECULATE])
    good = draft_pb2.DraftServiceSpeculateRequest(events=[draft_pb2.VerifyEvent()])
    call = running.channel.stream_stream(SPECULATE)()
    await call.write(good.SerializeToString())
    assert len(draft_pb2.DraftServiceSpeculateResponse.FromString(await call.read()).events) == 1
    await call.write(TRUNCATED)
    assert (await refusal(call)).code == "malformed_message"


async def test_malformed_bytes_are_refused_in_a_stream_of_requests_with_one_response(tmp_path: Path) -> None:
    async def count(requests: AsyncIterator[Any], context: Any) -> Any:
        return verify_pb2.VerifyServiceGetLoadResponse(num_running=len([request async for request in requests]))

    handler = grpc.stream_unary_rpc_method_handler(
        count,
        request_deserializer=verify_pb2.VerifyServiceGetLoadRequest.FromString,
        response_serializer=verify_pb2.VerifyServiceGetLoadResponse.SerializeToString,
    )
    server = GrpcServer(address=f"unix:{tmp_path}/s", service_names=["outrider.Test"])
    server.grpc.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("outrider.Test", {"Count": handler})])
    async with open_channel(await server.start()) as channel:
        method = channel.stream_unary("/outrider.Test/Count")
        answer = verify_pb2.VerifyServiceGetLoadResponse.FromString(await method(iter([b"", b""])))
        assert answer.num_running == 2
        call = method()
        await call.write(b"")
        await call.write(TRUNCATED)
        assert (await refusal(call)).code == "malformed_message"
    await server.stop(0)


async def test_invalid_utf8_names_the_field(start: Any) -> None:
    running = await start()
    text = b"\xff\xfe"
    field_1 = b"\x0a" + bytes([len(text)]) + text
    error = await refusal(running.channel.unary_stream(GENERATE)(field_1))
    assert (error.field, error.code) == ("request_id", "invalid_utf8")


def test_invalid_utf8_in_a_nested_message_names_the_whole_path() -> None:
    good = gateway_pb2.GatewayServiceGenerateRequest(
        chat=gateway_pb2.ChatMessages(messages=[gateway_pb2.ChatMessage(role="user", content="abc")])
    )
    decode = strict(gateway_pb2.GatewayServiceGenerateRequest.FromString, allow_unknown=False)
    assert decode(good.SerializeToString()) == good
    with pytest.raises(InvalidRequestError) as caught:
        decode(good.SerializeToString().replace(b"abc", b"a\xffc"))
    assert caught.value.field == "chat.messages.content"


async def test_an_unknown_field_is_refused_with_number_and_type(start: Any) -> None:
    running = await start()
    error = await refusal(running.channel.unary_unary(GET_LOAD)(UNKNOWN))
    assert (error.field, error.code) == ("105", "unknown_field")
    assert "outrider.v1.VerifyServiceGetLoadRequest has no field number 105" in error.message


def test_an_unknown_field_in_a_nested_message_names_the_path() -> None:
    request = gateway_pb2.GatewayServiceGenerateRequest(chat=gateway_pb2.ChatMessages())
    request.chat.messages.add(content="fine")
    request.chat.messages.add().MergeFromString(UNKNOWN)
    with pytest.raises(InvalidRequestError, match=r"chat\.messages\[1\]\.105: outrider\.v1\.ChatMessage has no field"):
        check_known(request)


def test_maps_and_scalars_are_no_trouble() -> None:
    check_known(
        verify_pb2.VerifyServiceGenerateRequest(
            prompt_token_ids=range(1000), sampling=common_pb2.SamplingParams(logit_bias={3: 1.5})
        )
    )


async def test_a_method_on_the_list_takes_unknown_fields(start: Any) -> None:
    running = await start(allow_unknown_fields=[SPECULATE])
    call = running.channel.stream_stream(SPECULATE)()
    await call.write(UNKNOWN)
    await call.done_writing()
    assert await call.read() == b""
    assert await call.read() is grpc.aio.EOF


async def test_a_method_off_the_list_refuses_unknown_fields_in_a_stream(start: Any) -> None:
    running = await start()
    call = running.channel.stream_stream(SPECULATE)()
    await call.write(UNKNOWN)
    assert (await refusal(call)).code == "unknown_field"


def test_what_is_too_much_to_look_through_is_refused_all_the_same() -> None:
    decode = strict(gateway_pb2.GatewayServiceGenerateRequest.FromString, allow_unknown=False)
    chat = gateway_pb2.GatewayServiceGenerateRequest(chat={"messages": [{}] * 10_000}).SerializeToString()
    unknown = b"\xa8\x06\x01"
    for data in (unknown * 30_000, _in_chat(b"\x0a\x00" * 10_000 + b"\x0a\x03" + unknown)):
        with pytest.raises(InvalidRequestError, match="no fields of outrider"):
            decode(data)
    with pytest.raises(InvalidRequestError, match="not a valid outrider"):
        decode(_in_chat(b"\x0a\x00" * 10_000 + b"\x0a\x03\x0a\x01\xff"))
    assert len(decode(chat).chat.messages) == 10_000


def test_bad_text_is_named_behind_fields_of_every_wire_type() -> None:
    decode = strict(gateway_pb2.GatewayServiceGenerateRequest.FromString, allow_unknown=False)
    before = b"\xa8\x06\xff\x7f" + b"\xa9\x06" + bytes(8) + b"\xad\x06" + bytes(4) + b"\xaa\x06\x02ab"
    with pytest.raises(InvalidRequestError, match=r"^chat\.messages\.content: is not valid UTF-8"):
        decode(before + _in_chat(b"\x0a\x00" + b"\x0a\x03\x12\x01\xff"))


def _in_chat(data: bytes) -> bytes:
    length = bytearray()
    number = len(data)
    while number > 0x7F:
        length.append(number & 0x7F | 0x80)
        number >>= 7
    return b"\x22" + bytes([*length, number]) + data

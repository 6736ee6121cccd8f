"""The bearer token guards every method but health; request ids travel and stay harmless."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from hypothesis import given
from hypothesis import strategies as st

from outrider import logs
from outrider.errors import OutriderError
from outrider.rpc.call import clean_request_id
from outrider.rpc.credentials import fixed_tokens
from outrider.rpc.interceptors import BoundaryInterceptor
from outrider.rpc.status import error_from_rpc
from outrider.v1 import verify_pb2

Load = verify_pb2.VerifyServiceGetLoadRequest
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


async def test_the_right_token_opens_the_door(start: Any) -> None:
    running = await start(auth_tokens=fixed_tokens("s3cret"), client_token="s3cret")
    assert (await running.stub.GetLoad(Load())).num_running == 7


@pytest.mark.parametrize(
    "metadata",
    [(), (("authorization", "Bearer wrong"),), (("authorization", "s3cret"),), (("authorization", "Basic s3cret"),)],
)
async def test_anything_else_is_unauthenticated(start: Any, metadata: Any) -> None:
    running = await start(auth_tokens=fixed_tokens("s3cret"))
    calls = [
        running.stub.GetLoad(Load(), metadata=metadata),
        running.stub.Generate(verify_pb2.VerifyServiceGenerateRequest(), metadata=metadata),
        running.draft_stub.Speculate(metadata=metadata),
    ]
    for call in calls:
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls[0]
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in rpc_status.from_call(caught.value).details)
    assert (info.domain, info.reason) == ("outrider", "invalid_api_key")
    decoded = error_from_rpc(caught.value, "the gateway")
    assert decoded.code == "peer_refused_credentials"
    assert "the gateway refused the credentials: missing or wrong" in decoded.message
    assert running.verify.request_ids == []
    assert not running.verify.entered.is_set()


async def test_nothing_is_decoded_for_who_may_not_call() -> None:
    seen: list[bytes] = []
    handler: Any = grpc.unary_unary_rpc_method_handler(_answer, request_deserializer=seen.append)

    async def found(details: Any) -> Any:
        return handler

    class Details:
        method = "/outrider.v1.VerifyService/GetLoad"
        invocation_metadata: Any = ()

    boundary = BoundaryInterceptor(auth_tokens=fixed_tokens("s3cret"))
    closed: Any = await boundary.intercept_service(found, Details())
    # A stream of bytes, of which none is read.
    assert closed.request_streaming and closed.request_deserializer is None
    Details.invocation_metadata = (("authorization", "Bearer s3cret"),)
    opened: Any = await boundary.intercept_service(found, Details())
    opened.request_deserializer(b"16 MiB of them")
    assert seen == [b"16 MiB of them"]


async def _answer(request: Any, context: Any) -> None:
    return None


async def test_calls_that_no_servicer_sees_are_counted(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    counted: list[OutriderError] = []
    options = {"auth_tokens": fixed_tokens("s3cret"), "max_message_bytes": 1000, "on_refused": counted.append}
    running = await start(client_token="s3cret", **options)
    for _ in range(3):
        assert await running.stub.GetLoad(Load(), metadata=(("authorization", "x"),)).code() is UNAUTHENTICATED
    assert [error.code for error in counted] == 3 * ["invalid_api_key"]
    assert sum("wrong bearer token" in record.getMessage() for record in caplog.records) == 1, "seldom"
    large = running.channel.unary_unary("/outrider.v1.VerifyService/GetLoad")(2000 * b"x")
    assert await large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await running.stub.GetLoad(Load())  # which is read behind it
    assert counted[3].message == "the call ended without a message of at most 1000 bytes; send one"


async def test_who_may_not_call_is_told_so_before_a_message_has_come(start: Any) -> None:
    running = await start(auth_tokens=fixed_tokens("s3cret"))
    for method in ("GetLoad", "Generate"):
        call = running.channel.stream_stream(f"/outrider.v1.VerifyService/{method}")()
        async with asyncio.timeout(10):  # nothing is ever written
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_health_needs_no_token(start: Any) -> None:
    running = await start(auth_tokens=fixed_tokens("s3cret"))
    answer = await health_pb2_grpc.HealthStub(running.channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_refusal_does_not_log_the_token(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    running = await start(auth_tokens=fixed_tokens("s3cret"))
    with caplog.at_level(logging.DEBUG):
        assert await running.stub.GetLoad(Load(), metadata=(("authorization", "Bearer gue55"),)).code() is not None
    assert "refused" in caplog.text
    assert "gue55" not in caplog.text
    assert "s3cret" not in caplog.text


async def test_a_request_id_goes_from_caller_to_handler(start: Any) -> None:
    running = await start()
    await running.stub.GetLoad(Load(), metadata=(("x-request-id", "from-client.1"),))
    token = logs.request_id.set("from-context")
    await running.stub.GetLoad(Load())
    await running.stub.GetLoad(Load(), metadata=(("x-request-id", "explicit"),))
    logs.request_id.reset(token)
    await running.stub.GetLoad(Load())
    assert running.verify.request_ids[:3] == ["from-client.1", "from-context", "explicit"]
    assert len(running.verify.request_ids[3]) == 32


async def test_calls_at_the_same_time_keep_their_own_ids(start: Any) -> None:
    running = await start()
    await asyncio.gather(*(running.stub.GetLoad(Load(), metadata=(("x-request-id", f"r{i}"),)) for i in range(20)))
    assert sorted(running.verify.request_ids) == sorted(f"r{i}" for i in range(20))


@given(st.one_of(st.none(), st.text(), st.binary()))
def test_a_request_id_is_never_empty_long_or_harmful(given_id: Any) -> None:
    cleaned = clean_request_id(given_id)
    assert 1 <= len(cleaned) <= 64
    assert cleaned.isascii()
    assert all(c.isalnum() or c in "._:-" for c in cleaned)

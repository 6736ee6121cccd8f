"""Every error crosses the wire and comes back as what it was."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st
from raw_server import raw_server

from outrider.cli.client import list_models
from outrider.cli.health import ask
from outrider.errors import (
    ConfigError,
    ContextLengthError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    OverloadedError,
    UnavailableError,
)
from outrider.rpc.channel import open_channel
from outrider.rpc.interceptors import BoundaryInterceptor
from outrider.rpc.status import error_from_rpc, status_from_error
from outrider.v1 import verify_pb2, verify_pb2_grpc

Load = verify_pb2.VerifyServiceGetLoadRequest


async def failed_call(running: Any, **arguments: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.GetLoad(Load(), **arguments)
    return caught.value


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (InvalidRequestError("sampling.top_p", "3 is above 1", "use 0 to 1"), grpc.StatusCode.INVALID_ARGUMENT),
        (InvalidRequestError("", "odd", code="odd_request"), grpc.StatusCode.INVALID_ARGUMENT),
        (ContextLengthError("prompt", "9 tokens, 8 fit", "shorten it"), grpc.StatusCode.INVALID_ARGUMENT),
        (NotFoundError("model", "no model 'x'"), grpc.StatusCode.NOT_FOUND),
        (OverloadedError("the queue is full", retry_after=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (UnavailableError("draining", retry_after=0.25, code="draining"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_an_error_comes_back_as_itself(start: Any, raised: OutriderError, code: grpc.StatusCode) -> None:
    running = await start()
    running.verify.error = raised
    error = await failed_call(running)
    assert error.code() is code
    assert error.details() == raised.message
    decoded = error_from_rpc(error)
    assert type(decoded) is type(raised)
    assert decoded.code == raised.code
    assert decoded.message == raised.message
    assert vars(decoded).get("field") == vars(raised).get("field")
    assert vars(decoded).get("fix") == vars(raised).get("fix")
    assert vars(decoded).get("retry_after") == vars(raised).get("retry_after")


async def test_details_are_the_standard_ones(start: Any) -> None:
    running = await start()
    running.verify.error = InvalidRequestError("n", "17 is above 16", "use 16 or less")
    error = await failed_call(running, metadata=(("x-request-id", "abc"),))
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    bad, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(bad)
    assert status.details[1].Unpack(info)
    assert (bad.field_violations[0].field, bad.field_violations[0].description) == ("n", "17 is above 16")
    assert (info.domain, info.reason, info.metadata["request_id"]) == ("outrider", "invalid_value", "abc")


async def test_an_error_in_mid_stream_follows_what_was_sent(start: Any) -> None:
    running = await start()
    running.verify.error = UnavailableError("gone")
    running.verify.release.set()
    received = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in running.stub.Generate(verify_pb2.VerifyServiceGenerateRequest()):
            received.extend(response.token_ids)
    assert received == [1]
    assert isinstance(error_from_rpc(caught.value), UnavailableError)


@pytest.mark.parametrize("raised", [RuntimeError("the password is 1234"), KeyError("x"), ConfigError("no such folder")])
async def test_an_unexpected_exception_tells_an_id_and_logs_the_rest(
    start: Any, caplog: pytest.LogCaptureFixture, raised: Exception
) -> None:
    running = await start()
    running.verify.error = raised
    with caplog.at_level(logging.ERROR):
        error = await failed_call(running)
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "1234" not in (error.details() or "")
    decoded = error_from_rpc(error)
    assert isinstance(decoded, InternalError)
    error_id = decoded.message.rstrip(")").rsplit(" ", 1)[1]
    [record] = [record for record in caplog.records if error_id in record.getMessage()]
    assert record.exc_info is not None
    assert record.exc_info[1] is raised


async def test_a_cancelled_call_frees_what_it_held_and_raises_no_status(start: Any) -> None:
    running = await start()
    call = running.stub.Generate(verify_pb2.VerifyServiceGenerateRequest())
    await call.read()
    await running.verify.entered.wait()
    call.cancel()
    await asyncio.wait_for(running.verify.freed.wait(), 10)
    with pytest.raises(asyncio.CancelledError):
        await call.read()


async def test_a_client_that_leaves_amid_a_flood_is_no_error_of_ours(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    running = await start()
    running.verify.flood = True
    with caplog.at_level(logging.WARNING):
        async with open_channel(running.address) as leaving:
            call = verify_pb2_grpc.VerifyServiceStub(leaving).Generate(verify_pb2.VerifyServiceGenerateRequest())
            for _ in range(3):
                await call.read()
        await asyncio.wait_for(running.verify.freed.wait(), 10)
        assert (await running.stub.GetLoad(Load())).num_running == 7
    # gRPC may have had something for the loop of an earlier test.
    assert [record for record in caplog.records if "PollerCompletionQueue" not in record.getMessage()] == []


class LostContext:
    """A call whose client went away a moment ago, which the core alone knows: what is sent fails."""

    async def read(self) -> Load:
        return Load()

    def done(self) -> bool:
        return False

    cancelled = done

    async def abort(self, *status: Any) -> None:
        raise grpc.aio.InternalError("SendStatusFromServerOperation")


async def test_a_client_that_leaves_before_its_status_is_no_error_either() -> None:
    async def refuse(request: Any, context: Any) -> Any:
        raise UnavailableError("gone")

    async def found(details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(refuse)

    details = SimpleNamespace(method="/outrider.v1.VerifyService/GetLoad", invocation_metadata=())
    handler = await BoundaryInterceptor().intercept_service(found, details)  # type: ignore[arg-type]
    assert handler is not None
    with pytest.raises(asyncio.CancelledError):
        await handler.stream_stream(None, LostContext())


async def test_a_stop_amid_a_flood_is_no_error_either(start: Any, caplog: pytest.LogCaptureFixture) -> None:
    running = await start()
    running.verify.flood = True
    call = running.stub.Generate(verify_pb2.VerifyServiceGenerateRequest())
    await call.read()
    with caplog.at_level(logging.WARNING):
        await running.server.stop(0)
        await asyncio.wait_for(running.verify.freed.wait(), 10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while await call.read() is not grpc.aio.EOF:
            pass
    assert isinstance(error_from_rpc(caught.value), UnavailableError)
    # gRPC may have had something for the loop of an earlier test.
    assert [record for record in caplog.records if "PollerCompletionQueue" not in record.getMessage()] == []


async def test_a_method_that_is_not_here_is_unimplemented(start: Any) -> None:
    running = await start()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.channel.unary_unary("/outrider.v1.VerifyService/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "same release" in error_from_rpc(caught.value).message


async def test_a_deadline_is_a_timeout_of_the_peer(start: Any) -> None:
    running = await start()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in running.stub.Generate(verify_pb2.VerifyServiceGenerateRequest(), timeout=0.05):
            pass
    decoded = error_from_rpc(caught.value, "the verify service")
    assert isinstance(decoded, UnavailableError)
    assert (decoded.code, decoded.message) == ("peer_timeout", "the verify service did not answer in time")
    await asyncio.wait_for(running.verify.freed.wait(), 10)


async def test_a_port_that_speaks_http_1_is_told_as_no_grpc_door() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")

    async with raw_server(answer) as address:
        async with open_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await verify_pb2_grpc.VerifyServiceStub(channel).GetLoad(Load(), timeout=20)
            with pytest.raises(UnavailableError) as models:
                await list_models(channel)
        _, health = await ask(address, "", 20, "", None)
    for text in (error_from_rpc(caught.value).message, models.value.message, health):
        assert "probably a REST or metrics port" in text and "SETTINGS" not in text


async def test_a_peer_that_is_away_is_unavailable(start: Any) -> None:
    running = await start()
    await running.server.stop(0)
    decoded = error_from_rpc(await failed_call(running), "the verify service")
    assert isinstance(decoded, UnavailableError)
    assert "the verify service cannot be reached" in decoded.message


async def test_a_request_over_the_limit_is_the_clients_mistake(start: Any) -> None:
    running = await start(max_message_bytes=1000)
    call = running.stub.Generate(verify_pb2.VerifyServiceGenerateRequest(request_id="x" * 2000))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
        await call.code()
    decoded = error_from_rpc(caught.value)
    assert isinstance(decoded, InvalidRequestError)
    assert decoded.code == "request_too_large"
    assert "1000" in decoded.message
    assert (await running.stub.GetLoad(Load())).num_running == 7


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", UnavailableError),
        (grpc.StatusCode.UNKNOWN, "Stream removed", UnavailableError),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", UnavailableError),
        (grpc.StatusCode.INTERNAL, "Internal error from Core", UnavailableError),
        (grpc.StatusCode.CANCELLED, "", UnavailableError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", OverloadedError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 8)", InternalError),
        (grpc.StatusCode.INVALID_ARGUMENT, "bad", InvalidRequestError),
        (grpc.StatusCode.NOT_FOUND, "", NotFoundError),
        (grpc.StatusCode.UNAUTHENTICATED, "no token", InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", InternalError),
        (grpc.StatusCode.DATA_LOSS, "", InternalError),
    ],
)
@pytest.mark.parametrize("trailing", [None, b"\xff\xff", status_pb2.Status(code=2).SerializeToString()])
def test_a_status_without_our_details_is_judged_by_its_code(
    code: grpc.StatusCode, details: str, kind: type[OutriderError], trailing: bytes | None
) -> None:
    metadata = grpc.aio.Metadata() if trailing is None else grpc.aio.Metadata(("grpc-status-details-bin", trailing))
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details=details)
    decoded = error_from_rpc(error, "the peer")
    assert type(decoded) is kind
    assert decoded.message


@given(
    field=st.text(max_size=500),
    problem=st.text(st.characters(codec=None, categories=None), max_size=3000),
    fix=st.text(max_size=3000),
    code=st.text(max_size=500),
)
def test_no_text_makes_a_status_too_large_to_send(field: str, problem: str, fix: str, code: str) -> None:
    error = InvalidRequestError(field, problem * 5, fix, code=code)
    _, message, metadata = status_from_error(error, "r" * 64)
    assert 3 * len(message.encode()) + len(metadata[0][1]) * 4 / 3 < 6500


async def test_a_huge_message_in_any_script_arrives(start: Any) -> None:
    running = await start()
    running.verify.error = InvalidRequestError("f" * 9000, "\U0001f600\n\ud800" * 9000, "\u00e9" * 9000)
    decoded = error_from_rpc(await failed_call(running))
    assert isinstance(decoded, InvalidRequestError)
    assert decoded.problem.startswith("\U0001f600")

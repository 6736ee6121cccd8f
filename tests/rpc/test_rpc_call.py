"""What travels beside a message: on whose behalf a call is made, how long it may take, and who may set that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.rpc import call
from outrider.rpc.credentials import fixed_tokens
from outrider.rpc.transport import server_options
from outrider.v1 import verify_pb2

Load = verify_pb2.VerifyServiceGetLoadRequest


@pytest.fixture
async def carrying() -> AsyncIterator[None]:
    """What a test sets in its task is unset at its end."""
    tokens = call.client.set(""), call.deadline.set(None)
    yield
    call.client.reset(tokens[0])
    call.deadline.reset(tokens[1])


async def test_several_tokens_open_the_door_and_only_whole_ones(start: Any) -> None:
    running = await start(auth_tokens=fixed_tokens("token-one", "token-two"))
    for token, code in (
        ("token-one", "OK"),
        ("token-two", "OK"),
        ("token", "UNAUTHENTICATED"),
        ("token-one,token-two", "UNAUTHENTICATED"),
    ):
        reply = running.stub.GetLoad(Load(), metadata=(("authorization", f"Bearer {token}"),))
        assert (await reply.code()).name == code


async def test_a_door_without_tokens_guards_nothing_and_says_so(caplog: pytest.LogCaptureFixture, start: Any) -> None:
    with caplog.at_level(logging.WARNING, "outrider.rpc.server"):
        await start()
        assert "can use it" not in caplog.text
        running = await start(address="0.0.0.0:0")
        assert (
            f"anyone who can reach {running.address} can use it; set a bearer token (docs/security.md)" in caplog.text
        )
        caplog.clear()
        await start(address="0.0.0.0:0", auth_tokens=fixed_tokens("token-t"))
        assert caplog.text == ""


async def test_a_deadline_of_the_task_bounds_every_call_it_makes(start: Any) -> None:
    running = await start()

    async def ask(seconds: float, timeout: float | None) -> grpc.StatusCode:
        call.limit_time(seconds, 3600)
        stream = running.stub.Generate(verify_pb2.VerifyServiceGenerateRequest(), timeout=timeout)
        return await stream.code()

    codes = await asyncio.gather(*(asyncio.create_task(ask(*one)) for one in ((0.05, None), (0.05, 900), (900, 0.05))))
    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}
    await asyncio.wait_for(running.verify.freed.wait(), 10)
    assert call.seconds_left() is None, "other tasks have their own"


@pytest.mark.parametrize(("for_peers", "client"), [(True, "k/u"), (False, "")])
async def test_only_peers_are_believed_on_whose_behalf_they_call(start: Any, for_peers: bool, client: str) -> None:
    running = await start(for_peers=for_peers)
    seen: list[str] = []

    async def answer(request: Any, context: Any) -> Any:
        seen.append(call.client.get())
        return verify_pb2.VerifyServiceGetLoadResponse()

    handler = grpc.unary_unary_rpc_method_handler(answer, Load.FromString, lambda message: message.SerializeToString())
    running.server.grpc.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("outrider.Test", {"T": handler})]
    )
    await running.channel.unary_unary("/outrider.Test/T")(b"", metadata=((call.CLIENT_KEY, "k/u"),))
    assert seen == [client]


async def test_a_channel_passes_the_client_on(start: Any, carrying: None) -> None:
    running = await start()
    call.name_client("a key", "")
    call.name_user("ann")
    await running.stub.GetLoad(Load())
    client = running.verify.metadata[0][call.CLIENT_KEY]
    assert client == call.client.get() == call.clean_client(client)
    assert "key" not in client and "ann" not in client


@given(st.one_of(st.none(), st.text(), st.binary()))
def test_what_a_peer_calls_a_client_is_short_and_harmless(given: Any) -> None:
    cleaned = call.clean_client(given)
    assert len(cleaned) <= call.MAX_CHARACTERS and cleaned.replace("/", "a").isalnum() | (cleaned == "")
    assert cleaned.isascii() and call.clean_client(cleaned) == cleaned


async def test_an_old_connection_is_replaced_and_no_call_fails(start: Any) -> None:
    running = await start(address="127.0.0.1:0", max_connection_age=0.05)
    while len(running.verify.peers) < 3:
        assert (await running.stub.GetLoad(Load())).num_running == 7


def test_the_age_of_a_connection_is_a_choice() -> None:
    assert dict(server_options(1000, 2.5))["grpc.max_connection_age_ms"] == 2500
    assert "grpc.max_connection_age_ms" not in dict(server_options(1000))

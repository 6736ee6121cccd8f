"""A request has so much time as its client gives it and the gateway allows, and verify knows how much that is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from gateway_world import open_world, until
from scripted_verify import ScriptedVerify

from outrider.errors import DeadlineError
from outrider.rpc.status import error_from_rpc
from outrider.v1 import gateway_pb2

TEXT = "/v1/completions"
Request = gateway_pb2.GatewayServiceGenerateRequest


@pytest.fixture
def silent(verify: ScriptedVerify) -> ScriptedVerify:
    """Answers with one round and then with nothing."""
    verify.set_answer("one two three")
    verify.gate = asyncio.Event()
    return verify


async def test_over_the_gateways_limit_a_request_ends_and_verify_with_it(
    silent: ScriptedVerify, tmp_path: Path
) -> None:
    async with open_world(silent, tmp_path, max_request_seconds=0.2) as world:
        whole = await world.http.post(TEXT, json={"prompt": "x"})
        assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
        stream = await world.http.post(TEXT, json={"prompt": "x", "stream": True})
        assert stream.status_code == 200 and '"code":"deadline_exceeded"' in stream.text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in world.stub.Generate(Request(prompt="x"))]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert isinstance(error_from_rpc(caught.value), DeadlineError)
        assert all(seconds is not None and seconds <= 0.21 for seconds in silent.seconds)
        await until(lambda: silent.num_open == 0)
        # On a busy machine the time may be over before a request has come to verify.
        asked = [request.request_id for request in silent.requests]
        assert len(asked) == len(set(asked)), "no request was tried twice"


async def test_a_clients_deadline_goes_on_to_verify_if_it_is_earlier(silent: ScriptedVerify, tmp_path: Path) -> None:
    assert silent.gate is not None
    silent.gate.set()
    async with open_world(silent, tmp_path, max_request_seconds=1000) as world:
        for timeout, most in ((100, 100), (5000, 1000), (None, 1000)):
            [message async for message in world.stub.Generate(Request(prompt="x", n=2), timeout=timeout)]
            limits = silent.seconds[-2:]
            # On the wire a timeout has few digits, rounded up.
            assert all(seconds is not None and most - 30 < seconds <= 1.02 * most for seconds in limits), limits


async def test_a_client_whose_time_is_up_frees_its_place_at_once(silent: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(silent, tmp_path) as world:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in world.stub.Generate(Request(prompt="x", n=3), timeout=0.2)]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: silent.num_open == 0)
        page = (await world.http.get("/metrics")).text
        assert "outrider_gateway_answers_in_flight 0.0" in page

"""Verify dies and comes back, clients go away, the process drains."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import grpc
import httpx
import openai
import pytest
from gateway_world import World, open_world, until
from grpc_health.v1 import health_pb2, health_pb2_grpc
from scripted_verify import MODEL, ScriptedVerify, VerifyHost

from gateway.http.app import RestApp
from gateway.http.server import HttpServer
from gateway.main import build_gateway
from outrider.config.gateway import GatewayOptions
from outrider.errors import ConfigError, UnavailableError
from outrider.rpc.channel import open_channel
from outrider.rpc.status import error_from_rpc
from outrider.v1 import gateway_pb2
from outrider.v1.gateway_pb2_grpc import GatewayServiceStub

TEXT = "/v1/completions"


async def status_of(world: World, path: str) -> int:
    return (await world.http.get(path)).status_code


async def events_of(world: World, body: dict[str, object]) -> list[str]:
    response = await world.http.post(TEXT, json=body)
    assert response.status_code == 200
    return [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]


async def test_before_verify_is_there_health_is_up_and_ready_is_not(verify: ScriptedVerify, tmp_path: Path) -> None:
    host = VerifyHost(verify, tmp_path / "verify.sock")
    options = GatewayOptions(verify=(host.address,), rest_address="127.0.0.1:0", probe_seconds=0.05)
    gateway = build_gateway(options)
    server = HttpServer(RestApp(gateway, options), options.rest_address, option="--rest-address", options=options)
    await server.start()
    gateway.router.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{server.address}") as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
            refused = await http.post(TEXT, json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_ready")
            assert int(refused.headers["retry-after"]) >= 1
            assert (await http.get("/metrics")).status_code == 200
            await host.start()
            await until(lambda: gateway.ready)
            assert (await http.get("/ready")).status_code == 200
    finally:
        await host.stop()
        await server.stop()
        await gateway.router.close()


async def test_a_stream_that_verify_breaks_ends_with_an_error_event(world: World) -> None:
    world.verify.set_answer("one two three four five six")
    world.verify.fail_after = 4
    events = await events_of(world, {"prompt": "x", "stream": True})
    assert json.loads(events[0])["choices"][0]["text"]
    assert json.loads(events[-1])["error"]["type"] == "server_error"
    stream = await world.openai().completions.create(model=MODEL, prompt="x", stream=True)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass
    assert (await world.http.post(TEXT, json={"prompt": "x"})).status_code == 500


async def test_an_answer_that_verify_leaves_open_is_never_short(world: World) -> None:
    world.verify.set_answer("one two three", eos=False)
    world.verify.ends_silently = True
    whole = await world.http.post(TEXT, json={"prompt": "x"})
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "answer_incomplete")
    events = await events_of(world, {"prompt": "x", "stream": True})
    assert json.loads(events[-1])["error"]["code"] == "answer_incomplete"
    assert not any('"finish_reason":"' in event for event in events)


async def test_verify_dies_in_mid_stream_and_is_found_again(world: World) -> None:
    verify = world.verify
    verify.set_answer("one two three four five six")
    verify.gate = asyncio.Event()
    pending = asyncio.create_task(events_of(world, {"prompt": "x", "stream": True}))
    await until(lambda: verify.num_open)
    await asyncio.sleep(0.05)
    await world.host.stop()
    events = await pending
    assert json.loads(events[-1])["error"]["type"] == "server_error"
    async with asyncio.timeout(10):
        while await status_of(world, "/ready") != 503:
            await asyncio.sleep(0.02)
    assert await status_of(world, "/health") == 200
    refused = await world.http.post(TEXT, json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "verify_unavailable")
    verify.gate.set()
    await world.host.start()
    async with asyncio.timeout(10):
        while await status_of(world, "/ready") != 200:
            await asyncio.sleep(0.02)
    again = await world.http.post(TEXT, json={"prompt": "x"})
    assert again.json()["choices"][0]["text"] == "one two three four five six"


async def test_a_failure_before_the_first_token_is_tried_once_more(world: World) -> None:
    verify = world.verify
    verify.set_answer("ok")
    verify.failures = [UnavailableError("restarting")]
    assert (await world.http.post(TEXT, json={"prompt": "x"})).json()["choices"][0]["text"] == "ok"
    verify.failures = [UnavailableError("restarting"), UnavailableError("still restarting")]
    assert (await world.http.post(TEXT, json={"prompt": "x"})).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_answers_at_once(world: World, stream: bool) -> None:
    verify = world.verify
    verify.set_answer("one two three four five six")
    verify.gate = asyncio.Event()
    body = {"prompt": "x", "n": 2, "stream": stream}
    task = asyncio.create_task(world.http.post(TEXT, json=body))
    await until(lambda: verify.num_open == 2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: verify.num_open == 0)
    assert verify.num_cancelled == 2
    metrics = (await world.http.get("/metrics")).text
    assert f'vllm:request_success_total{{finished_reason="abort",model_name="{MODEL}"}} 2.0' in metrics
    assert "outrider_gateway_answers_in_flight 0.0" in metrics


async def test_over_the_limit_requests_get_429_and_places_come_back(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path, max_answers=3) as world:
        verify.set_answer("ok")
        verify.gate = asyncio.Event()
        first = asyncio.create_task(world.http.post(TEXT, json={"prompt": "x", "n": 2}))
        await until(lambda: verify.num_open == 2)
        full = await world.http.post(TEXT, json={"prompt": "x", "n": 2})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "overloaded")
        assert int(full.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in world.stub.Generate(gateway_pb2.GatewayServiceGenerateRequest(prompt="x", n=2)):
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        never = await world.http.post(TEXT, json={"prompt": "x", "n": 4})
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        verify.gate.set()
        assert (await first).status_code == 200
        assert (await world.http.post(TEXT, json={"prompt": "x", "n": 3})).status_code == 200


async def test_drain_finishes_running_streams_and_refuses_new_ones(world: World) -> None:
    verify = world.verify
    verify.set_answer("one two three")
    verify.gate = asyncio.Event()
    running = asyncio.create_task(events_of(world, {"prompt": "x", "stream": True}))
    call = world.stub.Generate(gateway_pb2.GatewayServiceGenerateRequest(prompt="x"))
    assert (await call.read()).text
    await until(lambda: verify.num_open == 2)
    channel = await world.stack.enter_async_context(open_channel(world.address))
    health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
    world.stop.set()
    assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await status_of(world, "/ready") == 503, "both doors say so at once"
    assert await status_of(world, "/health") == 200
    async with asyncio.timeout(5):  # requests that were on their way are taken for a moment
        while (await world.http.post(TEXT, json={"prompt": "x", "model": "another"})).status_code != 503:
            await asyncio.sleep(0.01)
    refused = await world.http.post(TEXT, json={"prompt": "x"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["connection"] == "close", "the next one may lead to another gateway"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in world.stub.Generate(gateway_pb2.GatewayServiceGenerateRequest(prompt="x")):
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    verify.gate.set()
    assert (await running)[-1] == "[DONE]"
    while (response := await call.read()) is not grpc.aio.EOF:
        last = response
    assert last.HasField("usage")
    await world.task


async def test_after_the_drain_time_what_is_left_is_cancelled(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path, drain_seconds=0.05) as world:
        verify.set_answer("one two three")
        verify.gate = asyncio.Event()
        running = asyncio.create_task(world.http.post(TEXT, json={"prompt": "x"}))
        await until(lambda: verify.num_open)
        world.stop.set()
        await world.task
        await asyncio.gather(running, return_exceptions=True)
        await until(lambda: verify.num_open == 0)


async def test_who_is_cut_off_by_the_end_of_the_drain_is_told_so(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path, drain_seconds=0.05) as world:
        verify.set_answer("one two three")
        verify.gate = asyncio.Event()
        streamed = asyncio.create_task(events_of(world, {"prompt": "x", "stream": True}))
        whole = asyncio.create_task(world.http.post(TEXT, json={"prompt": "x", "n": 2}))
        call = world.stub.Generate(gateway_pb2.GatewayServiceGenerateRequest(prompt="x"))
        assert (await call.read()).text
        await until(lambda: verify.num_open == 4)
        world.stop.set()
        assert json.loads((await streamed)[-1])["error"]["code"] == "draining"
        refused = await whole
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        decoded = error_from_rpc(caught.value)
        assert isinstance(decoded, UnavailableError) and decoded.code == "draining"
        await world.task


async def test_every_door_but_health_and_ready_wants_the_key(verify: ScriptedVerify, tmp_path: Path) -> None:
    key = "correct-horse-battery"
    async with open_world(verify, tmp_path, api_key=key, metrics_address="127.0.0.1:0") as world:
        verify.set_answer("ok")
        for path in ("/health", "/ready"):
            assert await status_of(world, path) == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/v1/nothing"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {key}"}):
                response = await world.http.get(path, headers=headers)
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.AuthenticationError):
            await world.openai(api_key="wrong").completions.create(model=MODEL, prompt="x")
        answer = await world.openai(api_key=key).completions.create(model=MODEL, prompt="x")
        assert answer.choices[0].text == "ok"
        request = gateway_pb2.GatewayServiceGenerateRequest(prompt="x")
        assert "".join([m.text async for m in world.stub.Generate(request)]) == "ok"
        async with open_channel(world.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in GatewayServiceStub(channel).Generate(request):
                    pass
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # A page of its own lets scrapers in without the key.
        metrics_address = json.loads((tmp_path / "ready.json").read_text())["metrics_address"]
        assert (await world.http.get(f"http://{metrics_address}/metrics")).status_code == 200


async def test_strangers_do_not_fill_the_log_and_are_all_counted(
    verify: ScriptedVerify, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(verify, tmp_path, api_key="right") as world:
        with caplog.at_level(logging.INFO):
            for _ in range(20):
                wrong = await world.http.get("/v1/models", headers={"authorization": "Bearer wrong"})
                assert wrong.status_code == 401
                assert (await world.http.request("A" * 5000, "/health")).status_code == 405
        page = (await world.http.get("/metrics", headers={"authorization": "Bearer right"})).text
    # One line for the first refusal; the others come within the time that it stands for.
    assert caplog.text.count(" refused: ") == 1
    assert "refused: invalid_api_key" in caplog.text
    assert 'outrider_gateway_errors_total{code="invalid_api_key",door="rest"} 20.0' in page


@pytest.mark.parametrize(("options", "is_warned"), [({}, True), ({"api_key": "correct-horse-battery"}, False)])
async def test_doors_that_anybody_may_use_say_so_and_what_would_close_them(
    verify: ScriptedVerify, tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, str], is_warned: bool
) -> None:
    async with open_world(verify, tmp_path, address="0.0.0.0:0", rest_address="0.0.0.0:0", **options):
        warnings = [line for line in caplog.text.splitlines() if "anyone who can reach 0.0.0.0:" in line]
        assert len(warnings) == (2 if is_warned else 0), warnings
        assert all(line.endswith("; set OUTRIDER_API_KEY or --api-key-file") for line in warnings)


async def test_a_replica_with_another_tokenizer_is_not_used(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path) as world:
        verify.tokenizer_hash = "0" * 64
        async with asyncio.timeout(5):
            while await status_of(world, "/ready") != 503:
                await asyncio.sleep(0.02)
        assert 'state="unsuitable"} 1.0' in (await world.http.get("/metrics")).text


async def test_a_replica_may_come_back_with_another_model(world: World) -> None:
    await world.host.stop()
    world.verify.model = "tiny/next"
    await world.host.start()
    async with asyncio.timeout(10):
        while (await world.http.get("/v1/models/tiny/next")).status_code != 200:
            await asyncio.sleep(0.02)


async def test_ports_in_use_and_wrong_options_end_the_start(world: World, tmp_path: Path) -> None:
    from gateway.main import serve

    taken = world.rest.removeprefix("http://")
    for options, words in (
        (GatewayOptions(rest_address=taken, address="127.0.0.1:0"), "--rest-address"),
        (GatewayOptions(rest_address="127.0.0.1:0", address=world.address), "--address"),
        (GatewayOptions(verify=()), "--verify"),
        (GatewayOptions(tokenizer=tmp_path / "nothing"), "tokenizer"),
        (GatewayOptions(api_key_file=tmp_path / "nothing"), "--api-key-file"),
        (GatewayOptions(api_key="two words"), "--api-key"),
    ):
        with pytest.raises(ConfigError, match=words):
            await serve(options, asyncio.Event())

"""What HTTP clients, browsers and load balancers expect of any server."""

from __future__ import annotations

import asyncio
from datetime import UTC
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest
from gateway_world import World, open_world, until
from scripted_verify import MODEL, ScriptedVerify

from gateway.http.server import HttpServer
from outrider import __version__
from outrider.config.gateway import GatewayOptions
from outrider.errors import ConfigError


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/metrics", "/openapi.json", "/get_model_info"])
async def test_head_has_the_headers_of_get_and_no_body(world: World, path: str) -> None:
    head, get = await world.http.head(path), await world.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


async def test_options_names_the_methods_of_a_path(world: World) -> None:
    for path, methods in (("/v1/completions", {"POST"}), ("/health", {"GET", "HEAD"}), ("/generate", {"POST"})):
        response = await world.http.options(path)
        assert (response.status_code, response.content) == (204, b"")
        assert set(response.headers["allow"].split(", ")) == methods | {"OPTIONS"}
    assert (await world.http.options("/nowhere")).status_code == 404
    reader, writer = await asyncio.open_connection(*world.rest.removeprefix("http://").split(":"))
    writer.write(b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    head, *headers = (await reader.read()).lower().split(b"\r\n")
    writer.close()
    assert head.split()[1] == b"204" and b"allow: get, head, post, options" in headers


async def test_a_wrong_method_or_path_is_told_in_openais_shape(world: World) -> None:
    for method, path, code, status in (
        ("GET", "/v1/completions", "method_not_allowed", 405),
        ("DELETE", "/health", "method_not_allowed", 405),
        ("GET", "/v2/models", "path_not_found", 404),
    ):
        response = await world.http.request(method, path)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (status, code)
        assert {"message", "type", "param", "code"} == set(error)


async def test_a_slash_at_the_end_changes_nothing(world: World) -> None:
    world.verify.set_answer("ok")
    answer = await world.http.post("/v1/completions/", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "ok")
    for path in ("/v1/models", "/health", f"/v1/models/{MODEL}"):
        assert (await world.http.get(f"{path}/")).content == (await world.http.get(path)).content


async def test_no_page_of_another_origin_may_call_unless_told(
    world: World, verify: ScriptedVerify, tmp_path_factory: pytest.TempPathFactory
) -> None:
    ask = {"origin": "https://page.example", "access-control-request-method": "POST"}
    closed = await world.http.options("/v1/completions", headers=ask)
    assert not [name for name in closed.headers if name.startswith("access-control")]
    folder = tmp_path_factory.mktemp("cors")
    # Preflights carry no token: they are answered before one is asked for.
    async with open_world(
        ScriptedVerify(verify.folder), folder, cors_origins=("https://page.example",), api_key="k3y-for-pages"
    ) as open_to_one:
        ahead = await open_to_one.http.options("/v1/completions", headers=ask)
        assert ahead.status_code == 200
        assert ahead.headers["access-control-allow-origin"] == "https://page.example"
        headers = {"origin": "https://page.example", "authorization": "Bearer k3y-for-pages"}
        models = await open_to_one.http.get("/v1/models", headers=headers)
        assert models.headers["access-control-allow-origin"] == "https://page.example"
        assert "x-request-id" in models.headers["access-control-expose-headers"]
        refused = await open_to_one.http.get("/v1/models", headers={"origin": "https://page.example"})
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers
        other = await open_to_one.http.options("/v1/completions", headers=ask | {"origin": "https://evil.example"})
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/path", ""])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="--cors-origins"):
        GatewayOptions(cors_origins=(origin,)).check()


async def test_a_stream_without_news_gets_comments_that_clients_skip(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path, keep_alive_seconds=0.05) as world:
        verify.set_answer("one two")
        verify.slow_prompt = asyncio.Event()
        body = {"prompt": "a b c", "stream": True, "echo": True, "logprobs": 0}
        async with world.http.stream("POST", "/v1/completions", json=body) as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                # Before the first token, and between two.
                if text.count(": keep-alive\n\n") > 1:
                    verify.slow_prompt.set()
        assert text.startswith(": keep-alive\n\n") and text.endswith("data: [DONE]\n\n")
        assert '"one' in text

        verify.slow_prompt = None
        verify.gate = asyncio.Event()
        stream = await world.openai().completions.create(model=MODEL, prompt="x", stream=True)
        texts = []
        async for chunk in stream:
            texts.append(chunk.choices[0].text)
            asyncio.get_running_loop().call_later(0.2, verify.gate.set)
        assert "".join(texts) == "one two"


async def test_a_client_that_leaves_between_comments_ends_its_answer(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path, keep_alive_seconds=0.05) as world:
        verify.set_answer("one two three")
        verify.gate = asyncio.Event()
        async with world.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                # Before the first token verify may not have heard of it.
                if "keep-alive" in text.rpartition("data: ")[2] and "data: " in text:
                    break
        await until(lambda: verify.num_cancelled == 1)


async def test_an_error_behind_a_comment_is_an_event(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path, keep_alive_seconds=0.05) as world:
        verify.set_answer("one two three")
        verify.gate = asyncio.Event()
        verify.fail_after = 2
        text = ""
        async with world.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            async for piece in response.aiter_text():
                text += piece
                if ": keep-alive" in text:
                    verify.gate.set()
        assert response.status_code == 200
        assert '"error"' in text and "[DONE]" not in text


async def test_a_stream_that_fails_before_its_first_event_has_the_status_of_the_error(world: World) -> None:
    world.verify.set_answer("🙂")
    world.verify.round_size = world.verify.fail_after = 1  # the first token is a part of a character, without text
    response = await world.http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert (response.status_code, response.json()["error"]["type"]) == (500, "server_error")


async def test_an_idle_connection_outlives_those_of_proxies_and_client_libraries() -> None:
    server = HttpServer(None, "127.0.0.1:0", option="--rest-address", options=GatewayOptions())
    # nginx and the load balancers of clouds keep idle connections for 60 s, httpx for 5 s.
    assert server.config.timeout_keep_alive > 60
    await server.stop()


async def test_answers_bear_the_date(world: World) -> None:
    answers = [await world.http.get("/health"), await world.http.get("/nowhere")]
    assert [answer.status_code for answer in answers] == [200, 404]
    for answer in answers:
        assert parsedate_to_datetime(answer.headers["date"]).tzinfo is UTC


async def test_requests_carry_an_id_back(world: World) -> None:
    world.verify.set_answer("ok")
    given = await world.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1" and given.json()["id"].startswith("cmpl-")
    made = await world.http.get("/v1/models/other", headers={"x-request-id": "not fit\tfor a log"})
    assert made.status_code == 404 and made.headers["x-request-id"] not in ("", "not fit\tfor a log")


async def test_the_release_is_told(world: World) -> None:
    assert (await world.http.get("/version")).json() == {"version": __version__}


async def test_models_are_told_as_load_generators_read_them(world: World) -> None:
    (model,) = (await world.http.get("/v1/models")).json()["data"]
    assert model | {"id": MODEL, "object": "model", "root": MODEL, "parent": None, "max_model_len": 256} == model
    assert isinstance(model["created"], int) and model["owned_by"] == "outrider"


async def test_harmless_fields_are_taken(world: World) -> None:
    world.verify.set_answer("ok")
    body = {"prompt": "x", "user": "u-1", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    assert (await world.http.post("/v1/completions", json=body)).status_code == 200

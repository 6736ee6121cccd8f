"""A page elsewhere whose name resolves to this machine gets nothing from a keyless door on loopback."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_world import World, open_world
from scripted_verify import ScriptedVerify

from gateway.http.app import HostRule
from gateway.http.responses import HttpError
from outrider.config.gateway import GatewayOptions
from outrider.errors import ConfigError

LOCAL = ("localhost", "localhost:8000", "LocalHost.", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "a.localhost")
PATHS = ("/", "/v1/models", "/metrics", "/openapi.json", "/health_generate", "/nowhere")


async def ask(world: World, path: str, host: str) -> httpx.Response:
    return await world.http.get(path, headers={"host": host})


async def test_on_loopback_without_keys_only_names_of_this_machine_are_served(world: World) -> None:
    for path in PATHS:
        refused = await ask(world, path, "evil.example:8000")
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (421, "host_not_allowed")
        assert "--allowed-hosts" in error["message"]
    posted = await world.http.post("/v1/completions", json={"prompt": "x"}, headers={"host": "evil.example"})
    assert posted.status_code == 421 and world.verify.requests == []
    for host in (*LOCAL, "192.168.1.7:8000"):
        assert (await ask(world, "/v1/models", host)).status_code == 200, host
    # Load balancers ask under names of their own, and there is nothing to be had.
    assert (await ask(world, "/health", "evil.example")).status_code == 200
    assert 'errors_total{code="host_not_allowed",door="rest"}' in (await world.http.get("/metrics")).text


async def test_the_host_of_a_whole_url_counts_in_place_of_the_headers(world: World) -> None:
    for named, header, status in (("localhost", "evil.example", b"200"), ("evil.example", "localhost", b"421")):
        reader, writer = await asyncio.open_connection(*world.rest.removeprefix("http://").split(":"))
        writer.write(f"GET http://{named}/v1/models HTTP/1.1\r\nhost: {header}\r\n\r\n".encode())
        assert (await reader.readline()).split()[1] == status
        writer.close()


async def test_a_page_of_another_site_cannot_post_without_being_asked_first(world: World) -> None:
    # What browsers send without a preflight; JSON is not among it.
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        headers = {"content-type": kind, "origin": "https://evil.example"}
        answer = await world.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert answer.status_code == 415 and world.verify.requests == []


@pytest.mark.parametrize(
    ("options", "host", "served"),
    [
        ({"allowed_hosts": ("llm.example", "*.inner.example")}, "LLM.example:443", True),
        ({"allowed_hosts": ("llm.example", "*.inner.example")}, "a.b.inner.example", True),
        ({"allowed_hosts": ("llm.example", "*.inner.example")}, "inner.example", False),
        ({"allowed_hosts": ("llm.example",)}, "localhost", True),
        ({"allowed_hosts": ("llm.example",)}, "llm.example.evil.example", False),
        ({"allowed_hosts": ("*",)}, "evil.example", True),
        ({"api_key": "correct-horse-battery"}, "llm.example", True),
        ({"api_key": "correct-horse-battery", "allowed_hosts": ("llm.example",)}, "evil.example", False),
        ({"rest_address": "0.0.0.0:0"}, "llm.example", True),
        ({"rest_address": "0.0.0.0:0", "allowed_hosts": ("llm.example",)}, "evil.example", False),
    ],
)
async def test_names_are_let_in_as_the_option_says(
    verify: ScriptedVerify, tmp_path: Path, options: dict[str, Any], host: str, served: bool
) -> None:
    async with open_world(verify, tmp_path, **options) as world:
        bearer = {"authorization": f"Bearer {options.get('api_key', 'none')}"}
        answer = await world.http.get("/v1/models", headers={"host": host} | bearer)
        assert answer.status_code == (200 if served else 421)


async def test_the_metrics_page_has_the_same_rule(verify: ScriptedVerify, tmp_path: Path) -> None:
    async with open_world(verify, tmp_path, metrics_address="127.0.0.1:0", api_key="correct-horse-battery") as world:
        page = f"http://{json.loads((tmp_path / 'ready.json').read_text())['metrics_address']}/metrics"
        assert (await world.http.get(page)).status_code == 200
        assert (await world.http.get(page, headers={"host": "evil.example"})).status_code == 421


async def test_beyond_loopback_scrapers_call_the_metrics_page_by_any_name(
    verify: ScriptedVerify, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"metrics_address": "0.0.0.0:0", "allowed_hosts": ("llm.example",)}
    async with open_world(verify, tmp_path, **options) as world:
        port = json.loads((tmp_path / "ready.json").read_text())["metrics_address"].rpartition(":")[2]
        answer = await world.http.get(f"http://127.0.0.1:{port}/metrics", headers={"host": "gateway:9101"})
        assert answer.status_code == 200
        assert (await world.http.get("/metrics", headers={"host": "gateway:9101"})).status_code == 421


@pytest.mark.parametrize(
    "host", ["", "[", "[::1", ":", ".", "localhost.evil.example", "127.0.0.1.evil.example", "0x7f.1"]
)
def test_odd_names_are_names_of_strangers(host: str) -> None:
    rule = HostRule("127.0.0.1:8000")
    if host in ("", "[::1"):  # no browser sends these
        rule.check({"host": host})
        return
    with pytest.raises(HttpError):
        rule.check({"host": host})


@pytest.mark.parametrize("host", ["https://example.org", "example.org:80", "a b", "", "*.", "a.*"])
def test_what_is_no_name_is_refused_at_the_start(host: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        GatewayOptions(allowed_hosts=(host,)).check()

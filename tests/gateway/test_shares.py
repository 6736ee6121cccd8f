"""Several API keys: each opens both doors, and none takes all the places."""

from __future__ import annotations

import asyncio
import contextlib
from argparse import Namespace
from pathlib import Path

import grpc
import httpx
import pytest
from gateway_world import World, open_world, until
from hypothesis import given
from hypothesis import strategies as st
from scripted_verify import ScriptedVerify

from gateway.core.gate import Gate
from outrider.config.gateway import GatewayOptions
from outrider.config.service import gateway_key
from outrider.errors import ConfigError, OverloadedError
from outrider.rpc.call import client
from outrider.v1 import gateway_pb2

TEXT = "/v1/completions"
Request = gateway_pb2.GatewayServiceGenerateRequest


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def post(world: World, key: str, **fields: object) -> httpx.Response:
    return await world.http.post(TEXT, json={"prompt": "x"} | fields, headers=bearer(key))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# clients\nkey-alpha\nkey-beta\n\nkey-alpha\n")
    return path


async def test_every_key_opens_both_doors_and_no_other_does(verify: ScriptedVerify, tmp_path: Path, keys: Path) -> None:
    verify.set_answer("ok")
    async with open_world(verify, tmp_path, api_key_file=keys) as world:
        for key, status in (("key-alpha", 200), ("key-beta", 200), ("key-gamma", 401), ("# clients", 401)):
            assert (await post(world, key)).status_code == status
        for key in ("key-alpha", "key-beta"):
            call = world.stub.Generate(Request(prompt="x"), metadata=tuple(bearer(key).items()))
            assert "".join([message.text async for message in call]) == "ok"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.stub.ListModels(
                gateway_pb2.GatewayServiceListModelsRequest(), metadata=(("authorization", "x"),)
            )
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_key_is_added_and_revoked_without_a_restart(verify: ScriptedVerify, tmp_path: Path, keys: Path) -> None:
    verify.set_answer("ok")
    async with open_world(verify, tmp_path, api_key_file=keys) as world:
        assert [(await post(world, key)).status_code for key in ("key-alpha", "key-gamma")] == [200, 401]
        keys.write_text("key-beta\nkey-gamma\n")
        for key, status, code in (
            ("key-alpha", 401, grpc.StatusCode.UNAUTHENTICATED),
            ("key-gamma", 200, grpc.StatusCode.OK),
        ):
            assert (await post(world, key)).status_code == status
            models = gateway_pb2.GatewayServiceListModelsRequest()
            assert await world.stub.ListModels(models, metadata=tuple(bearer(key).items())).code() is code


async def test_verify_learns_whom_a_request_is_for_but_neither_key_nor_name(
    verify: ScriptedVerify, tmp_path: Path, keys: Path
) -> None:
    verify.set_answer("ok")
    async with open_world(verify, tmp_path, api_key_file=keys) as world:
        await post(world, "key-alpha", user="ann")
        await post(world, "key-alpha", user="bob")
        await post(world, "key-beta", user="ann")
        metadata = (*bearer("key-alpha").items(), ("x-user", "ann"), ("x-outrider-client", "forged"))
        [message async for message in world.stub.Generate(Request(prompt="x"), metadata=metadata)]
        first, second, third, fourth = (name.split("/") for name in verify.clients)
        assert first[0] == second[0] != third[0] and first[1] == third[1] != second[1] and fourth == first
        assert not any(
            word in name for name in verify.clients for word in ("key-alpha", "key-beta", "ann", "bob", "forged")
        )


async def test_a_tenant_is_a_key_or_keys_of_one_name_and_a_salt_narrows_it(
    verify: ScriptedVerify, tmp_path: Path, keys: Path
) -> None:
    verify.set_answer("ok")
    keys.write_text("key-alpha\nkey-beta\nkey-gamma team\nkey-delta team\nkey-epsilon key-alpha\n")
    async with open_world(verify, tmp_path, api_key_file=keys) as world:
        found = {}
        for key in ("alpha", "beta", "gamma", "delta", "epsilon"):
            for salt in (None, "salt"):
                assert (await post(world, f"key-{key}", cache_salt=salt)).status_code == 200
                found[key, salt] = verify.requests[-1].tenant
        assert found["gamma", None] == found["delta", None] and found["gamma", "salt"] == found["delta", "salt"]
        assert len(set(found.values())) == 8 and all(found.values())
        request = Request(prompt="x", cache_salt="salt")
        [_ async for _ in world.stub.Generate(request, metadata=tuple(bearer("key-beta").items()))]
        assert verify.requests[-1].tenant == found["beta", "salt"]
        refused = await post(world, "key-beta", cache_salt="x" * 257)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


async def test_without_keys_all_are_one_tenant(verify: ScriptedVerify, tmp_path: Path) -> None:
    verify.set_answer("ok")
    async with open_world(verify, tmp_path) as world:
        await post(world, "anything")
        await post(world, "another", user="ann")
        assert [request.tenant for request in verify.requests] == ["", ""]


async def test_with_one_key_only_the_user_counts(verify: ScriptedVerify, tmp_path: Path) -> None:
    verify.set_answer("ok")
    async with open_world(verify, tmp_path, api_key="key-alpha") as world:
        await post(world, "key-alpha")
        await post(world, "key-alpha", user="ann")
        assert verify.clients[0] == "" and verify.clients[1].startswith("0/")


async def test_a_flood_of_one_key_leaves_places_for_another(verify: ScriptedVerify, tmp_path: Path, keys: Path) -> None:
    verify.set_answer("one two three")
    verify.gate = asyncio.Event()
    async with open_world(verify, tmp_path, api_key_file=keys, max_answers=8) as world:
        flood = [asyncio.create_task(post(world, "key-alpha")) for _ in range(12)]
        await until(lambda: verify.num_open == 6 and sum(task.done() for task in flood) == 6)
        refused = [task.result() for task in flood if task.done()]
        assert {(r.status_code, r.json()["error"]["code"]) for r in refused} == {(429, "share_used_up")}
        assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
        late = [asyncio.create_task(post(world, "key-beta")) for _ in range(2)]
        await until(lambda: verify.num_open == 8)
        verify.gate.set()
        assert [r.status_code for r in await asyncio.gather(*late)] == [200, 200]
        await asyncio.gather(*flood)
        page = (await world.http.get("/metrics", headers=bearer("key-beta"))).text
        assert 'outrider_gateway_errors_total{code="share_used_up",door="rest"} 6.0' in page
        assert "outrider_gateway_max_answers 8.0" in page


@given(st.integers(1, 40), st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5)), max_size=60))
def test_whoever_holds_nothing_gets_a_place_while_one_is_free(max_places: int, asked: list[tuple[str, int]]) -> None:
    gate = Gate(max_places)
    for key, num_places in asked:
        with contextlib.suppress(OverloadedError):
            gate.take(num_places, key)
    assert gate.num_answers <= max_places
    if gate.num_answers < max_places:
        gate.take(1, "new")


def test_a_request_keeps_its_place_when_another_key_s_comes_in_before_its_answer_begins() -> None:
    gate = Gate(8)
    gate.take(5, "alpha")
    name = client.set("alpha/0")
    with gate.enter() as first:
        client.set("beta/0")
        with gate.enter() as second:
            second(1)
            first(1)
            assert gate.num_answers == 7
            with pytest.raises(OverloadedError):
                first(2)
    client.reset(name)
    assert gate.num_answers == 5


async def test_what_no_key_can_ever_have_is_a_mistake_and_no_matter_of_time(
    verify: ScriptedVerify, tmp_path: Path, keys: Path
) -> None:
    verify.set_answer("ok")
    async with open_world(verify, tmp_path, api_key_file=keys, max_answers=8) as world:
        assert (await post(world, "key-alpha", n=6)).status_code == 200
        never = await post(world, "key-alpha", n=7)
        assert (never.status_code, never.json()["error"]["param"]) == (400, "n")
        assert "limit of 6" in never.json()["error"]["message"]


def test_clients_that_no_key_tells_apart_share_all_places() -> None:
    gate = Gate(8)
    gate.take(7, "")
    gate.take(1, "")
    Gate(8).take(8, "0")
    assert gate.num_answers == 8


def test_a_file_of_keys_is_read_strictly(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for content, words in (("\n# nothing\n", "is empty"), ("\n".join(map(str, range(2000))), "at most 1024")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=words):
            GatewayOptions(api_key_file=path).read_api_keys()
    for content, words in (("key a b", "write KEY or KEY TENANT"), ("key a\nkey b", "two tenants")):
        path.write_text(content)
        with pytest.raises(ConfigError, match=words):
            GatewayOptions(api_key_file=path).read_api_keys()
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="it is no text"):
        GatewayOptions(api_key_file=path).read_api_keys()


def test_who_asks_a_gateway_reads_the_gateway_s_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    path = tmp_path / "keys"
    path.write_text("key tenant\n")
    arguments = Namespace(api_key_file=str(path))
    assert gateway_key(arguments) == "key"
    path.write_text("key tenant\nother\n")
    with pytest.raises(ConfigError, match=r"--api-key-file: .* has 2 keys; one is sent"):
        gateway_key(arguments)
    with pytest.raises(ConfigError, match=r"^--api-key-file: .* cannot be read"):
        gateway_key(Namespace(api_key_file=str(tmp_path / "none")))
    monkeypatch.setenv("OUTRIDER_API_KEY", "key")
    with pytest.raises(ConfigError, match="OUTRIDER_API_KEY is set too"):
        gateway_key(arguments)
    assert gateway_key(Namespace(api_key_file=None)) == "key"

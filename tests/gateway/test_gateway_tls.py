"""Both doors over TLS, the way to verify too, and files that are replaced while they are in use."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import asdict
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from certificates import Authority, replace
from gateway_world import http_trust, open_world, until
from scripted_verify import ScriptedVerify
from starlette.types import Receive, Scope, Send

from gateway.http.responses import run_while_connected
from gateway.http.server import HttpServer
from gateway.main import serve
from outrider.cli.health import ask as ask_health
from outrider.cli.main import make_parser
from outrider.config.gateway import GatewayOptions
from outrider.config.service import TlsFiles
from outrider.errors import ConfigError, OutriderError
from outrider.rpc.credentials import fixed_tokens
from outrider.rpc.tls import TlsSource
from outrider.v1 import gateway_pb2
from outrider_tools.cli import bench, top

TEXT = "/v1/completions"


def door(files: TlsFiles, *, clients_too: bool = True) -> dict[str, str]:
    words = ("cert", "key", "ca") if clients_too else ("cert", "key")
    return {f"tls_{word}": asdict(files)[word] for word in words}


async def ask(rest: str, trust: TlsFiles) -> int:
    async with httpx.AsyncClient(base_url=rest, verify=http_trust(trust)) as http:
        return (await http.get("/health")).status_code


async def test_both_doors_speak_tls_and_only_tls(verify: ScriptedVerify, tmp_path: Path) -> None:
    verify.set_answer("ok")
    ours = Authority(tmp_path / "ours")
    trust = TlsFiles(ca=ours.files("client").ca)
    files = door(ours.files("server"), clients_too=False)
    async with open_world(verify, tmp_path, trust=trust, **files) as world:
        assert (await world.http.post(TEXT, json={"prompt": "x"})).json()["choices"][0]["text"] == "ok"
        messages = [m async for m in world.stub.Generate(gateway_pb2.GatewayServiceGenerateRequest(prompt="x"))]
        assert "".join(m.text for m in messages) == "ok"
        async with httpx.AsyncClient(base_url=world.rest.replace("https", "http")) as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get("/health")


async def test_who_begins_no_handshake_is_cut_off(verify: ScriptedVerify, tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    files = door(ours.files("server"), clients_too=False)
    async with open_world(
        verify, tmp_path, trust=TlsFiles(ca=ours.files("client").ca), header_seconds=0.2, **files
    ) as world:
        for address in (world.rest.removeprefix("https://"), world.address):
            reader, writer = await asyncio.open_connection(*address.split(":"))
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            writer.close()


async def test_who_begins_no_handshake_cannot_take_all_places(verify: ScriptedVerify, tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    files = door(ours.files("server"), clients_too=False)
    trust = TlsFiles(ca=ours.files("client").ca)
    async with open_world(verify, tmp_path, trust=trust, max_connections_per_address=3, **files) as world:
        host, port = world.rest.removeprefix("https://").split(":")
        silent = [await asyncio.open_connection(host, port, local_addr=("127.0.0.2", 0)) for _ in range(8)]
        ends = [asyncio.create_task(reader.read()) for reader, _ in silent]
        await until(lambda: sum(end.done() for end in ends) == 5)
        # An address that is not theirs is served, and so are they when they have gone.
        assert (await world.http.get("/health")).status_code == 200
        for _, writer in silent:
            writer.transport.abort()
        await asyncio.gather(*ends, return_exceptions=True)
        mine = httpx.AsyncHTTPTransport(verify=http_trust(trust), local_address="127.0.0.2", retries=20)
        async with httpx.AsyncClient(base_url=world.rest, transport=mine) as http:
            assert (await http.get("/health")).status_code == 200


async def test_with_a_ca_clients_of_either_door_need_a_certificate(verify: ScriptedVerify, tmp_path: Path) -> None:
    verify.set_answer("ok")
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    client = ours.files("client")
    async with open_world(verify, tmp_path, trust=client, **door(ours.files("server"))) as world:
        assert (await world.http.post(TEXT, json={"prompt": "x"})).status_code == 200
        for stranger in (TlsFiles(ca=client.ca), theirs.files("forged", trust=ours)):
            with pytest.raises(httpx.TransportError):
                await ask(world.rest, stranger)


async def test_a_load_over_rest_comes_in_with_its_certificate_and_to_the_name_that_it_was_told(
    verify: ScriptedVerify, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify.set_answer("ok")
    ours = Authority(tmp_path / "ours")
    client = ours.files("client")
    server = ours.files("server", hosts=["gateway.example"])
    words = [f"--connect-tls-{word}={asdict(client)[word]}" for word in ("cert", "key", "ca")]
    async with open_world(verify, tmp_path, trust=client, **door(server)) as world:
        base = ["bench", "--backend=openai", f"--base-url={world.rest}", "--num-prompts=2", "--num-warmups=0", *words]
        base += ["--random-input-len=4", "--random-vocab-size=100", "--random-output-len=4"]
        arguments = make_parser(["bench"]).parse_args(base)
        with pytest.raises(OutriderError, match=r"IP address mismatch.*; --connect-tls-ca says .* name in it$"):
            await asyncio.to_thread(bench.run, arguments)
        arguments.base_url = world.rest.replace("https:", "http:")
        with pytest.raises(OutriderError, match=r"; begin it with https:// where the door has TLS$"):
            await asyncio.to_thread(bench.run, arguments)
        arguments.base_url = world.rest
        arguments.connect_tls_name = "gateway.example"
        assert await asyncio.to_thread(bench.run, arguments) == 0
        assert "no acceptance by depth" not in capsys.readouterr().err
        watch = make_parser(["top"]).parse_args(
            ["top", "--once", "--interval=0.05", world.rest, *words, "--connect-tls-name=gateway.example"]
        )
        assert await asyncio.to_thread(top.run, watch) == 0
        monkeypatch.setattr(top, "DEFAULT_PAGES", (world.rest.removeprefix("https://"), "127.0.0.1:1", "127.0.0.1:1"))
        watch.pages = []
        assert await asyncio.to_thread(top.run, watch) == 0, "the gateway's default page is read over TLS, too"
        watch.pages = [world.rest.replace("https:", "http:")]
        assert await asyncio.to_thread(top.run, watch) == 1
        assert "begin it with https:// where the door has TLS" in capsys.readouterr().out
        _, health = await ask_health(
            world.rest.removeprefix("https://"), "", 20, "", replaced(client, name="gateway.example")
        )
        assert "probably a REST or metrics port" in health


async def test_a_tool_without_a_certificate_that_the_door_wants_is_told_so(
    verify: ScriptedVerify, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = Authority(tmp_path / "ours")
    client = ours.files("client")
    trust = f"--connect-tls-ca={client.ca}"
    async with open_world(verify, tmp_path, trust=client, **door(ours.files("server"))) as world:
        load = make_parser(["bench"]).parse_args(["bench", "--backend=openai", f"--base-url={world.rest}", trust])
        with pytest.raises(OutriderError, match=r"request failed: http_\w+: \w+.*; --connect-tls-cert shows"):
            await asyncio.to_thread(bench.run, load)
        watch = make_parser(["top"]).parse_args(["top", "--once", "--interval=0.05", world.rest, trust])
        assert await asyncio.to_thread(top.run, watch) == 1
        output = capsys.readouterr().out
        assert (
            "--connect-tls-cert shows the door a certificate, where it wants one" in output
            and "begin it with https" not in output
        )


async def test_replaced_files_serve_the_next_connection_of_the_rest_door(
    verify: ScriptedVerify, tmp_path: Path
) -> None:
    ours, new = Authority(tmp_path / "ours"), Authority(tmp_path / "new")
    server, client = ours.files("server"), ours.files("client")
    async with open_world(verify, tmp_path, trust=client, **door(server)) as world:
        assert (await world.http.get("/health")).status_code == 200
        other = new.files("server")
        for word in ("key", "cert", "ca"):
            replace(asdict(server)[word], Path(asdict(other)[word]).read_bytes())
        assert await ask(world.rest, new.files("client")) == 200
        with pytest.raises(httpx.TransportError):
            await ask(world.rest, client)
        with pytest.raises(httpx.TransportError):
            await ask(world.rest, new.files("half", trust=ours))
        # The connection of before stays.
        assert (await world.http.get("/health")).status_code == 200


async def test_verify_is_called_over_tls_with_a_token(verify: ScriptedVerify, tmp_path: Path) -> None:
    verify.set_answer("ok")
    ours = Authority(tmp_path / "ours")
    server, client = ours.files("server"), ours.files("client")
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    verify.door = {"tls": server, "auth_tokens": fixed_tokens("s3cret")}
    options: dict[str, Any] = {f"verify_tls_{word}": asdict(client)[word] for word in ("cert", "key", "ca")}
    options |= {"verify_tls_name": "localhost", "verify_auth_token_file": str(token)}
    async with open_world(verify, tmp_path, **options) as world:
        assert (await world.http.post(TEXT, json={"prompt": "x"})).json()["choices"][0]["text"] == "ok"


async def test_files_of_no_use_end_the_start(tmp_path: Path) -> None:
    for options, words in (
        (GatewayOptions(tls_cert="none", tls_key="none"), "--tls-cert: none cannot be read"),
        (GatewayOptions(verify_tls_ca="none"), "--verify-tls-ca: none cannot be read"),
        (GatewayOptions(verify_auth_token_file="none"), "--verify-auth-token-file: none cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            await serve(options, asyncio.Event())


async def test_a_call_without_a_certificate_is_unavailable_not_an_answer(
    verify: ScriptedVerify, tmp_path: Path
) -> None:
    ours = Authority(tmp_path / "ours")
    trust = TlsFiles(ca=ours.files("client").ca)
    async with open_world(verify, tmp_path, trust=trust, **door(ours.files("server"))) as world:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.stub.ListModels(gateway_pb2.GatewayServiceListModelsRequest())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_who_ends_its_side_of_tls_has_ended_the_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python's TLS cannot go on sending behind the other side's end; what runs for that client ends, too."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await run_while_connected(receive, asyncio.Event().wait())
        ended.set()

    files = Authority(tmp_path).files("server")
    source = TlsSource(replaced(files, ca=""))
    server = HttpServer(app, "127.0.0.1:0", option="--rest-address", options=GatewayOptions(), tls=source)
    await server.start()
    try:
        host, _, port = server.address.rpartition(":")
        plain = await asyncio.to_thread(socket.create_connection, (host, int(port)))
        trust = http_trust(files)
        with await asyncio.to_thread(trust.wrap_socket, plain, server_hostname="localhost") as half:
            half.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await begun.wait()
            (await asyncio.to_thread(half.unwrap)).close()
            await ended.wait()
    finally:
        await server.stop()
    assert not [record for record in caplog.records if record.name == "asyncio"]

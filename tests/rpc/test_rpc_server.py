"""Addresses are bound as asked or refused with a reason, and a stop lets running calls finish."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from outrider import metrics
from outrider.errors import ConfigError
from outrider.metrics import serve_metrics
from outrider.rpc.channel import open_channel
from outrider.rpc.credentials import fixed_tokens
from outrider.rpc.server import GrpcServer
from outrider.rpc.transport import KEEPALIVE_SECONDS, channel_options, check_address, server_options, split_host_port
from outrider.v1 import verify_pb2

Load = verify_pb2.VerifyServiceGetLoadRequest


def make_server(address: str) -> GrpcServer:
    return GrpcServer(address=address, service_names=["outrider.v1.VerifyService"])


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_port_0_takes_a_free_one_and_tells_which(start: Any, host: str) -> None:
    running = await start(address=f"{host}:0")
    assert split_host_port(running.address, "x")[1] > 0
    assert (await running.stub.GetLoad(Load())).num_running == 7


async def test_a_taken_port_is_named(start: Any) -> None:
    running = await start(address="127.0.0.1:0")
    port = running.address.rpartition(":")[2]
    with pytest.raises(
        ConfigError, match=rf"--address: cannot bind port {port} of 127\.0\.0\.1: Address already in use"
    ):
        await make_server(running.address).start()


async def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"--address: cannot bind port 5 of 192\.0\.2\.1: Cannot .* address; use an address of this"
    ):
        await make_server("192.0.2.1:5").start()


async def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    script = f"import os, socket, signal; s = socket.socket(socket.AF_UNIX); s.bind({str(path)!r}); s.listen(); \
os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode < 0
    assert path.is_socket()
    server = make_server(f"unix:{path}")
    assert await server.start() == f"unix:{path}"
    async with open_channel(f"unix:{path}") as channel:
        await channel.channel_ready()
    await server.stop(0)
    assert not path.exists()


@pytest.mark.parametrize("name", ["h#sh", "qu?y", "per%cent", "a%20b", "new\nline", "\u00fc b"])
async def test_a_sockets_path_may_hold_what_means_something_in_a_uri(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    server = make_server(f"unix:{path}")
    assert await server.start() == f"unix:{path}"
    assert path.is_socket()
    async with open_channel(f"unix:{path}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 20)
    await server.stop(0)
    assert not path.exists()


async def test_the_socket_of_a_running_process_is_left_alone(start: Any) -> None:
    running = await start()
    with pytest.raises(ConfigError, match="in use by a running process"):
        await make_server(running.address).start()
    assert (await running.stub.GetLoad(Load())).num_running == 7


async def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        await make_server(f"unix:{tmp_path}/s").start()
    assert (tmp_path / "s").read_text() == "precious"


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none does not exist"):
        await make_server(f"unix:{tmp_path}/none/s").start()


def test_a_socket_path_over_the_kernels_limit_is_refused_at_once() -> None:
    check_address(f"unix:/{'x' * 106}", "--address")
    with pytest.raises(ConfigError, match=r"--address: the path .* has 108 bytes, the kernel allows 107"):
        check_address(f"unix:/{'é' * 53}x", "--address")
    with socket.socket(socket.AF_UNIX) as probe, pytest.raises(OSError, match="too long"):
        probe.bind("/" + "x" * 107)


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "host:-1", "host:65536", "host:x", "::1:5", "unix:", "h:²"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--verify: "):
        check_address(text, "--verify")


async def test_a_stop_lets_a_running_stream_finish_and_takes_no_new_call(start: Any) -> None:
    running = await start()
    call = running.stub.Generate(verify_pb2.VerifyServiceGenerateRequest())
    assert (await call.read()).token_ids == [1]
    stopping = asyncio.create_task(running.server.stop(grace=3600))
    async with open_channel(running.address) as late:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await late.unary_unary("/outrider.v1.VerifyService/GetLoad")(b"", wait_for_ready=False)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not stopping.done()
    running.verify.release.set()
    assert (await call.read()).token_ids == [2]
    assert await call.read() is grpc.aio.EOF
    await stopping


async def test_a_stop_ends_what_outlasts_its_grace(start: Any) -> None:
    running = await start()
    call = running.stub.Generate(verify_pb2.VerifyServiceGenerateRequest())
    assert (await call.read()).token_ids == [1]
    await running.server.stop(grace=0.05)
    await asyncio.wait_for(running.verify.freed.wait(), 10)
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()


async def test_a_server_that_could_not_start_can_still_be_stopped(tmp_path: Path) -> None:
    server = make_server(f"unix:{tmp_path}/none/s")
    with pytest.raises(ConfigError):
        await server.start()
    await server.stop(grace=0)
    await server.stop(grace=0)


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "é"])
async def test_a_token_that_no_header_can_carry_is_refused_unseen(token: str) -> None:
    with pytest.raises(ConfigError, match="token") as caught:
        GrpcServer(address="127.0.0.1:0", service_names=[], auth_tokens=fixed_tokens(token))
    assert token not in caught.value.message
    with pytest.raises(ConfigError):
        open_channel("127.0.0.1:1", auth_token=token)


async def test_reflection_is_there_only_when_asked_for(start: Any, tmp_path: Path) -> None:
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async def answer(running: Any) -> Any:
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        return await stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")])).read()

    listed = await answer(await start(reflection=True))
    assert "outrider.v1.VerifyService" in [service.name for service in listed.list_services_response.service]
    plain = await start(address=f"unix:{tmp_path}/plain")
    # A stream may be refused before the client has sent, and then the library tells that instead.
    call = plain.channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_metrics_address_whose_host_is_no_name_is_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"--metrics-address: 'a\.\.b:9102' is not an address: .*; use a host's name"),
        serve_metrics("a..b:9102", CollectorRegistry()),
    ):
        pass


def _metrics_client(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_nobody_holds_a_metrics_page_by_being_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_REQUEST_SECONDS", 0.05)
    with serve_metrics("127.0.0.1:0", CollectorRegistry()) as address, _metrics_client(address) as silent:
        silent.sendall(b"GET /metr")
        assert silent.recv(1) == b"", "it is closed"


def test_a_metrics_page_has_so_many_connections_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_CONNECTIONS", 1)
    with serve_metrics("127.0.0.1:0", CollectorRegistry()) as address:
        with _metrics_client(address) as first, _metrics_client(address) as second:
            assert second.recv(1) == b"", "the place is taken"
            first.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert first.makefile("rb").read().startswith(b"HTTP/1.0 200")
        with _metrics_client(address) as other:
            other.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert other.makefile("rb").read().startswith(b"HTTP/1.0 404")


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:0"])
async def test_nobody_listens_on_port_0(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--draft: .* has port 0, where nothing can listen"):
        open_channel(address, option="--draft")


def test_a_clients_pings_never_come_faster_than_the_server_allows() -> None:
    server, client = dict(server_options(1000)), dict(channel_options(1000))
    assert client["grpc.keepalive_time_ms"] == server["grpc.keepalive_time_ms"] == KEEPALIVE_SECONDS * 1000
    assert int(server["grpc.http2.min_ping_interval_without_data_ms"]) < int(client["grpc.keepalive_time_ms"])
    assert server["grpc.so_reuseport"] == 0


def test_a_peer_that_comes_back_at_another_address_is_looked_for_as_soon_as_one_at_the_same() -> None:
    client = dict(channel_options(1000))
    assert int(client["grpc.dns_min_time_between_resolutions_ms"]) < int(client["grpc.max_reconnect_backoff_ms"])


@pytest.mark.parametrize("module", ["server", "channel", "status", "lifecycle", "interceptors"])
def test_the_rpc_layer_imports_without_torch(module: str) -> None:
    script = f"import sys, outrider.rpc.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, env={**os.environ}).returncode == 0

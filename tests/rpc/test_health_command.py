"""`outrider health`: the exit code that container engines act on."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace as changed
from pathlib import Path

import pytest
from certificates import Authority

from outrider.cli.health import reachable
from outrider.config.gateway import GatewayOptions
from outrider.errors import ConfigError
from outrider.rpc.credentials import fixed_tokens
from outrider.rpc.server import GrpcServer
from outrider.rpc.tls import TlsSource

NAME = "outrider.v1.VerifyService"


async def health(*arguments: str, **env: str) -> tuple[int | None, str]:
    """Exit code and what was printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "outrider.cli", "health", "--timeout", "20", *arguments),
        env={**os.environ, **env},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    """Not serving yet, and closed to whoever has no token."""
    running = GrpcServer(address="127.0.0.1:0", service_names=[NAME], auth_tokens=fixed_tokens("secret"))
    await running.start()
    yield running
    await running.stop(0)


async def test_the_exit_code_is_0_only_while_it_serves(server: GrpcServer) -> None:
    code, text = await health(server.address)
    assert code == 1 and "NOT_SERVING" in text
    server.set_serving(True)
    code, text = await health(server.address)
    assert code == 0 and text == f"{server.address}: SERVING\n"
    assert (await health(server.address, "--service", NAME))[0] == 0
    code, text = await health(server.address, "--service", "nobody")
    assert code == 1 and "NOT_FOUND" in text


async def test_a_certificate_without_what_turns_tls_on_is_refused(server: GrpcServer) -> None:
    for prefix in ("--connect-tls", "--tls"):
        code, text = await health(server.address, f"{prefix}-cert", "c.pem", f"{prefix}-key", "k.pem")
        assert code == 2 and "--connect-tls-ca is not set" in text


async def test_in_a_container_it_asks_the_service_that_binds_every_interface(server: GrpcServer) -> None:
    server.set_serving(True)
    port = server.address.rpartition(":")[2]
    assert (await health(OUTRIDER_ADDRESS=f"0.0.0.0:{port}"))[0] == 0
    assert (
        reachable("[::]:9") == "[::1]:9" and reachable("unix:/s") == "unix:/s" and reachable("verify:9") == "verify:9"
    )


async def test_nobody_there_is_not_healthy_and_no_address_is_the_gateway_s(tmp_path: Path) -> None:
    code, text = await health(f"unix:{tmp_path}/none")
    assert code == 1 and "UNAVAILABLE" in text
    code, text = await health(OUTRIDER_ADDRESS="")
    assert code in (0, 1) and text.startswith(f"{GatewayOptions.address}: ")
    with pytest.raises(ConfigError, match="URL"):
        reachable("http://here:1")


async def test_behind_mutual_tls_it_needs_the_files_that_callers_need(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    running = GrpcServer(address="127.0.0.1:0", service_names=[NAME], tls=TlsSource(ours.files("server")))
    address = await running.start()
    running.set_serving(True)
    files = changed(ours.files("client"), name="localhost")
    env = {f"OUTRIDER_HEALTH_TLS_{word.upper()}": getattr(files, word) for word in ("ca", "cert", "key", "name")}
    assert (await health(address, **env))[0] == 0
    given = [f"--connect-tls-{word}={getattr(files, word)}" for word in ("ca", "cert", "key", "name")]
    assert (await health(address, *given))[0] == 0
    assert (await health(address, "--tls-ca", files.ca))[0] == 1
    code, text = await health(address)
    assert code == 1 and "; perhaps it requires TLS or a client certificate" in text
    assert "; perhaps it requires TLS or a client cert" in (await health(address, "--tls-ca", files.ca))[1]
    await running.stop(0)

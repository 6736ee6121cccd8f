"""A whole gateway before a scripted verify service."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
from scripted_verify import ScriptedVerify, VerifyHost

from gateway import main
from outrider.config.gateway import GatewayOptions
from outrider.config.service import TlsFiles
from outrider.rpc.channel import open_channel
from outrider.rpc.tls import TlsSource
from outrider.v1.gateway_pb2_grpc import GatewayServiceStub

main._READINESS_SECONDS = 0.005
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For clients of plain HTTP: httpx reads all certificates of the machine for each client that is given none."""


@dataclass
class World:
    """A running gateway and what stands around it."""

    verify: ScriptedVerify
    host: VerifyHost
    rest: str
    address: str
    http: httpx.AsyncClient
    stub: Any
    stop: asyncio.Event
    task: asyncio.Task[None]
    stack: AsyncExitStack

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        http_client = openai.DefaultAsyncHttpxClient(verify=NO_TLS)
        options = {"api_key": "none", "max_retries": 0, "http_client": http_client} | options
        client = openai.AsyncOpenAI(base_url=f"{self.rest}/v1", **options)
        self.stack.push_async_callback(client.close)
        return client


@asynccontextmanager
async def open_world(
    verify: ScriptedVerify, folder: Path, *, trust: TlsFiles | None = None, **changes: Any
) -> AsyncIterator[World]:
    """Runs the real `serve` on free ports until the block ends. `trust`: what clients use of TLS."""
    host = VerifyHost(verify, folder / "verify.sock")
    ready_file = folder / "ready.json"
    options = GatewayOptions(
        address="127.0.0.1:0",
        rest_address="127.0.0.1:0",
        verify=(host.address,),
        ready_file=str(ready_file),
        drain_seconds=5.0,
        probe_seconds=0.1,
    )
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        await host.start()
        stack.push_async_callback(host.stop)
        task = asyncio.create_task(main.serve(replace(options, **changes), stop))
        stack.push_async_callback(_stop, task, stop)
        await until(lambda: ready_file.exists() or task.done())
        if task.done():
            await task
        bound = json.loads(ready_file.read_text())
        rest = f"{'http' if trust is None else 'https'}://{bound['rest_address']}"
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=rest, timeout=20, verify=http_trust(trust)))
        token = changes.get("api_key", "")
        tls = None if trust is None else TlsSource(trust)
        channel = await stack.enter_async_context(open_channel(bound["address"], auth_token=token, tls=tls))
        yield World(verify, host, rest, bound["address"], http, GatewayServiceStub(channel), stop, task, stack)


def http_trust(trust: TlsFiles | None) -> ssl.SSLContext:
    """What an HTTP client verifies servers with."""
    if trust is None:
        return NO_TLS
    context = ssl.create_default_context(cafile=trust.ca)
    if trust.cert:
        context.load_cert_chain(trust.cert, trust.key)
    return context


async def _stop(task: asyncio.Task[None], stop: asyncio.Event) -> None:
    stop.set()
    await task


async def until(condition: Callable[[], Any]) -> None:
    """Waits for a condition; the test's own time limit ends it."""
    while not condition():
        await asyncio.sleep(0.005)

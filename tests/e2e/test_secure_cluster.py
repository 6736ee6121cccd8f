"""Real processes with TLS, client certificates and tokens on every door and every way between them."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from client import COPY_PROMPT, chat
from google.protobuf.json_format import MessageToDict

from outrider.cli.cluster import Cluster
from outrider.config.draft import DraftOptions
from outrider.config.gateway import GatewayOptions
from outrider.config.service import TlsFiles
from outrider.config.verify import VerifyOptions
from outrider.errors import UnavailableError
from outrider.rpc.channel import open_channel
from outrider.rpc.status import error_from_rpc
from outrider.rpc.tls import TlsSource
from outrider.v1 import draft_pb2, gateway_pb2_grpc, verify_pb2
from outrider.v1.draft_pb2_grpc import DraftServiceStub
from outrider.v1.verify_pb2_grpc import VerifyServiceStub

sys.path.append(str(Path(__file__).parent.parent / "rpc"))
from certificates import Authority, replace

pytestmark = pytest.mark.slow

KEY = "client-key-1f0c"
VERIFY_TOKEN = "verify-token-77aa"
DRAFT_TOKEN = "draft-token-90bd"


class Secure:
    """A cluster in which nobody is trusted without certificate and token."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.authority = Authority(folder / "ca")
        self.files = {name: self.authority.files(name) for name in ("gateway", "verify", "draft", "client")}
        self.tokens = {name: folder / name for name in ("verify-token", "draft-token")}
        self.lines: list[str] = []
        for name, text in (("verify-token", VERIFY_TOKEN), ("draft-token", DRAFT_TOKEN)):
            replace(str(self.tokens[name]), text.encode())
        gateway: dict[str, Any] = self.door("gateway") | self.way("verify", "gateway")
        verify: dict[str, Any] = self.door("verify") | self.way("draft", "verify")
        files = {name: str(path) for name, path in self.tokens.items()}
        self.cluster = Cluster(
            gateway=GatewayOptions(api_key=KEY, verify_auth_token_file=files["verify-token"], **gateway),
            verify=VerifyOptions(
                model=str(model),
                max_total_tokens=4096,
                served_model_name="smollm2",
                auth_token_file=files["verify-token"],
                draft_auth_token_file=files["draft-token"],
                **verify,
            ),
            draft=DraftOptions(auth_token=DRAFT_TOKEN, **self.door("draft")),
            on_line=lambda name, line: self.lines.append(line),
        )

    def door(self, name: str) -> dict[str, str]:
        files = self.files[name]
        return {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}

    def way(self, peer: str, name: str) -> dict[str, str]:
        files = self.files[name]
        words = {"cert": files.cert, "key": files.key, "ca": files.ca, "name": "localhost"}
        return {f"{peer}_tls_{word}": value for word, value in words.items()}

    def channel(self, address: str, token: str, files: TlsFiles | None = None) -> grpc.aio.Channel:
        files = files or self.files["client"]
        tls = TlsSource(TlsFiles(files.cert, files.key, files.ca, "localhost"))
        return open_channel(address, auth_token=token, tls=tls)

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        files = self.files["client"]
        context = ssl.create_default_context(cafile=files.ca)
        context.load_cert_chain(files.cert, files.key)
        headers = {"authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(
            base_url=self.cluster.rest_url, verify=context, headers=headers, timeout=60
        ) as client:
            yield client


@pytest.fixture(scope="module")
def secure(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    made = Secure(tmp_path_factory.mktemp("secure"), model_path)
    with made.cluster:
        yield made


async def until(condition: Any) -> None:
    """The test's own time limit ends it."""
    while not await condition():
        await asyncio.sleep(0.02)


async def test_drafts_reach_verify_and_answers_the_client(secure: Secure) -> None:
    async with secure.channel(secure.cluster.gateway_address, KEY) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        messages = [message async for message in stub.Generate(chat(COPY_PROMPT, max_tokens=40))]
    assert messages[-1].usage.num_accepted_tokens > 0, "the speculation stream runs over TLS too"
    async with secure.http() as http:
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "smollm2"


@pytest.mark.parametrize("name", ["gateway", "verify", "draft"])
async def test_neither_token_nor_certificate_alone_opens_a_door(secure: Secure, name: str, tmp_path: Path) -> None:
    address = secure.cluster.address(name)
    method = {
        "gateway": "/outrider.v1.GatewayService/ListModels",
        "verify": "/outrider.v1.VerifyService/GetInfo",
        "draft": "/outrider.v1.DraftService/GetInfo",
    }[name]
    token = {"gateway": KEY, "verify": VERIFY_TOKEN, "draft": DRAFT_TOKEN}[name]
    forged = Authority(tmp_path / "forged").files("client", trust=secure.authority)
    for files, given, code in (
        (None, token, "OK"),
        (None, "wrong", "UNAUTHENTICATED"),
        (None, "", "UNAUTHENTICATED"),
        (forged, token, "UNAVAILABLE"),
    ):
        async with secure.channel(address, given, files) as channel:
            assert (await channel.unary_unary(method)(b"").code()).name == code
    async with open_channel(address, auth_token=token) as plain:
        assert (await plain.unary_unary(method)(b"").code()).name == "UNAVAILABLE"


async def test_a_cancelled_call_leaves_verify_and_draft_at_once(secure: Secure) -> None:
    async with (
        secure.channel(secure.cluster.gateway_address, KEY) as channel,
        secure.channel(secure.cluster.address("verify"), VERIFY_TOKEN) as verify_channel,
        secure.channel(secure.cluster.address("draft"), DRAFT_TOKEN) as draft_channel,
    ):
        verify, draft = VerifyServiceStub(verify_channel), DraftServiceStub(draft_channel)

        async def open_requests() -> tuple[int, int]:
            load = await verify.GetLoad(verify_pb2.VerifyServiceGetLoadRequest())
            info = await draft.GetInfo(draft_pb2.DraftServiceGetInfoRequest())
            return load.num_running + load.num_waiting, info.num_requests

        async def all_open() -> bool:
            return await open_requests() == (2, 2)

        async def none_open() -> bool:
            return await open_requests() == (0, 0)

        request = chat(COPY_PROMPT, max_tokens=1500)
        request.n = 2
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(request)
        await call.read()
        await until(all_open)
        call.cancel()
        await until(none_open)


async def test_on_sigterm_streams_finish_and_new_requests_are_sent_elsewhere(secure: Secure) -> None:
    async with secure.channel(secure.cluster.gateway_address, KEY) as channel, secure.http() as http:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        running = stub.Generate(chat(COPY_PROMPT, max_tokens=1500))
        messages = [await running.read()]
        os.kill(secure.cluster.gateway.pid, signal.SIGTERM)

        async def draining() -> bool:
            return (await http.get("/ready")).status_code == 503

        await until(draining)
        # What may have been on its way when clients were told is still served.
        served = 200
        while served == 200:
            refused = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
            served = refused.status_code
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) >= 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(chat(COPY_PROMPT)).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # The door of gRPC is shut at once, so that clients find another gateway.
        assert isinstance(error_from_rpc(caught.value), UnavailableError)
        while (message := await running.read()) is not grpc.aio.EOF:
            messages.append(message)
        assert sum(len(message.token_ids) for message in messages) == 1500
        assert messages[-1].HasField("usage"), MessageToDict(messages[-1])
    assert secure.cluster.gateway.wait(30) and secure.cluster.gateway.poll() == 0
    secure.cluster.restart("gateway")
    async with secure.http() as http:
        assert (await http.get("/ready")).status_code == 200


def test_no_log_line_holds_a_secret(secure: Secure) -> None:
    text = "\n".join(secure.lines)
    assert "with TLS" in text and "refused: missing or wrong bearer" in text
    for secret in (KEY, VERIFY_TOKEN, DRAFT_TOKEN, "PRIVATE KEY"):
        assert secret not in text

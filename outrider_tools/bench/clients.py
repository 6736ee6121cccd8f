"""The doors that a load generator may knock at: one request in, a record filled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import httpx2

from outrider.config.service import KEY_FIX
from outrider.errors import OutriderError
from outrider.rpc.channel import open_channel
from outrider.rpc.status import error_from_rpc
from outrider.rpc.tls import TlsSource
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from outrider_tools.bench.requests import Prompt, RequestRecord

Clock = Callable[[], float]


@dataclass(frozen=True)
class RequestOptions:
    """What all requests have in common. None leaves a field to the server."""

    temperature: float | None = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool = False
    speculation: bool = True
    model: str = ""
    chat: bool = True
    """Texts are a user's turn rather than raw prompts; token ids never are."""


class Client(Protocol):
    """One door of a gateway."""

    async def send(self, prompt: Prompt, record: RequestRecord, clock: Clock) -> None:
        """Ask, and note in `record` what comes and when. Never raises what a server or network does."""

    async def close(self) -> None:
        """Give up the connections."""


class GrpcClient:
    """The gRPC door."""

    def __init__(self, address: str, ask: RequestOptions, api_key: str = "", tls: TlsSource | None = None) -> None:
        self._channel = open_channel(address, auth_token=api_key, tls=tls, option="--connect")
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        self._ask = ask

    async def send(self, prompt: Prompt, record: RequestRecord, clock: Clock) -> None:
        """Ask, and note what comes."""
        call = self._stub.Generate(self._encode(prompt))
        try:
            async for response in call:
                record.take(clock(), len(response.token_ids))
                record.take_origins(response.origins)
                if response.HasField("usage"):
                    _take_usage(record, response.usage)
        except grpc.aio.AioRpcError as error:
            told = error_from_rpc(error, "the gateway")
            record.finish(clock(), told.code, told.message)
        else:
            record.finish(clock())
        finally:
            call.cancel()

    async def close(self) -> None:
        """Give up the channel."""
        await self._channel.close()

    def _encode(self, prompt: Prompt) -> gateway_pb2.GatewayServiceGenerateRequest:
        ask = self._ask
        request = gateway_pb2.GatewayServiceGenerateRequest(
            model=ask.model,
            sampling=common_pb2.SamplingParams(
                temperature=ask.temperature, top_p=ask.top_p, top_k=ask.top_k, seed=ask.seed
            ),
            max_tokens=prompt.max_tokens,
            ignore_eos=ask.ignore_eos,
            speculation=gateway_pb2.SPECULATION_UNSPECIFIED if ask.speculation else gateway_pb2.SPECULATION_OFF,
        )
        if prompt.token_ids:
            request.prompt_token_ids.ids.extend(prompt.token_ids)
        elif ask.chat:
            for role, content in _messages(prompt):
                request.chat.messages.add(role=role, content=content)
        else:
            request.prompt = prompt.text
        return request


class RestClient:
    """The REST door, by server-sent events."""

    def __init__(
        self, base_url: str, ask: RequestOptions, api_key: str = "", verify: Any = True, timeout: float = 600.0
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx2.AsyncClient(
            base_url=base_url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            verify=verify,
            timeout=timeout,
            trust_env=False,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )
        self._ask = ask

    async def send(self, prompt: Prompt, record: RequestRecord, clock: Clock) -> None:
        """Ask, and note what comes."""
        path, body = self._encode(prompt)
        complete = False
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    record.finish(clock(), *_error_of(await response.aread(), f"http_{response.status_code}"))
                    return
                async for line in response.aiter_lines():
                    complete = complete or line == "data: [DONE]"
                    if line.startswith("data: {") and _take_event(record, line[6:], clock):
                        return
        except httpx2.HTTPError as error:
            record.finish(clock(), f"http_{type(error).__name__}", str(error))
        except (ValueError, KeyError, TypeError) as error:
            record.finish(clock(), "malformed_answer", f"{type(error).__name__}: {error}")
        else:
            cut = ("incomplete", "the stream ended without usage or [DONE]")
            record.finish(clock(), *(() if complete and record.prompt_tokens else cut))

    async def close(self) -> None:
        """Give up the connections."""
        await self._http.aclose()

    def _encode(self, prompt: Prompt) -> tuple[str, dict[str, Any]]:
        ask = self._ask
        body: dict[str, Any] = {
            "model": ask.model or None,
            "max_tokens": prompt.max_tokens,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
            "top_k": ask.top_k,
            "seed": ask.seed,
            "ignore_eos": ask.ignore_eos or None,
            "speculation": None if ask.speculation else "off",
            "stream": True,
            # Only the usage so far tells how many tokens an event brought.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        body = {name: value for name, value in body.items() if value is not None}
        if ask.chat and not prompt.token_ids:
            messages = [{"role": role, "content": content} for role, content in _messages(prompt)]
            return "/v1/chat/completions", body | {"messages": messages}
        return "/v1/completions", body | {"prompt": list(prompt.token_ids) or prompt.text}


def _messages(prompt: Prompt) -> list[tuple[str, str]]:
    return [("system", prompt.system)] * bool(prompt.system) + [("user", prompt.text)]


def _take_usage(record: RequestRecord, usage: common_pb2.Usage) -> None:
    record.prompt_tokens = usage.prompt_tokens
    record.cached_tokens = usage.cached_prompt_tokens
    record.rounds = usage.num_rounds
    record.draft_tokens = usage.num_draft_tokens
    record.accepted_tokens = usage.num_accepted_tokens


def _take_event(record: RequestRecord, text: str, clock: Clock) -> bool:
    """Note an event; whether it was an error, which ends the stream."""
    fields = json.loads(text)
    if "error" in fields:
        record.finish(clock(), *_error_of(text.encode(), "error"))
        return True
    usage = fields.get("usage")
    if usage is None:
        return False
    record.take(clock(), usage["completion_tokens"] - record.tokens)
    record.prompt_tokens = usage["prompt_tokens"]
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    speculation = usage.get("outrider")
    if speculation:
        record.rounds = speculation["rounds"]
        record.draft_tokens = speculation["draft_tokens"]
        record.accepted_tokens = speculation["accepted_tokens"]
    return False


def _error_of(body: bytes, otherwise: str) -> tuple[str, str]:
    """Code and message of an error body."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or otherwise), str(error.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return otherwise, body[:200].decode("utf-8", "replace")


async def first_answer(client: Client, prompt: Prompt, seconds: float, option: str) -> None:
    """Wait for one answer, so that a wrong address, which `option` gave, is told at once. Raises OutriderError."""
    record = RequestRecord(due=0.0)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            await client.send(prompt, record, loop.time)
    except TimeoutError:
        raise OutriderError(f"the first answer was not complete after {seconds:g} s", code="client_timeout") from None
    if record.error:
        fix = ""
        if record.error in ("peer_refused_credentials", "invalid_api_key"):
            fix = f"; {KEY_FIX}"
        elif record.error in ("service_unavailable", "http_ConnectError", "http_RemoteProtocolError"):
            fix = f"; {option} names the gateway (`outrider up` prints its doors)"
        raise OutriderError(
            f"the first request failed: {record.error}: {record.detail.rstrip('.')}{fix}", code=record.error
        )

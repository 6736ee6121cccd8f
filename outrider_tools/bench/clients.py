"""Clients of a load generator, one for each door, and the driver that sends a load through them.

A client sends one request and fills one record. A load is a closed loop (a fixed number of requests at once) or an
open one (a fixed number a second), and ends after a number of requests or after a time.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc
import httpx2

from outrider.cli.client import Message, Sampling, encode, open_gateway
from outrider.config.service import KEY_FIX, TlsFiles
from outrider.errors import OutriderError
from outrider.metrics import BEGINS_WITH_HTTPS, SHOWS_CERTIFICATE, TRUSTS_CERTIFICATE
from outrider.rpc.status import error_from_rpc
from outrider.v1 import gateway_pb2, gateway_pb2_grpc
from outrider_tools.bench.requests import LoadPoint, LoadRun, Prompt, RequestRecord, arrivals

Clock = Callable[[], float]


@dataclass(frozen=True)
class RequestOptions(Sampling):
    """What all requests have in common. `max_tokens` comes from their prompts."""

    temperature: float | None = 0.0
    model: str = ""
    chat: bool = True
    """Send texts as a user's turn rather than as raw prompts. Token ids are always raw prompts."""


class GrpcClient:
    """A client of the gRPC door."""

    def __init__(self, address: str, ask: RequestOptions, api_key: str = "", tls: TlsFiles | None = None) -> None:
        self._channel = open_gateway(address, api_key, tls)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        self._ask = ask

    async def send(self, prompt: Prompt, record: RequestRecord, clock: Clock) -> None:
        """Send `prompt`, and note in `record` what comes and when. Errors of server and network go to `record`, too."""
        call = self._stub.Generate(self._encode(prompt))
        try:
            async for response in call:
                record.take(clock(), len(response.token_ids))
                record.take_origins(response.origins)
                if response.HasField("usage"):
                    usage = response.usage
                    record.prompt_tokens = usage.prompt_tokens
                    record.cached_tokens = usage.cached_prompt_tokens
                    record.rounds = usage.num_rounds
                    record.draft_tokens = usage.num_draft_tokens
                    record.accepted_tokens = usage.num_accepted_tokens
        except grpc.aio.AioRpcError as error:
            failure = error_from_rpc(error, "the gateway")
            record.finish(clock(), failure.code, failure.message)
        else:
            record.finish(clock())
        finally:
            call.cancel()

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    def _encode(self, prompt: Prompt) -> gateway_pb2.GatewayServiceGenerateRequest:
        ask = replace(self._ask, max_tokens=prompt.max_tokens)
        request = encode(ask, _messages(prompt) if ask.chat and not prompt.token_ids else [])
        request.model = ask.model
        if prompt.token_ids:
            request.prompt_token_ids.ids.extend(prompt.token_ids)
        elif not ask.chat:
            request.prompt = prompt.text
        return request


class RestClient:
    """A client of the REST door, which reads server-sent events."""

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
        """See GrpcClient."""
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
            record.finish(clock(), f"http_{type(error).__name__}", str(error) or "the connection was lost")
        except (ValueError, KeyError, TypeError) as error:
            record.finish(clock(), "malformed_answer", f"{type(error).__name__}: {error}")
        else:
            cut = ("incomplete", "the stream ended without usage or [DONE]")
            record.finish(clock(), *(() if complete and record.prompt_tokens else cut))

    async def close(self) -> None:
        """Close the connections."""
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
            # Only the running usage shows how many tokens an event brought.
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        body = {name: value for name, value in body.items() if value is not None}
        if ask.chat and not prompt.token_ids:
            messages = [{"role": role, "content": content} for role, content in _messages(prompt)]
            return "/v1/chat/completions", body | {"messages": messages}
        return "/v1/completions", body | {"prompt": list(prompt.token_ids) or prompt.text}


Client = GrpcClient | RestClient


def _messages(prompt: Prompt) -> list[Message]:
    return [("system", prompt.system)] * bool(prompt.system) + [("user", prompt.text)]


def _take_event(record: RequestRecord, text: str, clock: Clock) -> bool:
    """Note an event in `record`. Return whether it was an error, which ends the stream."""
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
    """Return code and message of an error body; `otherwise` stands for a code that is missing."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code") or otherwise), str(error.get("message", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return otherwise, body[:200].decode("utf-8", "replace")


async def first_answer(client: Client, prompt: Prompt, seconds: float, option: str, url: str = "") -> None:
    """Wait for one answer, so that a wrong address is found at once; `option` gave it, over REST as `url`.

    Raises OutriderError.
    """
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
        elif record.error in ("service_unavailable", "http_ConnectError", "http_RemoteProtocolError", "http_ReadError"):
            fix = f"; {option} names the gateway (`outrider up` prints its doors)"
        # A door that wants TLS or a client certificate silently closes connections without, before or after a request.
        if record.error in ("http_RemoteProtocolError", "http_ReadError"):
            fix += f"; {SHOWS_CERTIFICATE if url.startswith('https:') else BEGINS_WITH_HTTPS}"
        elif "CERTIFICATE_VERIFY_FAILED" in record.detail:
            fix += f"; {TRUSTS_CERTIFICATE}"
        raise OutriderError(
            f"the first request failed: {record.error}: {record.detail.rstrip('.')}{fix}", code=record.error
        )


async def run_point(
    client: Client,
    prompts: Sequence[Prompt],
    point: LoadPoint,
    on_progress: Callable[[LoadRun], None] = lambda run: None,
) -> LoadRun:
    """Send `prompts`, again and again, until the point's count or time is reached; then wait for running requests.

    `on_progress` is called once a second with the run so far.
    """
    return await _LoadDriver(client, prompts, point).run(on_progress)


class _LoadDriver:
    def __init__(self, client: Client, prompts: Sequence[Prompt], point: LoadPoint) -> None:
        self._client = client
        self._prompts = prompts
        self._point = point
        self._run = LoadRun()
        self._next = 0
        self._begin = 0.0
        self._is_over = False
        """Whether time is up, so that no more requests begin."""

    async def run(self, on_progress: Callable[[LoadRun], None]) -> LoadRun:
        self._begin = time.perf_counter()
        before = time.process_time()
        reporter = asyncio.create_task(self._report_progress(on_progress))
        try:
            await (self._closed() if math.isinf(self._point.rate) else self._open())
        finally:
            reporter.cancel()
            await asyncio.gather(reporter, return_exceptions=True)
        run = self._run
        run.cpu_seconds = time.process_time() - before
        ended = max((record.end for record in run.records), default=self._clock())
        seconds = self._point.seconds
        # A load with a time limit ends with its time, even if nothing was due in the last part of it.
        run.window = seconds if self._is_over or 0 < seconds < ended else ended
        return run

    def _clock(self) -> float:
        return time.perf_counter() - self._begin

    async def _report_progress(self, on_progress: Callable[[LoadRun], None]) -> None:
        while True:
            await asyncio.sleep(1.0)
            self._run.window = self._clock()
            on_progress(self._run)

    def _take(self, now: float) -> Prompt | None:
        """Return the next prompt, or None if no more requests shall begin."""
        point = self._point
        if point.num_prompts and self._next >= point.num_prompts:
            return None
        if point.seconds and now >= point.seconds:
            self._is_over = True
            return None
        self._next += 1
        return self._prompts[(self._next - 1) % len(self._prompts)]

    async def _closed(self) -> None:
        """Run one worker for each request allowed at once; a worker sends its next request when the last one ended."""
        most = self._point.concurrency or self._point.num_prompts
        await asyncio.gather(*(self._worker() for _ in range(most)))

    async def _worker(self) -> None:
        while (prompt := self._take(self._clock())) is not None:
            record = await self._send(prompt, self._clock())
            if record.error:
                await asyncio.sleep(0.05)  # do not hammer a door that refuses at once

    async def _open(self) -> None:
        """Send requests when they are due, no matter how long earlier ones take."""
        point = self._point
        places = asyncio.Semaphore(point.concurrency or 1 << 30)
        async with asyncio.TaskGroup() as tasks:
            for due in arrivals(point.rate, point.burstiness, point.seed):
                prompt = self._take(due)
                if prompt is None:
                    break
                await asyncio.sleep(max(0.0, due - self._clock()))
                tasks.create_task(self._send_when_free(places, prompt, due))

    async def _send_when_free(self, places: asyncio.Semaphore, prompt: Prompt, due: float) -> None:
        async with places:
            await self._send(prompt, due)

    async def _send(self, prompt: Prompt, due: float) -> RequestRecord:
        record = RequestRecord(due)
        self._run.records.append(record)
        try:
            async with asyncio.timeout(self._point.timeout):
                await self._client.send(prompt, record, self._clock)
        except TimeoutError:
            record.finish(self._clock(), "client_timeout", f"not complete after {self._point.timeout:g} s")
        return record

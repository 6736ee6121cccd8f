"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway.admission import ServedModel, admit
from gateway.events import Delta
from gateway.request import Job
from gateway.rest.body import read_json
from gateway.rest.errors import error_body
from gateway.rest.prompt import Echo
from gateway.rest.requests import ChatCompletionRequest, CompletionRequest
from gateway.rest.shapes import ChatShape, CompletionShape, Shape
from gateway.rest.stream import (
    DONE,
    KEEP_ALIVE,
    ClientStalled,
    EventStream,
    event,
    run_while_connected,
    send_json,
    with_pauses,
)
from gateway.service import Gateway
from gateway.validation import validate
from outrider.config.gateway import GatewayOptions
from outrider.errors import InternalError, InvalidRequestError, OutriderError, OverloadedError
from outrider.logs import get_logger
from outrider.rpc.call import limit_time, name_user

_logger = get_logger(__name__)

DOOR = "rest"

_MAX_DESCRIBED = 1 << 21
"""Log-probabilities of prompts in one answer, which is built in memory: about 0.7 KB each."""
_INLINE_ECHO = 4096
"""Prompt tokens that the event loop spells out itself, in some milliseconds."""


class GenerationRoute(ABC):
    """An ASGI application for one route."""

    def __init__(self, gateway: Gateway, options: GatewayOptions) -> None:
        self._gateway = gateway
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. Raises OutriderError where nothing was sent yet."""
        limit_time(None, self._options.max_request_seconds)
        with self._gateway.enter(DOOR) as ticket:
            body = await read_json(
                Request(scope, receive), max_bytes=self._options.max_body_bytes, seconds=self._options.body_seconds
            )
            user = body.get("user")
            name_user(user if isinstance(user, str) else "")
            model = self._gateway.model
            jobs, shape, stream = await self._prepare(body, model)
            _check_described(shape)
            ticket.reserve(sum(job.n for job in jobs))
            deltas = self._gateway.engine.generate(jobs, model)
            answer = self._stream if stream else self._whole
            await run_while_connected(receive, answer(deltas, shape, send))

    @abstractmethod
    async def _prepare(self, body: Mapping[str, Any], model: ServedModel) -> tuple[Sequence[Job], Shape, bool]:
        """Jobs, the shape of the response, and whether it is streamed. Raises OutriderError."""

    async def _whole(self, deltas: AsyncGenerator[Delta, None], shape: Shape, send: Send) -> None:
        async with aclosing(deltas):
            async for delta in deltas:
                shape.collect(delta)
        await send_json(send, await _rendered(shape, lambda: shape.whole().json_bytes()))

    async def _stream(self, deltas: AsyncGenerator[Delta, None], shape: Shape, send: Send) -> None:
        stream = EventStream(send, stall_seconds=self._options.stall_seconds)
        try:
            async with aclosing(with_pauses(deltas, self._options.keep_alive_seconds)) as items:
                async for delta in items:
                    if delta is None:
                        await stream.write(KEEP_ALIVE)
                    else:
                        await stream.write(await _rendered(shape, partial(_events, shape, delta)))
        except ClientStalled:
            self._gateway.count_error(DOOR, OverloadedError("the stream was left unread", code="slow_reader"))
            raise
        except Exception as error:
            if not stream.begun:
                raise
            await stream.end(event(error_body(self._told(error)).json_bytes()))
        else:
            await stream.end(DONE)

    def _told(self, error: Exception) -> OutriderError:
        """What the reader of a broken stream is told; counts it."""
        if not isinstance(error, OutriderError):
            error_id = secrets.token_hex(4)
            _logger.error("a stream failed, error id %s", error_id, exc_info=error)
            error = InternalError(f"internal error, id {error_id}")
        else:
            _logger.warning("a stream failed: %s: %s", error.code, error.message)
        self._gateway.count_error(DOOR, error)
        return error


def _check_described(shape: Shape) -> None:
    if shape.num_described > _MAX_DESCRIBED:
        raise InvalidRequestError(
            "",
            f"log-probabilities of prompts would be {shape.num_described}, over the limit of {_MAX_DESCRIBED}",
            "send fewer prompts at once, or ask for fewer likely tokens",
        )


def _events(shape: Shape, delta: Delta) -> bytes:
    return b"".join(event(body.json_bytes()) for body in shape.chunks(delta))


async def _rendered(shape: Shape, render: Callable[[], bytes]) -> bytes:
    return await asyncio.to_thread(render) if shape.is_large else render()


class ChatRoute(GenerationRoute):
    """POST /v1/chat/completions."""

    async def _prepare(self, body: Mapping[str, Any], model: ServedModel) -> tuple[Sequence[Job], Shape, bool]:
        parsed = validate(ChatCompletionRequest, body)
        job = await admit(parsed.request(), model, _request_id(ChatShape), parsed.field_names)
        return [job], ChatShape(model, [job], parsed.stream_options), bool(parsed.stream)


class CompletionRoute(GenerationRoute):
    """POST /v1/completions."""

    async def _prepare(self, body: Mapping[str, Any], model: ServedModel) -> tuple[Sequence[Job], Shape, bool]:
        parsed = validate(CompletionRequest, body)
        requests = parsed.requests()
        limit = self._options.max_prompts
        if len(requests) > limit:
            raise InvalidRequestError(
                "prompt", f"{len(requests)} prompts are over the limit of {limit}", f"send at most {limit}"
            )
        request_id = _request_id(CompletionShape)
        jobs = []
        for index, (request, names) in enumerate(requests):
            jobs.append(await admit(request, model, request_id if index == 0 else f"{request_id}-{index}", names))
        echoes: Sequence[Echo] = ()
        if parsed.echo and sum(len(job.prompt_token_ids) for job in jobs) > _INLINE_ECHO:
            echoes = await asyncio.to_thread(_echoes, parsed, jobs, model)
        elif parsed.echo:
            echoes = _echoes(parsed, jobs, model)
        shape = CompletionShape(model, jobs, parsed.stream_options, echoes, parsed.prompt_logprobs)
        return jobs, shape, bool(parsed.stream)


def _echoes(parsed: CompletionRequest, jobs: Sequence[Job], model: ServedModel) -> list[Echo]:
    prompts = parsed.prompt if isinstance(parsed.prompt, list) else [parsed.prompt]
    texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
    if len(texts) != len(jobs):  # one list of token ids
        texts = [None]
    return [
        Echo.of(job.prompt_token_ids, text, parsed.logprobs, model.tokenizer)
        for job, text in zip(jobs, texts, strict=True)
    ]


def _request_id(shape: type[Shape]) -> str:
    return f"{shape.prefix}-{uuid.uuid4().hex}"

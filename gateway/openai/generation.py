"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway.core.admission import ServedModel, admit
from gateway.core.allowance import Account
from gateway.core.events import Delta
from gateway.core.request import GenerateRequest, Job
from gateway.core.service import Gateway
from gateway.core.validation import validate
from gateway.http.body import BodyReader
from gateway.http.errors import error_body
from gateway.http.stream import (
    DONE,
    KEEP_ALIVE,
    ClientStalled,
    EventStream,
    event,
    run_while_connected,
    send_json,
    with_pauses,
)
from gateway.openai.prompt import Echo
from gateway.openai.requests import ChatCompletionRequest, CompletionRequest
from gateway.openai.shapes import ChatShape, CompletionShape, Shape
from outrider.config.gateway import GatewayOptions
from outrider.errors import InternalError, InvalidRequestError, OutriderError, OverloadedError
from outrider.logs import get_logger
from outrider.rpc.call import limit_time, name_user

_logger = get_logger(__name__)

DOOR = "rest"

Named = Sequence[tuple[GenerateRequest, Mapping[str, str]]]
"""Requests, each with what the body calls its fields."""

Parsed = TypeVar("Parsed")

_INLINE_ECHO = 4096
"""Prompt tokens that the event loop spells out itself, in some milliseconds."""


class GenerationRoute(ABC, Generic[Parsed]):
    """An ASGI application for one route."""

    def __init__(self, gateway: Gateway, options: GatewayOptions, bodies: BodyReader) -> None:
        self._gateway = gateway
        self._options = options
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request. Raises OutriderError where nothing was sent yet."""
        limit_time(None, self._options.max_request_seconds)
        with self._gateway.counted(DOOR):
            # A place is taken once the body is there: a slow sender holds none.
            self._gateway.gate.check()
            user, parsed = await self._bodies.read(Request(scope, receive), self._understand)
            name_user(user)
            with self._gateway.gate.enter() as ticket:
                model = self._gateway.model
                jobs, shape, stream = await self._prepare(parsed, model)
                ticket.reserve(sum(job.n for job in jobs))
                with self._account(shape) as account:
                    deltas = self._gateway.engine.generate(jobs, model)
                    answer = self._stream if stream else self._whole
                    await run_while_connected(receive, answer(deltas, shape, account, send))

    def _understand(self, body: dict[str, Any]) -> tuple[str, Parsed]:
        """The user that a body names, and the body. Raises OutriderError."""
        user = body.get("user")
        return user if isinstance(user, str) else "", self._parse(body)

    @abstractmethod
    def _parse(self, body: Mapping[str, Any]) -> Parsed:
        """The body, validated. Called in a thread if it is long. Raises InvalidRequestError."""

    @abstractmethod
    async def _prepare(self, parsed: Parsed, model: ServedModel) -> tuple[Sequence[Job], Shape, bool]:
        """Jobs, the shape of the response, and whether it is streamed. Raises OutriderError."""

    @contextmanager
    def _account(self, shape: Shape) -> Iterator[Account | None]:
        """Where is written down what the answer keeps in memory; None where that is text alone."""
        if not shape.tells_values:
            yield None
            return
        with self._gateway.allowance.open() as account:
            account.hold(shape.num_kept, shape.kept_field)
            yield account

    async def _whole(
        self, deltas: AsyncGenerator[Delta, None], shape: Shape, account: Account | None, send: Send
    ) -> None:
        async with aclosing(deltas):
            async for delta in deltas:
                shape.collect(delta)
                if account is not None:
                    account.hold(shape.num_kept, shape.kept_field)
        await send_json(send, await self._rendered(shape, None, lambda: shape.whole().json_bytes()))

    async def _stream(
        self, deltas: AsyncGenerator[Delta, None], shape: Shape, account: Account | None, send: Send
    ) -> None:
        stream = EventStream(send, stall_seconds=self._options.stall_seconds)
        try:
            async with aclosing(with_pauses(deltas, self._options.keep_alive_seconds)) as items:
                async for delta in items:
                    if delta is None:
                        await stream.write(KEEP_ALIVE)
                    else:
                        await stream.write(await self._rendered(shape, delta, partial(_events, shape, delta)))
                        if account is not None:
                            account.hold(shape.num_kept, shape.kept_field)
        except ClientStalled:
            self._gateway.count_error(DOOR, OverloadedError("the stream was left unread", code="slow_reader"))
            raise
        except Exception as error:
            if not stream.begun:
                raise
            await stream.end(event(error_body(self._told(error)).json_bytes()))
        else:
            await stream.end(DONE)

    async def _rendered(self, shape: Shape, delta: Delta | None, render: Callable[[], bytes]) -> bytes:
        if not shape.is_large(delta):
            return render()
        if not shape.is_very_large:
            return await asyncio.to_thread(render)
        async with self._gateway.allowance.one_large:
            return await asyncio.to_thread(render)

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


def _events(shape: Shape, delta: Delta) -> bytes:
    return b"".join(event(body.json_bytes()) for body in shape.chunks(delta))


class ChatRoute(GenerationRoute[tuple[ChatCompletionRequest, GenerateRequest]]):
    """POST /v1/chat/completions."""

    def _parse(self, body: Mapping[str, Any]) -> tuple[ChatCompletionRequest, GenerateRequest]:
        parsed = validate(ChatCompletionRequest, body)
        return parsed, parsed.request()

    async def _prepare(
        self, both: tuple[ChatCompletionRequest, GenerateRequest], model: ServedModel
    ) -> tuple[Sequence[Job], Shape, bool]:
        parsed, request = both
        job = await admit(request, model, _request_id(ChatShape), parsed.field_names)
        return [job], ChatShape(model, [job], parsed.stream_options), bool(parsed.stream)


class CompletionRoute(GenerationRoute[tuple[CompletionRequest, Named]]):
    """POST /v1/completions."""

    def _parse(self, body: Mapping[str, Any]) -> tuple[CompletionRequest, Named]:
        parsed = validate(CompletionRequest, body)
        prompts = parsed.prompt
        if isinstance(prompts, list) and not isinstance(prompts[0], int):
            check_prompts(len(prompts), self._options.max_prompts, "prompt")
        return parsed, parsed.requests()

    async def _prepare(
        self, both: tuple[CompletionRequest, Named], model: ServedModel
    ) -> tuple[Sequence[Job], Shape, bool]:
        parsed, requests = both
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


def check_prompts(number: int, limit: int, field: str) -> None:
    """Raises InvalidRequestError for too many prompts in one request."""
    if number > limit:
        raise InvalidRequestError(field, f"{number} prompts are over the limit of {limit}", f"send at most {limit}")


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

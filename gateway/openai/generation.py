"""Code that all routes that generate share: serving a request, and building its response."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from gateway.core.admission import admit
from gateway.core.answer import Delta, Token, count_rounds
from gateway.core.catalogue import GatewayModel
from gateway.core.request import Job
from gateway.core.service import Gateway
from gateway.core.tool_parser import ToolCallDelta
from gateway.core.validation import validate
from gateway.http.body import BodyReader
from gateway.http.responses import (
    DONE,
    DOOR,
    IN_EVENTS,
    KEEP_ALIVE,
    Body,
    ClientStalled,
    EventStream,
    error_json,
    event,
    internal_error,
    json_bytes,
    run_while_connected,
    send_json,
    with_pauses,
)
from gateway.openai.fields import GenerationBody, NamedRequests, OpenAIRequest, StreamOptions
from gateway.openai.logprobs import TokenNames, prompt_logprobs_body, trace_body
from outrider.config.gateway import GatewayOptions
from outrider.errors import OutriderError, OverloadedError
from outrider.logs import get_logger
from outrider.protocol.generation import FinishReason, PromptLogprobs, RoundTree, Usage
from outrider.rpc.call import limit_time, name_user

_logger = get_logger(__name__)

_INLINE_VALUES = 1024
"""Log-probabilities and tree nodes up to which the event loop writes a body itself, in some milliseconds."""
_INLINE_PROMPT_TOKENS = 4096
"""Prompt tokens up to which the event loop spells them out itself, in some milliseconds."""
_VERY_LARGE_VALUES = 1 << 16
"""Bodies with more values than this take so much memory that only one is built at a time."""


class AnswerHead(Body):
    """What OpenAI's answers and their events begin with."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class PromptTokensDetails(Body):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionTokensDetails(Body):
    """Details of the answers' tokens."""

    reasoning_tokens: int


class SpeculationUsage(Body):
    """What speculation did."""

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    accept_length: float
    """Tokens committed in a round, on average; 0 if there was no round."""

    @classmethod
    def of(cls, usage: Usage) -> SpeculationUsage:
        """Return the part of a usage that is about rounds."""
        return cls(
            rounds=usage.num_rounds,
            draft_tokens=usage.num_draft_tokens,
            accepted_tokens=usage.num_accepted_tokens,
            accept_length=round(usage.accept_length, 3),
        )


class UsageBody(Body):
    """What a request used."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None
    outrider: SpeculationUsage | None = None

    @classmethod
    def of(cls, usage: Usage) -> UsageBody:
        """Return OpenAI's view of a usage."""
        return cls(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_prompt_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.num_reasoning_tokens),
            outrider=SpeculationUsage.of(usage),
        )


class ChoiceEnd(Body):
    """What ended one of the answers; in a stream, only in its last event."""

    stop_reason: int | str | None = None
    """The string of stop or token of stop_token_ids that ended the answer; null otherwise, as in vLLM."""
    matched_stop: int | str | None = None
    """The same under SGLang's name, or the end-of-sequence token."""


FinishWord = Literal["stop", "length"]


def finish_word(reason: FinishReason | None) -> FinishWord:
    """Return OpenAI's word for the reason."""
    return "length" if reason is FinishReason.LENGTH else "stop"


@dataclass(slots=True)
class CollectedAnswer:
    """One answer so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    trees: list[RoundTree] = field(default_factory=list)
    num_characters: int = 0
    """Characters in the text of the streamed tokens."""
    begun: bool = False
    """Whether the role, or the prompt that is echoed, was streamed."""
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    usage: Usage = field(default_factory=Usage)
    """Counts of its rounds, and of prompt tokens found in the cache."""


class ResponseBuilder(ABC):
    """Builds the bodies of one response."""

    id_prefix: str
    """Prefix of the ids of responses."""
    top_field = "top_logprobs"
    """The route's name for the number of likely tokens."""
    prompt_field = "prompt_logprobs"
    """The route's name for the number of likely tokens of prompts."""
    stream_end = DONE
    """Sent after the last event."""

    def __init__(self, model: GatewayModel, jobs: Sequence[Job], body: Any) -> None:
        """`body` is the request to answer, as the route takes it."""
        self._tokenizer = model.tokenizer
        self._jobs = [job for job in jobs for _ in range(job.n)]
        """The job of each answer."""
        self._answers = [CollectedAnswer() for _ in self._jobs]
        self.num_prompt_values = sum(
            len(job.prompt_token_ids) * (1 + num_top)
            for job in self._jobs
            if (num_top := job.request.num_prompt_logprobs) is not None
        )
        """Log-probabilities of prompt tokens in the response."""
        self._num_collected = 0
        """Log-probabilities, tree nodes and tokens of the answers that are kept in memory."""
        self._usage = Usage()
        self._head: dict[str, Any] = {
            "id": jobs[0].request.request_id,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    @property
    def keeps_values(self) -> bool:
        """Whether more than text and tokens may be kept in memory."""
        asked = (job.request for job in self._jobs)
        return any(
            one.sampling.num_logprobs is not None or one.num_prompt_logprobs is not None or one.trace for one in asked
        )

    @property
    def num_kept(self) -> int:
        """Number of values in memory; those of prompts count from the start."""
        return self.num_prompt_values + self._num_collected

    @property
    def kept_field(self) -> str:
        """The field of the request that asked for most of the values in memory."""
        if self.num_prompt_values > self._num_collected:
            return self.prompt_field
        request = self._jobs[0].request
        return "trace" if request.trace and request.sampling.num_logprobs is None else self.top_field

    def is_large(self, delta: Delta | None = None) -> bool:
        """Whether a body, with this delta, holds so many values that it should be built in a thread."""
        return self.num_kept + (0 if delta is None else _num_values(delta)) > _INLINE_VALUES

    def _keeps_tokens(self, job: Job) -> bool:
        """Whether a whole answer needs its tokens, and not only their text."""
        return job.request.sampling.num_logprobs is not None or job.request.trace

    def collect(self, delta: Delta) -> None:
        """Keep a delta for `whole`."""
        answer = self._answers[delta.choice_index]
        answer.text.append(delta.text)
        answer.reasoning.append(delta.reasoning)
        answer.calls.extend(delta.tool_calls)
        if self._keeps_tokens(self._jobs[delta.choice_index]):
            answer.tokens.extend(delta.tokens)
            self._num_collected += _num_values(delta)
        answer.prompt_logprobs.extend(delta.chunk.prompt_logprobs)
        answer.trees.extend(delta.chunk.round_trees)
        count_rounds(answer.usage, delta.chunk)
        answer.finish_reason = delta.finish_reason or answer.finish_reason
        answer.matched_stop = delta.matched_stop
        self._usage = delta.usage or self._usage

    @abstractmethod
    def whole(self) -> BaseModel:
        """Return the response that is not streamed; every answer must have been collected to its end."""

    @abstractmethod
    def chunks(self, delta: Delta) -> Iterator[BaseModel]:
        """Yield the events of a delta, including the usage at the end."""

    def event(self, body: BaseModel) -> bytes:
        """Return an event as it is sent."""
        return event(json_bytes(body))

    def error_event(self, error: OutriderError) -> bytes:
        """Return the last event of a stream that fails."""
        return event(error_json(error))

    def _trace(self, index: int, tokens: Sequence[Token], trees: Sequence[RoundTree]) -> dict[str, Any]:
        """Return the field with the trace of an answer's tokens; none unless the request is traced."""
        return {"trace": trace_body(tokens, trees, self._tokenizer)} if self._jobs[index].request.trace else {}

    def _prompt_logprobs(self, index: int, num_top: int | None) -> dict[str, Any]:
        """Return the field with the prompt's log-probabilities; none unless they were asked for."""
        if num_top is None:
            return {}
        parts = self._answers[index].prompt_logprobs
        body = prompt_logprobs_body(self._jobs[index].prompt_token_ids, parts, num_top, self._tokenizer)
        return {"prompt_logprobs": body}


class ChoicesBuilder(ResponseBuilder):
    """Builds OpenAI's responses, whose events hold choices and usage."""

    def __init__(self, model: GatewayModel, jobs: Sequence[Job], body: OpenAIRequest) -> None:
        super().__init__(model, jobs, body)
        self._options = body.stream_options or StreamOptions()
        self._prompt_tokens = sum(len(job.prompt_token_ids) for job in jobs)
        self._completion_tokens = 0
        self._with_ids = self._shows_prompt = bool(body.return_token_ids)
        self._names = TokenNames(self._tokenizer, as_ids=bool(body.return_tokens_as_token_ids))

    def is_large(self, delta: Delta | None = None) -> bool:
        """See the base; a long prompt that is shown is large, too. A stream shows it once for each answer."""
        shows = self._shows_prompt and (delta is None or not self._answers[delta.choice_index].begun)
        return (shows and self._prompt_tokens > _INLINE_PROMPT_TOKENS) or super().is_large(delta)

    def _keeps_tokens(self, job: Job) -> bool:
        return self._with_ids or super()._keeps_tokens(job)

    def _ids(self, tokens: Sequence[Token]) -> dict[str, list[int]]:
        """Return the field with the ids of an answer's tokens; none unless they were asked for."""
        return {"token_ids": [token.id for token in tokens]} if self._with_ids else {}

    def _about_tokens(self, delta: Delta) -> dict[str, Any]:
        """Return the fields with trace and ids of a delta's tokens, as far as they were asked for and are not empty."""
        trees = delta.chunk.round_trees
        trace = self._trace(delta.choice_index, delta.tokens, trees) if trees else {}
        return trace | (self._ids(delta.tokens) if delta.tokens else {})

    def _prompt_ids(self, index: int) -> dict[str, list[int]]:
        """Return the field with the ids of an answer's prompt; none unless they were asked for."""
        return {"prompt_token_ids": list(self._jobs[index].prompt_token_ids)} if self._with_ids else {}

    def chunks(self, delta: Delta) -> Iterator[Body]:
        """See the base."""
        before = self._completion_tokens
        self._completion_tokens += len(delta.tokens)
        for choice in self._choices(delta, self._answers[delta.choice_index]):
            num_tokens = self._completion_tokens if self._has_tokens(choice) else before
            yield self._chunk([choice], **self._usage_so_far(num_tokens))
        if delta.usage is not None and self._options.include_usage:
            yield self._chunk([], usage=UsageBody.of(delta.usage))

    def _stopped_by(self, index: int, matched: int | str | None) -> dict[str, Any]:
        """Return the fields of a ChoiceEnd."""
        named = isinstance(matched, str) or matched in self._jobs[index].request.stop_token_ids
        return {"stop_reason": matched if named else None, "matched_stop": matched}

    def _usage_so_far(self, num_tokens: int) -> dict[str, UsageBody | None]:
        """Return the usage field of a chunk with choices: null if the usage comes at the end, as with OpenAI."""
        if not self._options.continuous_usage_stats:
            return {"usage": None} if self._options.include_usage else {}
        total = self._prompt_tokens + num_tokens
        return {"usage": UsageBody(prompt_tokens=self._prompt_tokens, completion_tokens=num_tokens, total_tokens=total)}

    def _has_tokens(self, choice: Any) -> bool:
        """Whether a choice has tokens of the answer, and not only the role."""
        return True

    @abstractmethod
    def _choices(self, delta: Delta, answer: CollectedAnswer) -> Iterator[Body]:
        """Yield a choice for each event of a delta; `answer` holds what earlier events have sent."""

    @abstractmethod
    def _chunk(self, choices: list[Any], **more: Any) -> Body:
        """Return one event."""


def _num_values(delta: Delta) -> int:
    """Count the tokens, log-probabilities and tree nodes of a delta."""
    num_scored = sum(1 if token.logprobs is None else 2 + len(token.logprobs.top) for token in delta.tokens)
    return num_scored + sum(len(tree.token_ids) for tree in delta.chunk.round_trees)


@dataclass(eq=False, repr=False)
class GenerationRoute:
    """An ASGI application for one route that generates."""

    gateway: Gateway
    options: GatewayOptions
    bodies: BodyReader
    body_type: type[GenerationBody]
    builder_type: type[ResponseBuilder]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises OutriderError if nothing was sent yet."""
        limit_time(None, self.options.max_request_seconds)
        with self.gateway.counted(DOOR):
            # Take a place only once the body is here, so that a slow sender holds none.
            self.gateway.gate.check()
            async with AsyncExitStack() as counted:
                reading = self.bodies.open(Request(scope, receive), self._parse)
                user, body, requests = await counted.enter_async_context(reading)
                name_user(user)
                scope["state"][IN_EVENTS] = bool(body.stream)
                await run_while_connected(receive, self._serve(body, requests, counted, send))

    async def _serve(self, body: GenerationBody, requests: NamedRequests, counted: AsyncExitStack, send: Send) -> None:
        """Answer a request; `counted` is closed once the request's texts are token ids."""
        with ExitStack() as place:
            reserve = place.enter_context(self.gateway.gate.enter())
            model = self.gateway.model
            request_id = f"{self.builder_type.id_prefix}-{uuid.uuid4().hex}"
            jobs = [
                await admit(request, model, request_id if index == 0 else f"{request_id}-{index}", names)
                for index, (request, names) in enumerate(requests)
            ]
            await counted.aclose()
            builder = self.builder_type(model, jobs, body)
            reserve(sum(job.n for job in jobs))
            with self._quota_of(builder) as hold:
                deltas = self.gateway.generate(jobs, model)
                if body.stream:
                    await self._send_stream(deltas, builder, hold, send)
                    return
                whole = await self._whole(deltas, builder, hold)
                # The client may read as slowly as it likes: the answer stays in memory, but gives up its place.
                place.close()
                await send_json(send, whole)

    def _parse(self, body: dict[str, Any]) -> tuple[str, GenerationBody, NamedRequests]:
        """Return the user that a body names, the parsed body, and its requests. Called in a thread for a long body."""
        user = body.get("user")
        parsed = validate(self.body_type, body, ignore_unknown=self.options.ignore_unknown_fields)
        return user if isinstance(user, str) else "", parsed, parsed.requests(self.options.max_prompts)

    @contextmanager
    def _quota_of(self, builder: ResponseBuilder) -> Iterator[Callable[[], None]]:
        """Count what the response keeps in memory, and yield a function that counts again when it keeps more.

        Text is not counted.
        """
        if not builder.keeps_values:
            yield lambda: None
            return
        with self.gateway.logprob_quota.open() as hold:
            hold(builder.num_kept, builder.kept_field)
            yield lambda: hold(builder.num_kept, builder.kept_field)

    async def _whole(
        self, deltas: AsyncGenerator[Delta, None], builder: ResponseBuilder, hold: Callable[[], None]
    ) -> bytes:
        async with aclosing(deltas):
            async for delta in deltas:
                builder.collect(delta)
                hold()
        return await self._rendered(builder)

    async def _send_stream(
        self, deltas: AsyncGenerator[Delta, None], builder: ResponseBuilder, hold: Callable[[], None], send: Send
    ) -> None:
        stream = EventStream(send, stall_seconds=self.options.stall_seconds)
        try:
            async with aclosing(with_pauses(deltas, self.options.keep_alive_seconds)) as items:
                async for delta in items:
                    if delta is None:
                        await stream.write(KEEP_ALIVE)
                        continue
                    await stream.write(await self._rendered(builder, delta))
                    hold()
        except ClientStalled:
            self.gateway.count_error(DOOR, OverloadedError("the stream was not read", code="slow_reader"))
            raise
        except Exception as error:
            if not stream.begun:
                raise
            if isinstance(error, OutriderError):
                _logger.warning("a stream failed: %s: %s", error.code, error.message)
            else:
                error = internal_error(error, "a stream", _logger)
            self.gateway.count_error(DOOR, error)
            await stream.write(builder.error_event(error), more=False)
        else:
            await stream.write(builder.stream_end, more=False)

    async def _rendered(self, builder: ResponseBuilder, delta: Delta | None = None) -> bytes:
        """Return the events of a delta, or the whole response."""

        def render() -> bytes:
            if delta is None:
                return json_bytes(builder.whole())
            return b"".join(map(builder.event, builder.chunks(delta)))

        if not builder.is_large(delta):
            return render()
        if builder.num_kept <= _VERY_LARGE_VALUES:
            return await asyncio.to_thread(render)
        async with self.gateway.logprob_quota.one_large:
            return await asyncio.to_thread(render)

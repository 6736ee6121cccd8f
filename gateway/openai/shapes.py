"""Deltas in OpenAI's shapes: one builder a route, for whole answers and for streams."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gateway.core.admission import ServedModel
from gateway.core.events import Delta, Token, Usage
from gateway.core.request import Job
from gateway.openai.fields import StreamOptions
from gateway.openai.logprobs import chat_logprobs, completion_logprobs
from gateway.openai.prompt import Echo, echo_logprobs, prompt_logprobs_body, together
from gateway.openai.responses import (
    AssistantMessage,
    Body,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    UsageBody,
)
from gateway.openai.trace import trace_body
from outrider.protocol.tokens import FinishReason, PromptLogprobs, RoundTree

_INLINE = 1024
"""Log-probabilities, and nodes of trees, that are put into JSON in the event loop, in some milliseconds."""
_VERY_LARGE = 1 << 16


@dataclass(slots=True)
class Collected:
    """One answer so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    trees: list[RoundTree] = field(default_factory=list)
    num_characters: int = 0
    """Of the text of the tokens that were streamed."""
    begun: bool = False
    """Whether the role, or the prompt that is echoed, was streamed."""
    finish_reason: FinishReason | None = None
    num_rounds: int = 0
    num_accepted: int = 0
    cached_tokens: int = 0


class Sendable(Protocol):
    """A body of a response."""

    def json_bytes(self) -> bytes:
        """As JSON."""


class Shape(ABC):
    """Builds the bodies of one response."""

    prefix: str
    top_field = "top_logprobs"
    """What the route calls the number of likely tokens."""
    prompt_field = "prompt_logprobs"
    """What the route calls the same of prompts."""

    def __init__(self, model: ServedModel, jobs: Sequence[Job]) -> None:
        self._tokenizer = model.tokenizer
        self._jobs = [job for job in jobs for _ in range(job.n)]
        """Of each answer."""
        self._answers = [Collected() for job in jobs for _ in range(job.n)]
        self._num_described = sum(_described(job) for job in self._jobs)
        self._num_collected = 0
        """Log-probabilities, tree nodes and tokens of the answers that are kept."""
        self._usage = Usage()
        self._head: dict[str, Any] = {
            "id": jobs[0].request_id,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    @property
    def num_described(self) -> int:
        """Log-probabilities that are told of prompts."""
        return self._num_described

    @property
    def tells_values(self) -> bool:
        """Whether more than text and tokens may be kept in memory."""
        job = self._jobs[0]  # the others ask for the same
        return job.sampling.num_logprobs is not None or job.num_prompt_logprobs is not None or job.trace

    @property
    def num_kept(self) -> int:
        """Values in memory, those of prompts from the start."""
        return self.num_described + self._num_collected

    @property
    def kept_field(self) -> str:
        """The field of the request that most of them are due to."""
        if self.num_described > self._num_collected:
            return self.prompt_field
        return "trace" if self._jobs[0].sampling.num_logprobs is None else self.top_field

    @property
    def is_very_large(self) -> bool:
        """Whether the body takes so much memory that only one of the kind should be made at a time."""
        return self.num_kept > _VERY_LARGE

    def is_large(self, delta: Delta | None = None) -> bool:
        """Whether so much is told, with a delta, that bodies are better built beside the event loop."""
        return self.num_kept + (0 if delta is None else _num_values(delta)) > _INLINE

    def _keeps_tokens(self, job: Job) -> bool:
        """Whether a whole answer tells of its tokens, not of their text alone."""
        return job.sampling.num_logprobs is not None or job.trace

    def collect(self, delta: Delta) -> None:
        """Keeps a delta for `whole`."""
        answer = self._answers[delta.choice_index]
        answer.text.append(delta.text)
        if self._keeps_tokens(self._jobs[delta.choice_index]):
            answer.tokens.extend(delta.tokens)
            self._num_collected += _num_values(delta)
        answer.prompt_logprobs.extend(delta.prompt_logprobs)
        answer.trees.extend(delta.trees)
        answer.num_rounds += delta.num_rounds
        answer.num_accepted += delta.num_accepted
        answer.cached_tokens = max(answer.cached_tokens, delta.cached_tokens)
        answer.finish_reason = delta.finish_reason or answer.finish_reason
        self._usage = delta.usage or self._usage

    @abstractmethod
    def whole(self) -> Sendable:
        """The response that is not streamed; every answer has been collected to its end."""

    @abstractmethod
    def chunks(self, delta: Delta) -> Iterator[Sendable]:
        """The events of a delta, the usage at the end included."""

    def _trace(self, index: int, tokens: Sequence[Token], trees: Sequence[RoundTree]) -> dict[str, Any]:
        """The field of a choice that tells how its tokens came about, for a request that is traced."""
        return {"trace": trace_body(tokens, trees, self._tokenizer)} if self._jobs[index].trace else {}

    def _prompt_logprobs(self, index: int, num_top: int | None) -> dict[str, Any]:
        """The field that tells of the prompt's tokens, where asked for."""
        if num_top is None:
            return {}
        parts = self._answers[index].prompt_logprobs
        body = prompt_logprobs_body(self._jobs[index].prompt_token_ids, parts, num_top, self._tokenizer)
        return {"prompt_logprobs": body}


class ChoicesShape(Shape):
    """OpenAI's: events that hold choices, and usage."""

    def __init__(self, model: ServedModel, jobs: Sequence[Job], options: StreamOptions | None) -> None:
        super().__init__(model, jobs)
        self._options = options or StreamOptions()
        self._prompt_tokens = sum(len(job.prompt_token_ids) for job in jobs)
        self._completion_tokens = 0

    def chunks(self, delta: Delta) -> Iterator[Body]:
        """See the base."""
        self._completion_tokens += len(delta.tokens)
        more: dict[str, Any] = {}
        if self._options.continuous_usage_stats:
            more["usage"] = UsageBody(
                prompt_tokens=self._prompt_tokens,
                completion_tokens=self._completion_tokens,
                total_tokens=self._prompt_tokens + self._completion_tokens,
            )
        for choice in self._choices(delta, self._answers[delta.choice_index]):
            yield self._chunk([choice], **more)
        if delta.usage is not None and self._options.include_usage:
            yield self._chunk([], usage=UsageBody.of(delta.usage))

    @abstractmethod
    def _choices(self, delta: Delta, answer: Collected) -> Iterator[Body]:
        """A choice for each event of a delta; `answer` is what was sent before."""

    @abstractmethod
    def _chunk(self, choices: list[Any], **more: Any) -> Body:
        """One event."""


class ChatShape(ChoicesShape):
    """For /v1/chat/completions."""

    prefix = "chatcmpl"

    def whole(self) -> ChatCompletion:
        """See the base."""
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(role="assistant", content="".join(answer.text), refusal=None),
                logprobs=chat_logprobs(answer.tokens, self._tokenizer),
                finish_reason=_word(answer.finish_reason),
                **self._trace(index, answer.tokens, answer.trees),
            )
            for index, answer in enumerate(self._answers)
        ]
        more = self._prompt_logprobs(0, self._jobs[0].num_prompt_logprobs)
        return ChatCompletion(
            object="chat.completion", choices=choices, usage=UsageBody.of(self._usage), **more, **self._head
        )

    def _choices(self, delta: Delta, answer: Collected) -> Iterator[ChatChunkChoice]:
        index, logprobs = delta.choice_index, chat_logprobs(delta.tokens, self._tokenizer)
        if not answer.begun:
            answer.begun = True
            role = ChatDelta(role="assistant", content="")
            yield ChatChunkChoice(index=index, delta=role, logprobs=None, finish_reason=None)
        trace = self._trace(index, delta.tokens, delta.trees) if delta.trees else {}
        if delta.text or logprobs is not None or trace:
            yield ChatChunkChoice(
                index=index, delta=ChatDelta(content=delta.text), logprobs=logprobs, finish_reason=None, **trace
            )
        if delta.finish_reason is not None:
            yield ChatChunkChoice(
                index=index, delta=ChatDelta(), logprobs=None, finish_reason=_word(delta.finish_reason)
            )

    def _chunk(self, choices: list[Any], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **more, **self._head)


class CompletionShape(ChoicesShape):
    """For /v1/completions."""

    prefix = "cmpl"
    top_field = "logprobs"

    def __init__(
        self,
        model: ServedModel,
        jobs: Sequence[Job],
        options: StreamOptions | None,
        echoes: Sequence[Echo] = (),
        num_prompt_logprobs: int | None = None,
    ) -> None:
        """`echoes`: the prompt of each job, where it is given back; `num_prompt_logprobs`: see vLLM's field."""
        super().__init__(model, jobs, options)
        self._num_prompt_logprobs = num_prompt_logprobs
        self.prompt_field = "logprobs" if num_prompt_logprobs is None else "prompt_logprobs"
        self._echoes = [echo for job, echo in zip(jobs, echoes, strict=True) for _ in range(job.n)] if echoes else []

    def whole(self) -> Completion:
        """See the base."""
        choices = []
        for index, answer in enumerate(self._answers):
            before, told = self._prompt(index, answer)
            logprobs = completion_logprobs(answer.tokens, self._tokenizer, len(before), with_end=bool(self._echoes))
            choices.append(
                CompletionChoice(
                    index=index,
                    text=before + "".join(answer.text),
                    logprobs=together(told, logprobs),
                    finish_reason=_word(answer.finish_reason),
                    **self._prompt_logprobs(index, self._num_prompt_logprobs),
                    **self._trace(index, answer.tokens, answer.trees),
                )
            )
        return self._chunk(choices, usage=UsageBody.of(self._usage))

    def _choices(self, delta: Delta, answer: Collected) -> Iterator[CompletionChoice]:
        index = delta.choice_index
        answer.prompt_logprobs.extend(delta.prompt_logprobs if self._echoes else ())
        ready = delta.tokens or delta.finish_reason is not None
        if self._echoes and ready and not answer.begun:
            answer.begun = True
            text, told = self._prompt(index, answer)
            answer.prompt_logprobs.clear()
            answer.num_characters = len(text)
            yield CompletionChoice(index=index, text=text, logprobs=told, finish_reason=None)
        logprobs = completion_logprobs(
            delta.tokens, self._tokenizer, answer.num_characters, with_end=bool(self._echoes)
        )
        answer.num_characters += sum(len(token.text) for token in delta.tokens)
        trace = self._trace(index, delta.tokens, delta.trees) if delta.trees else {}
        if delta.text or logprobs is not None or trace or delta.finish_reason is not None:
            reason = None if delta.finish_reason is None else _word(delta.finish_reason)
            yield CompletionChoice(index=index, text=delta.text, logprobs=logprobs, finish_reason=reason, **trace)

    def _prompt(self, index: int, answer: Collected) -> tuple[str, CompletionLogprobs | None]:
        """The prompt's text and log-probabilities, where they are given back."""
        if not self._echoes:
            return "", None
        echo = self._echoes[index]
        return echo.text, echo_logprobs(echo, answer.prompt_logprobs, self._tokenizer)

    def _chunk(self, choices: list[Any], **more: Any) -> Completion:
        return Completion(object="text_completion", choices=choices, **more, **self._head)


def _num_values(delta: Delta) -> int:
    """What a delta adds to what an answer tells beside its text."""
    told = sum(1 if token.logprobs is None else 2 + len(token.logprobs.top) for token in delta.tokens)
    return told + sum(len(tree.token_ids) for tree in delta.trees)


def _word(reason: FinishReason | None) -> Literal["stop", "length"]:
    return "length" if reason is FinishReason.LENGTH else "stop"


def _described(job: Job) -> int:
    """Log-probabilities that are told of a job's prompt."""
    if job.num_prompt_logprobs is None:
        return 0
    return len(job.prompt_token_ids) * (1 + job.num_prompt_logprobs)

"""Deltas in OpenAI's shapes: one builder a route, for whole answers and for streams."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.admission import ServedModel
from gateway.events import Delta, Token, Usage
from gateway.request import Job
from gateway.rest.fields import StreamOptions
from gateway.rest.logprobs import chat_logprobs, completion_logprobs
from gateway.rest.responses import (
    AssistantMessage,
    Body,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    Completion,
    CompletionChoice,
    UsageBody,
)
from outrider.tokens import FinishReason


@dataclass(slots=True)
class _Collected:
    """One answer so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    num_characters: int = 0
    """Of the text of the tokens that were streamed."""
    begun: bool = False
    """Whether the role was streamed."""
    finish_reason: FinishReason | None = None


class Shape(ABC):
    """Builds the bodies of one response."""

    prefix: str

    def __init__(self, model: ServedModel, jobs: Sequence[Job], options: StreamOptions | None) -> None:
        self._tokenizer = model.tokenizer
        self._options = options or StreamOptions()
        self._answers = [_Collected() for job in jobs for _ in range(job.n)]
        self._prompt_tokens = sum(len(job.prompt_token_ids) for job in jobs)
        self._completion_tokens = 0
        self._usage = Usage()
        self._head: dict[str, Any] = {
            "id": jobs[0].request_id,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    def collect(self, delta: Delta) -> None:
        """Keeps a delta for `whole`."""
        answer = self._answers[delta.choice_index]
        answer.text.append(delta.text)
        answer.tokens.extend(delta.tokens)
        answer.finish_reason = delta.finish_reason or answer.finish_reason
        self._usage = delta.usage or self._usage

    @abstractmethod
    def whole(self) -> Body:
        """The response that is not streamed; every answer has been collected to its end."""

    def chunks(self, delta: Delta) -> Iterator[Body]:
        """The events of a delta, the usage at the end included."""
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
    def _choices(self, delta: Delta, answer: _Collected) -> Iterator[Body]:
        """A choice for each event of a delta; `answer` is what was sent before."""

    @abstractmethod
    def _chunk(self, choices: list[Any], **more: Any) -> Body:
        """One event."""


class ChatShape(Shape):
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
            )
            for index, answer in enumerate(self._answers)
        ]
        return ChatCompletion(object="chat.completion", choices=choices, usage=UsageBody.of(self._usage), **self._head)

    def _choices(self, delta: Delta, answer: _Collected) -> Iterator[ChatChunkChoice]:
        index, logprobs = delta.choice_index, chat_logprobs(delta.tokens, self._tokenizer)
        if not answer.begun:
            answer.begun = True
            role = ChatDelta(role="assistant", content="")
            yield ChatChunkChoice(index=index, delta=role, logprobs=None, finish_reason=None)
        if delta.text or logprobs is not None:
            yield ChatChunkChoice(
                index=index, delta=ChatDelta(content=delta.text), logprobs=logprobs, finish_reason=None
            )
        if delta.finish_reason is not None:
            yield ChatChunkChoice(
                index=index, delta=ChatDelta(), logprobs=None, finish_reason=_word(delta.finish_reason)
            )

    def _chunk(self, choices: list[Any], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **more, **self._head)


class CompletionShape(Shape):
    """For /v1/completions."""

    prefix = "cmpl"

    def whole(self) -> Completion:
        """See the base."""
        choices = [
            CompletionChoice(
                index=index,
                text="".join(answer.text),
                logprobs=completion_logprobs(answer.tokens, self._tokenizer, 0),
                finish_reason=_word(answer.finish_reason),
            )
            for index, answer in enumerate(self._answers)
        ]
        return self._chunk(choices, usage=UsageBody.of(self._usage))

    def _choices(self, delta: Delta, answer: _Collected) -> Iterator[CompletionChoice]:
        logprobs = completion_logprobs(delta.tokens, self._tokenizer, answer.num_characters)
        answer.num_characters += sum(len(token.text) for token in delta.tokens)
        if delta.text or logprobs is not None or delta.finish_reason is not None:
            reason = None if delta.finish_reason is None else _word(delta.finish_reason)
            yield CompletionChoice(index=delta.choice_index, text=delta.text, logprobs=logprobs, finish_reason=reason)

    def _chunk(self, choices: list[Any], **more: Any) -> Completion:
        return Completion(object="text_completion", choices=choices, **more, **self._head)


def _word(reason: FinishReason | None) -> Literal["stop", "length"]:
    return "length" if reason is FinishReason.LENGTH else "stop"

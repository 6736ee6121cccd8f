"""The one request that both doors map to, and what it becomes once the served model has been asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec.structs import replace
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.core.fields import MAX_LOGPROBS, MAX_MESSAGES, OutputFields, SamplingFields, StrictModel, Text, TokenIdList
from outrider.grammar.spec import Grammar
from outrider.protocol.generation import GenerationRequest


class Sampling(SamplingFields):
    """How tokens are chosen, and how many log-probabilities are told."""

    num_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class Message(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: Text
    name: Text | None = None


class Chat(StrictModel):
    """A conversation, oldest message first."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class GenerateRequest(OutputFields):
    """A request with exactly one of `prompt`, `prompt_token_ids` and `chat`."""

    model: Text | None = None
    prompt: Annotated[Text, Field(min_length=1)] | None = None
    prompt_token_ids: TokenIdList | None = None
    chat: Chat | None = None
    sampling: Sampling = Sampling()
    grammar: Grammar | None = None
    """What each answer must be; `check_grammar` has passed it."""
    num_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_only: bool = False
    """No answer is wanted; `max_tokens` is 1, the least that verify commits, and that token is dropped."""

    @model_validator(mode="after")
    def _one_input(self) -> GenerateRequest:
        if sum(x is not None for x in (self.prompt, self.prompt_token_ids, self.chat)) != 1:
            raise PydanticCustomError(
                "input", "exactly one of prompt, prompt_token_ids and chat is needed; set one", {"field": "input"}
            )
        if self.grammar is not None and self.ignore_eos:
            raise PydanticCustomError(
                "ignore_eos",
                "does not go with a form of the answer, which ends where it is complete; leave it out",
                {"field": "ignore_eos"},
            )
        return self


@dataclass(frozen=True, slots=True)
class Job:
    """A request that the served model can run: `n` answers to one tokenized prompt."""

    request: GenerationRequest
    """Of all answers; `answer` is one's."""
    n: int
    stop: tuple[str, ...]
    arrived: float
    """time.monotonic() when the request came in, in seconds."""
    grammar_field: str = ""
    """What the door calls the field with the grammar; empty where that is as verify calls it."""
    prompt_only: bool = False
    """The answer is not wanted: the one token that verify commits is dropped."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt."""
        return self.request.prompt_token_ids

    def answer(self, choice_index: int) -> GenerationRequest:
        """What verify is asked for one of the answers."""
        request_id = f"{self.request.request_id}-{choice_index}"
        sampling = replace(self.request.sampling, choice_index=choice_index)
        return replace(self.request, request_id=request_id, sampling=sampling)

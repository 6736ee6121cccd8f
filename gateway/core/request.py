"""The one request that both doors map to, and what it becomes once the served model has been asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.core.fields import MAX_LOGPROBS, MAX_MESSAGES, OutputFields, SamplingFields, StrictModel, Text, TokenIdList
from outrider.grammar.spec import Grammar
from outrider.sampling.params import SamplingParams


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

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    """`choice_index` is 0 here; answer i runs with i."""
    n: int
    max_tokens: int
    """Prompt and this many tokens fit the context."""
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    speculation: bool
    arrived: float
    """time.monotonic() when the request came in, in seconds."""
    num_prompt_logprobs: int | None = None
    """None: no log-probabilities of the prompt; k: those of its tokens and of the k most likely at each position."""
    trace: bool = False
    """Whether the tree that each round verified is told."""
    priority: int = 0
    """Lower is earlier."""
    tenant: str = ""
    """Whose text this is (outrider.rpc.call.salted_tenant)."""
    grammar_field: str = ""
    """What the door calls the field with the grammar; empty where that is as verify calls it."""
    prompt_only: bool = False
    """The answer is not wanted: the one token that verify commits is dropped."""

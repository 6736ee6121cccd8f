"""OpenAI's request bodies, and how they become the gateway's own requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gateway.core.fields import MAX_LOGPROBS, MAX_MESSAGES, OutputFields, SamplingFields, StrictModel, Text, TokenIdList
from gateway.core.request import GenerateRequest
from gateway.core.validation import validate
from gateway.openai.fields import HarmlessFields, Only, StreamOptions
from gateway.openai.formats import FormatFields

_NO_TOOLS = "tools are not supported"
_NO_AUDIO = "only text is supported"


class TextPart(StrictModel):
    """One part of a message."""

    type: Literal["text"]
    text: Text


def _content_kind(value: Any) -> str:
    return "@parts" if isinstance(value, list) else "@text"


Content = Annotated[
    Annotated[Text, Tag("@text")]
    | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("@parts")],
    Discriminator(_content_kind),
]


class ChatMessage(StrictModel):
    """One message of a conversation. Fields that only answers have may be sent back empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Text | None = None
    refusal: Annotated[Any, Only(why="refusals are not supported")] = None
    annotations: Annotated[Any, Only([], why="annotations are not supported")] = None
    audio: Annotated[Any, Only(why=_NO_AUDIO)] = None
    tool_calls: Annotated[Any, Only([], why=_NO_TOOLS)] = None
    function_call: Annotated[Any, Only(why=_NO_TOOLS)] = None

    def plain(self) -> dict[str, Any]:
        """The message as the chat template takes it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content, "name": self.name}


class StreamFields(StrictModel):
    """Whether and how an answer is streamed."""

    model: Text | None = Field(None, description="Name of the served model; may be left out.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")
    stream_options: StreamOptions | None = None

    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Tell the log-probabilities of the prompt's tokens and of this many of the most likely ones at "
        "each position; not in a stream.",
    )

    @model_validator(mode="after")
    def _prompt_logprobs_need_a_whole(self) -> StreamFields:
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError(
                "prompt_logprobs",
                "are not told in a stream; set stream to false or leave it out",
                {"field": "prompt_logprobs"},
            )
        return self

    @model_validator(mode="after")
    def _options_need_stream(self) -> StreamFields:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "stream_options",
                "only streams have them; set stream to true or leave it out",
                {"field": "stream_options"},
            )
        return self


class ChatCompletionRequest(StreamFields, FormatFields, SamplingFields, OutputFields, HarmlessFields):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="The present name of max_tokens."
    )
    logprobs: bool | None = Field(None, description="Tell the log-probability of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Tell this many of the most likely tokens too; needs logprobs."
    )
    tools: Annotated[Any, Only([], why=_NO_TOOLS)] = None
    tool_choice: Annotated[Any, Only("none", "auto", why=_NO_TOOLS)] = None
    parallel_tool_calls: bool | None = Field(None, description="Without effect: there are no tools.")
    functions: Annotated[Any, Only([], why=_NO_TOOLS)] = None
    function_call: Annotated[Any, Only("none", "auto", why=_NO_TOOLS)] = None
    modalities: Annotated[Any, Only(["text"], why=_NO_AUDIO)] = None
    audio: Annotated[Any, Only(why=_NO_AUDIO)] = None
    prediction: Annotated[Any, Only(why="predicted outputs are not supported: drafts are made here")] = None
    reasoning_effort: Annotated[Any, Only("none", why="reasoning effort is not supported")] = None
    verbosity: Annotated[Any, Only("medium", why="verbosity is not supported")] = None
    web_search_options: Annotated[Any, Only(why="nothing is fetched for a client")] = None

    @model_validator(mode="after")
    def _fit_together(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs", "needs logprobs; set logprobs to true or leave it out", {"field": "top_logprobs"}
            )
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise PydanticCustomError(
                "max_tokens", "differs from max_completion_tokens; send one of them", {"field": "max_tokens"}
            )
        return self

    @property
    def field_names(self) -> dict[str, str]:
        """What this body calls the fields of a GenerateRequest."""
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {
            "chat.messages": "messages",
            "logit_bias": "logit_bias",
            "max_tokens": limit,
            "grammar": self.grammar_field,
        }

    def request(self) -> GenerateRequest:
        """The gateway's own request."""
        fields = _common(self, (self.top_logprobs or 0) if self.logprobs else None)
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        fields["num_prompt_logprobs"] = self.prompt_logprobs
        fields["chat"] = {"messages": [message.plain() for message in self.messages]}
        return validate(GenerateRequest, fields)


def _prompt_kind(value: Any) -> str:
    if not isinstance(value, list):
        return "@text"
    first = value[0] if value else None
    return "@texts" if isinstance(first, str) else "@lists" if isinstance(first, list) else "@ids"


_PromptText = Annotated[Text, Field(min_length=1)]
_MAX_PROMPTS = 4096
"""The most that --max-prompts may allow."""
Prompt = Annotated[
    Annotated[_PromptText, Tag("@text")]
    | Annotated[list[_PromptText], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True), Tag("@texts")]
    | Annotated[TokenIdList, Tag("@ids")]
    | Annotated[list[TokenIdList], Field(min_length=1, max_length=_MAX_PROMPTS, fail_fast=True), Tag("@lists")],
    Discriminator(_prompt_kind),
]


class CompletionRequest(StreamFields, FormatFields, SamplingFields, OutputFields, HarmlessFields):
    """Body of POST /v1/completions."""

    prompt: Prompt = Field(description="A text, a list of texts, token ids, or a list of lists of token ids.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="Tell the log-probabilities of each token and of this many of the most likely ones."
    )
    echo: bool | None = Field(
        None, description="Begin the text with the prompt; with logprobs, tell those of the prompt's tokens, too."
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None,
        description="Most tokens per answer. Default: what the context leaves. 0 only with echo or prompt_logprobs.",
    )
    max_completion_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        None, description="Another name of max_tokens."
    )
    suffix: Annotated[Any, Only("", why="insertion is not supported")] = None
    best_of: Annotated[Any, Only(1, why="choosing the best of several answers is not supported")] = None

    @model_validator(mode="after")
    def _lengths_fit(self) -> CompletionRequest:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise PydanticCustomError(
                "max_tokens", "differs from max_completion_tokens; send one of them", {"field": "max_tokens"}
            )
        if self.limit == 0 and not self.echo and self.prompt_logprobs is None:
            raise PydanticCustomError(
                "max_tokens",
                "is 0, and nothing of the prompt is asked for; send at least 1, or echo or prompt_logprobs",
                {"field": self.limit_field},
            )
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens per answer, by whichever name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        """The name by which it was sent."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Likely tokens that are needed at each position of the prompt; None where nothing of it is told."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in asked if number is not None), default=None)

    def requests(self) -> list[tuple[GenerateRequest, dict[str, str]]]:
        """The gateway's own requests, one a prompt, each with what this body calls its fields."""
        common = _common(self, self.logprobs) | {
            "num_prompt_logprobs": self.num_prompt_logprobs,
            # Verify commits a token in any case; of an answer without room it is dropped.
            "max_tokens": 1 if self.limit == 0 else self.limit,
            "prompt_only": self.limit == 0,
        }
        names = {"logit_bias": "logit_bias", "max_tokens": self.limit_field, "grammar": self.grammar_field}
        if isinstance(self.prompt, str):
            return [(validate(GenerateRequest, common | {"prompt": self.prompt}), names)]
        if isinstance(self.prompt[0], int):
            ids = validate(GenerateRequest, common | {"prompt_token_ids": self.prompt})
            return [(ids, names | {"prompt_token_ids": "prompt"})]
        field = "prompt" if isinstance(self.prompt[0], str) else "prompt_token_ids"
        return [
            (validate(GenerateRequest, common | {field: prompt}), names | {field: f"prompt[{i}]"})
            for i, prompt in enumerate(self.prompt)
        ]


def _common(body: ChatCompletionRequest | CompletionRequest, num_logprobs: int | None) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(body, name) for name in OutputFields.model_fields}
    fields["sampling"] = {name: getattr(body, name) for name in SamplingFields.model_fields}
    fields["sampling"]["num_logprobs"] = num_logprobs
    return fields | {"model": body.model, "grammar": body.grammar}

"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.core.answer import Delta
from gateway.core.catalogue import GatewayModel
from gateway.core.request import MAX_LOGPROBS, MAX_MESSAGES, ClientRequest, Job, PromptEnd, StrictModel, Text
from gateway.core.validation import validate
from gateway.http.responses import Body
from gateway.openai.fields import NamedRequests, Only, OpenAIRequest, TemplateFields
from gateway.openai.generation import (
    ChoicesBuilder,
    CollectedAnswer,
    FinishWord,
    GenerationRoute,
    UsageBody,
    finish_word,
)
from gateway.openai.logprobs import ChatLogprobs, PromptLogprobsBody, chat_logprobs
from gateway.openai.trace import TraceBody
from outrider.errors import InvalidRequestError

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
    reasoning_content: Text | None = Field(None, description="What the assistant thought; the chat template has it.")
    refusal: Annotated[Any, Only(why="refusals are not supported")] = None
    annotations: Annotated[Any, Only([], why="annotations are not supported")] = None
    audio: Annotated[Any, Only(why=_NO_AUDIO)] = None
    tool_calls: Annotated[Any, Only([], why=_NO_TOOLS)] = None
    function_call: Annotated[Any, Only(why=_NO_TOOLS)] = None

    def plain(self) -> dict[str, Any]:
        """The message as the chat template takes it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
            "name": self.name,
            "reasoning_content": self.reasoning_content,
        }


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatCompletionRequest(OpenAIRequest, TemplateFields, PromptEnd):
    """Body of POST /v1/chat/completions."""

    messages: Messages
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
    separate_reasoning: bool | None = Field(
        None, description="Tell what the model thinks as reasoning_content, not as part of the content. Default true."
    )
    verbosity: Annotated[Any, Only("medium", why="verbosity is not supported")] = None
    web_search_options: Annotated[Any, Only(why="nothing is fetched for a client")] = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs", "set logprobs to true or leave it out")
        return self

    def requests(self, max_prompts: int) -> NamedRequests:
        """The gateway's own request."""
        fields = self.common((self.top_logprobs or 0) if self.logprobs else None)
        fields["separate_reasoning"] = self.separate_reasoning is not False
        fields["chat"] = {
            "messages": [message.plain() for message in self.messages],
            "template_values": self.template_values(),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        }
        return [(validate(ClientRequest, fields), self.field_names | {"chat.messages": "messages"})]


class AssistantMessage(Body):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None
    reasoning_content: str | None = None
    """What the model thought before it answered."""


class ChatChoice(Body):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord
    trace: TraceBody | None = None


class ChatCompletion(Body):
    """Answer to POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobsBody | None = None


class ChatDelta(Body):
    """Text that a chunk adds; the first one names the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    """What the model thinks before it answers."""


class ChatChunkChoice(Body):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishWord | None
    trace: TraceBody | None = None


class ChatCompletionChunk(Body):
    """One event of a streamed chat answer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None


class ChatBuilder(ChoicesBuilder):
    """Builds chat completions and their chunks."""

    def whole(self) -> ChatCompletion:
        """See the base."""
        choices = [
            ChatChoice(
                index=index,
                message=_message(answer),
                logprobs=chat_logprobs(answer.tokens, self._tokenizer),
                finish_reason=finish_word(answer.finish_reason),
                **self._trace(index, answer.tokens, answer.trees),
            )
            for index, answer in enumerate(self._answers)
        ]
        more = self._prompt_logprobs(0, self._jobs[0].request.num_prompt_logprobs)
        return ChatCompletion(
            object="chat.completion", choices=choices, usage=UsageBody.of(self._usage), **more, **self._head
        )

    def _choices(self, delta: Delta, answer: CollectedAnswer) -> Iterator[ChatChunkChoice]:
        index, logprobs = delta.choice_index, chat_logprobs(delta.tokens, self._tokenizer)
        if not answer.begun:
            answer.begun = True
            role = ChatDelta(role="assistant", content="")
            yield ChatChunkChoice(index=index, delta=role, logprobs=None, finish_reason=None)
        trace = self._trace(index, delta.tokens, delta.trees) if delta.trees else {}
        if delta.reasoning or delta.text or logprobs is not None or trace:
            news = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
            if delta.text or not news:
                news["content"] = delta.text
            yield ChatChunkChoice(index=index, delta=ChatDelta(**news), logprobs=logprobs, finish_reason=None, **trace)
        if delta.finish_reason is not None:
            reason = finish_word(delta.finish_reason)
            yield ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=None, finish_reason=reason)

    def _chunk(self, choices: list[Any], **more: Any) -> ChatCompletionChunk:
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **more, **self._head)


def _message(answer: CollectedAnswer) -> AssistantMessage:
    more = {"reasoning_content": reasoning} if (reasoning := "".join(answer.reasoning)) else {}
    return AssistantMessage(role="assistant", content="".join(answer.text), refusal=None, **more)


class ChatRoute(GenerationRoute[ChatCompletionRequest]):
    """POST /v1/chat/completions as an ASGI application."""

    body_type = ChatCompletionRequest
    id_prefix = "chatcmpl"

    async def _builder(self, body: ChatCompletionRequest, jobs: Sequence[Job], model: GatewayModel) -> ChatBuilder:
        return ChatBuilder(model, jobs, body.stream_options)

"""POST /v1/chat/completions, and calls of tools in its messages and answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.core.answer import Delta
from gateway.core.catalogue import GatewayModel
from gateway.core.request import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CallArguments,
    ClientRequest,
    Job,
    PromptEnd,
    RequestMessage,
    Role,
    StrictModel,
    Text,
    Tool,
    ToolCall,
    check_role,
)
from gateway.core.tool_parser import ToolCallDelta
from gateway.core.validation import validate
from gateway.http.responses import Body
from gateway.openai.fields import (
    ChoiceOf,
    ContentOf,
    NamedRequests,
    Only,
    OpenAIRequest,
    TemplateFields,
    content_text,
    template_values,
    tool_fields,
)
from gateway.openai.generation import AnswerHead, ChoiceEnd, ChoicesBuilder, CollectedAnswer, UsageBody, finish_word
from gateway.openai.logprobs import ChatLogprobs, PromptLogprobsBody, TraceBody, chat_logprobs
from outrider.errors import InvalidRequestError
from outrider.protocol.generation import FinishReason
from outrider.sampling.params import MAX_LOGPROBS


class ToolBody(StrictModel):
    """A function that the answer may call."""

    type: Literal["function"]
    function: Tool


class NamedFunction(StrictModel):
    """One of the functions."""

    name: Text


class NamedChoice(StrictModel):
    """The function that the answer must call."""

    type: Literal["function"]
    function: NamedFunction

    @property
    def allowed(self) -> tuple[str, list[str], str]:
        """The mode (whether one may or must be called), the functions' names, and the field of each name, to format."""
        return "required", [self.function.name], "tool_choice.function.name"


class AllowedTools(StrictModel):
    """Some of the functions, and whether the answer may or must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedChoice(StrictModel):
    """The functions that the answer may call; the model does not see the others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools

    @property
    def allowed(self) -> tuple[str, list[str], str]:
        """See NamedChoice."""
        names = [one.function.name for one in self.allowed_tools.tools]
        return self.allowed_tools.mode, names, "tool_choice.allowed_tools.tools[{}].function.name"


class CalledFunction(StrictModel):
    """What an earlier answer called."""

    name: Annotated[Text, Field(min_length=1, max_length=256)]
    arguments: CallArguments = Field("", description="JSON, as in the answer.")


class CallBody(StrictModel):
    """A call of an earlier answer."""

    id: Annotated[Text, Field(max_length=256)]
    type: Literal["function"] = "function"
    index: int | None = Field(None, description="Accepted but ignored.")
    function: CalledFunction

    def plain(self) -> ToolCall:
        """Return the call as the gateway's own request has it."""
        return ToolCall(id=self.id, name=self.function.name, arguments=self.function.arguments)


class FunctionMade(Body):
    """What an answer calls."""

    name: str
    arguments: str
    """JSON."""


class CallMade(Body):
    """A call of an answer."""

    id: str
    type: Literal["function"]
    function: FunctionMade


class FunctionDelta(Body):
    """The name once, then pieces of the arguments."""

    name: str | None = None
    arguments: str


class CallDelta(Body):
    """What a chunk adds to a call; the first one names it."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta

    @classmethod
    def of(cls, delta: ToolCallDelta) -> CallDelta:
        """Return OpenAI's view of a call's delta."""
        if not delta.id:
            return cls(index=delta.index, function=FunctionDelta(arguments=delta.arguments))
        function = FunctionDelta(name=delta.name, arguments=delta.arguments)
        return cls(index=delta.index, id=delta.id, type="function", function=function)


def calls_made(deltas: Sequence[ToolCallDelta]) -> list[CallMade]:
    """Return the calls of one answer; `deltas` are all deltas of its calls."""
    made = []
    for _, group in groupby(deltas, key=attrgetter("index")):
        head, *more = group
        function = FunctionMade(name=head.name, arguments="".join(delta.arguments for delta in (head, *more)))
        made.append(CallMade(id=head.id, type="function", function=function))
    return made


_NO_FUNCTIONS = "the old form of tools is not supported: use tools, tool_choice and tool_calls"
_NO_AUDIO = "only text is supported"


class TextPart(StrictModel):
    """One part of a message."""

    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description="Accepted but ignored.")
    cache_control: dict[str, Any] | None = Field(None, description="Accepted but ignored.")
    # OpenAI's agents for JavaScript repeat the other fields of an answer's message in its text part.
    role: Literal["assistant"] | None = Field(None, description="Accepted but ignored.")
    reasoning_content: Text | None = Field(None, description="Accepted but ignored.")
    reasoning: Text | None = Field(None, description="Accepted but ignored.")
    tool_calls: list[Any] | None = Field(None, description="Accepted but ignored.")


Content = ContentOf[TextPart]


class ChatMessage(StrictModel):
    """One message of a conversation. Fields that only answers have may be sent back if they are empty."""

    role: Role
    content: Content | None = Field(None, description="Optional if there are tool_calls or a refusal.")
    name: Text | None = None
    reasoning_content: Text | None = Field(None, description="The assistant's reasoning, passed to the chat template.")
    reasoning: Text | None = Field(None, description="The same; one of the two is enough.")
    tool_calls: Annotated[list[CallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Calls of an earlier answer, in an assistant's message."""
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = None
    """The id of the call that a tool's message answers."""
    refusal: Text | None = Field(None, description="Why the assistant did not answer; text for the template.")
    annotations: Annotated[Any, Only([], why="annotations are not supported")] = None
    audio: Annotated[Any, Only(why=_NO_AUDIO)] = None
    function_call: Annotated[Any, Only(why=_NO_FUNCTIONS)] = None

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> ChatMessage:
        check_role(self.role, self.tool_calls, self.tool_call_id)
        parts = self.content if isinstance(self.content, list) else []
        if self.role != "assistant" and (self.refusal or any(part.type == "refusal" for part in parts)):
            problem = "only an assistant's message has one; send text"
            raise PydanticCustomError("refusal", problem, {"within": "refusal"})
        if self.content is None and not self.tool_calls and not self.refusal:
            raise PydanticCustomError("missing", "missing", {"within": "content"})
        return self

    def plain(self) -> RequestMessage:
        """Return the message as the gateway's own request has it."""
        return RequestMessage(
            role=self.role,
            content=content_text(self.content or "") + (self.refusal or ""),
            name=self.name,
            reasoning_content=self.reasoning_content or self.reasoning,
            tool_calls=[call.plain() for call in self.tool_calls] if self.tool_calls else None,
            tool_call_id=self.tool_call_id,
        )


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatCompletionRequest(OpenAIRequest, TemplateFields, PromptEnd):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = Field(None, description="Return the log-probability of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Also return this many most likely tokens; needs logprobs."""
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the answer may call."""
    tool_choice: ChoiceOf[NamedChoice, AllowedChoice] | None = None
    """Whether the answer may call functions (auto, the default), must not, must call any or a named one, or may or must
    call one of a list."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. Default true; a forced answer has one."""
    functions: Annotated[Any, Only([], why=_NO_FUNCTIONS)] = None
    function_call: Annotated[Any, Only("none", "auto", why=_NO_FUNCTIONS)] = None
    modalities: Annotated[Any, Only(["text"], why=_NO_AUDIO)] = None
    audio: Annotated[Any, Only(why=_NO_AUDIO)] = None
    prediction: Annotated[Any, Only(why="predicted outputs are not supported: drafts are made here")] = None
    separate_reasoning: bool | None = None
    """Return the model's reasoning as reasoning_content, not as part of the content. Default true."""
    include_reasoning: bool | None = Field(None, description="False leaves separated reasoning out of the answer.")
    verbosity: Annotated[Any, Only("medium", why="verbosity is not supported")] = None
    web_search_options: Annotated[Any, Only(why="nothing is fetched for a client")] = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs", "set logprobs to true or leave it out")
        return self

    def requests(self, max_prompts: int) -> NamedRequests:
        """Return the gateway's own request."""
        tools = [tool.function for tool in self.tools or []]
        fields = self.common((self.top_logprobs or 0) if self.logprobs else None)
        fields["separate_reasoning"] = self.separate_reasoning is not False
        fields["chat"] = {
            "messages": [message.plain() for message in self.messages],
            "template_values": template_values(self.reasoning_effort, self.chat_template_kwargs),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
        } | tool_fields(tools, self.tool_choice, self.parallel_tool_calls, place="tools[{}].function")
        names = {"chat.messages": "messages", "chat.tools": "tools", "chat.tool_choice": "tool_choice"}
        names |= self.field_names
        return [(validate(ClientRequest, fields, names=names), names)]


ChatFinishWord = Literal["stop", "length", "tool_calls"]


class AssistantMessage(Body):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    """Null if the answer consists only of calls."""
    refusal: None
    reasoning_content: str | None = None
    """The model's reasoning before its answer."""
    reasoning: str | None = None
    """The same under the name that vLLM and OpenRouter use."""
    tool_calls: list[CallMade] | None = None


class ChatChoice(ChoiceEnd):
    """One of the answers."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishWord
    token_ids: list[int] | None = None
    trace: TraceBody | None = None


class ChatCompletion(AnswerHead):
    """Answer to POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobsBody | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(Body):
    """Text that a chunk adds; the first one names the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    """The model's reasoning before its answer."""
    reasoning: str | None = None
    """The same under the name that vLLM and OpenRouter use."""
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(ChoiceEnd):
    """What a chunk adds to one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishWord | None
    token_ids: list[int] | None = None
    trace: TraceBody | None = None


class ChatCompletionChunk(AnswerHead):
    """One event of a streamed chat answer."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    prompt_token_ids: list[int] | None = None
    """Only in the chunk with the role."""


def _finish_word(reason: FinishReason | None, answer: CollectedAnswer) -> ChatFinishWord:
    """Return OpenAI's word for the reason why a chat answer ended."""
    word = finish_word(reason)
    return "tool_calls" if word == "stop" and answer.calls else word


class ChatBuilder(ChoicesBuilder):
    """Builds chat completions and their chunks."""

    id_prefix = "chatcmpl"

    def __init__(self, model: GatewayModel, jobs: Sequence[Job], body: ChatCompletionRequest) -> None:
        super().__init__(model, jobs, body)
        self._returns_reasoning = body.include_reasoning is not False

    def whole(self) -> ChatCompletion:
        """See the base."""
        choices = [
            ChatChoice(
                index=index,
                message=self._message(answer),
                logprobs=chat_logprobs(answer.tokens, self._names),
                finish_reason=_finish_word(answer.finish_reason, answer),
                **self._stopped_by(index, answer.matched_stop),
                **self._ids(answer.tokens),
                **self._trace(index, answer.tokens, answer.trees),
            )
            for index, answer in enumerate(self._answers)
        ]
        more = self._prompt_logprobs(0, self._jobs[0].request.num_prompt_logprobs) | self._prompt_ids(0)
        return ChatCompletion(
            object="chat.completion", choices=choices, usage=UsageBody.of(self._usage), **more, **self._head
        )

    def _choices(self, delta: Delta, answer: CollectedAnswer) -> Iterator[ChatChunkChoice]:
        index, text, tool_calls = delta.choice_index, delta.text, delta.tool_calls
        logprobs = chat_logprobs(delta.tokens, self._names)
        if not answer.begun:
            answer.begun = True
            role = ChatDelta(role="assistant", content="")
            yield ChatChunkChoice(index=index, delta=role, logprobs=None, finish_reason=None)
        more = self._about_tokens(delta)
        if delta.reasoning or text or logprobs is not None or more:
            news = self._reasoning_fields(delta.reasoning)
            if text or not news:
                news["content"] = text
            yield ChatChunkChoice(index=index, delta=ChatDelta(**news), logprobs=logprobs, finish_reason=None, **more)
        if tool_calls:
            answer.calls.extend(tool_calls)
            calls = ChatDelta(tool_calls=[CallDelta.of(call) for call in tool_calls])
            yield ChatChunkChoice(index=index, delta=calls, logprobs=None, finish_reason=None)
        if delta.finish_reason is not None:
            reason = _finish_word(delta.finish_reason, answer)
            more = self._stopped_by(index, delta.matched_stop)
            yield ChatChunkChoice(index=index, delta=ChatDelta(), logprobs=None, finish_reason=reason, **more)

    def _has_tokens(self, choice: ChatChunkChoice) -> bool:
        return choice.delta.role is None

    def _chunk(self, choices: list[Any], **more: Any) -> ChatCompletionChunk:
        if choices and choices[0].delta.role is not None:
            more |= self._prompt_ids(0)
        return ChatCompletionChunk(object="chat.completion.chunk", choices=choices, **more, **self._head)

    def _reasoning_fields(self, text: str) -> dict[str, Any]:
        """Return reasoning under both names that clients look for: DeepSeek's, and that of vLLM from 0.16 on."""
        return {"reasoning_content": text, "reasoning": text} if text and self._returns_reasoning else {}

    def _message(self, answer: CollectedAnswer) -> AssistantMessage:
        text, calls = "".join(answer.text), calls_made(answer.calls)
        more = self._reasoning_fields("".join(answer.reasoning))
        if calls:
            more["tool_calls"] = calls
        return AssistantMessage(role="assistant", content=text or (None if calls else ""), refusal=None, **more)

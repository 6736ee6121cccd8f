"""Requests to POST /v1/responses, OpenAI's newer route for one answer; nothing is stored."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from gateway.core.request import (
    MAX_MESSAGES,
    MAX_TOOLS,
    CallArguments,
    ClientRequest,
    PromptText,
    ReasoningEffort,
    SamplingFields,
    ServingFields,
    Speaker,
    StopFields,
    StrictModel,
    TemplateValues,
    Text,
    Tool,
    ToolCall,
    at_most,
)
from gateway.core.validation import validate
from gateway.openai.fields import (
    ChoiceOf,
    ContentOf,
    Form,
    FormBody,
    GenerationBody,
    HarmlessFields,
    JsonSchema,
    NamedRequests,
    Only,
    check_goes_with,
    content_text,
    list_or,
    template_values,
    tool_fields,
)
from outrider.errors import InvalidRequestError
from outrider.grammar.spec import Grammar, GrammarKind
from outrider.sampling.params import MAX_LOGPROBS

_NOT_STORED = "answers are not stored here: send the whole conversation as input"
_LOGPROBS = "message.output_text.logprobs"


class InputPart(StrictModel):
    """One part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description="Accepted but ignored.")
    cache_control: dict[str, Any] | None = Field(None, description="Accepted but ignored.")
    annotations: Annotated[Any, Only([], why="annotations are not supported")] = None
    logprobs: list[Any] | None = Field(None, description="Accepted but ignored.")


class _ItemHead(StrictModel):
    """Fields that items of an earlier answer have besides their content."""

    id: Text | None = Field(None, description="Accepted but ignored.")
    status: Text | None = Field(None, description="Accepted but ignored.")


class InputMessage(_ItemHead):
    """A message of the conversation, new or as in an earlier answer."""

    type: Literal["message"] | None = None
    role: Speaker
    content: ContentOf[InputPart]
    phase: Text | None = Field(None, description="Accepted but ignored.")


class ReasoningText(StrictModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(_ItemHead):
    """The assistant's reasoning before its next message, as in an earlier answer."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    summary: list[Any] | None = Field(None, description="Accepted but ignored.")
    encrypted_content: Annotated[Any, Only(why="reasoning is not encrypted here")] = None


class InputCall(_ItemHead):
    """A call of a function, as in an earlier answer."""

    type: Literal["function_call"]
    call_id: Annotated[Text, Field(max_length=256)]
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    arguments: CallArguments = Field(description="JSON, as in the answer.")


class InputCallOutput(_ItemHead):
    """What the function returned to the client."""

    type: Literal["function_call_output"]
    call_id: Annotated[Text, Field(max_length=256)] = Field(description="The call that this answers.")
    output: ContentOf[InputPart]


_TAGS = {"reasoning": "@reasoning", "function_call": "@call", "function_call_output": "@output"}


def _item_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return _TAGS.get(kind, "@message") if isinstance(kind, str) else "@message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("@message")]
    | Annotated[InputReasoning, Tag("@reasoning")]
    | Annotated[InputCall, Tag("@call")]
    | Annotated[InputCallOutput, Tag("@output")],
    Discriminator(_item_kind),
]


Input = Annotated[
    Annotated[PromptText, Tag("@text")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("@list")],
    list_or("@text"),
]


class _Function(StrictModel):
    type: Literal["function"]


class FlatTool(Tool, _Function):
    """A function that the answer may call."""


class FlatNamedChoice(_Function):
    """The function that the answer must call."""

    name: Text

    @property
    def allowed(self) -> tuple[str, list[str], str]:
        """The mode (whether one may or must be called), the functions' names, and the field of each name, to format."""
        return "required", [self.name], "tool_choice.name"


class FlatAllowedChoice(StrictModel):
    """The functions of which the answer may or must call one; the model does not see the others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]

    @property
    def allowed(self) -> tuple[str, list[str], str]:
        """See FlatNamedChoice."""
        return self.mode, [one.name for one in self.tools], "tool_choice.tools[{}].name"


class TextFormat(JsonSchema):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _schema_for_its_type(self) -> TextFormat:
        check_goes_with(self.type, "json_schema", self.schema_, "text.format.schema", "schema")
        return self

    @property
    def forms(self) -> list[Form]:
        """The forms that the answer must have; empty if any text will do."""
        if self.type == "text":
            return []
        if self.schema_ is None:
            return [Form("text.format", Grammar(GrammarKind.JSON_OBJECT))]
        return [self.form("text.format.schema")]


class TextConfig(StrictModel):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, Only("medium", why="verbosity is not supported")] = None


class ReasoningConfig(StrictModel):
    """How much the model reasons before it answers."""

    effort: ReasoningEffort | None = None
    """The template's reasoning_effort; none also sets enable_thinking to false."""
    summary: Annotated[Any, Only("auto", why="reasoning is returned as it is, not summed up")] = None
    generate_summary: Annotated[Any, Only("auto", why="reasoning is returned as it is, not summed up")] = None


class ResponsesStreamOptions(StrictModel):
    """Options of a stream."""

    include_obfuscation: Annotated[Any, Only(False, why="streams are not padded")] = None


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
_MAX_INCLUDED = 64
_MAX_METADATA = 16
Metadata = Annotated[
    dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
    Field(max_length=_MAX_METADATA),
    BeforeValidator(at_most(_MAX_METADATA)),
]
"""Metadata within OpenAI's limits, since every answer and some events of a stream repeat it."""


class ResponsesRequest(GenerationBody, FormBody, SamplingFields, ServingFields, StopFields, HarmlessFields):
    """Body of POST /v1/responses."""

    input: Input
    """A text, or the items of a conversation: messages, reasoning, calls and their outputs, in order."""
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Most tokens of the answer, including reasoning. Default: as many as the context allows."""
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: TemplateValues | None = Field(None, description="As in chat completions.")
    metadata: Metadata | None = Field(
        None, description="Returned in the answer, but not used. Keys have at most 64 characters."
    )
    stream_options: ResponsesStreamOptions | None = None
    previous_response_id: Annotated[Any, Only(why=_NOT_STORED)] = None
    conversation: Annotated[Any, Only(why=_NOT_STORED)] = None
    background: Annotated[Any, Only(False, why="answers are not stored here, so none can be fetched later")] = None
    include: Annotated[list[Included], Field(max_length=_MAX_INCLUDED, fail_fast=True)] | None = None
    """What else to return of an answer: the log-probabilities of its text. Some clients always ask for encrypted
    reasoning; it has no effect, since none is encrypted here."""
    client_metadata: dict[str, Any] | None = Field(None, description="Accepted but ignored; Codex sends it.")
    truncation: Annotated[Any, Only("disabled", why="no message is left out of a conversation")] = None
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """Functions that the answer may call."""
    tool_choice: ChoiceOf[FlatNamedChoice, FlatAllowedChoice] | None = None
    """As in chat completions."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. Default true; a forced answer has one."""
    max_tool_calls: Annotated[Any, Only(why="there are no tools that run here")] = None
    prompt: Annotated[Any, Only(why="no prompts are stored here")] = None
    n: Annotated[Any, Only(1, why="a response is one answer")] = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Also return this many most likely tokens; needs message.output_text.logprobs in include."""

    @cached_property
    def forms(self) -> list[Form]:
        """See the base."""
        return [] if self.text is None or self.text.format is None else self.text.format.forms

    @property
    def returns_logprobs(self) -> bool:
        """Whether the answer's text has log-probabilities."""
        return _LOGPROBS in (self.include or ())

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ResponsesRequest:
        if self.top_logprobs and not self.returns_logprobs:
            raise InvalidRequestError("top_logprobs", "needs logprobs", f"add {_LOGPROBS} to include, or leave it out")
        return self

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation for the chat template. Raises InvalidRequestError for too many calls in a row."""
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        thought = ""
        for index, item in enumerate(items):
            if isinstance(item, InputReasoning):
                thought += "".join(part.text for part in item.content or ())
                continue
            about = {"reasoning_content": thought} if thought else {}
            if isinstance(item, InputCall):
                if thought or not found or found[-1]["role"] != "assistant":
                    found.append({"role": "assistant", "content": "", **about})
                calls = found[-1].setdefault("tool_calls", [])
                if len(calls) == MAX_TOOLS:
                    problem = f"follows {MAX_TOOLS} calls without an output, which is the limit"
                    raise InvalidRequestError(f"input[{index}]", problem, "send each output after its call")
                calls.append(ToolCall(id=item.call_id, name=item.name, arguments=item.arguments))
            elif isinstance(item, InputCallOutput):
                found.append({"role": "tool", "content": content_text(item.output), "tool_call_id": item.call_id})
            else:
                about = about if item.role == "assistant" else {}
                found.append({"role": item.role, "content": content_text(item.content), **about})
            thought = ""
        return found

    def requests(self, max_prompts: int) -> NamedRequests:
        """See the base."""
        tools = tool_fields(self.tools or [], self.tool_choice, self.parallel_tool_calls, place="tools[{}]")
        effort = None if self.reasoning is None else self.reasoning.effort
        shared = (*ServingFields.model_fields, *StopFields.model_fields)
        fields: dict[str, Any] = {name: getattr(self, name) for name in shared}
        fields |= {
            "model": self.model,
            "sampling": {name: getattr(self, name) for name in SamplingFields.model_fields}
            | {"num_logprobs": (self.top_logprobs or 0) if self.returns_logprobs else None},
            "max_tokens": self.max_output_tokens,
            "grammar": self.grammar,
            "separate_reasoning": True,
            "chat": tools
            | {
                "messages": self.messages(),
                "template_values": template_values(effort, self.chat_template_kwargs),
            },
        }
        names = {
            "max_tokens": "max_output_tokens",
            "sampling.logit_bias": "logit_bias",
            "grammar": self.grammar_field,
            "chat.messages": "input",
            "chat.tools": "tools",
            "chat.tool_choice": "tool_choice",
        }
        return [(validate(ClientRequest, fields, names=names), names)]

"""POST /v1/responses: OpenAI's newer route for one answer, of which nothing is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from gateway.core.answer import Delta
from gateway.core.catalogue import GatewayModel
from gateway.core.request import (
    MAX_MESSAGES,
    ClientRequest,
    Job,
    PromptText,
    ReasoningEffort,
    SamplingFields,
    ServingFields,
    Speaker,
    StrictModel,
    TemplateValues,
    Text,
)
from gateway.core.validation import validate
from gateway.http.responses import Body, event, json_bytes
from gateway.openai.fields import (
    FormBody,
    Forms,
    GenerationBody,
    HarmlessFields,
    JsonSchema,
    NamedRequests,
    Only,
    RefusalPart,
    check_goes_with,
    part_kind,
    part_text,
    template_values,
    text_or_list,
)
from gateway.openai.generation import ResponseBuilder, SpeculationUsage
from gateway.openai.logprobs import TraceBody
from outrider.grammar.spec import Grammar, GrammarKind
from outrider.protocol.generation import FinishReason, Usage

_NO_TOOLS = "tools are not supported on this route"
_NOT_STORED = "answers are not stored here: send the whole conversation as input"


class InputPart(StrictModel):
    """One part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description="Taken and not used.")
    annotations: Annotated[Any, Only([], why="annotations are not supported")] = None
    logprobs: list[Any] | None = Field(None, description="Taken and not used.")


Part = Annotated[Annotated[InputPart, Tag("@part")] | Annotated[RefusalPart, Tag("@refusal")], Discriminator(part_kind)]


class InputMessage(StrictModel):
    """A message of the conversation, sent anew or as an earlier answer had it."""

    type: Literal["message"] | None = None
    role: Speaker
    content: Annotated[
        Annotated[Text, Tag("@text")]
        | Annotated[list[Part], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("@list")],
        Discriminator(text_or_list),
    ]
    id: Text | None = Field(None, description="Taken and not used.")
    status: Text | None = Field(None, description="Taken and not used.")
    phase: Text | None = Field(None, description="Taken and not used.")


class ReasoningText(StrictModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(StrictModel):
    """What the assistant thought before its next message, as an earlier answer had it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    summary: list[Any] | None = Field(None, description="Taken and not used.")
    encrypted_content: Annotated[Any, Only(why="reasoning is not encrypted here")] = None
    id: Text | None = Field(None, description="Taken and not used.")
    status: Text | None = Field(None, description="Taken and not used.")


def _item_kind(value: Any) -> str:
    return "@reasoning" if isinstance(value, dict) and value.get("type") == "reasoning" else "@message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("@message")] | Annotated[InputReasoning, Tag("@reasoning")], Discriminator(_item_kind)
]


Input = Annotated[
    Annotated[PromptText, Tag("@text")]
    | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("@list")],
    Discriminator(text_or_list),
]


class TextFormat(JsonSchema):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]

    @model_validator(mode="after")
    def _schema_for_its_type(self) -> TextFormat:
        check_goes_with(self.type, "json_schema", self.schema_, "text.format.schema", "schema")
        return self

    @property
    def forms(self) -> Forms:
        """What the answer must be; none where any text will do."""
        if self.type == "text":
            return []
        if self.schema_ is None:
            return [("text.format", Grammar(GrammarKind.JSON_OBJECT))]
        return [("text.format.schema", self.grammar())]


class TextConfig(StrictModel):
    """What the answer's text is like."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, Only("medium", why="verbosity is not supported")] = None


class ReasoningConfig(StrictModel):
    """How much the model thinks before it answers."""

    effort: ReasoningEffort | None = Field(
        None, description="The template's reasoning_effort; none sets enable_thinking to false, too."
    )
    summary: Annotated[Any, Only("auto", why="reasoning is told as it is, not summed up")] = None
    generate_summary: Annotated[Any, Only("auto", why="reasoning is told as it is, not summed up")] = None


class ResponsesStreamOptions(StrictModel):
    """What a stream is like."""

    include_obfuscation: Annotated[Any, Only(False, why="streams are not padded")] = None


class ResponsesRequest(GenerationBody, FormBody, SamplingFields, ServingFields, HarmlessFields):
    """Body of POST /v1/responses."""

    input: Input = Field(description="A text, or the items of a conversation: messages and reasoning, oldest first.")
    instructions: Text | None = Field(None, description="A system message before the input.")
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="Most tokens of the answer, reasoning included. Default: what the context leaves."
    )
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: TemplateValues | None = Field(None, description="As in chat completions.")
    stream_options: ResponsesStreamOptions | None = None
    previous_response_id: Annotated[Any, Only(why=_NOT_STORED)] = None
    conversation: Annotated[Any, Only(why=_NOT_STORED)] = None
    background: Annotated[Any, Only(False, why="answers are not stored here, so none can be fetched later")] = None
    include: Annotated[Any, Only([], why="nothing more is told of an answer")] = None
    truncation: Annotated[Any, Only("disabled", why="no message is left out of a conversation")] = None
    tools: Annotated[Any, Only([], why=_NO_TOOLS)] = None
    tool_choice: Annotated[Any, Only("none", "auto", why=_NO_TOOLS)] = None
    parallel_tool_calls: bool | None = Field(None, description="Without effect: there are no tools.")
    max_tool_calls: Annotated[Any, Only(why=_NO_TOOLS)] = None
    prompt: Annotated[Any, Only(why="no prompts are stored here")] = None
    top_logprobs: Annotated[Any, Only(0, why="log-probabilities are told by /v1/chat/completions")] = None

    @cached_property
    def forms(self) -> Forms:
        """See the base."""
        return [] if self.text is None or self.text.format is None else self.text.format.forms

    @property
    def is_strict(self) -> bool:
        """See the base."""
        return self.text is not None and self.text.format is not None and bool(self.text.format.strict)

    def messages(self) -> list[dict[str, Any]]:
        """The conversation as the chat template takes it."""
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        items = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        thought = ""
        for item in items:
            if isinstance(item, InputReasoning):
                thought += "".join(part.text for part in item.content or ())
                continue
            content = item.content if isinstance(item.content, str) else "".join(map(part_text, item.content))
            message = {"role": item.role, "content": content}
            found.append(message | ({"reasoning_content": thought} if thought and item.role == "assistant" else {}))
            thought = ""
        return found

    def requests(self, max_prompts: int) -> NamedRequests:
        """See the base."""
        effort = None if self.reasoning is None else self.reasoning.effort
        fields: dict[str, Any] = {name: getattr(self, name) for name in ServingFields.model_fields}
        fields |= {
            "model": self.model,
            "sampling": {name: getattr(self, name) for name in SamplingFields.model_fields},
            "max_tokens": self.max_output_tokens,
            "grammar": self.grammar,
            "separate_reasoning": True,
            "chat": {
                "messages": self.messages(),
                "template_values": template_values(effort, self.chat_template_kwargs),
            },
        }
        names = {
            "max_tokens": "max_output_tokens",
            "sampling.logit_bias": "logit_bias",
            "grammar": self.grammar_field,
            "chat.messages": "input",
        }
        return [(validate(ClientRequest, fields, names=names), names)]


ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputPart(Body):
    """A text of an item."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    """Of an output_text; empty."""
    logprobs: list[Any] | None = None
    """Of an output_text; empty."""


class OutputItem(Body):
    """What the model thought, or its answer."""

    type: Literal["reasoning", "message"]
    id: str
    status: ItemStatus
    content: list[OutputPart]
    role: Literal["assistant"] | None = None
    """Of a message."""
    summary: list[Any] | None = None
    """Of reasoning; empty."""


class IncompleteDetails(Body):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(Body):
    """Of the input's tokens."""

    cached_tokens: int


class OutputTokensDetails(Body):
    """Of the output's tokens."""

    reasoning_tokens: int


class ResponseUsage(Body):
    """What a response used."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    outrider: SpeculationUsage


class ResponseBody(Body):
    """Answer to POST /v1/responses."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: ItemStatus
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    """The form of the text, as it was asked for."""
    tool_choice: Literal["none", "auto"]
    tools: list[Any]
    top_p: float
    truncation: Literal["disabled"]
    trace: TraceBody | None = None


class ResponseEvent(Body):
    """One event of a streamed response; which fields it has follows from its type, which is the event's name, too."""

    type: str
    sequence_number: int
    response: ResponseBody | None = None
    output_index: int | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputPart | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[Any] | None = None


class ResponsesBuilder(ResponseBuilder):
    """Builds a response, or the events of one: of its items, reasoning and message, at most one is open."""

    id_prefix = "resp"
    stream_end = b""

    def __init__(self, model: GatewayModel, jobs: Sequence[Job], body: ResponsesRequest) -> None:
        super().__init__(model, jobs, body)
        self._body = body
        self._num_events = 0
        self._items: list[OutputItem] = []
        """Of a stream: those that were begun."""
        sampling = jobs[0].request.sampling
        self._fields: dict[str, Any] = {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": model.name,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": self._format()},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": sampling.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def whole(self) -> ResponseBody:
        """See the base."""
        status, answer = self._status, self._answers[0]
        answered = any(answer.text) or not any(answer.reasoning)
        items = [self._item("reasoning", "completed" if answered else status)] if any(answer.reasoning) else []
        if answered:
            items.append(self._item("message", status))
        return self._response(status, items)

    def chunks(self, delta: Delta) -> Iterator[ResponseEvent]:
        """See the base. What was streamed is kept: the last events tell all of it again."""
        if not self._num_events:
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._response("in_progress", []))
        self.collect(delta)
        if delta.reasoning:
            yield from self._more("reasoning", delta.reasoning)
        if delta.text:
            yield from self._more("message", delta.text)
        if delta.finish_reason is not None:
            if not self._items:
                yield from self._begin("message")
            status = self._status
            yield from self._end(status)
            yield self._event(f"response.{status}", response=self._response(status, self._items))

    def event(self, body: Any) -> bytes:
        """See the base."""
        return b"event: " + str(body.type).encode() + b"\n" + event(json_bytes(body))

    def _more(self, kind: Literal["reasoning", "message"], text: str) -> Iterator[ResponseEvent]:
        if not self._items or self._items[-1].type != kind:
            if self._items:
                yield from self._end("completed")
            yield from self._begin(kind)
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{_part(kind, '').type}.delta", **self._place, delta=text, **more)

    def _begin(self, kind: Literal["reasoning", "message"]) -> Iterator[ResponseEvent]:
        empty = self._item(kind, "in_progress").model_copy(update={"content": []})
        self._items.append(empty)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=empty)
        yield self._event("response.content_part.added", **self._place, part=_part(kind, ""))

    def _end(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """The last events of the item that is open."""
        kind = self._items[-1].type
        item = self._items[-1] = self._item(kind, status)
        (part,) = item.content
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield self._event(f"response.{part.type}.done", **self._place, text=part.text, **more)
        yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _event(self, name: str, **fields: Any) -> ResponseEvent:
        made = ResponseEvent(type=name, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return made

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1].id, "output_index": len(self._items) - 1, "content_index": 0}

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._answers[0].finish_reason is FinishReason.LENGTH else "completed"

    def _item(self, kind: Literal["reasoning", "message"], status: ItemStatus) -> OutputItem:
        """An item with what there is of its text."""
        answer, request_id = self._answers[0], self._fields["id"]
        if kind == "message":
            content = [_part(kind, "".join(answer.text))]
            return OutputItem(type=kind, id=f"msg-{request_id}", status=status, content=content, role="assistant")
        content = [_part(kind, "".join(answer.reasoning))]
        return OutputItem(type=kind, id=f"rs-{request_id}", status=status, content=content, summary=[])

    def _response(self, status: ItemStatus, items: Sequence[OutputItem]) -> ResponseBody:
        answer, ended = self._answers[0], status != "in_progress"
        reason = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        return ResponseBody(
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            output=list(items),
            usage=_usage(self._usage) if ended else None,
            incomplete_details=reason,
            **self._fields,
            **(self._trace(0, answer.tokens, answer.trees) if ended else {}),
        )

    def _format(self) -> dict[str, Any]:
        asked = None if self._body.text is None else self._body.text.format
        return {"type": "text"} if asked is None else asked.model_dump(by_alias=True, exclude_unset=True)


def _part(kind: Literal["reasoning", "message"], text: str) -> OutputPart:
    if kind == "reasoning":
        return OutputPart(type="reasoning_text", text=text)
    return OutputPart(type="output_text", text=text, annotations=[], logprobs=[])


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.cached_prompt_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.num_reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        outrider=SpeculationUsage.of(usage),
    )

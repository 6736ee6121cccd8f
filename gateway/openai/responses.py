"""Answers to POST /v1/responses: items, whole or as named events."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from gateway.core.answer import Delta, Token
from gateway.core.catalogue import GatewayModel
from gateway.core.request import Job
from gateway.core.tool_parser import ToolCallDelta
from gateway.http.responses import Body, ErrorDetail, error_detail, event, json_bytes
from gateway.openai.generation import CompletionTokensDetails, PromptTokensDetails, ResponseBuilder, SpeculationUsage
from gateway.openai.logprobs import TokenLogprob, TokenNames, TraceBody, chat_logprobs
from gateway.openai.responses_request import ResponsesRequest
from outrider.errors import OutriderError
from outrider.protocol.generation import FinishReason, Usage

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputPart(Body):
    """A text of an item."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    """For output_text; empty."""
    logprobs: list[TokenLogprob] | None = None
    """For output_text; empty unless included."""


ItemKind = Literal["reasoning", "message", "function_call"]


class OutputItem(Body):
    """The model's reasoning, its answer, or its call of a function."""

    type: ItemKind
    id: str
    status: ItemStatus
    content: list[OutputPart] | None = None
    """For reasoning and messages."""
    role: Literal["assistant"] | None = None
    """For messages."""
    summary: list[Any] | None = None
    """For reasoning; empty."""
    call_id: str | None = None
    """For calls: the id that their output names."""
    name: str | None = None
    """For calls: name of the function."""
    arguments: str | None = None
    """For calls; JSON."""


class IncompleteDetails(Body):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"]


class ResponseUsage(Body):
    """What a response used."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
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
    """The form of the text, as requested."""
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"]
    trace: TraceBody | None = None


class ResponseEvent(Body):
    """One event of a streamed response; its fields depend on its type, which is also the event's name."""

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
    logprobs: list[TokenLogprob] | None = None
    arguments: str | None = None
    code: str | None = None
    """For errors, as are the last three fields."""
    message: str | None = None
    param: str | None = None
    error: ErrorDetail | None = None
    """The error again, in the form of all routes."""


@dataclass(slots=True)
class _Item:
    """An item so far."""

    kind: ItemKind
    id: str
    call: ToolCallDelta | None
    """The first delta of a call; None for other kinds of items."""
    names: TokenNames
    pieces: list[str] = field(default_factory=list)
    """Pieces of the item's text, or of its arguments."""
    tokens: list[Token] = field(default_factory=list)
    """The tokens of a message, if their log-probabilities are returned."""
    num_sent: int = 0
    """How many of them were streamed."""

    def body(self, status: ItemStatus) -> OutputItem:
        """Return the item as clients see it."""
        text = "".join(self.pieces)
        if self.call is not None:
            about: dict[str, Any] = {"call_id": self.call.id, "name": self.call.name, "arguments": text}
        elif self.kind == "message":
            about = {"content": [_part(self.kind, text, self.logprobs())], "role": "assistant"}
        else:
            about = {"content": [_part(self.kind, text)], "summary": []}
        return OutputItem(type=self.kind, id=self.id, status=status, **about)

    def logprobs(self, start: int = 0) -> list[TokenLogprob]:
        """Return the log-probabilities of the tokens from `start` on."""
        logprobs = chat_logprobs(self.tokens[start:], self.names)
        return [] if logprobs is None else logprobs.content

    def empty(self) -> OutputItem:
        """Return the item as clients see it when it begins."""
        body = _Item(self.kind, self.id, self.call, self.names).body("in_progress")
        return body if self.call is not None else body.model_copy(update={"content": []})


_ID_PREFIXES: dict[ItemKind, str] = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_CONTENTS = {"reasoning": "reasoning_text", "message": "output_text", "function_call": "function_call_arguments"}
"""Names of an item's content in the names of events; for an item with parts, also the type of its part."""


class _ItemPiece(NamedTuple):
    """What a delta adds to one item."""

    kind: ItemKind
    text: str
    """A piece of text or arguments."""
    call: ToolCallDelta | None = None
    """The call of the arguments."""
    start: int = 0
    """Where a message's piece begins and ends among the characters of the answer's tokens."""
    end: float = 0


class ResponsesBuilder(ResponseBuilder):
    """Builds a response or its events. Only its last item is open."""

    id_prefix = "resp"
    stream_end = b""

    def __init__(self, model: GatewayModel, jobs: Sequence[Job], body: ResponsesRequest) -> None:
        super().__init__(model, jobs, body)
        self._num_events = 0
        self._items: list[_Item] = []
        """Items that have begun."""
        self._returns_logprobs = body.returns_logprobs
        self._names = TokenNames(self._tokenizer)
        self._waiting: deque[Token] = deque()
        """Tokens not yet assigned to a message; those of reasoning and calls are dropped."""
        self._waiting_from = 0
        """Number of characters in the tokens before `_waiting`."""
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
            "text": {"format": _as_sent(body.text and body.text.format) or {"type": "text"}},
            "tool_choice": _as_sent(body.tool_choice) or "auto",
            "tools": [_as_sent(tool) for tool in body.tools or ()],
            "top_p": sampling.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def collect(self, delta: Delta) -> None:
        """See the base."""
        super().collect(delta)
        for piece in self._pieces(delta):
            self._add(piece)

    def whole(self) -> ResponseBody:
        """See the base."""
        return self._response(self._status)

    def chunks(self, delta: Delta) -> Iterator[ResponseEvent]:
        """See the base. What was streamed is kept, since the last events repeat all of it."""
        if not self._num_events:
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._response("in_progress"))
        super().collect(delta)
        for piece in self._pieces(delta):
            yield from self._more(piece)
        if delta.finish_reason is not None:
            status = self._status
            yield from self._end(len(self._items) - 1, status)
            yield self._event(f"response.{status}", response=self._response(status))

    def event(self, body: Any) -> bytes:
        """See the base."""
        return b"event: " + str(body.type).encode() + b"\n" + event(json_bytes(body))

    def error_event(self, error: OutriderError) -> bytes:
        """See the base. Clients of this route distinguish events by type, and accept none without a type."""
        detail = error_detail(error)
        fields = {"code": detail.code, "message": detail.message, "param": detail.param, "error": detail}
        return self.event(self._event("error", **fields))

    def _pieces(self, delta: Delta) -> Iterator[_ItemPiece]:
        """Yield what a delta adds. The last piece of an answer that ends with a message, or has no item, is empty."""
        self._waiting.extend(delta.tokens if self._returns_logprobs else ())
        start = delta.parts_start
        if delta.reasoning:
            yield _ItemPiece("reasoning", delta.reasoning)
        for part in delta.parts:
            if isinstance(part, ToolCallDelta):
                yield _ItemPiece("function_call", part.arguments, part)
            else:
                yield _ItemPiece("message", part.text, None, start + part.start, start + part.end)
        if delta.finish_reason is not None and (not self._items or self._items[-1].kind == "message"):
            yield _ItemPiece("message", "", None, start + delta.text_from, math.inf)

    def _add(self, piece: _ItemPiece) -> bool:
        """Keep a piece and, for a message, its tokens. Return whether it begins an item."""
        kind, call = piece.kind, piece.call
        begins = not self._items or self._items[-1].kind != kind or (call is not None and bool(call.id))
        if begins:
            number = sum(item.kind == kind for item in self._items)
            item_id = f"{_ID_PREFIXES[kind]}-{self._fields['id']}" + (f"-{number}" if number else "")
            self._items.append(_Item(kind, item_id, call, self._names))
        item = self._items[-1]
        item.pieces.append(piece.text)
        while kind == "message" and self._waiting and self._waiting_from < piece.end:
            token = self._waiting.popleft()
            start, self._waiting_from = self._waiting_from, self._waiting_from + len(token.text)
            # A token without text of its own begins a character, and so belongs to what follows it.
            if start >= piece.start or self._waiting_from > piece.start:
                item.tokens.append(token)
        return begins

    def _more(self, piece: _ItemPiece) -> Iterator[ResponseEvent]:
        kind = piece.kind
        if self._add(piece):
            index = len(self._items) - 1
            if index:
                yield from self._end(index - 1, "completed")
            yield self._event("response.output_item.added", output_index=index, item=self._items[-1].empty())
            if piece.call is None:
                yield self._event("response.content_part.added", **self._place(index), part=_part(kind, ""))
        item = self._items[-1]
        news = item.logprobs(item.num_sent)
        item.num_sent = len(item.tokens)
        if piece.text or news:
            more: dict[str, Any] = {"logprobs": news} if kind == "message" else {}
            place = self._place(len(self._items) - 1)
            yield self._event(f"response.{_CONTENTS[kind]}.delta", **place, delta=piece.text, **more)

    def _end(self, index: int, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Yield the last events of an item."""
        item = self._items[index]
        kind, body, place = item.kind, item.body(status), self._place(index)
        name = f"response.{_CONTENTS[kind]}.done"
        if body.content is None:
            yield self._event(name, **place, arguments=body.arguments)
        else:
            (part,) = body.content
            more = {"logprobs": part.logprobs} if kind == "message" else {}
            yield self._event(name, **place, text=part.text, **more)
            yield self._event("response.content_part.done", **place, part=part)
        yield self._event("response.output_item.done", output_index=index, item=body)

    def _event(self, name: str, **fields: Any) -> ResponseEvent:
        made = ResponseEvent(type=name, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return made

    def _place(self, index: int) -> dict[str, Any]:
        item = self._items[index]
        place = {"item_id": item.id, "output_index": index}
        return place if item.call is not None else place | {"content_index": 0}

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._answers[0].finish_reason is FinishReason.LENGTH else "completed"

    def _response(self, status: ItemStatus) -> ResponseBody:
        """Return the response and its items; `status` is also that of the last item."""
        items = [item.body("completed" if item is not self._items[-1] else status) for item in self._items]
        answer, ended = self._answers[0], status != "in_progress"
        reason = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        return ResponseBody(
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            output=items,
            usage=_usage(self._usage) if ended else None,
            incomplete_details=reason,
            **self._fields,
            **(self._trace(0, answer.tokens, answer.trees) if ended else {}),
        )


def _as_sent(value: Any) -> Any:
    """Return a part of the request as the client sent it."""
    return value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, BaseModel) else value


def _part(kind: ItemKind, text: str, logprobs: Sequence[TokenLogprob] = ()) -> OutputPart:
    about: dict[str, Any] = {"annotations": [], "logprobs": list(logprobs)} if kind == "message" else {}
    return OutputPart(type=_CONTENTS[kind], text=text, **about)


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_prompt_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.num_reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        outrider=SpeculationUsage.of(usage),
    )

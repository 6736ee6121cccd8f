"""A request: its fields and their limits, defined once for both doors, and the job that it becomes for the model.

Values are strict: a string is never taken for a number, nor a boolean for an integer. Unknown fields are refused
unless they are null. `None` means the default everywhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from msgspec.structs import replace
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.core.json_size import MAX_MEMBERS, json_excess
from gateway.core.reasoning import ReasoningStart
from gateway.core.tool_parser import ToolCalls
from outrider.errors import InvalidRequestError
from outrider.grammar.spec import MAX_DEPTH, Grammar, GrammarKind
from outrider.protocol.generation import GenerationRequest
from outrider.sampling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_TOKEN_IDS

MAX_CHOICES = 16
MAX_STOP_STRINGS = 64
MAX_MESSAGES = 4096
MAX_BAD_WORDS = 64
MAX_TOOLS = 128
MAX_TEMPLATE_VALUES_BYTES = 16384
_TEMPLATE_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"})
"""Names of template values that have fields of their own, or that clients cannot set."""
MAX_PROMPT_TOKENS = 1 << 20
"""More than any context; longer lists are refused before they take the event loop's time."""

_IDENTIFIER = re.compile(r"[A-Za-z0-9_.-]+")


class StrictModel(BaseModel):
    """Base of everything that a client may send. A field's meaning is the docstring below it, or its description."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, data: Any) -> Any:
        # A finding for each of a million unknown fields would hold the event loop for seconds; one is enough to refuse.
        if not isinstance(data, dict):
            return data
        names = [field.alias or name for name, field in cls.model_fields.items()]
        known = {name: data[name] for name in names if name in data}
        # Clients send parts of an answer back with all fields that their release knows: null asks for nothing.
        unknown = next((name for name, value in data.items() if value is not None and name not in known), None)
        return known if unknown is None else known | {unknown: None}


def _encodable(text: str) -> str:
    # JSON and Python can carry half of a surrogate pair, UTF-8 and the tokenizer cannot.
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PydanticCustomError(
            "lone_surrogate",
            "holds a lone surrogate at character {position}, which is not Unicode text; send valid UTF-8",
            {"position": error.start},
        ) from None
    return text


def at_most(limit: int) -> Callable[[Any], Any]:
    """Return a validator that refuses an object of more than `limit` members before it looks at them.

    Each of them may be wrong, every finding costs time, and pydantic's `fail_fast` is for lists alone.
    """

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            about = {"length": len(value), "limit": limit}
            raise PydanticCustomError(
                "at_most", "{length} entries, over the limit of {limit}; send at most {limit}", about
            )
        return value

    return check


def _integer_keys(value: Any) -> Any:
    # JSON writes the keys of an object as strings.
    if not isinstance(value, dict):
        return value
    return {
        int(k) if isinstance(k, str) and k.isascii() and k.isdigit() and len(k) < 12 else k: v for k, v in value.items()
    }


def _template_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return values for a chat template, after checking their names, size and text."""
    for name in values:
        if not name.isidentifier() or len(name) > 64 or name in _TEMPLATE_NAMES:
            raise PydanticCustomError(
                "template_values",
                "{name} is not a valid name for a template's value; use at most 64 letters, digits and _, and none of "
                "{taken}",
                {"name": repr(name[:80]), "taken": ", ".join(sorted(_TEMPLATE_NAMES))},
            )
    try:
        size = len(json.dumps(values, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError):
        raise PydanticCustomError(
            "template_values", "holds a value that JSON cannot represent; send JSON values"
        ) from None
    if size > MAX_TEMPLATE_VALUES_BYTES:
        raise PydanticCustomError(
            "template_values",
            "{size} bytes of JSON, over the limit of {limit}; send less",
            {"size": size, "limit": MAX_TEMPLATE_VALUES_BYTES},
        )
    return values


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIdList = Annotated[list[TokenId], Field(min_length=1, max_length=MAX_PROMPT_TOKENS, fail_fast=True)]
PromptText = Annotated[Text, Field(min_length=1)]
StopString = Annotated[Text, Field(min_length=1, max_length=256)]
StopStringList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
StopStrings = Annotated[
    StopStringList,
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value,
        json_schema_input_type=StopString | StopStringList,
    ),
]
LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIAS),
    BeforeValidator(_integer_keys),
    BeforeValidator(at_most(MAX_LOGIT_BIAS)),
]


TemplateValues = Annotated[dict[str, Any], Field(max_length=64), AfterValidator(_template_values)]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class SamplingFields(StrictModel):
    """How tokens are chosen."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Divides the logits; 0 is greedy. Default 1."""
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Keep the smallest set of most likely tokens whose total probability reaches this; 0 keeps one."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Keep tokens whose probability is at least this fraction of the most likely token's."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """Seed of the random numbers: the same request with the same seed gives the same tokens, apart from rounding."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted once from the logit of every token that is in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from a token's logit for each time that it is in the output."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    """Divides positive and multiplies negative logits of tokens in the prompt or output."""
    logit_bias: LogitBias | None = Field(None, description="Maps token ids to numbers that are added to their logits.")


class StopFields(StrictModel):
    """How many answers there are, and what ends them."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = Field(None, description="Answers per prompt. Default 1.")
    stop: StopStrings | None = Field(None, description="An answer ends before any of these strings.")
    include_stop_str_in_output: bool | None = None
    """End the text with the stop string that ended the answer, not before it."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text. Default true; with false they are in the text, except the one that ends the
    answer."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    """Tokens that end an answer; they are not part of its text."""
    ignore_eos: bool | None = Field(None, description="Go on past the end-of-sequence token.")
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Fewest tokens per answer: no token or string ends it earlier. Default 0."""
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    """Texts that an answer must not contain, with or without a space before them: it never has their tokens in
    sequence."""


class ServingFields(StrictModel):
    """How a request is served, whatever it asks for."""

    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Requests with a lower number are served earlier. Default 0."""
    cache_salt: Annotated[Text, Field(max_length=256)] | None = None
    """Share cached prefixes and n-grams only with requests of the same API key and the same salt."""
    skip_prefix_cache: bool | None = Field(
        None, description="Compute the whole prompt, even if parts of it are cached."
    )
    speculation: Literal["on", "off"] | None = None
    """Whether drafts may be used. The distribution of answers is the same; in 16 bits, rounding may change the text
    where two tokens are almost equally likely."""
    trace: bool | None = None
    """Return, for each round, the tree that was verified and where each token came from."""


class OutputFields(ServingFields, StopFields):
    """Fields of a request besides its prompt and its sampling."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Most tokens per answer. Default: as many as the context allows."""


class RequestSampling(SamplingFields):
    """How tokens are chosen, and how many log-probabilities are returned."""

    num_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class PromptEnd(StrictModel):
    """Where the prompt made from a conversation ends."""

    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of an answer, not with the last message. Default true."""
    continue_final_message: bool | None = None
    """End the prompt inside the last message, which the answer then continues."""

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt", "does not go with continue_final_message", "set it to false or leave it out"
            )
        return self


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    # Breadth first with a list of our own, so that depth costs no stack here; in a template, it would.
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for outer in level
            for child in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(child, dict | list)
        ]
        if not level:
            return value
    raise PydanticCustomError(
        "depth", "is nested over {limit} levels; move inner schemas to $defs and use $ref", {"limit": MAX_DEPTH}
    )


def _identifier(name: str) -> str:
    if not _IDENTIFIER.fullmatch(name):
        problem = "holds more than letters, digits, underscores, hyphens and dots; rename the function"
        raise PydanticCustomError("identifier", problem)
    return name


def _parsable(arguments: str) -> str:
    # Templates get the object that this JSON stands for.
    if len(arguments) > MAX_MEMBERS and (excess := json_excess(arguments.encode(), MAX_MEMBERS)):
        problem = "holds {number} {what}, over the limit of {limit}; send at most {limit}"
        raise PydanticCustomError("arguments", problem, dict(zip(("number", "limit", "what"), excess, strict=True)))
    return arguments


CallArguments = Annotated[Text, AfterValidator(_parsable)]
"""The arguments of an earlier call: JSON, as the model wrote it."""


class Tool(StrictModel):
    """A function that the client can call for the model."""

    name: Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_identifier)]
    """Letters, digits, underscores, hyphens and dots."""
    description: Text | None = Field(None, description="What it does, for the model.")
    parameters: Annotated[dict[str, Any], AfterValidator(_flat)] | None = None
    """A JSON schema of its arguments. Default: no arguments."""
    strict: bool | None = None
    """In the formats hermes, gemma4 and json, also restrict calls that the model chooses to make to the schema; forced
    calls are restricted anyway, where possible."""

    @property
    def arguments_schema(self) -> dict[str, Any]:
        """A JSON schema of the tool's arguments."""
        return {"type": "object", "properties": {}} if self.parameters is None else self.parameters


class ToolCall(StrictModel):
    """A call in an earlier answer."""

    id: Annotated[Text, Field(max_length=256)] = ""
    name: Annotated[Text, Field(min_length=1, max_length=256)]
    arguments: CallArguments = ""


def check_role(role: str, tool_calls: Sequence[object] | None, tool_call_id: str | None) -> None:
    """Raise PydanticCustomError for fields about tools in a message of another role."""
    if tool_calls and role != "assistant":
        problem = "only an assistant's message has them; leave them out"
        raise PydanticCustomError("tool_calls", problem, {"within": "tool_calls"})
    if (tool_call_id is not None) != (role == "tool"):
        problem = "is required in messages of role tool, where it names the call that they answer; send it only there"
        raise PydanticCustomError("tool_call_id", problem, {"within": "tool_call_id"})


_SpeakerName = Literal["system", "developer", "user", "assistant"]
# Templates know no developer: it is a newer name of what they call system.
_AsSystem = AfterValidator(lambda role: "system" if role == "developer" else role)
Speaker = Annotated[_SpeakerName, _AsSystem]
"""Roles of messages where answers of tools are not messages."""
Role = Annotated[Literal[_SpeakerName, "tool"], _AsSystem]
"""Roles of messages."""


class RequestMessage(StrictModel):
    """One message of a conversation."""

    role: Role
    content: Text
    name: Text | None = None
    reasoning_content: Text | None = None
    """What an assistant thought before it said this."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    """The calls in an assistant's message."""
    tool_call_id: Annotated[Text, Field(max_length=256)] | None = None
    """The call that a tool's message answers."""

    @model_validator(mode="after")
    def _fields_of_its_role(self) -> Self:
        check_role(self.role, self.tool_calls, self.tool_call_id)
        return self


class Chat(PromptEnd):
    """A conversation, oldest message first, and the tools that the answer may call."""

    messages: Annotated[list[RequestMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    template_values: TemplateValues = Field(default_factory=dict)
    """Further values for the chat template, by name."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = []
    tool_choice: Literal["auto", "none", "required"] = "auto"
    tool_name: str | None = None
    """The one tool that must be called, if any; goes with "required"."""
    parallel_tool_calls: bool = True
    """Whether an answer may hold several calls."""

    @property
    def size(self) -> int:
        """About how many characters a template makes of the messages."""
        texts = sum(64 + len(message.content) + len(message.reasoning_content or "") for message in self.messages)
        calls = (call for message in self.messages for call in message.tool_calls or ())
        return texts + sum(64 + len(call.name) + len(call.arguments) for call in calls)

    @property
    def offered(self) -> list[Tool]:
        """Tools that the answer may call."""
        if self.tool_choice == "none":
            return []
        return [tool for tool in self.tools if self.tool_name in (None, tool.name)]

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.tool_choice == "required"


_ENDS_COMPLETE = ("cannot be combined with structured output, which ends where it is complete", "leave it out")
_NOT_WITH_A_FORM = {
    "ignore_eos": _ENDS_COMPLETE,
    "min_tokens": _ENDS_COMPLETE,
    "bad_words": ("cannot be combined with structured output, which may need them", "leave them out"),
}


class ClientRequest(OutputFields):
    """A request with exactly one of `prompt`, `prompt_token_ids` and `chat`."""

    model: Text | None = None
    prompt: PromptText | None = None
    prompt_token_ids: TokenIdList | None = None
    chat: Chat | None = None
    sampling: RequestSampling = RequestSampling()
    grammar: Grammar | None = None
    """The grammar that each answer must fit; `check_grammar` has passed it."""
    num_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    default_max_tokens: int | None = None
    """Most tokens per answer without `max_tokens`, as far as the context has room; None for all of the room."""
    separate_reasoning: bool = False
    """Whether reasoning is separated from the answer to a conversation."""
    prompt_only: bool = False
    """Whether no answer is wanted; `max_tokens` is then 1, the least that verify commits, and that token is dropped."""

    @model_validator(mode="after")
    def _one_input(self) -> ClientRequest:
        if sum(x is not None for x in (self.prompt, self.prompt_token_ids, self.chat)) != 1:
            raise InvalidRequestError("prompt", "exactly one of prompt, prompt_token_ids and chat is needed", "set one")
        if self.grammar is not None:
            is_json = self.grammar.kind in (GrammarKind.JSON_OBJECT, GrammarKind.JSON_SCHEMA)
            if self.chat is not None and self.chat.offered and not is_json:
                raise InvalidRequestError(
                    "grammar", "only JSON goes with tools", "set tool_choice to none or leave it out"
                )
            for name, problem in _NOT_WITH_A_FORM.items():
                if getattr(self, name):
                    raise InvalidRequestError(name, *problem)
        if self.min_tokens and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = self.max_tokens
            raise InvalidRequestError(
                "min_tokens", f"{self.min_tokens} is more than the limit of {limit} tokens", f"send at most {limit}"
            )
        return self


@dataclass(frozen=True, slots=True)
class Job:
    """A request that the served model can run: `n` answers to one tokenized prompt."""

    request: GenerationRequest
    """The request for all answers; `answer` makes the one for a single answer."""
    n: int
    stop: tuple[str, ...]
    arrived: float
    """time.monotonic() when the request came in, in seconds."""
    grammar_field: str = ""
    """The door's name for the field with the grammar; empty if it is verify's name."""
    grammar_fix: str = ""
    """Advice to the client if verify refuses a grammar that was made from its fields; empty if it sent the grammar."""
    loose_grammar: Grammar | None = None
    """Used in place of a grammar that verify cannot compile; None if such a grammar is the client's fault."""
    keeps_stop: bool = False
    """Whether the text includes the stop string that ended it."""
    skips_special: bool = True
    """Whether special tokens are left out of the text."""
    shown_tokens: frozenset[str] = frozenset()
    """Special tokens that are part of the text all the same: marks of reasoning and of calls."""
    prompt_only: bool = False
    """Whether no answer is wanted: the one token that verify commits is dropped."""
    reasoning: ReasoningStart | None = None
    """How reasoning is separated from the answers; None if everything is their text."""
    tool_calls: ToolCalls | None = None
    """How calls are found in the answers; None if the answers are only text."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt."""
        return self.request.prompt_token_ids

    def answer(self, choice_index: int) -> GenerationRequest:
        """Return the request to verify for one of the answers."""
        request_id = f"{self.request.request_id}-{choice_index}"
        sampling = replace(self.request.sampling, choice_index=choice_index)
        return replace(self.request, request_id=request_id, sampling=sampling)

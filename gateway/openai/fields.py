"""Fields shared by OpenAI's requests: streaming, forms of answers, choices of tools, and fields without effect."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import BaseModel, Discriminator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, Tag, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gateway.core.request import (
    MAX_MESSAGES,
    ClientRequest,
    OutputFields,
    ReasoningEffort,
    SamplingFields,
    StrictModel,
    TemplateValues,
    Text,
    Tool,
)
from gateway.core.tool_grammar import check_tools
from gateway.core.validation import validate
from outrider.errors import InvalidRequestError
from outrider.grammar.spec import MAX_CHOICES, Grammar, GrammarKind, check_grammar, without_further_keys
from outrider.sampling.params import MAX_LOGPROBS

MAX_PROMPTS = 4096
"""The most that --max-prompts may allow."""
NO_TAGS = "structural tags are not supported: use a JSON schema, a regular expression, choices or a grammar"
_NO_WHITESPACE = "whitespace between JSON's parts cannot be chosen"

EBNF = "A context-free grammar that the whole answer must match: Lark in llguidance's dialect (start), or GBNF (root)."
Choices = Annotated[list[Text], Field(max_length=MAX_CHOICES, fail_fast=True)]
Schema = Annotated[
    Annotated[dict[str, Any], Tag("@object")] | Annotated[Text, Tag("@text")],
    Discriminator(lambda value: "@text" if isinstance(value, str) else "@object"),
]
"""A JSON schema as an object, or as JSON in a string."""
T = TypeVar("T")
ListForPrompts = Annotated[list[T], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
"""A list of prompts, or of values for each of them."""
NamedRequests = list[tuple[ClientRequest, Mapping[str, str]]]
"""Requests, each with the body's names for its fields."""


class Form(NamedTuple):
    """A form that the answer must have."""

    field: str
    """The field of the body that asks for this form."""
    grammar: Grammar
    strict: bool = False
    """Whether a schema that cannot be enforced in full is refused, as with OpenAI's `strict`."""


class Only:
    """Annotation of a field that accepts only null and some values, none of which changes anything here."""

    def __init__(self, *allowed: Any, why: str) -> None:
        """`why` explains why all other values are refused."""
        self._allowed = allowed
        self._why = why
        words = [json.dumps(value) for value in allowed]
        self._fix = f"leave it out or send {' or '.join(words)}" if words else "leave it out"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Have `_check` run on the value."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Name the accepted values in the JSON schema."""
        return {"enum": [None, *self._allowed], "description": f"Only these values are accepted, because {self._why}."}

    def _check(self, value: Any) -> Any:
        # 0 == False in Python, not in JSON.
        if value is None or any(type(value) is type(one) and value == one for one in self._allowed):
            return value
        about = {"problem": self._why, "fix": self._fix, "code": "unsupported_parameter"}
        raise PydanticCustomError("refused", "{problem}; {fix}", about)


class HarmlessFields(StrictModel):
    """Fields of OpenAI's routes that are taken and have no effect on an answer's text."""

    user: Text | None = None
    """The end user; under load, users of one API key take turns. Not used for anything else."""
    safety_identifier: Text | None = Field(None, description="Accepted but ignored.")
    prompt_cache_key: Text | None = Field(None, description="Accepted but ignored.")
    prompt_cache_retention: Text | None = Field(None, description="Accepted but ignored.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Accepted but ignored.")
    metadata: dict[str, Any] | None = Field(None, description="Accepted but ignored.")
    store: Annotated[Any, Only(False, why="answers are not stored here")] = None
    service_tier: Annotated[Any, Only("auto", "default", why="there is one service tier")] = None
    spaces_between_special_tokens: bool | None = Field(None, description="Accepted but ignored.")


class TemplateFields(StrictModel):
    """Values for a conversation's template besides the messages."""

    chat_template_kwargs: TemplateValues | None = None
    """Further values for the chat template, by name, like enable_thinking; at most 16384 bytes of JSON."""
    reasoning_effort: ReasoningEffort | None = None
    """The template's value of this name; none also sets enable_thinking to false."""


def template_values(effort: ReasoningEffort | None, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a conversation's template values besides the messages, by name."""
    known: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        known["enable_thinking"] = False
    return {**known, **(values or {})}


def list_or(tag: str) -> Discriminator:
    """Return a discriminator that gives lists the tag @list, and everything else `tag`."""
    return Discriminator(lambda value: "@list" if isinstance(value, list) else tag)


class RefusalPart(StrictModel):
    """A part of an assistant's message that says why it did not answer; text for the template."""

    type: Literal["refusal"]
    refusal: Text


def _part_kind(value: Any) -> str:
    return "@refusal" if isinstance(value, dict) and value.get("type") == "refusal" else "@part"


P = TypeVar("P", bound=StrictModel)
_Part = Annotated[Annotated[P, Tag("@part")] | Annotated[RefusalPart, Tag("@refusal")], Discriminator(_part_kind)]
ContentOf = Annotated[
    Annotated[Text, Tag("@text")]
    | Annotated[list[_Part[P]], Field(max_length=MAX_MESSAGES, fail_fast=True), Tag("@list")],
    list_or("@text"),
]
"""A message's text, or its parts: those of a class with a `text`, and refusals."""


def content_text(content: str | list[Any]) -> str:
    """Return a ContentOf as the text that the template gets."""
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


def _choice_kind(value: Any) -> str:
    if not isinstance(value, dict):
        return "@word"
    return "@allowed" if value.get("type") == "allowed_tools" else "@named"


Named = TypeVar("Named", bound=StrictModel)
Allowed = TypeVar("Allowed", bound=StrictModel)
ChoiceOf = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("@word")]
    | Annotated[Named, Tag("@named")]
    | Annotated[Allowed, Tag("@allowed")],
    Discriminator(_choice_kind),
]
"""Which tools an answer may or must call: a word, or a class that names one or some of them in its `allowed`."""


def tool_fields(tools: Sequence[Tool], choice: Any, parallel: bool | None, *, place: str) -> dict[str, Any]:
    """Return the fields of a `Chat` about tools; `choice` is a ChoiceOf, `place` as in `check_tools`.

    Raises InvalidRequestError, also about tools that are not valid.
    """
    mode, offered = choice or "auto", list(tools)
    if not isinstance(mode, str):
        mode, allowed, name_place = choice.allowed
        known = {tool.name for tool in tools}
        for index, name in enumerate(allowed):
            if name not in known:
                problem = f"{name[:64]!r} is not one of the tools"
                raise InvalidRequestError(name_place.format(index), problem, "send the name of one")
        offered = [tool for tool in tools if tool.name in allowed]
    check_tools(tools, mode, place=place)
    return {"tools": offered, "parallel_tool_calls": parallel is not False, "tool_choice": mode}


class StreamOptions(StrictModel):
    """What a stream contains besides the text."""

    include_usage: bool | None = Field(None, description="Send the usage in a last chunk without choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every chunk.")
    include_obfuscation: Annotated[Any, Only(False, why="streams are not padded")] = None


class GenerationBody(StrictModel):
    """Fields that the bodies of all routes that generate share."""

    model: Text | None = Field(None, description="Name of the served model; optional.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it is generated.")

    @abstractmethod
    def requests(self, max_prompts: int) -> NamedRequests:
        """Return the gateway's own requests, one for each prompt.

        Raises InvalidRequestError, also for more than `max_prompts`.
        """


_FORMS = {
    "json_": GrammarKind.JSON_SCHEMA,
    "guided_json": GrammarKind.JSON_SCHEMA,
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "guided_regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "guided_choice": GrammarKind.CHOICE,
    "json_object": GrammarKind.JSON_OBJECT,
    "guided_json_object": GrammarKind.JSON_OBJECT,
    "grammar": GrammarKind.EBNF,
    "guided_grammar": GrammarKind.EBNF,
    "ebnf": GrammarKind.EBNF,
}
"""Fields that give the form of the answer, in any body, and the kinds of their grammars."""


def named_forms(body: BaseModel, prefix: str = "") -> list[Form]:
    """Return the form of each field in `_FORMS` that is set in a body; `prefix` goes before the field's name."""
    return [
        Form(prefix + (field.alias or name), _grammar(_FORMS[name], value))
        for name, field in type(body).model_fields.items()
        if name in _FORMS and (value := getattr(body, name)) is not None and value is not False
    ]


def _grammar(kind: GrammarKind, value: Any, *, strict: bool = False) -> Grammar:
    if kind is GrammarKind.JSON_OBJECT:
        return Grammar(kind)
    source = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if strict and kind is GrammarKind.JSON_SCHEMA:
        with suppress(ValueError, RecursionError):  # check_grammar says what is wrong with it
            source = without_further_keys(source)
    return Grammar(kind, source)


class FormBody(StrictModel):
    """A body that may give the form of the answer in one of several fields."""

    @cached_property
    def forms(self) -> list[Form]:
        """The forms that the body asks for."""
        return named_forms(self)

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        try:
            for form in self.forms[1:]:
                # Clients for several releases of vLLM send the same form under its old name and its new one.
                if form.grammar != self.forms[0].grammar:
                    first, second = (one.field.partition(".")[0] for one in (self.forms[0], form))
                    raise InvalidRequestError(second, f"does not go with {first}", "send one of them")
            for form in self.forms:
                check_grammar(form.grammar, form.field, strict=form.strict)
        except InvalidRequestError as error:
            about = {"within": error.field, "problem": error.problem, "fix": error.fix, "code": error.code}
            raise PydanticCustomError("refused", "{problem}; {fix}", about) from None
        return self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the answer must fit; None allows anything."""
        return self.forms[0].grammar if self.forms else None

    @property
    def grammar_field(self) -> str:
        """The body's field with the grammar."""
        return self.forms[0].field if self.forms else "grammar"


class JsonSchema(StrictModel):
    """A JSON schema as OpenAI wraps it."""

    name: Annotated[Text, Field(max_length=64)] | None = Field(None, description="Accepted but ignored.")
    description: Text | None = Field(None, description="Accepted but ignored.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="The JSON schema. Default: any object.")
    strict: bool | None = None
    """Enforce all of the schema, or refuse it. Objects of which it names no keys are then empty."""

    def form(self, field: str) -> Form:
        """Return the form of answers that fit the schema; `field` is the schema's place in the body."""
        strict = bool(self.strict)
        return Form(field, _grammar(GrammarKind.JSON_SCHEMA, self.schema_, strict=strict), strict)


def check_goes_with(kind: str, wanted: str, value: object, field: str, what: str) -> None:
    """Raise InvalidRequestError if a form of type `wanted` lacks a value in `field`, or one of another type has one."""
    if kind == wanted and value is None:
        raise InvalidRequestError(field, "is missing", f"send the {what}", code="missing_required_parameter")
    if kind != wanted and value is not None:
        raise InvalidRequestError(field, f"does not go with type {kind}", f"leave it out, or set type to {wanted}")


class ResponseFormat(StrictModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    grammar_: Text | None = Field(None, alias="grammar", description=EBNF)
    value: dict[str, Any] | None = None
    """The JSON schema of a json_object, as clients of Hugging Face's text-generation-inference send it."""

    @model_validator(mode="after")
    def _schema_for_its_type(self) -> ResponseFormat:
        check_goes_with(self.type, "json_schema", self.json_schema, "response_format.json_schema", "schema")
        check_goes_with(self.type, "grammar", self.grammar_, "response_format.grammar", "grammar")
        if self.value is not None:
            check_goes_with(self.type, "json_object", self.value, "response_format.value", "schema")
        return self

    @property
    def forms(self) -> list[Form]:
        """The forms that the answer must have; empty if any text will do."""
        if self.type == "text":
            return []
        if self.grammar_ is not None:
            return [Form("response_format.grammar", Grammar(GrammarKind.EBNF, self.grammar_))]
        if self.value is not None:
            return [Form("response_format.value", _grammar(GrammarKind.JSON_SCHEMA, self.value))]
        if self.json_schema is None or self.json_schema.schema_ is None:
            return [Form("response_format", Grammar(GrammarKind.JSON_OBJECT))]
        return [self.json_schema.form("response_format.json_schema.schema")]


class StructuredOutputs(StrictModel):
    """vLLM's structured_outputs; set exactly one of the first five fields."""

    json_: Schema | None = Field(None, alias="json", description="A JSON schema.")
    regex: Text | None = Field(None, description="A regular expression that the whole answer must match.")
    choice: Choices | None = Field(None, description="Texts of which the answer must be one.")
    json_object: bool | None = Field(None, description="The answer must be a JSON object.")
    grammar: Text | None = Field(None, description=EBNF)
    structural_tag: Annotated[Any, Only(why=NO_TAGS)] = None
    disable_fallback: bool | None = Field(None, description="No effect: there is only one grammar library.")
    disable_any_whitespace: Annotated[Any, Only(False, why=_NO_WHITESPACE)] = None
    disable_additional_properties: bool | None = Field(
        None, description="No effect: objects have no further keys anyway."
    )
    whitespace_pattern: Annotated[Any, Only(why=_NO_WHITESPACE)] = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [self.json_, self.regex, self.choice, self.json_object or None, self.grammar]
        if sum(one is not None for one in given) != 1:
            raise InvalidRequestError(
                "structured_outputs", "exactly one of json, regex, choice, json_object and grammar is needed", "set one"
            )
        return self


class FormatFields(FormBody):
    """The form of the answer, under any of its names; at most one."""

    response_format: ResponseFormat | None = Field(None, description="The form of the answer; text by default.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The same under vLLM's name.")
    guided_json: Schema | None = Field(None, description="A JSON schema that the answer must fit.")
    guided_regex: Text | None = Field(None, description="A regular expression that the whole answer must match.")
    guided_choice: Choices | None = Field(None, description="Texts of which the answer must be one.")
    guided_json_object: bool | None = Field(None, description="The answer must be a JSON object.")
    guided_grammar: Text | None = Field(None, description=EBNF)
    json_schema: Schema | None = Field(None, description="guided_json under SGLang's name.")
    regex: Text | None = Field(None, description="guided_regex under SGLang's name.")
    ebnf: Text | None = Field(None, description="guided_grammar under SGLang's name.")
    guided_whitespace_pattern: Annotated[Any, Only(why=_NO_WHITESPACE)] = None
    guided_decoding_backend: Text | None = Field(None, description="Accepted but ignored.")

    @cached_property
    def forms(self) -> list[Form]:
        """See the base."""
        forms = [] if self.response_format is None else self.response_format.forms
        if (outputs := self.structured_outputs) is not None:
            forms = forms + named_forms(outputs, "structured_outputs.")
        return forms + named_forms(self)


class OpenAIRequest(GenerationBody, FormatFields, SamplingFields, OutputFields, HarmlessFields):
    """Fields that the bodies of chat and completions share, with all of SamplingFields and OutputFields."""

    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Return the log-probabilities of the prompt's tokens and of this many most likely tokens at each position; not in
    a stream."""
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The current name of max_tokens."""
    return_token_ids: bool | None = Field(None, description="Return the token ids of the prompt and of each answer.")
    return_tokens_as_token_ids: bool | None = None
    """Name tokens by id, like token_id:5, where log-probabilities are returned."""
    no_stop_trim: bool | None = Field(None, description="include_stop_str_in_output under SGLang's name.")

    @model_validator(mode="after")
    def _fit_together(self) -> OpenAIRequest:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs", "are not available in a stream", "set stream to false or leave it out"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "only streams have them", "set stream to true or leave it out")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidRequestError("max_tokens", "differs from max_completion_tokens", "send one of them")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens per answer, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_field(self) -> str:
        """The name under which the limit was sent."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def field_names(self) -> dict[str, str]:
        """The body's names for fields of a ClientRequest, where they differ."""
        return {"sampling.logit_bias": "logit_bias", "max_tokens": self.limit_field, "grammar": self.grammar_field}

    def common(self, num_logprobs: int | None) -> dict[str, Any]:
        """Return the fields of a ClientRequest, without the prompt."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in OutputFields.model_fields}
        if self.no_stop_trim is not None:
            fields["include_stop_str_in_output"] = self.no_stop_trim
        sampling = {name: getattr(self, name) for name in SamplingFields.model_fields}
        sampling["num_logprobs"] = num_logprobs
        return fields | {
            "model": self.model,
            "grammar": self.grammar,
            "sampling": sampling,
            "max_tokens": self.limit,
            "num_prompt_logprobs": self.prompt_logprobs,
        }


def prompt_requests(
    prompts: str | list[Any],
    field: str,
    about: Callable[[int], tuple[dict[str, Any], Mapping[str, str]]],
    max_prompts: int,
) -> NamedRequests:
    """Return the gateway's own requests, one for each prompt.

    `prompts` is a text, a list of texts, token ids, or a list of lists of token ids, and `field` is the body's name for
    it. `about` returns the other fields of a ClientRequest for a prompt's index, and the body's names for these.
    Raises InvalidRequestError, also for more than `max_prompts`.
    """
    is_one = isinstance(prompts, str) or isinstance(prompts[0], int)
    several = [prompts] if is_one else prompts
    if len(several) > max_prompts:
        raise InvalidRequestError(
            field, f"{len(several)} prompts are over the limit of {max_prompts}", f"send at most {max_prompts}"
        )
    inner = "prompt" if isinstance(several[0], str) else "prompt_token_ids"
    requests: NamedRequests = []
    for index, prompt in enumerate(several):
        common, names = about(index)
        ours = {**names, inner: field if is_one else f"{field}[{index}]"}
        requests.append((validate(ClientRequest, common | {inner: prompt}, names=ours), ours))
    return requests

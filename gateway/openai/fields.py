"""Fields that OpenAI's requests share: how they stream, what form the answer must have, and what is not acted on."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from gateway.core.request import (
    MAX_LOGPROBS,
    ClientRequest,
    OutputFields,
    ReasoningEffort,
    SamplingFields,
    StrictModel,
    TemplateValues,
    Text,
)
from gateway.core.validation import validate
from outrider.errors import InvalidRequestError
from outrider.grammar.spec import MAX_CHOICES, Grammar, GrammarKind, check_grammar, without_further_keys

MAX_PROMPTS = 4096
"""The most that --max-prompts may allow."""
NO_TAGS = "structural tags are not supported: use a JSON schema, a regular expression, choices or a grammar"
_NO_WHITESPACE = "whitespace between JSON's parts cannot be chosen"

EBNF = "A context-free grammar that derives the whole answer: Lark in llguidance's dialect (start), or GBNF (root)."
Forms = list[tuple[str, Grammar]]
"""Fields that say what the answer must be, and the grammars that they stand for."""
Choices = Annotated[list[Text], Field(max_length=MAX_CHOICES, fail_fast=True)]
Schema = dict[str, Any] | Text
"""A JSON schema as an object, or as JSON in a string."""
NamedRequests = list[tuple[ClientRequest, Mapping[str, str]]]
"""Requests, each with what the body calls its fields."""


class Only:
    """Annotation of a field that takes null and some values, which change nothing here."""

    def __init__(self, *allowed: Any, why: str) -> None:
        """`why` explains a refusal of all other values."""
        self._allowed = allowed
        self._why = why
        words = [json.dumps(value) for value in allowed]
        self._fix = f"leave it out or send {' or '.join(words)}" if words else "leave it out"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Checks the value."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Names the values."""
        return {"enum": [None, *self._allowed], "description": f"Taken at these values only: {self._why}."}

    def _check(self, value: Any) -> Any:
        # 0 == False in Python, not in JSON.
        if value is None or any(type(value) is type(one) and value == one for one in self._allowed):
            return value
        raise PydanticCustomError("unsupported", "{problem}; {fix}", {"problem": self._why, "fix": self._fix})


class HarmlessFields(StrictModel):
    """Fields of both routes that are taken and have no effect on the answer."""

    user: Text | None = Field(
        None, description="Who this is for; under load, users of one API key take turns. Nothing else is done with it."
    )
    safety_identifier: Text | None = Field(None, description="Taken and not used.")
    prompt_cache_key: Text | None = Field(None, description="Taken and not used.")
    metadata: dict[str, Any] | None = Field(None, description="Taken and not used.")
    store: Annotated[Any, Only(False, why="answers are not stored here")] = None
    service_tier: Annotated[Any, Only("auto", "default", why="there is one service tier")] = None
    spaces_between_special_tokens: bool | None = Field(None, description="Taken and not used.")


class TemplateFields(StrictModel):
    """What a conversation's template is told beside the messages."""

    chat_template_kwargs: TemplateValues | None = Field(
        None, description="Further values for the chat template, by name, like enable_thinking; 16384 bytes of JSON."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="The template's value of this name; none sets enable_thinking to false, too."
    )

    def template_values(self) -> dict[str, Any]:
        """All of them by name."""
        return template_values(self.reasoning_effort, self.chat_template_kwargs)


def template_values(effort: ReasoningEffort | None, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a conversation's template is told beside the messages, by name."""
    known: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        known["enable_thinking"] = False
    return {**known, **(values or {})}


class StreamOptions(StrictModel):
    """What a stream tells besides the text."""

    include_usage: bool | None = Field(None, description="Send the usage in a last chunk without choices.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every chunk.")
    include_obfuscation: Annotated[Any, Only(False, why="streams are not padded")] = None


class GenerationBody(StrictModel):
    """What the bodies of all routes that generate share."""

    model: Text | None = Field(None, description="Name of the served model; may be left out.")
    stream: bool | None = Field(None, description="Send the answer as server-sent events while it grows.")

    @abstractmethod
    def requests(self, max_prompts: int) -> NamedRequests:
        """The gateway's own requests, one a prompt. Raises InvalidRequestError, also for more than `max_prompts`."""


class JsonSchema(StrictModel):
    """OpenAI's wrapping of a JSON schema."""

    name: Annotated[Text, Field(max_length=64)] | None = Field(None, description="Taken and not used.")
    description: Text | None = Field(None, description="Taken and not used.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="The JSON schema; any object without it.")
    strict: bool | None = Field(
        None, description="Objects have no keys but those that the schema names, unless it says otherwise."
    )


class ResponseFormat(StrictModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema", "grammar"]
    json_schema: JsonSchema | None = None
    grammar_: Text | None = Field(None, alias="grammar", description=EBNF)

    @model_validator(mode="after")
    def _schema_for_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            problem = "is missing" if self.json_schema is None else f"does not go with type {self.type}"
            fix = "send the schema" if self.json_schema is None else "leave it out, or set type to json_schema"
            raise InvalidRequestError("response_format.json_schema", problem, fix)
        if (self.type == "grammar") != (self.grammar_ is not None):
            problem = "is missing" if self.grammar_ is None else f"does not go with type {self.type}"
            fix = "send the grammar" if self.grammar_ is None else "leave it out, or set type to grammar"
            raise InvalidRequestError("response_format.grammar", problem, fix)
        return self

    def grammar(self) -> tuple[str, Grammar] | None:
        """The field at fault if something is, and the grammar; None where any text will do."""
        if self.type == "text":
            return None
        if self.grammar_ is not None:
            return "response_format.grammar", Grammar(GrammarKind.EBNF, self.grammar_)
        if self.json_schema is None or self.json_schema.schema_ is None:
            return "response_format", Grammar(GrammarKind.JSON_OBJECT)
        schema, strict = self.json_schema.schema_, bool(self.json_schema.strict)
        return "response_format.json_schema.schema", _schema_grammar(schema, strict=strict)


class StructuredOutputs(StrictModel):
    """vLLM's: exactly one of the first five."""

    json_: Schema | None = Field(None, alias="json", description="A JSON schema.")
    regex: Text | None = Field(None, description="A regular expression that the whole answer matches.")
    choice: Choices | None = Field(None, description="Texts of which the answer is one.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    grammar: Text | None = Field(None, description=EBNF)
    structural_tag: Annotated[Any, Only(why=NO_TAGS)] = None
    disable_fallback: bool | None = Field(None, description="Without effect: there is one grammar library.")
    disable_any_whitespace: Annotated[Any, Only(False, why=_NO_WHITESPACE)] = None
    disable_additional_properties: bool | None = Field(None, description="The same as strict of response_format.")
    whitespace_pattern: Annotated[Any, Only(why=_NO_WHITESPACE)] = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [self.json_, self.regex, self.choice, self.json_object or None, self.grammar]
        if sum(one is not None for one in given) != 1:
            raise InvalidRequestError(
                "structured_outputs", "exactly one of json, regex, choice, json_object and grammar is needed", "set one"
            )
        return self


class FormatFields(StrictModel):
    """The form of the answer, under any of its names; at most one."""

    response_format: ResponseFormat | None = Field(None, description="The form of the answer; text by default.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The same under vLLM's name.")
    guided_json: Schema | None = Field(None, description="A JSON schema that the answer fits.")
    guided_regex: Text | None = Field(None, description="A regular expression that the whole answer matches.")
    guided_choice: Choices | None = Field(None, description="Texts of which the answer is one.")
    guided_json_object: bool | None = Field(None, description="Any JSON object.")
    guided_grammar: Text | None = Field(None, description=EBNF)
    json_schema: Schema | None = Field(None, description="guided_json under SGLang's name.")
    regex: Text | None = Field(None, description="guided_regex under SGLang's name.")
    ebnf: Text | None = Field(None, description="guided_grammar under SGLang's name.")
    guided_whitespace_pattern: Annotated[Any, Only(why=_NO_WHITESPACE)] = None
    guided_decoding_backend: Text | None = Field(None, description="Taken and not used.")

    @model_validator(mode="after")
    def _one_form(self) -> FormatFields:
        forms = self._forms()
        if len(forms) > 1:
            field = forms[1][0].partition(".")[0]
            raise InvalidRequestError(field, f"does not go with {forms[0][0].partition('.')[0]}", "send one of them")
        for field, grammar in forms:
            check_grammar(grammar, field)
        return self

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must be; None allows anything."""
        return next((grammar for _, grammar in self._forms()), None)

    @property
    def grammar_field(self) -> str:
        """The field that says so."""
        return next((field for field, _ in self._forms()), "grammar")

    def _forms(self) -> list[tuple[str, Grammar]]:
        forms = [self.response_format.grammar() if self.response_format is not None else None]
        if (outputs := self.structured_outputs) is not None:
            forms += _forms_of(
                "structured_outputs.",
                json=outputs.json_,
                regex=outputs.regex,
                choice=outputs.choice,
                json_object=outputs.json_object,
                grammar=outputs.grammar,
                strict=bool(outputs.disable_additional_properties),
            )
        forms += _forms_of(
            "guided_",
            json=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            json_object=self.guided_json_object,
            grammar=self.guided_grammar,
        )
        forms += sglang_forms(self.json_schema, self.regex, self.ebnf)
        return [form for form in forms if form is not None]


def _forms_of(
    prefix: str,
    *,
    json: Schema | None,
    regex: str | None,
    choice: list[str] | None,
    json_object: bool | None,
    grammar: str | None,
    strict: bool = False,
) -> Forms:
    """Fields whose names begin with `prefix`, and their grammars."""
    forms: Forms = []
    if json is not None:
        forms.append((f"{prefix}json", _schema_grammar(json, strict=strict)))
    if regex is not None:
        forms.append((f"{prefix}regex", Grammar(GrammarKind.REGEX, regex)))
    if choice is not None:
        forms.append((f"{prefix}choice", Grammar.of_choices(choice)))
    if json_object:
        forms.append((f"{prefix}json_object", Grammar(GrammarKind.JSON_OBJECT)))
    if grammar is not None:
        forms.append((f"{prefix}grammar", Grammar(GrammarKind.EBNF, grammar)))
    return forms


def sglang_forms(schema: Schema | None, regex: str | None, ebnf: str | None, prefix: str = "") -> Forms:
    """The form of the answer by SGLang's names: fields, and their grammars."""
    forms: Forms = []
    if schema is not None:
        forms.append((f"{prefix}json_schema", _schema_grammar(schema)))
    if regex is not None:
        forms.append((f"{prefix}regex", Grammar(GrammarKind.REGEX, regex)))
    if ebnf is not None:
        forms.append((f"{prefix}ebnf", Grammar(GrammarKind.EBNF, ebnf)))
    return forms


def _schema_grammar(schema: Schema, *, strict: bool = False) -> Grammar:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    if strict:
        with suppress(ValueError, RecursionError):  # check_grammar says what is wrong with it
            text = without_further_keys(text)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


class OpenAIRequest(GenerationBody, FormatFields, SamplingFields, OutputFields, HarmlessFields):
    """What the bodies of chat and completions share. A field of SamplingFields or OutputFields is one of both."""

    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Tell the log-probabilities of the prompt's tokens and of this many of the most likely ones at "
        "each position; not in a stream.",
    )
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="The present name of max_tokens."
    )

    @model_validator(mode="after")
    def _fit_together(self) -> OpenAIRequest:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs", "are not told in a stream", "set stream to false or leave it out"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "only streams have them", "set stream to true or leave it out")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise InvalidRequestError("max_tokens", "differs from max_completion_tokens", "send one of them")
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
    def field_names(self) -> dict[str, str]:
        """What this body calls the fields of a ClientRequest, where the names differ."""
        return {"logit_bias": "logit_bias", "max_tokens": self.limit_field, "grammar": self.grammar_field}

    def common(self, num_logprobs: int | None) -> dict[str, Any]:
        """Fields of a ClientRequest, without the prompt."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in OutputFields.model_fields}
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
    prompts: str | list[Any], field: str, common: dict[str, Any], names: Mapping[str, str], max_prompts: int
) -> NamedRequests:
    """The gateway's own requests, one a prompt: a text, a list of texts, token ids, or a list of lists of them.

    `field` is what the body calls them; `common` holds the other fields of a ClientRequest, `names` what the body
    calls these. Raises InvalidRequestError, also for more than `max_prompts`.
    """
    is_one = isinstance(prompts, str) or isinstance(prompts[0], int)
    several = [prompts] if is_one else prompts
    if len(several) > max_prompts:
        raise InvalidRequestError(
            field, f"{len(several)} prompts are over the limit of {max_prompts}", f"send at most {max_prompts}"
        )
    inner = "prompt" if isinstance(several[0], str) else "prompt_token_ids"
    return [
        (
            validate(ClientRequest, common | {inner: prompt}),
            {**names, inner: field if is_one else f"{field}[{index}]"},
        )
        for index, prompt in enumerate(several)
    ]

"""What form an answer must have: OpenAI's response_format, vLLM's structured_outputs and its older guided_* fields."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gateway.core.fields import StrictModel, Text
from gateway.openai.fields import Only
from outrider.grammar.spec import MAX_CHOICES, Grammar, GrammarKind, check_grammar

_NO_LANGUAGE = "grammars in another language are not supported: use a JSON schema, a regular expression or choices"
_NO_WHITESPACE = "whitespace between JSON's parts cannot be chosen"

Choices = Annotated[list[Text], Field(max_length=MAX_CHOICES, fail_fast=True)]
Schema = dict[str, Any] | Text
"""As an object, or as JSON in a string."""


class JsonSchema(StrictModel):
    """OpenAI's wrapping of a JSON schema."""

    name: Annotated[Text, Field(max_length=64)] | None = Field(None, description="Taken and not used.")
    description: Text | None = Field(None, description="Taken and not used.")
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="The JSON schema; any object without it.")
    strict: bool | None = Field(None, description="The schema is enforced in any case.")


class ResponseFormat(StrictModel):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_for_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            problem = "is missing" if self.json_schema is None else f"does not go with type {self.type}"
            fix = "send the schema" if self.json_schema is None else "leave it out, or set type to json_schema"
            raise PydanticCustomError("json_schema", f"{problem}; {fix}", {"field": "response_format.json_schema"})
        return self

    def grammar(self) -> tuple[str, Grammar] | None:
        """The field at fault if something is, and the grammar; None where any text will do."""
        if self.type == "text":
            return None
        if self.json_schema is None or self.json_schema.schema_ is None:
            return "response_format", Grammar(GrammarKind.JSON_OBJECT)
        return "response_format.json_schema.schema", _of_schema(self.json_schema.schema_)


class StructuredOutputs(StrictModel):
    """vLLM's: exactly one of the first four."""

    json_: Schema | None = Field(None, alias="json", description="A JSON schema.")
    regex: Text | None = Field(None, description="A regular expression that the whole answer matches.")
    choice: Choices | None = Field(None, description="Texts of which the answer is one.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    grammar: Annotated[Any, Only(why=_NO_LANGUAGE)] = None
    structural_tag: Annotated[Any, Only(why=_NO_LANGUAGE)] = None
    disable_fallback: bool | None = Field(None, description="Without effect: there is one grammar library.")
    disable_any_whitespace: Annotated[Any, Only(False, why=_NO_WHITESPACE)] = None
    disable_additional_properties: Annotated[Any, Only(False, why="say it in the schema")] = None
    whitespace_pattern: Annotated[Any, Only(why=_NO_WHITESPACE)] = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = [self.json_, self.regex, self.choice, self.json_object or None]
        if sum(one is not None for one in given) != 1:
            raise PydanticCustomError(
                "structured_outputs",
                "exactly one of json, regex, choice and json_object is needed; set one",
                {"field": "structured_outputs"},
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
    guided_grammar: Annotated[Any, Only(why=_NO_LANGUAGE)] = None
    guided_whitespace_pattern: Annotated[Any, Only(why=_NO_WHITESPACE)] = None
    guided_decoding_backend: Text | None = Field(None, description="Taken and not used.")

    @model_validator(mode="after")
    def _one_form(self) -> FormatFields:
        forms = self._forms()
        if len(forms) > 1:
            field = forms[1][0].partition(".")[0]
            raise PydanticCustomError(
                "format", f"does not go with {forms[0][0].partition('.')[0]}; send one of them", {"field": field}
            )
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
            fields = (outputs.json_, outputs.regex, outputs.choice, outputs.json_object)
            forms += _of_fields("structured_outputs.", *fields)
        forms += _of_fields("guided_", self.guided_json, self.guided_regex, self.guided_choice, self.guided_json_object)
        return [form for form in forms if form is not None]


class SglangFormatFields(StrictModel):
    """The same as SGLang has it, within sampling_params."""

    json_schema: Text | None = Field(None, description="A JSON schema that the answer fits, as JSON in a string.")
    regex: Text | None = Field(None, description="A regular expression that the whole answer matches.")
    ebnf: Annotated[Any, Only(why=_NO_LANGUAGE)] = None
    structural_tag: Annotated[Any, Only(why=_NO_LANGUAGE)] = None

    @model_validator(mode="after")
    def _one_form(self) -> SglangFormatFields:
        if self.json_schema is not None and self.regex is not None:
            raise PydanticCustomError(
                "format", "does not go with json_schema; send one of them", {"field": "sampling_params.regex"}
            )
        if self.grammar is not None:
            check_grammar(self.grammar, self.grammar_field)
        return self

    @property
    def grammar(self) -> Grammar | None:
        """What the answer must be; None allows anything."""
        if self.json_schema is not None:
            return Grammar(GrammarKind.JSON_SCHEMA, self.json_schema)
        return None if self.regex is None else Grammar(GrammarKind.REGEX, self.regex)

    @property
    def grammar_field(self) -> str:
        """The field that says so."""
        return "sampling_params.json_schema" if self.json_schema is not None else "sampling_params.regex"


def _of_fields(
    prefix: str, schema: Schema | None, regex: str | None, choices: list[str] | None, json_object: bool | None
) -> list[tuple[str, Grammar]]:
    forms: list[tuple[str, Grammar]] = []
    if schema is not None:
        forms.append((f"{prefix}json", _of_schema(schema)))
    if regex is not None:
        forms.append((f"{prefix}regex", Grammar(GrammarKind.REGEX, regex)))
    if choices is not None:
        forms.append((f"{prefix}choice", Grammar.of_choices(choices)))
    if json_object:
        forms.append((f"{prefix}json_object", Grammar(GrammarKind.JSON_OBJECT)))
    return forms


def _of_schema(schema: Schema) -> Grammar:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return Grammar(GrammarKind.JSON_SCHEMA, text)

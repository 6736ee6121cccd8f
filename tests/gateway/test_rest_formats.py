"""response_format and its relatives, from the body to verify and back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_world import World
from pydantic import BaseModel

from outrider.errors import InvalidRequestError
from outrider.grammar.spec import Grammar, GrammarKind
from outrider.protocol.generation_codec import decode_grammar
from outrider.v1 import common_pb2, gateway_pb2

CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}, "required": ["b"]}
OF_SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA, ensure_ascii=False))
ANY_OBJECT = Grammar(GrammarKind.JSON_OBJECT)
DIGITS = Grammar(GrammarKind.REGEX, "[0-9]+")
LARK = Grammar(GrammarKind.EBNF, 'start: "yes" | "no"')
GUIDANCE = Grammar(GrammarKind.EBNF, '%llguidance {}\n\nstart: START\nSTART: "sunny"\n     | "rainy"\n\n')
CHOICES = Grammar.of_choices(["yes", "no"])


def wrapped(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema} | fields}}


FORMS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"response_format": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    (wrapped(SCHEMA, strict=False, description="d"), OF_SCHEMA),
    ({"json_schema": SCHEMA}, OF_SCHEMA),
    ({"regex": "[0-9]+"}, DIGITS),
    *(({name: LARK.source}, LARK) for name in ("guided_grammar", "ebnf")),
    ({"structured_outputs": {"grammar": LARK.source}}, LARK),
    ({"response_format": {"type": "grammar", "grammar": LARK.source}}, LARK),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, ANY_OBJECT),
    ({"structured_outputs": {"json": SCHEMA}}, OF_SCHEMA),
    ({"structured_outputs": {"json": OF_SCHEMA.source, "disable_additional_properties": True}}, OF_SCHEMA),
    ({"structured_outputs": {"regex": "[0-9]+"}}, DIGITS),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, CHOICES),
    ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, ANY_OBJECT),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, OF_SCHEMA),
    ({"guided_regex": "[0-9]+"}, DIGITS),
    ({"guided_choice": ["yes", "no"]}, CHOICES),
    ({"guided_json_object": True}, ANY_OBJECT),
    # As guidance's clients of vLLM and SGLang ask.
    ({"guided_grammar": GUIDANCE.source, "structured_outputs": {"grammar": GUIDANCE.source}}, GUIDANCE),
    ({"ebnf": GUIDANCE.source}, GUIDANCE),
    (wrapped(SCHEMA) | {"guided_json": SCHEMA}, OF_SCHEMA),
    # What huggingface_hub makes of a json_schema.
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, OF_SCHEMA),
]
SGLANG: list[tuple[dict[str, Any], Grammar | None]] = [
    ({}, None),
    ({"json_schema": OF_SCHEMA.source}, OF_SCHEMA),
    ({"regex": "[0-9]+"}, DIGITS),
    ({"ebnf": LARK.source}, LARK),
]


def asked(world: World) -> Grammar | None:
    """What verify was asked for last."""
    request = world.verify.requests[-1]
    return decode_grammar(request.grammar) if request.HasField("grammar") else None


async def test_every_form_reaches_verify_as_one_grammar(world: World) -> None:
    world.verify.set_answer("{}")
    bodies = [(CHAT, HELLO | form, want) for form, want in FORMS]
    bodies += [(COMPLETION, {"prompt": "hi"} | form, want) for form, want in FORMS]
    bodies += [(GENERATE, {"text": "hi", "sampling_params": form}, want) for form, want in SGLANG]
    for path, body, want in bodies:
        response = await world.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert asked(world) == want, body


async def test_the_grpc_door_takes_the_same(world: World) -> None:
    world.verify.set_answer("{}")
    for message, want in (
        (common_pb2.Grammar(json_object=True), ANY_OBJECT),
        (common_pb2.Grammar(json_schema=OF_SCHEMA.source), OF_SCHEMA),
        (common_pb2.Grammar(regex="[0-9]+"), DIGITS),
        (common_pb2.Grammar(choice=common_pb2.Grammar.Choices(texts=["yes", "no"])), CHOICES),
    ):
        request = gateway_pb2.GatewayServiceGenerateRequest(prompt="hi", grammar=message)
        async for _ in world.stub.Generate(request):
            pass
        assert asked(world) == want


async def test_lists_of_different_entries_are_taken_and_not_held_to(world: World) -> None:
    world.verify.set_answer("{}")
    listed = {"type": "array", "items": {"type": "string", "format": "weird"}, "uniqueItems": True}
    for form in (wrapped(listed), {"guided_json": listed}):
        assert (await world.http.post(CHAT, json=HELLO | form)).status_code == 200
        grammar = asked(world)
        assert grammar is not None and "uniqueItems" in grammar.source
    text = {"format": {"type": "json_schema", "name": "x", "schema": listed, "strict": True}}
    response = await world.http.post("/v1/responses", json={"input": "hi", "text": text})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text.format.schema.uniqueItems")


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format.json_schema", "does not go"),
    ({"response_format": {"type": "text", "value": {}}}, "response_format.value", "does not go"),
    (wrapped([]), "response_format.json_schema.schema", "an object"),
    (wrapped({}, strikt=True), "response_format.json_schema.strikt", "unknown field"),
    (wrapped({"items": {"not": {}}}), "response_format.json_schema.schema.items.not", "say what is allowed"),
    (wrapped({"uniqueItems": True}, strict=True), "response_format.json_schema.schema.uniqueItems", "strict"),
    (wrapped({"$ref": "http://a/b"}), "response_format.json_schema.schema.$ref", "begins with #"),
    (wrapped({"title": "\ud800"}), "", ""),
    (wrapped({"title": "x" * 70_000}), "response_format.json_schema.schema", "65536"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"grammar": " "}}, "structured_outputs.grammar", "is empty"),
    ({"response_format": {"type": "grammar"}}, "response_format.grammar", "is missing"),
    ({"ebnf": '%llguidance {"no_forcing": true}\nstart: "a"'}, "ebnf", "remove %llguidance"),
    ({"ebnf": '%llguidance {}\n%llguidance {}\nstart: "a"'}, "ebnf", "remove %llguidance"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not valid JSON"),
    ({"guided_regex": "a" * 5000}, "guided_regex", "4096"),
    ({"guided_choice": []}, "guided_choice", "1 to 1024"),
    ({"guided_choice": ["a"] * 2000}, "guided_choice", "1024"),
    ({"guided_grammar": "x" * 70_000}, "guided_grammar", "65536"),
    ({"guided_json": 7}, "guided_json", "expected an object or a string, got an integer"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "does not go with guided_regex"),
    (wrapped({}) | {"guided_regex": "a"}, "guided_regex", "does not go with response_format"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "leave it out"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_what_cannot_be_is_refused_by_its_name(world: World, path: str) -> None:
    for form, field, words in REFUSED:
        body = json.dumps((HELLO if path == CHAT else {"prompt": "hi"}) | form)
        response = await world.http.post(path, content=body, headers={"content-type": "application/json"})
        error = response.json()["error"]
        param = error["param"] or ""
        assert response.status_code == 400 and param.startswith(field) and "dict" not in param, (form, error)
        assert words in error["message"], error
    assert world.verify.requests == []


async def test_sglangs_names_are_those_of_its_body(world: World) -> None:
    for form, field in (
        ({"json_schema": '{"not": {}}'}, "sampling_params.json_schema.not"),
        ({"json_schema": "{}", "regex": "a"}, "sampling_params.regex"),
        ({"ebnf": ""}, "sampling_params.ebnf"),
    ):
        response = await world.http.post(GENERATE, json={"text": "hi", "sampling_params": form})
        assert response.status_code == 400 and response.json()["error"]["param"] == field, response.text


async def test_what_only_verify_finds_has_the_clients_name(world: World) -> None:
    found = InvalidRequestError("grammar.json_schema", "Invalid type: strin", "leave it out", code="invalid_grammar")
    for path, body, field in (
        (CHAT, HELLO | wrapped({"type": "strin"}), "response_format.json_schema.schema"),
        (CHAT, HELLO | {"guided_json": {"type": "strin"}}, "guided_json"),
        (COMPLETION, {"prompt": ["a", "b"], "structured_outputs": {"json": {"type": "strin"}}},
         "structured_outputs.json"),
        (GENERATE, {"text": "hi", "sampling_params": {"json_schema": '{"type": "strin"}'}},
         "sampling_params.json_schema"),
    ):  # fmt: skip
        world.verify.failures = [found, found]
        response = await world.http.post(path, json=body)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == field and error["code"] == "invalid_grammar"
        assert error["message"] == f"{field}: Invalid type: strin; leave it out"


class Person(BaseModel):
    """What the client library makes a strict schema of."""

    name: str
    age: int


async def test_the_openai_client_parses_an_answer_into_its_model(world: World) -> None:
    world.verify.set_answer('{"name": "one", "age": 2}')
    completion = await world.openai().chat.completions.parse(
        model="", messages=[{"role": "user", "content": "hi"}], response_format=Person
    )
    assert completion.choices[0].message.parsed == Person(name="one", age=2)
    grammar = asked(world)
    assert grammar is not None and json.loads(grammar.source)["required"] == ["name", "age"]

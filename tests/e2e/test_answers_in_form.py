"""The real model answers in the form that a client asks for, exactly as without drafts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

from outrider.cli.cluster import Cluster

pytestmark = pytest.mark.xdist_group("cluster")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
ASK: Any = [{"role": "user", "content": "Describe a person: name, age and favourite colours."}]


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.rest_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def answers(client: openai.OpenAI, temperature: float, extra: dict[str, Any], **fields: Any) -> tuple[str, str]:
    """The answer and why it ended, which speculation must not change."""

    def ask(speculation: str) -> tuple[str, str]:
        completion = client.chat.completions.create(
            model="smollm2",
            messages=ASK,
            temperature=temperature,
            seed=5,
            extra_body=extra | {"speculation": speculation},
            **{"max_tokens": 96} | fields,
        )
        return completion.choices[0].message.content, completion.choices[0].finish_reason

    with ThreadPoolExecutor() as pool:
        with_drafts, plain = pool.map(ask, ("on", "off"))
    assert with_drafts == plain
    return with_drafts


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_a_json_schema_is_answered_by_json_that_fits_it(client: openai.OpenAI, temperature: float) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    text, reason = answers(client, temperature, {}, response_format=wrapped)
    assert reason == "stop"
    jsonschema.validate(json.loads(text), SCHEMA)


@pytest.mark.slow
def test_other_forms_are_held_to_as_well(client: openai.OpenAI) -> None:
    text, reason = answers(client, 0.0, {}, response_format={"type": "json_object"})
    assert reason == "length" or isinstance(json.loads(text), dict)
    text, reason = answers(client, 0.9, {"guided_choice": ["Paris", "London", "New York"]})
    assert text in ("Paris", "London", "New York") and reason == "stop"
    text, reason = answers(client, 0.9, {"structured_outputs": {"regex": r"\d{3}-\d{4}"}})
    assert re.fullmatch("[0-9]{3}-[0-9]{4}", text) and reason == "stop"


def test_an_answer_has_its_least_number_of_tokens(client: openai.OpenAI) -> None:
    text, reason = answers(client, 0.0, {"min_tokens": 20, "stop": [".", " "]}, max_tokens=32)
    assert " " in text or reason == "length"
    short, _ = answers(client, 0.0, {"stop": [".", " "]}, max_tokens=32)
    assert len(text) > len(short)


def test_a_grammar_is_answered_by_what_it_derives(client: openai.OpenAI) -> None:
    text, reason = answers(client, 0.9, {"ebnf": 'root ::= "I am " [0-9]{2} (" years" | " months") " old."'})
    assert re.fullmatch("I am [0-9]{2} (years|months) old[.]", text) and reason == "stop"


def test_a_hostile_grammar_is_refused_by_name_and_harms_no_other_request(client: openai.OpenAI) -> None:
    others = client.chat.completions.create(model="smollm2", messages=ASK, max_tokens=24, temperature=0, stream=True)
    for extra, field in (
        ({"guided_regex": "((a{100}){100}){100}"}, "guided_regex"),
        ({"guided_json": {"type": "string", "pattern": "(a)\\1"}}, "guided_json"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="smollm2", messages=ASK, extra_body=extra)
        assert caught.value.param == field and caught.value.code == "invalid_grammar"
    assert [chunk.choices[0].finish_reason for chunk in others][-1] == "length"

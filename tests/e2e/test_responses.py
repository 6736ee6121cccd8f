"""/v1/responses over real services, with openai-python's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from outrider.cli.cluster import Cluster

pytestmark = pytest.mark.xdist_group("cluster")

ASK = "What is the capital of France?"


class Answer(BaseModel):
    """What the client asks for."""

    city: Literal["Paris", "London", "Rome"]
    certain: bool


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.rest_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_response_is_the_chats_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    asked: Any = {"model": "smollm2", "temperature": 0}
    chat = client.chat.completions.create(messages=[{"role": "user", "content": ASK}], max_tokens=24, **asked)
    answer = client.responses.create(input=ASK, max_output_tokens=24, **asked)
    assert answer.output_text == chat.choices[0].message.content and answer.output_text
    with client.responses.stream(input=ASK, max_output_tokens=24, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text
    plain = client.responses.create(input=ASK, max_output_tokens=24, extra_body={"speculation": "off"}, **asked)
    assert plain.output_text == answer.output_text
    turns: Any = [{"role": "user", "content": ASK}, *answer.output, {"role": "user", "content": "And of Italy?"}]
    assert client.responses.create(input=turns, max_output_tokens=8, **asked).output_text


def test_a_form_is_parsed(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model="smollm2", input=ASK, text_format=Answer, temperature=0)
    assert isinstance(answer.output_parsed, Answer)


# Only compiling shows that no grammar can hold to the pattern; the tool is not strict, so any arguments will do.
EXOTIC = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^(?=R)"}}, "required": ["city"]}
PLACE = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}


@pytest.mark.parametrize("parameters", [PLACE, EXOTIC])
def test_a_function_is_called_and_its_output_goes_back(client: openai.OpenAI, parameters: dict[str, Any]) -> None:
    tool = {"type": "function", "name": "weather", "description": "Tells the weather.", "parameters": parameters}
    asked: Any = {"model": "smollm2", "temperature": 0.9, "tools": [tool], "max_output_tokens": 100}
    asked["extra_body"] = {"seed": 3}
    question = "What is the weather in Rome?"
    answer = client.responses.create(input=question, tool_choice="required", **asked)
    (call,) = answer.output
    assert call.type == "function_call" and call.name == "weather"
    with client.responses.stream(input=question, tool_choice="required", **asked) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (again,) = stream.get_final_response().output
    assert again.type == "function_call" and again.arguments == call.arguments == "".join(pieces)
    if answer.status == "completed":
        held = json.loads(call.arguments)
        assert isinstance(held, dict) and (parameters is EXOTIC or held["city"] in ("Rome", "Paris"))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}
    turns: Any = [{"role": "user", "content": question}, call, result]
    assert client.responses.create(input=turns, **asked | {"tool_choice": "none"}).output_text


def test_a_chat_without_reasoning_has_none(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": ASK}],
        max_tokens=8,
        reasoning_effort="low",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert answer.choices[0].message.content and not hasattr(answer.choices[0].message, "reasoning_content")
    assert client.models.list().data[0].model_dump()["default_sampling_params"] == {}

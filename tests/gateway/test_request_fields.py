"""A field of a request is declared once, and all routes take it: a new one needs no line in any of them."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_world import World
from pydantic import ValidationError

from gateway.core.request import ClientRequest, OutputFields, SamplingFields, ServingFields, StopFields, StrictModel
from gateway.core.validation import validate
from gateway.http.openapi import openapi
from gateway.openai.chat import ChatCompletionRequest
from gateway.openai.completions import CompletionRequest
from gateway.sglang import GenerateBody
from outrider.v1 import gateway_pb2

CANDIDATES: tuple[Any, ...] = (0.5, 1, True, "on", "x", ["x"], [5], {"5": 1.0})


def legal_value(model: type[StrictModel], name: str) -> Any:
    for value in CANDIDATES:
        try:
            model.model_validate({name: value})
        except ValidationError:
            continue
        return value
    raise AssertionError(f"no candidate suits {name}; add one")


def requests(sampling: dict[str, Any], stops: dict[str, Any], serving: dict[str, Any]) -> dict[str, ClientRequest]:
    fields = sampling | stops | serving
    chat = validate(ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}]} | fields)
    completion = validate(CompletionRequest, {"prompt": "x"} | fields)
    generate = validate(GenerateBody, {"text": "x", "sampling_params": sampling | stops} | serving)
    bodies = {"ChatCompletionRequest": chat, "CompletionRequest": completion, "GenerateBody": generate}
    return {name: body.requests(1)[0][0] for name, body in bodies.items()}


@pytest.mark.parametrize("model", [SamplingFields, StopFields, ServingFields])
def test_every_field_arrives_from_every_route(model: type[StrictModel]) -> None:
    for name in model.model_fields:
        sent = {name: legal_value(model, name)}
        expected = getattr(model.model_validate(sent), name)
        parts = [sent if model is part else {} for part in (SamplingFields, StopFields, ServingFields)]
        for route, request in requests(*parts).items():
            found = getattr(request.sampling if model is SamplingFields else request, name)
            assert found == expected, (route, name)


def test_every_field_is_in_the_document() -> None:
    schemas = openapi(authenticated=False)["components"]["schemas"]
    for body in ("ChatCompletionRequest", "CompletionRequest"):
        assert {*SamplingFields.model_fields, *OutputFields.model_fields} <= set(schemas[body]["properties"])
    assert {*SamplingFields.model_fields, *StopFields.model_fields} <= set(schemas["GenerateSampling"]["properties"])
    assert set(ServingFields.model_fields) <= set(schemas["GenerateBody"]["properties"])


@pytest.mark.parametrize("skips", [True, False])
async def test_skip_prefix_cache_is_sent_on_to_verify(world: World, skips: bool) -> None:
    world.verify.set_answer("ok")
    request = gateway_pb2.GatewayServiceGenerateRequest(prompt="x", skip_prefix_cache=skips)
    assert [message async for message in world.stub.Generate(request)]
    answer = await world.http.post("/v1/completions", json={"prompt": "x", "skip_prefix_cache": skips})
    assert answer.status_code == 200
    assert [request.skip_prefix_cache for request in world.verify.requests] == [skips, skips]

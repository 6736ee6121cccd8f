"""Sizes are looked at before memory is taken for what they announce."""

from __future__ import annotations

import tracemalloc

import pytest

from outrider.errors import ContextLengthError, InvalidRequestError
from outrider.protocol.generation import GenerationRequest
from outrider.sampling.params import SamplingParams
from outrider.v1 import common_pb2, verify_pb2
from verify_service.door.admission import Admission
from verify_service.engine.request import Request

ADMISSION = Admission(vocab_size=61, context_length=200, eos_token_ids=(), speculation=True)
Message = verify_pb2.VerifyServiceGenerateRequest


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt_token_ids": [1] * 2_000_000}, "prompt_token_ids"),
        ({"stop_token_ids": range(2_000_000)}, "stop_token_ids"),
        ({"sampling": common_pb2.SamplingParams(logit_bias=dict.fromkeys(range(200_000), 1.0))}, "sampling.logit_bias"),
        ({"request_id": "x" * 2_000_000}, "request_id"),
    ],
)
def test_a_message_of_millions_is_refused_by_its_number(fields: dict[str, object], field: str) -> None:
    message = Message(**({"prompt_token_ids": [1], "max_tokens": 1} | fields))  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError) as caught:
            ADMISSION.admit(message)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.field == field and isinstance(caught.value, ContextLengthError) == (field == "prompt_token_ids")
    assert peak < 4_000_000, "bytes taken for a message that is refused"


def test_a_request_has_nothing_of_the_vocabularys_size_where_a_device_samples() -> None:
    params = SamplingParams(repetition_penalty=1.2)
    asked = GenerationRequest("r", [1] * 9, params, 8, stop_token_ids=frozenset({4}), min_tokens=2)
    tracemalloc.start()
    try:
        request = Request.begin(asked, lambda update: None, vocab_size=200_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000 and request.sampler.params == params

"""A least number of tokens, by each door's name for it."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_world import World


async def test_stop_strings_are_looked_for_behind_the_least_tokens(world: World) -> None:
    world.verify.set_answer("one two three. one two three.")
    body = {"prompt": "x", "stop": ["two"], "max_tokens": 40}
    early = (await world.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert early["text"] == "one "
    least = len(world.verify.tokenizer.encode("one two three.", add_special_tokens=False))
    late = (await world.http.post("/v1/completions", json=body | {"min_tokens": least})).json()["choices"][0]
    assert late["text"] == "one two three. one " and late["finish_reason"] == "stop"
    assert world.verify.requests[-1].min_tokens == least
    params = {"stop": ["two"], "min_new_tokens": least}
    answer = (await world.http.post("/generate", json={"text": "x", "sampling_params": params})).json()
    assert answer["text"] == late["text"] and answer["meta_info"]["finish_reason"]["matched"] == "two"
    assert world.verify.requests[-1].min_tokens == least


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "send at most 8"),
        ({"min_tokens": 1, "guided_regex": "a"}, "leave it out"),
        ({"min_tokens": -1}, "send at least 0"),
    ],
)
async def test_what_cannot_be_is_refused(world: World, fields: dict[str, Any], problem: str) -> None:
    response = await world.http.post("/v1/completions", json={"prompt": "x"} | fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "min_tokens" and problem in error["message"]


async def test_bad_words_are_sent_on_as_tokens_with_and_without_a_space(world: World) -> None:
    world.verify.set_answer("ok")
    encode = world.verify.tokenizer.encode
    expected = [encode(text, add_special_tokens=False) for text in ("two", " two")]
    for path, body in (
        ("/v1/completions", {"prompt": "x", "bad_words": ["two"]}),
        ("/generate", {"text": "x", "sampling_params": {"bad_words": ["two"]}}),
    ):
        assert (await world.http.post(path, json=body)).status_code == 200
        assert [list(word.ids) for word in world.verify.requests[-1].bad_words] == expected


async def test_what_does_not_go_with_a_form_is_named_as_the_client_named_it(world: World) -> None:
    for params, field in (
        ({"min_new_tokens": 2}, "sampling_params.min_new_tokens"),
        ({"min_tokens": 2}, "sampling_params.min_tokens"),
        ({"bad_words": ["x"]}, "sampling_params.bad_words"),
    ):
        response = await world.http.post("/generate", json={"text": "x", "sampling_params": {"regex": "a", **params}})
        assert response.status_code == 400 and response.json()["error"]["param"] == field

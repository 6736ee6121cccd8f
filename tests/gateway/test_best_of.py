"""The best of several completions, by the mean log-probability of their tokens."""

from __future__ import annotations

from typing import Any

import pytest
from gateway_world import World
from scripted_verify import EOS

from gateway.core.answer import Token
from gateway.openai.completions import _mean_logprob
from outrider.protocol.generation import TokenLogprobs, TokenOrigin


async def test_as_many_are_made_and_n_are_sent(world: World) -> None:
    world.verify.scripts = {i: [*world.verify.set_answer(f"answer {i}"), EOS] for i in range(3)}
    body = {"prompt": ["a", "b"], "n": 2, "best_of": 3, "max_tokens": 40}
    answer = (await world.http.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for pair in (answer["choices"][:2], answer["choices"][2:]):
        texts = {choice["text"] for choice in pair}
        assert len(texts) == 2 and texts < {"answer 0", "answer 1", "answer 2"}
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert len(world.verify.requests) == 6
    assert all(request.sampling.num_logprobs == 0 for request in world.verify.requests)


def test_the_mean_counts_not_the_sum() -> None:
    def tokens(*values: float) -> list[Token]:
        return [Token(1, TokenOrigin.PLAIN, "", TokenLogprobs(value, ())) for value in values]

    assert _mean_logprob(tokens(-1.0, -1.0, -1.0)) > _mean_logprob(tokens(-2.0))


@pytest.mark.parametrize("fields", [{"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 17}])
async def test_what_cannot_be_is_refused(world: World, fields: dict[str, Any]) -> None:
    response = await world.http.post("/v1/completions", json={"prompt": "x"} | fields)
    assert response.status_code == 400 and response.json()["error"]["param"] == "best_of"

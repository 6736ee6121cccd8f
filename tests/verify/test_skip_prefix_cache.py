"""A request may have its whole prompt computed, whatever the radix cache has of it."""

from __future__ import annotations

from harness import Answer, make_engine, make_request

from outrider.models.decoder import CausalLM
from outrider.sampling.params import SamplingParams

PROMPT = list(range(1, 31))


def test_its_prompt_is_computed_and_what_it_leaves_is_found_by_others(model: CausalLM) -> None:
    engine = make_engine(model)
    engine.start()
    try:
        answers = [Answer() for _ in range(4)]
        for answer, skips in zip(answers, (False, False, True, False), strict=True):
            request = make_request(answer, PROMPT, SamplingParams(temperature=0.0), 61, 4, skip_prefix_cache=skips)
            engine.submit(request)
            assert answer.done.wait(60)
    finally:
        engine.stop()
    found = [answer.updates[0].cached_prompt_tokens for answer in answers]
    assert found[0] == found[2] == 0 and found[1] == found[3] > 0
    assert len({tuple(answer.token_ids) for answer in answers}) == 1

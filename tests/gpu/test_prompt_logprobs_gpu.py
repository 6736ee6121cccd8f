"""Log-probabilities of prompts, on the GPU: right, and bitwise the same in any batch in deterministic mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_harness import VOCAB, make_paged_engine, small_model
from harness import Answer, make_request
from local_draft import LocalDraft, noise
from threaded_engine import ThreadedEngine

from outrider.models.decoder import CausalLM
from outrider.protocol.generation import PromptLogprobs
from outrider.sampling.params import SamplingParams

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0.0)
SIZES = {"max_running": 8, "max_round_tokens": 32, "max_nodes": 24}


def prompts() -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(VOCAB) for _ in range(length)] for length in (2, 17, 40, 90, 33)]


def ask(engine: ThreadedEngine, prompt: list[int], num_top: int = 3) -> Answer:
    answer = Answer()
    engine.submit(make_request(answer, prompt, GREEDY, VOCAB, max_tokens=6, num_prompt_logprobs=num_top))
    return answer


def logprobs_of(answer: Answer) -> PromptLogprobs:
    assert answer.done.wait(60) and answer.updates[-1].error is None
    parts = [part for update in answer.updates for part in update.prompt_logprobs]
    assert [part.start for part in parts] == [1, *np.cumsum([len(part) for part in parts[:-1]]) + 1]
    names = ("logprobs", "ranks", "top_ids", "top_logprobs")
    return PromptLogprobs(1, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def test_they_are_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    model = small_model(tmp_path, head_dim=64, dtype=torch.float32, device="cuda")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    engine, _ = make_paged_engine(model, **SIZES)
    engine.draft_connected(LocalDraft(engine, VOCAB, noise(4, VOCAB)))
    engine.start()
    try:
        # Beside decoding, whose results are read while chunks still run.
        for prompt, answer in [(prompt, ask(engine, prompt)) for prompt in prompts()]:
            got = logprobs_of(answer)
            with torch.inference_mode():
                expected = reference(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
            own = expected.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
            np.testing.assert_allclose(got.logprobs, own, atol=2e-3)
            np.testing.assert_allclose(got.top_logprobs, expected.topk(3, -1).values, atol=2e-3)
            greedy = got.logprobs == got.top_logprobs[:, 0]
            np.testing.assert_array_equal(greedy, got.ranks == 1)
    finally:
        engine.stop()


def test_in_deterministic_mode_they_depend_on_nothing_beside_them(small_models: Callable[..., CausalLM]) -> None:
    model = small_models()
    engine, _ = make_paged_engine(model, deterministic=True, **SIZES)
    engine.start()
    try:
        alone = [logprobs_of(ask(engine, prompt)) for prompt in prompts()]
        together = [logprobs_of(answer) for answer in [ask(engine, prompt) for prompt in prompts()]]
        assert together == alone
    finally:
        engine.stop()

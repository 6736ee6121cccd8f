"""Log-probabilities of a prompt are those of a plain forward, whatever is cached, chunked, preempted or drafted."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_harness import VOCAB, make_paged_engine, small_model
from harness import Answer, make_engine, make_request
from local_draft import LocalDraft, noise
from threaded_engine import ThreadedEngine

from outrider.models.decoder import CausalLM
from outrider.protocol.generation import FinishReason, PromptLogprobs
from outrider.sampling.params import SamplingParams
from verify_service.executors import base

GREEDY = SamplingParams(temperature=0.0)
NUM_TOP = 3


@dataclass
class Target:
    model: CausalLM
    folder: Path

    @cached_property
    def _reference(self) -> Any:
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)

    def expected(self, prompt: list[int]) -> torch.Tensor:
        """Log-probabilities [len(prompt) - 1, vocabulary] by transformers."""
        with torch.inference_mode():
            logits: torch.Tensor = self._reference(torch.tensor([prompt])).logits[0, :-1]
        return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("small")
    return Target(small_model(folder), folder)


def on_cpu(model: CausalLM, **options: object) -> ThreadedEngine:
    return make_engine(model, chunk_size=7, **options)  # type: ignore[arg-type]


def on_device(model: CausalLM, **options: object) -> ThreadedEngine:
    return make_paged_engine(model, **options)[0]  # type: ignore[arg-type]


def deterministic(model: CausalLM, **options: object) -> ThreadedEngine:
    return make_paged_engine(model, deterministic=True, **options)[0]  # type: ignore[arg-type]


Make = Callable[..., ThreadedEngine]
MAKERS = [on_cpu, on_device, deterministic]


def start(engines: list[ThreadedEngine], engine: ThreadedEngine) -> ThreadedEngine:
    engines.append(engine)
    engine.start()
    return engine


def prompt_of(length: int, seed: int = 1) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB) for _ in range(length)]


def ask(engine: ThreadedEngine, prompt: list[int], num_top: int | None = NUM_TOP, **fields: object) -> Answer:
    answer = Answer()
    values: dict[str, object] = {"max_tokens": 4, "num_prompt_logprobs": num_top} | fields
    engine.submit(make_request(answer, prompt, GREEDY, VOCAB, **values))  # type: ignore[arg-type]
    return answer


def logprobs_of(answer: Answer) -> PromptLogprobs:
    """All parts as one; they must follow each other without a gap, and come before the first token."""
    assert answer.done.wait(60)
    assert answer.updates[-1].error is None
    parts = [part for update in answer.updates for part in update.prompt_logprobs]
    end = 1
    for part in parts:
        assert part.start == end
        end += len(part)
    first_token = next(i for i, update in enumerate(answer.updates) if update.token_ids)
    assert all(not update.prompt_logprobs for update in answer.updates[first_token + 1 :])
    names = ("logprobs", "ranks", "top_ids", "top_logprobs")
    return PromptLogprobs(1, *(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def check(answer: Answer, prompt: list[int], expected: torch.Tensor, num_top: int = NUM_TOP) -> None:
    got = logprobs_of(answer)
    own = expected.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0]
    np.testing.assert_allclose(got.logprobs, own, atol=2e-4)
    assert got.ranks.tolist() == (1 + (expected > own[:, None]).sum(-1)).tolist()
    top = expected.topk(num_top, -1)
    np.testing.assert_array_equal(got.top_ids, top.indices)
    np.testing.assert_allclose(got.top_logprobs, top.values, atol=2e-4)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("piece", [1 << 23, 2 * VOCAB])
def test_they_are_those_of_a_plain_forward_chunk_by_chunk(
    make: Make, piece: int, target: Target, engines: list[ThreadedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_MAX_PIECE_LOGITS", piece)
    engine = start(engines, make(target.model))
    prompts = [prompt_of(length, seed=length) for length in (2, 7, 8, 23, 50)]
    # All at once, so that chunks of several share a round with others' decoding.
    for prompt, answer in [(prompt, ask(engine, prompt)) for prompt in prompts]:
        check(answer, prompt, target.expected(prompt))


@pytest.mark.parametrize("make", MAKERS)
def test_a_prompt_that_is_in_the_cache_is_described_from_its_beginning(
    make: Make, target: Target, engines: list[ThreadedEngine]
) -> None:
    engine = start(engines, make(target.model))
    prompt = prompt_of(30)
    plain = ask(engine, prompt, num_top=None)
    assert plain.done.wait(60) and all(not update.prompt_logprobs for update in plain.updates)
    again = ask(engine, prompt, num_top=None)
    assert again.done.wait(60) and again.updates[0].cached_prompt_tokens > 0
    described = ask(engine, prompt)
    check(described, prompt, target.expected(prompt))
    assert all(update.cached_prompt_tokens == 0 for update in described.updates)
    assert described.token_ids == plain.token_ids


@pytest.mark.parametrize("make", MAKERS)
def test_a_token_is_greedy_exactly_when_its_value_is_the_top_one(
    make: Make, target: Target, engines: list[ThreadedEngine]
) -> None:
    engine = start(engines, make(target.model))
    prompt = prompt_of(6)
    plain = ask(engine, prompt, num_top=None, max_tokens=20)
    assert plain.done.wait(60)
    text = prompt + plain.token_ids
    got = logprobs_of(ask(engine, text, num_top=1))
    greedy = (got.logprobs == got.top_logprobs[:, 0]).tolist()
    assert greedy == (got.ranks == 1).tolist()
    # From the prompt's end on the text is what greedy decoding gave.
    assert all(greedy[len(prompt) - 1 :]) and not all(greedy)


@pytest.mark.parametrize("make", MAKERS)
def test_a_prompt_of_one_token_has_none(make: Make, target: Target, engines: list[ThreadedEngine]) -> None:
    answer = ask(start(engines, make(target.model)), [5])
    assert answer.done.wait(60) and answer.updates[-1].finish_reason is FinishReason.LENGTH
    assert all(not update.prompt_logprobs for update in answer.updates)


@pytest.mark.parametrize("make", MAKERS)
def test_preemption_neither_repeats_nor_loses_a_position(
    make: Make, target: Target, engines: list[ThreadedEngine]
) -> None:
    engine = start(engines, make(target.model, num_pages=30))
    engine.draft_connected(LocalDraft(engine, VOCAB, noise(4, VOCAB)))
    prompts = [prompt_of(40 + i, seed=i) for i in range(5)]
    answers = [ask(engine, prompt, max_tokens=30) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        check(answer, prompt, target.expected(prompt))
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize("make", MAKERS)
def test_a_draft_does_not_round_them_in_another_way(make: Make, target: Target, engines: list[ThreadedEngine]) -> None:
    prompt = prompt_of(12)
    plain = logprobs_of(ask(start(engines, make(target.model)), prompt))
    engine = start(engines, make(target.model))
    # Its nodes are there before the prompt is computed; on a CPU one forward computes a chunk's end and the root.
    engine.draft_connected(LocalDraft(engine, VOCAB, noise(8, VOCAB)))
    drafted = ask(engine, prompt, max_tokens=24)
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(logprobs_of(drafted), name), getattr(plain, name))
    rounds = [counts for update in drafted.updates for counts in update.rounds]
    assert any(one.num_draft_tokens for one in rounds)


def test_a_model_that_breaks_fails_the_request_alone(
    target: Target, engines: list[ThreadedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(engines, on_device(target.model))
    logits = target.model.logits
    monkeypatch.setattr(target.model, "logits", lambda hidden: logits(hidden) * torch.nan)
    broken = ask(engine, prompt_of(20))
    assert broken.done.wait(60)
    error = broken.updates[-1].error
    assert error is not None and error.code == "unusable_logits"
    monkeypatch.undo()
    prompt = prompt_of(20)
    check(ask(engine, prompt), prompt, target.expected(prompt))

"""Requests that share a prompt while they run say what each says alone, on real engines with real drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from cuda_harness import KINDS, VOCAB, make_paged_engine
from feature_draft import FeatureDraft
from harness import Answer, make_engine, run_all
from local_draft import LocalDraft, noise, oracle
from test_cuda_executor_cpu import check_same
from threaded_engine import ThreadedEngine

from outrider.models.decoder import CausalLM
from outrider.models.drafters.heads import StandaloneDraft
from verify_service.engine.round import Growth

Start = Callable[..., ThreadedEngine]


@pytest.fixture(scope="module")
def siblings() -> list[Any]:
    """One prompt sampled in all ways, and three that share a part of it."""
    source = random.Random(2)
    prompt = [source.randrange(VOCAB) for _ in range(75)]
    tails = [[source.randrange(VOCAB) for _ in range(length)] for length in (1, 20, 50)]
    return [(prompt, params) for params in KINDS] + [(prompt[:60] + tail, KINDS[0]) for tail in tails]


@pytest.fixture(scope="module")
def alone(model: CausalLM, siblings: list[Any]) -> list[Answer]:
    """What they are answered one at a time, each with its whole prompt computed."""
    engine = make_engine(model)
    engine.start()
    try:
        return run_all(engine, siblings, width=1, speculate=False, skip_prefix_cache=True)
    finally:
        engine.stop()


def num_shared(answers: list[Answer]) -> int:
    """Answers whose prompts were shared."""
    return sum(any(update.cached_prompt_tokens for update in answer.updates) for answer in answers)


@pytest.mark.parametrize("draft", ["none", "right", "random", "features"])
@pytest.mark.parametrize("kind", ["torch", "paged", "deterministic"])
def test_all_at_once_say_what_each_says_alone(
    model: CausalLM, siblings: list[Any], alone: list[Answer], start: Start, kind: str, draft: str
) -> None:
    engine = start(kind, max_running=16)
    known = {tuple(prompt): prompt + one.token_ids for (prompt, _), one in zip(siblings, alone, strict=True)}
    guess = {"right": oracle(known, VOCAB), "random": noise(3, VOCAB)}.get(draft, lambda author: None)
    service = FeatureDraft(engine, VOCAB, guess, (0, 1)) if draft == "features" else LocalDraft(engine, VOCAB, guess)
    if isinstance(service, FeatureDraft):
        service.connect()
    elif draft != "none":
        engine.draft_connected(service)
    engine.start()
    if isinstance(service, FeatureDraft):
        service.wait()
    answers = run_all(engine, siblings, width=len(siblings))
    check_same(answers, alone)
    assert num_shared(answers) == len(siblings) - 1
    engine.stop()
    if isinstance(service, FeatureDraft):
        assert service.check(model) > 75 * len(siblings)


@pytest.mark.parametrize("num_pages", [256, 60])
def test_trees_that_grow_inside_rounds_find_the_pages_of_a_shared_prompt(
    model: CausalLM, siblings: list[Any], alone: list[Answer], engines: list[ThreadedEngine], num_pages: int
) -> None:
    engine, _ = make_paged_engine(
        model, num_pages, draft=StandaloneDraft(model, ""), growth=Growth(3, 16), max_running=16, max_round_tokens=48
    )
    engines.append(engine)
    engine.start()
    answers = run_all(engine, siblings, width=len(siblings))
    check_same(answers, alone)
    assert num_shared(answers) == len(siblings) - 1
    # The target drafts for itself, so greedy requests accept what it finds if its KV of the prompt is right.
    assert sum(answer.num_accepted for answer in answers) > 40

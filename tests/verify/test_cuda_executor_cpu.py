"""The GPU's executor gives what the CPU's gives: everything but kernels and graphs, run on torch references."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_harness import VOCAB, jobs, make_paged_engine, small_model, texts
from harness import Answer, run_all, tokens
from local_draft import Guess, LocalDraft, noise, oracle, wrong
from page_integrity import check_memory
from threaded_engine import ThreadedEngine

from kernels.sampling import sample_rows
from kernels.sampling_state import RoundTokens
from outrider.errors import InternalError
from outrider.models.decoder import CausalLM
from outrider.sampling.params import SamplingParams
from outrider.tree.author import TreeAuthor
from verify_service.executors.cuda import CudaExecutor

GREEDY = SamplingParams(temperature=0.0)


Made = list[tuple[ThreadedEngine, CudaExecutor]]


@pytest.fixture
def made() -> Iterator[Made]:
    """Engines that a test makes; in the end nothing may be left in them."""
    engines: Made = []
    yield engines
    for engine, executor in engines:
        engine.stop()
        assert engine.scheduler.running == [] and not engine.scheduler.waiting
        check_memory(engine.memory)
        assert engine.memory.num_used == engine.memory.radix.num_pages, "a page leaked"
        assert len(executor.rows) == 0, "a row leaked"


def start(made: Made, model: CausalLM, guess: Guess | None = None, **options: object) -> ThreadedEngine:
    engine, executor = make_paged_engine(model, **options)  # type: ignore[arg-type]
    made.append((engine, executor))
    if guess is not None:
        engine.draft_connected(LocalDraft(engine, VOCAB, guess))
    engine.start()
    return engine


def guesser(name: str, truth: list[Answer]) -> Guess | None:
    match name:
        case "right":
            return oracle(texts(truth), VOCAB)
        case "wrong":
            return wrong(texts(truth), VOCAB)
        case "random":
            return noise(9, VOCAB)
    return None


def check_same(answers: list[Answer], truth: list[Answer]) -> None:
    """Tokens are the same, and logprobs but for rounding."""
    for answer, expected in zip(answers, truth, strict=True):
        assert answer.token_ids == expected.token_ids
        got, want = ([entry for update in text.updates for entry in update.logprobs] for text in (answer, expected))
        assert [entry.logprob for entry in got] == pytest.approx([entry.logprob for entry in want], rel=1e-3, abs=1e-4)
        assert [[token for token, _ in entry.top] for entry in got] == [[token for token, _ in e.top] for e in want]


@pytest.mark.parametrize(
    ("name", "width", "num_pages", "deterministic"),
    [
        ("none", 4, 24, False),
        ("right", 1, 256, False),
        ("right", 4, 24, False),
        ("wrong", 4, 256, False),
        ("right", 4, 256, True),
        ("random", 4, 24, True),
    ],
)
def test_tokens_are_those_of_the_cpu(
    model: CausalLM, truth: list[Answer], made: Made, name: str, width: int, num_pages: int, deterministic: bool
) -> None:
    guess = guesser(name, truth)
    engine = start(made, model, guess, num_pages=num_pages, deterministic=deterministic)
    answers = run_all(engine, jobs(), width)
    check_same(answers, truth)
    accepted = sum(answer.num_accepted for answer in answers)
    if name == "right":
        assert accepted > 0.5 * sum(len(answer.token_ids) for answer in answers)
    if num_pages == 24:
        assert engine.scheduler.num_preemptions > 0
    else:
        assert any(update.cached_prompt_tokens for answer in answers for update in answer.updates)


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_request_may_fill_a_round(model: CausalLM, truth: list[Answer], made: Made, deterministic: bool) -> None:
    right, random_nodes = oracle(texts(truth), VOCAB, depth=20), noise(3, VOCAB)

    def wide(author: TreeAuthor) -> None:
        right(author)
        for _ in range(6):
            random_nodes(author)

    engine = start(made, model, wide, deterministic=deterministic, max_running=64, max_round_tokens=64, max_nodes=63)
    answers = run_all(engine, jobs()[:3], 1)
    check_same(answers, truth[:3])
    assert max(update.num_draft_tokens for answer in answers for update in answer.updates) > 40


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_requests_than_a_round_has_tokens_take_turns(
    model: CausalLM, truth: list[Answer], made: Made, deterministic: bool
) -> None:
    guess = guesser("right", truth)
    engine = start(made, model, guess, deterministic=deterministic, max_running=16, max_round_tokens=8, max_nodes=7)
    check_same(run_all(engine, jobs(), len(jobs())), truth)


def test_logits_wider_than_the_vocabulary_give_no_token_without_text(made: Made, model: CausalLM) -> None:
    engine = start(made, model, vocab_size=20)
    params = [SamplingParams(temperature=2.0, seed=seed) for seed in range(4)]
    answers = run_all(engine, [([1, 2, 3], each) for each in params])
    tokens = [token for answer in answers for token in answer.token_ids]
    assert max(tokens) < 20 and len(set(tokens)) > 10


def test_unusable_logits_fail_one_request_alone_and_leave_no_trace(
    truth: list[Answer], made: Made, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = small_model(tmp_path_factory.mktemp("poisoned"))
    poison = VOCAB - 1
    with torch.inference_mode():
        model.embedding[poison] = torch.nan  # type: ignore[attr-defined]
    plain = [(prompt, params) for prompt, params in jobs() if poison not in prompt]
    expected = [answer for (prompt, _), answer in zip(jobs(), truth, strict=True) if poison not in prompt]
    usable = [poison not in answer.token_ids for answer in expected]
    engine = start(made, model, num_pages=32)
    for bad in ([poison], [1, 2, 3, poison, 4, 5, 6, 7, 8, 9, 10]):
        group = [(bad, GREEDY), *plain]
        failed, *others = run_all(engine, group, len(group))
        assert isinstance(failed.updates[-1].error, InternalError)
        assert not failed.token_ids
        for answer, want, usual in zip(others, expected, usable, strict=True):
            if usual:
                assert answer.token_ids == want.token_ids


def test_a_token_outside_the_vocabulary_fails_one_request_alone(
    model: CausalLM, truth: list[Answer], made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampling kernel with a fault: it gives no token in place of one that only one answer has."""
    token_ids = tokens(truth)
    alone = {token: n for n, ids in enumerate(token_ids) for token in ids if sum(token in t for t in token_ids) == 1}
    wrong, number = max(alone.items(), key=lambda item: token_ids[item[1]].index(item[0]))
    place = token_ids[number].index(wrong)

    def faulty(logits: torch.Tensor, size: int, tokens: RoundTokens, *args: Any, **options: Any) -> None:
        sample_rows(logits, size, tokens, *args, **options)
        sampled = args[1].sampled[: len(tokens.token_ids)]
        sampled[sampled == wrong] = 2**31 - 1

    monkeypatch.setattr("outrider.sampling.device.sample_rows", faulty)
    engine = start(made, model, oracle(texts(truth), VOCAB))
    answers = run_all(engine, jobs(), len(jobs()))
    failed = answers.pop(number)
    error = failed.updates[-1].error
    assert isinstance(error, InternalError) and error.code == "illegal_token"
    assert failed.token_ids == token_ids[number][:place]
    check_same(answers, [*truth[:number], *truth[number + 1 :]])

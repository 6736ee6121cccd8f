"""Masks in captured rounds: the same tokens with any draft, and nothing that a grammar or a bad word forbids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cuda_harness
import pytest
import torch
from cuda_harness import make_paged_engine, texts
from grammar_cases import fits, guesser, jobs, run
from harness import run_all, tokens
from local_draft import LocalDraft, oracle
from threaded_engine import ThreadedEngine
from tiny_grammar import VOCAB, text_of, tiny_vocabulary

from outrider.models.decoder import CausalLM
from outrider.models.drafters.heads import StandaloneDraft
from outrider.protocol.generation import FinishReason
from verify_service.executors.cuda import CudaExecutor

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("use_graphs", [True, False])
def test_tokens_under_a_grammar_are_the_same_with_any_draft(
    tmp_path: Path, small_models: Callable[..., CausalLM], use_graphs: bool
) -> None:
    model = small_models(dtype=torch.float32)
    vocabulary = tiny_vocabulary(tmp_path)
    found: dict[str, list[list[int]]] = {}
    truth = None
    for name in ("none", "right", "mixed"):
        engine, executor = make_paged_engine(
            model, vocabulary=vocabulary, deterministic=True, use_graphs=use_graphs, spin=True
        )
        if truth is not None and (guess := guesser(name, truth)) is not None:
            engine.draft_connected(LocalDraft(engine, VOCAB, guess))
        try:
            answers = run(engine)
        finally:
            engine.stop()
        assert len(executor.rows) == 0
        truth = truth or answers
        found[name] = [answer.token_ids for answer in answers]
        if name != "none":
            assert sum(answer.num_accepted for answer in answers) > 0
    assert found["right"] == found["none"] and found["mixed"] == found["none"]
    complete = 0
    for (_, params), answer in zip(jobs(), truth or [], strict=True):
        assert answer.updates[-1].error is None
        if params.grammar is not None and answer.updates[-1].finish_reason is FinishReason.STOP:
            complete += 1
            assert fits(params.grammar, text_of(answer.token_ids))
    assert complete >= 8


@pytest.mark.parametrize("inside", [False, True])
def test_bad_words_of_several_tokens_are_never_said_with_any_draft(
    small_models: Callable[..., CausalLM], start: Callable[..., tuple[ThreadedEngine, CudaExecutor]], inside: bool
) -> None:
    model = small_models(dtype=torch.float32)
    asked = cuda_harness.jobs()
    free = run_all(start(model, deterministic=True, spin=True)[0], asked)
    ids = free[0].token_ids
    words = [[ids[0]], ids[3:5], ids[8:11]]
    plain = run_all(start(model, deterministic=True, spin=True)[0], asked, bad_words=words)
    draft = StandaloneDraft(model, "") if inside else None
    engine, _ = start(model, deterministic=True, spin=True, draft=draft)
    engine.draft_connected(LocalDraft(engine, cuda_harness.VOCAB, oracle(texts(plain), cuda_harness.VOCAB)))
    drafted = run_all(engine, asked, bad_words=words)
    assert tokens(drafted) == tokens(plain) != tokens(free)
    assert sum(answer.num_accepted for answer in drafted) > 35
    for answer in plain:
        for word in words:
            assert all(answer.token_ids[at : at + len(word)] != word for at in range(len(answer.token_ids)))

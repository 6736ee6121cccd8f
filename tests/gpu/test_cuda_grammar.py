"""Grammar masks in captured rounds: the same tokens with any draft, and nothing that a grammar forbids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda_harness import make_paged_engine
from grammar_cases import fits, guesser, jobs, run
from local_draft import LocalDraft
from tiny_grammar import VOCAB, text_of, tiny_vocabulary

from outrider.models.decoder import CausalLM
from outrider.protocol.generation import FinishReason

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("use_graphs", [True, False])
def test_tokens_under_a_grammar_are_the_same_with_any_draft(
    tmp_path: Path, small_models: Callable[..., CausalLM], use_graphs: bool
) -> None:
    model = small_models(dtype=torch.float32)
    vocabulary = tiny_vocabulary(tmp_path)
    said: dict[str, list[list[int]]] = {}
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
        said[name] = [answer.token_ids for answer in answers]
        if name != "none":
            assert sum(answer.num_accepted for answer in answers) > 0
    assert said["right"] == said["none"] and said["mixed"] == said["none"]
    complete = 0
    for (_, params), answer in zip(jobs(), truth or [], strict=True):
        assert answer.updates[-1].error is None
        if params.grammar is not None and answer.updates[-1].finish_reason is FinishReason.STOP:
            complete += 1
            assert fits(params.grammar, text_of(answer.token_ids))
    assert complete >= 8

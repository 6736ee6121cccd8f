"""Answers have their least number of tokens, and are the same with any draft on either executor."""

from __future__ import annotations

import pytest
from cuda_harness import VOCAB, jobs, make_paged_engine, texts
from harness import Answer, make_engine, run_all, tokens
from local_draft import LocalDraft, noise, oracle
from threaded_engine import ThreadedEngine

from outrider.models.decoder import CausalLM
from outrider.protocol.generation import FinishReason

STOPS = frozenset(range(0, VOCAB, 3))
"""So many that an answer would end after a few tokens."""
LEAST = 9


@pytest.mark.parametrize(("draft", "paged"), [("oracle", True), ("random", False)])
def test_an_answer_ends_no_sooner_with_any_draft(
    model: CausalLM, engines: list[ThreadedEngine], draft: str, paged: bool
) -> None:
    plain = make_engine(model)
    engine = make_paged_engine(model, num_pages=24)[0] if paged else make_engine(model, 24, chunk_size=16)
    engines += [plain, engine]
    plain.start()
    early = run_all(plain, jobs(), stop_token_ids=STOPS)
    truth = run_all(plain, jobs(), stop_token_ids=STOPS, min_tokens=LEAST)
    guess = noise(9, VOCAB) if draft == "random" else oracle(texts(truth), VOCAB)
    engine.draft_connected(LocalDraft(engine, VOCAB, guess))
    engine.start()
    drafted: list[Answer] = run_all(engine, jobs(), stop_token_ids=STOPS, min_tokens=LEAST)
    assert tokens(drafted) == tokens(truth)
    assert any(len(answer.token_ids) <= LEAST for answer in early)
    for answer in truth:
        assert STOPS.isdisjoint(answer.token_ids[:LEAST])
        if answer.updates[-1].finish_reason is FinishReason.STOP:
            assert len(answer.token_ids) > LEAST and answer.token_ids[-1] in STOPS
    if draft == "oracle":
        assert sum(answer.num_accepted for answer in drafted) > 0

"""Answers never have a bad word, and are the same with any draft."""

from __future__ import annotations

import pytest
from cuda_harness import VOCAB, jobs, make_paged_engine, texts
from harness import Answer, make_engine, make_request, run_all, tokens
from local_draft import LocalDraft, noise, oracle
from msgspec.structs import replace
from threaded_engine import ThreadedEngine

from outrider.errors import InvalidRequestError
from outrider.models.decoder import CausalLM
from outrider.sampling.params import SamplingParams
from verify_service.engine.scheduler import EngineLimits


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("draft", ["oracle", "random"])
def test_no_answer_has_one_with_any_draft(
    model: CausalLM, truth: list[Answer], engines: list[ThreadedEngine], draft: str, paged: bool
) -> None:
    ids = truth[0].token_ids
    words = [[ids[0]], [ids[3]]] if paged else [[ids[0]], ids[3:5], ids[8:11]]
    plain = make_engine(model)
    engine = make_paged_engine(model, num_pages=24)[0] if paged else make_engine(model, 24, chunk_size=16)
    engines += [plain, engine]
    plain.start()
    expected = run_all(plain, jobs(), bad_words=words)
    guess = noise(9, VOCAB) if draft == "random" else oracle(texts(expected), VOCAB)
    engine.draft_connected(LocalDraft(engine, VOCAB, guess))
    engine.start()
    drafted = run_all(engine, jobs(), bad_words=words)
    assert tokens(drafted) == tokens(expected) != tokens(truth)
    for answer in expected:
        for word in words:
            assert all(answer.token_ids[at : at + len(word)] != word for at in range(len(answer.token_ids)))


def test_long_ones_are_refused_where_they_cannot_be_held_to() -> None:
    request = make_request(Answer(), [1], SamplingParams(), VOCAB, bad_words=[[1], [2, 3]]).params
    EngineLimits(VOCAB, 64).check(request)
    limits = EngineLimits(VOCAB, 64, max_bad_word=1)
    limits.check(replace(request, bad_words=[[1]]))
    with pytest.raises(InvalidRequestError, match=r"bad_words.*2 tokens.*limit of 1.*one token each"):
        limits.check(request)

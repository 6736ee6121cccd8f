"""Answers never have a bad word, and are the same with any draft."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_harness import VOCAB, jobs, make_paged_engine, texts
from harness import Answer, make_engine, run_all, tokens
from local_draft import LocalDraft, noise, oracle
from threaded_engine import ThreadedEngine

from outrider.grammar.compiler import unpack
from outrider.models.decoder import CausalLM
from outrider.models.drafters.heads import StandaloneDraft
from verify_service.engine.request import BadWords


@pytest.mark.parametrize(("kind", "draft"), [("torch", "oracle"), ("paged", "random"), ("inside", "oracle")])
def test_no_answer_has_one_with_any_draft(
    model: CausalLM, truth: list[Answer], engines: list[ThreadedEngine], kind: str, draft: str
) -> None:
    ids = truth[0].token_ids
    words = [[ids[0]], ids[3:5], ids[8:11]]
    plain = make_engine(model)
    inside = StandaloneDraft(model, "") if kind == "inside" else None
    paged = None if kind == "torch" else make_paged_engine(model, num_pages=24, draft=inside)[0]
    engine = paged or make_engine(model, 24, chunk_size=16)
    engines += [plain, engine]
    plain.start()
    expected = run_all(plain, jobs(), bad_words=words)
    guess = noise(9, VOCAB) if draft == "random" else oracle(texts(expected), VOCAB)
    engine.draft_connected(LocalDraft(engine, VOCAB, guess))
    engine.start()
    drafted = run_all(engine, jobs(), bad_words=words)
    assert tokens(drafted) == tokens(expected) != tokens(truth)
    assert draft == "random" or sum(answer.num_accepted for answer in drafted) > 35
    for answer in expected:
        for word in words:
            assert all(answer.token_ids[at : at + len(word)] != word for at in range(len(answer.token_ids)))


def test_masks_forbid_the_last_token_of_a_word_behind_the_others() -> None:
    words = BadWords([[1, 2, 40], [3, 2], [2, 2, 2, 0]], 41)

    def forbidden(tokens: list[int], prompt_len: int, nodes: list[int], parents: list[int]) -> list[list[int]]:
        masks = words.masks(tokens, prompt_len, nodes, parents)
        return [np.flatnonzero(~unpack(mask, 41)).tolist() for mask in masks]

    assert forbidden([1, 2], 2, [], []) == [[]], "the prompt's tokens are no part of a word"
    assert forbidden([1, 2], 0, [], []) == [[40]] and forbidden([9, 1, 2], 1, [], []) == [[40]]
    assert forbidden([2, 1, 2], 2, [1, 2, 2, 2, 3], [-1, 0, -1, 2, 3]) == [[], [], [40], [], [0], [2]]

"""Families under an engine, on both executors: drafts, prefixes from the cache and preemption change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cuda_harness import VOCAB, jobs, make_paged_engine, small_model, texts
from harness import make_engine, run_all
from local_draft import LocalDraft, noise, oracle
from test_colocated_draft import WAITS, colocated, of_model
from threaded_engine import ThreadedEngine

from outrider.config.draft import DraftOptions
from outrider.models.drafters.heads import StandaloneDraft
from outrider.tree.author import TreeAuthor
from verify_service.engine.round import Growth

KINDS = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": 9},
    "Gemma2": {"sliding_window": 9, "attn_logit_softcapping": 5.0, "tie_word_embeddings": True},
    "Gemma3Text": {
        "sliding_window": 7,
        "layer_types": KINDS,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in KINDS},
    },
    "Phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "Olmo2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_and_memory_change_no_token(family: str, tmp_path: Path, engines: list[ThreadedEngine]) -> None:
    model = small_model(tmp_path, family, pad_token_id=0, **FAMILIES[family])
    given = jobs()
    plain = make_engine(model)
    engines.append(plain)
    plain.start()
    truth = run_all(plain, given, 1, speculate=False, max_tokens=16)
    right, random_nodes = oracle(texts(truth), VOCAB), noise(9, VOCAB)

    def both(author: TreeAuthor) -> None:
        right(author)
        random_nodes(author)

    for engine in (make_engine(model, 24, chunk_size=16), make_paged_engine(model, 24)[0]):
        engines.append(engine)
        engine.draft_connected(LocalDraft(engine, VOCAB, both))
        engine.start()
        answers = run_all(engine, given, 4, max_tokens=16)
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
        assert sum(answer.num_accepted for answer in answers) > 0


@pytest.mark.parametrize("family", ["Mistral", "Gemma3Text"])
def test_a_draft_model_of_the_family_guesses_as_it_is(
    family: str, tmp_path: Path, engines: list[ThreadedEngine]
) -> None:
    """The target as its own draft: on the engine's thread as on a CPU, and inside rounds as on a GPU."""
    model = small_model(tmp_path, family, pad_token_id=0, **FAMILIES[family])
    draft = StandaloneDraft(model, "")
    options = DraftOptions(speculative_algorithm=("STANDALONE",), device="cpu", max_requests=8, speculative_num_steps=4)
    beside = make_engine(model, colocated=colocated(of_model(draft, options)), **WAITS)  # type: ignore[arg-type]
    inside = make_paged_engine(model, draft=draft, growth=Growth(3, 16))[0]
    given = [job for job in jobs() if job[1].temperature == 0.0 and job[1].num_logprobs is None]
    for engine in (beside, inside):
        engines.append(engine)
        engine.start()
        answers = run_all(engine, given, 4)
        accepted = sum(answer.num_accepted for answer in answers)
        assert accepted > 0.4 * sum(len(answer.token_ids) for answer in answers)

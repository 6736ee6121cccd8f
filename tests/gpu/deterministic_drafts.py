"""Answers of a deterministic engine with drafts, on a GPU, beside those without."""

from __future__ import annotations

from collections.abc import Callable

from cuda_harness import VOCAB, jobs, texts
from harness import run_all
from local_draft import LocalDraft, oracle
from threaded_engine import ThreadedEngine

from outrider.models.decoder import CausalLM
from verify_service.executors.cuda import CudaExecutor

Start = Callable[..., tuple[ThreadedEngine, CudaExecutor]]


def check_drafts_change_nothing(start: Start, model: CausalLM) -> None:
    """With prefixes from the cache, and after preemptions."""
    sizes = {"deterministic": True, "max_round_tokens": 32, "max_nodes": 24}
    plain, _ = start(model, **sizes)
    truth = run_all(plain, jobs(), 1, speculate=False)
    drafted, _ = start(model, num_pages=28, **sizes)
    drafted.draft_connected(LocalDraft(drafted, VOCAB, oracle(texts(truth), VOCAB)))
    answers = run_all(drafted, jobs(), 8)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    assert sum(answer.num_accepted for answer in answers) > 0

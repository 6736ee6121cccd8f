"""Features that graphs store are those of one plain forward, and a draft may ask for them while the engine runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_harness import VOCAB, jobs, texts
from feature_draft import FeatureDraft
from harness import Answer, run_all, tokens
from local_draft import oracle
from threaded_engine import ThreadedEngine

from outrider.models.decoder import CausalLM
from verify_service.executors.cuda import CudaExecutor

pytestmark = pytest.mark.gpu

LAYERS = (0, 1, 3)
Models = Callable[..., CausalLM]
Start = Callable[..., tuple[ThreadedEngine, CudaExecutor]]


def guessing(engine: ThreadedEngine, truth: list[Answer], layers: tuple[int, ...] = LAYERS) -> FeatureDraft:
    return FeatureDraft(engine, VOCAB, oracle(texts(truth), VOCAB), layers)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("use_graphs", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_features_in_graphs_are_those_of_a_plain_forward(
    small_models: Models, start: Start, dtype: torch.dtype, tolerance: float, use_graphs: bool, deterministic: bool
) -> None:
    model = small_models(dtype=dtype)
    engine, executor = start(model, use_graphs=use_graphs, deterministic=deterministic)
    truth = run_all(engine, jobs(), speculate=False)
    num_graphs = len(executor.graphs)
    before = dict(executor.graphs._graphs)
    draft = guessing(engine, truth)
    draft.connect_and_wait()
    answers = run_all(engine, jobs())
    engine.stop()
    assert draft.check(model, tolerance) > 145
    assert len(executor.graphs) == num_graphs
    assert (num_graphs > 0) == use_graphs
    assert all(executor.graphs._graphs[bucket] is not graph for bucket, graph in before.items())
    if dtype is torch.float32 or deterministic:
        assert tokens(answers) == tokens(truth)


def test_a_draft_may_ask_while_requests_run(small_models: Models, start: Start) -> None:
    model = small_models(dtype=torch.float32)
    engine, _ = start(model)
    truth = run_all(engine, jobs(), speculate=False)
    first, second = guessing(engine, truth, (1,)), guessing(engine, truth, (3, 0))
    for draft in (first, second):
        draft.connect()
        assert tokens(run_all(engine, jobs(), len(jobs()))) == tokens(truth)
        draft.wait()
        assert tokens(run_all(engine, jobs(), 2)) == tokens(truth)
    engine.stop()
    assert first.num_begun == second.num_begun == 1
    for draft in (first, second):
        # What was open when the store was begun anew was closed in the middle.
        assert draft.check(model, 1e-3, preempted=True) > 70


def test_a_store_that_does_not_fit_leaves_the_engine_as_it_was(
    small_models: Models, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError("no room")

    model = small_models(dtype=torch.float32)
    engine, _ = start(model)
    truth = run_all(engine, jobs(), speculate=False)
    monkeypatch.setattr("verify_service.executors.base.FeatureStore", fail)
    draft = guessing(engine, truth)
    draft.connect()
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    assert not draft.texts and draft.num_begun == 0


def test_an_idle_engine_renews_all_graphs_before_a_draft_is_told_of_features(
    small_models: Models, start: Start
) -> None:
    model = small_models(dtype=torch.float32)
    engine, executor = start(model)
    before = dict(executor.graphs._graphs)
    draft = FeatureDraft(engine, VOCAB, lambda author: None, LAYERS)
    draft.connect_and_wait()
    assert before.keys() == executor.graphs._graphs.keys()
    assert all(executor.graphs._graphs[bucket] is not graph for bucket, graph in before.items())
    run_all(engine, jobs()[:4])
    engine.stop()
    assert draft.check(model, 1e-3) > 50

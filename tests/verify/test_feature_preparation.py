"""Graphs that store features are captured beside those that rounds use, and used all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from cuda_harness import VOCAB, jobs, make_paged_engine, texts
from feature_draft import FeatureDraft
from harness import Answer, run_all, tokens
from local_draft import oracle
from threaded_engine import ThreadedEngine

from outrider.cache.kv import FeatureStore
from outrider.models.decoder import CausalLM
from verify_service.executors.cuda import CudaExecutor
from verify_service.executors.ranks import ROUND, ExecutorLink
from verify_service.executors.round_buffers import Bucket, Buckets
from verify_service.features.staging import FeaturePlan

LAYERS = (0, 1, 3)

Stored = FeatureStore | None


class NotedGraphs:
    """A pool whose graphs note which features they were captured for; to run one is to run its work."""

    def __init__(self, executor: CudaExecutor, shapes: list[Bucket]) -> None:
        self._executor = executor
        self._graphs: dict[Bucket, Stored] = dict.fromkeys(shapes)
        self._next: dict[Bucket, Stored] = {}
        self.order: list[Bucket] = []
        self.num_discarded = 0
        self.full: Bucket | None = None
        """A shape for whose next graph there is no memory."""
        self.ran_without: set[Bucket] = set()
        self.num_runs = 0
        self.captured_during: Callable[[], None] = lambda: None

    def captured(self) -> list[Bucket]:
        return sorted(self._graphs, reverse=True)

    def capture_next(self, shape: Bucket, broadcast: Callable[[], None]) -> bool:
        self.order.append(shape)
        self.captured_during()
        broadcast()
        self._run(shape)
        if shape == self.full:
            return False
        broadcast()
        self._run(shape)
        self._next[shape] = self._executor._features
        return True

    def adopt(self) -> None:
        self._graphs, self._next = self._next, {}

    def discard_next(self) -> None:
        self.num_discarded += bool(self._next)
        self._next = {}

    def run(self, shape: Bucket) -> None:
        if shape in self._graphs:
            assert self._graphs[shape] is self._executor._features, "a graph stores other features than rounds should"
        else:
            self.ran_without.add(shape)
        self._run(shape)

    def _run(self, shape: Bucket) -> None:
        self.num_runs += 1
        self._executor._body(shape)


class NotedLink(ExecutorLink):
    """A link to other ranks, of which there are none: notes of how many rounds they are told."""

    def __init__(self) -> None:
        self.num_broadcast = 0

    def broadcast(self, kind: int, *parts: object) -> None:
        self.num_broadcast += kind == ROUND


Made = tuple[ThreadedEngine, CudaExecutor, NotedGraphs]


@pytest.fixture
def made(model: CausalLM) -> Iterator[Made]:
    engine, executor = make_paged_engine(model)
    graphs = NotedGraphs(executor, executor.buckets.all())
    executor.graphs = graphs  # type: ignore[assignment]
    yield engine, executor, graphs
    engine.stop()


@torch.inference_mode()
def refresh(executor: CudaExecutor) -> int:
    return executor.refresh_features()


def test_a_draft_gets_features_when_all_graphs_store_them(model: CausalLM, truth: list[Answer], made: Made) -> None:
    engine, executor, graphs = made
    engine.start()
    draft = FeatureDraft(engine, VOCAB, oracle(texts(truth), VOCAB), LAYERS)
    begun: list[int] = []
    graphs.captured_during = lambda: begun.append(draft.num_begun)
    draft.connect()
    assert tokens(run_all(engine, jobs(), 3)) == tokens(truth)
    draft.wait()
    assert sorted(graphs.order) == sorted(executor.buckets.all()) and not any(begun)
    assert engine.features.num_pending == 0
    assert tokens(run_all(engine, jobs(), 3)) == tokens(truth)
    engine.stop()
    assert draft.num_begun == 1 and draft.check(model, preempted=True) > 70


def test_rounds_go_on_without_features_meanwhile(model: CausalLM, truth: list[Answer], made: Made) -> None:
    engine, executor, graphs = made
    executor.begin_features(FeaturePlan(LAYERS))
    left = refresh(executor)
    assert left == len(graphs.captured()) - 1
    engine.start()
    assert tokens(run_all(engine, jobs()[:4], 2)) == tokens(truth[:4])
    assert executor._features is None
    while left:
        left = refresh(executor)
    assert executor._features is not None
    assert tokens(run_all(engine, jobs()[:4], 2)) == tokens(truth[:4])


def test_graphs_that_rounds_used_most_come_first(made: Made, truth: list[Answer]) -> None:
    engine, executor, graphs = made
    engine.start()
    run_all(engine, jobs()[:4], 1, speculate=False)
    engine.stop()
    executor.begin_features(FeaturePlan(LAYERS))
    while refresh(executor):
        pass
    used = Buckets(executor.limits.max_round_tokens, executor.limits.max_running).fit(1, 1)
    assert graphs.order[0] == used
    assert graphs.order[1:] == sorted(set(graphs.order) - {used})


def test_what_was_captured_for_other_features_is_discarded(made: Made) -> None:
    _, executor, graphs = made
    executor.begin_features(FeaturePlan((1,)))
    refresh(executor)
    executor.begin_features(FeaturePlan(LAYERS))
    while refresh(executor):
        pass
    assert graphs.num_discarded == 1
    assert executor._features is not None and executor._features.layers == LAYERS
    assert set(graphs._graphs.values()) == {executor._features}


def test_a_round_for_whose_graph_there_is_no_memory_runs_without(
    model: CausalLM, truth: list[Answer], made: Made
) -> None:
    engine, executor, graphs = made
    graphs.full = executor.buckets.fit(1, 1)
    executor.link = link = NotedLink()
    draft = FeatureDraft(engine, VOCAB, lambda author: None, LAYERS)
    engine.start()
    draft.connect_and_wait()
    assert tokens(run_all(engine, jobs()[:4], 1)) == tokens(truth[:4])
    engine.stop()
    assert graphs.ran_without == {graphs.full}
    assert link.num_broadcast == graphs.num_runs > 0, "other ranks would not keep step"
    assert draft.check(model) > 50

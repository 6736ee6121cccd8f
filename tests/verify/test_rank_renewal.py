"""Graphs that store features, captured anew while ranks serve, on a rank 0 whose memory ends."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_harness import RANKS_VOCAB, jobs, texts
from feature_draft import FeatureDraft, wait_for
from harness import Answer, make_request, run_all, tokens
from local_draft import oracle
from rank_threads import linked
from threaded_engine import ThreadedEngine

from outrider.errors import UnavailableError
from outrider.graphs import GraphPool
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_decoder


class Graph:
    """What a CPU has in the place of a graph: to replay it is to run its work."""

    def __init__(self, pool: GraphPool[Any], shape: Any) -> None:
        self._pool, self._shape = pool, shape

    def replay(self) -> None:
        self._pool._body(self._shape)


class Stream:
    """What a CPU has in the place of a stream."""

    def synchronize(self) -> None:
        """Nothing is under way."""


@pytest.fixture(scope="module")
def model(ranks_folder: Path) -> CausalLM:
    """The one of `truth`, too."""
    return load_decoder(ranks_folder)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


def draft_without_memory(engine: ThreadedEngine, truth: list[Answer], part: str) -> FeatureDraft:
    """A draft that has the engine capture its graphs anew; memory ends in every second `part` of a capture."""
    executor: Any = engine._executor
    num_tried = 0
    rounds, prompts = executor.graphs, executor.prefill.graphs
    for pool, shapes in ((rounds, executor.buckets.all()), (prompts, executor.prefill._shapes.small)):
        pool._graphs = {shape: Graph(pool, shape) for shape in shapes}
        pool._record = partial(Graph, pool)
        work = getattr(pool, part)

        def act(*arguments: Any, work: Any = work) -> Any:
            nonlocal num_tried
            num_tried += 1
            if num_tried % 2:
                raise torch.OutOfMemoryError("no room")
            return work(*arguments)

        setattr(pool, part, act)
    draft = FeatureDraft(engine, RANKS_VOCAB, oracle(texts(truth), RANKS_VOCAB), (0, 1, 3))
    draft.connect()
    return draft


def test_a_rank_without_memory_for_graphs_keeps_step(ranks_folder: Path, model: CausalLM, truth: list[Answer]) -> None:
    with linked(ranks_folder, 2) as engine:
        num_graphs = len(engine._executor.buckets.all())  # type: ignore[attr-defined]
        draft = draft_without_memory(engine, truth, "_record")
        engine.start()
        meanwhile = run_all(engine, jobs(), 4)
        draft.wait()
        afterwards = run_all(engine, jobs(), 4)
        engine.stop()
        assert 0 < len(engine._executor.graphs) < num_graphs  # type: ignore[attr-defined]
    assert tokens(meanwhile) == tokens(afterwards) == tokens(truth)
    assert draft.check(model) > 70


def test_memory_that_ends_amid_a_run_ends_the_engine(ranks_folder: Path, truth: list[Answer]) -> None:
    with linked(ranks_folder, 2) as engine:
        draft_without_memory(engine, truth, "_run_once")
        prompt, params = jobs()[0]
        answer = Answer()
        # Before the engine starts: it takes no request after its end, which is as soon as it captures.
        engine.submit(make_request(answer, prompt, params, RANKS_VOCAB))
        engine.start()
        wait_for([answer])
        engine.stop()
    error = answer.updates[-1].error
    assert isinstance(error, UnavailableError) and "no memory on rank 0 for a round with features" in error.message

"""The engine's thread with a model: what a session gets, and what is counted."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from growth_rig import GREEDY, VOCAB, Verify, scripted, shape
from scripted_runner import ScriptedRunner

from draft_service.drafters.base import Needs
from draft_service.drafters.model import ModelDrafter
from draft_service.engine import Engine
from draft_service.metrics import DraftMetrics
from outrider.config.draft import DraftOptions
from outrider.tree.messages import Close, Commit, DraftMessage, Open


class FakeSession:
    """Stands for a stream: keeps what it is sent and tells when enough of a tree is there."""

    vocab_size = VOCAB
    parts = None
    closed = False

    def __init__(self, request: Verify, wanted: int) -> None:
        self.request, self.wanted = request, wanted
        self.grown = threading.Event()

    def send(self, messages: Sequence[DraftMessage]) -> None:
        for message in messages:
            self.request.take(message)
        if len(self.request.held()) >= self.wanted:
            self.grown.set()

    def batch_done(self) -> None:
        pass


def test_a_session_gets_a_tree_and_figures_are_counted() -> None:
    runner = ScriptedRunner(scripted, shape())
    drafter = ModelDrafter(runner, ("standalone",), Needs())
    metrics = DraftMetrics(drafter.sources)
    engine = Engine(drafter, DraftOptions(), metrics)
    request = Verify(1, [1] * 40)
    session = FakeSession(request, 20)
    engine.start()
    try:
        opening = Open(1, np.array(request.tokens, np.int32), 40, GREEDY, 20)
        engine.submit(session, [opening])  # type: ignore[arg-type]
        assert session.grown.wait(30)
        request.check()
        closed = threading.Event()
        engine.submit(session, [Close(1)])  # type: ignore[arg-type]
        engine.drain(closed.set)
        assert closed.wait(30)
    finally:
        engine.stop()

    def value(name: str) -> float:
        return metrics.registry.get_sample_value(f"outrider_draft_{name}") or 0.0

    assert value("bursts_total") == len(runner.bursts) > 1
    assert value("burst_nodes_total") <= value("burst_places_total")
    assert value("burst_steps_total") >= 4
    assert value("prompt_tokens_total") == 39
    assert metrics.registry.get_sample_value("outrider_draft_nodes_grown_total", {"source": "standalone"}) == 20
    assert not runner.rows


def test_a_late_commit_message_changes_nothing() -> None:
    runner = ScriptedRunner(scripted, shape())
    engine = Engine(ModelDrafter(runner, ("standalone",), Needs()), DraftOptions(), DraftMetrics(("standalone",)))
    request = Verify(1, [1, 2, 3])
    session = FakeSession(request, 10)
    engine.start()
    try:
        engine.submit(session, [Open(1, np.array([1, 2, 3], np.int32), 3, GREEDY, 10)])  # type: ignore[arg-type]
        assert session.grown.wait(30)
        done = threading.Event()
        late = Commit(1, 1, np.array([2], np.int32), 0, 0, None, 10)
        engine.submit(session, [late, Close(1), Close(1)])  # type: ignore[arg-type]
        engine.drain(done.set)
        assert done.wait(30)
    finally:
        engine.stop()
    assert not runner.rows

"""The engine with a model, behind its sockets: what a session gets, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest
import torch
from draft_engine_thread import engine_thread
from growth_rig import GREEDY, VOCAB, Verify, scripted, shape
from scripted_runner import ScriptedRunner

from draft_service.door.metrics import DraftMetrics
from draft_service.door.remote import VerifySession
from draft_service.frames import SessionUp
from outrider.config.draft import DraftOptions
from outrider.drafting.base import Needs
from outrider.drafting.model.drafter import ModelDrafter
from outrider.protocol.speculation import Close, Commit, DraftMessage, Grow, Open

TARGET = SessionUp(0, VOCAB, "", None)


class Heeding(VerifySession):
    """A session that has verify's mirror take what comes, and signals when enough has."""

    def __init__(self, request: Verify) -> None:
        super().__init__(1024)
        self.request = request
        self.grows: list[Grow] = []
        self._received = asyncio.Event()

    def send(self, messages: Sequence[DraftMessage]) -> None:
        for message in messages:
            self.request.take(message)
        self.grows += [message for message in messages if isinstance(message, Grow)]
        self._received.set()

    async def until(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not enough():
                self._received.clear()
                await self._received.wait()


def opening(request: Verify, credit: int) -> Open:
    return Open(1, list(request.tokens), len(request.tokens), GREEDY, credit)


async def test_a_session_gets_a_tree_and_figures_are_counted() -> None:
    runner = ScriptedRunner(scripted, shape())
    drafter = ModelDrafter(runner, ("standalone",), Needs())
    metrics = DraftMetrics(drafter.sources)
    session = Heeding(request := Verify(1, [1] * 40))
    async with engine_thread(drafter, DraftOptions()) as thread:
        thread.remote.on_state = metrics.take
        thread.remote.attach(session, TARGET)
        thread.remote.submit(session, [opening(request, 20)])
        await session.until(lambda: len(request.held()) >= 20)
        request.check()
        thread.remote.submit(session, [Close(1)])
        await asyncio.wait_for(thread.remote.drain(), 30)
        await thread.remote.ask()
    assert thread.exit_codes == [0]

    def value(name: str) -> float:
        return metrics.registry.get_sample_value(f"outrider_draft_{name}") or 0.0

    assert value("bursts_total") == len(runner.bursts) > 1
    assert value("burst_nodes_total") <= value("burst_places_total")
    assert value("burst_steps_total") >= 4
    assert value("prompt_tokens_total") == 39
    assert value("growth_seconds_count") > 0 < value("growth_seconds_sum")
    assert metrics.registry.get_sample_value("outrider_draft_nodes_grown_total", {"source": "standalone"}) == 20
    assert not runner.rows


async def test_a_late_commit_message_changes_nothing() -> None:
    runner = ScriptedRunner(scripted, shape())
    session = Heeding(request := Verify(1, [1, 2, 3]))
    async with engine_thread(ModelDrafter(runner, ("standalone",), Needs()), DraftOptions()) as thread:
        thread.remote.attach(session, TARGET)
        thread.remote.submit(session, [opening(request, 10)])
        await session.until(lambda: len(request.held()) >= 10)
        late = Commit(1, 1, [2], 0, 0, None, 10)
        thread.remote.submit(session, [late, Close(1), Close(1)])
        await asyncio.wait_for(thread.remote.drain(), 30)
    assert not runner.rows


@pytest.mark.parametrize("fault", ["launch_fault", "wait_fault", "extend_fault"])
async def test_a_device_that_fails_in_a_burst_ends_the_engine(fault: str) -> None:
    runner = ScriptedRunner(scripted, shape())
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    setattr(runner, fault, (lambda burst: error) if fault == "wait_fault" else error)
    request = Verify(1, [1] * 40)
    async with engine_thread(ModelDrafter(runner, ("standalone",), Needs()), DraftOptions()) as thread:
        thread.remote.attach(session := Heeding(request), TARGET)
        thread.remote.submit(session, [opening(request, 20)])
        await asyncio.wait_for(thread.remote.lost(), 20)
    assert thread.exit_codes == [1]

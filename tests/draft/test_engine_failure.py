"""An engine whose device failed, or whose turns fail again and again, ends: a supervisor starts a fresh one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
import torch
from draft_engine_thread import EngineThread, engine_thread
from draft_fakes import VOCAB, Guesses, ScriptedDrafter, evenly, open_message

from draft_service.door.remote import VerifySession
from draft_service.frames import SessionUp
from outrider.config.draft import DraftOptions
from outrider.drafting.base import FrontierNode
from outrider.errors import is_device_failure
from outrider.protocol.speculation import Decline, DraftMessage

ILLEGAL_ACCESS = "an illegal memory access was encountered"


class Listening(VerifySession):
    """A session that keeps what comes."""

    def __init__(self) -> None:
        super().__init__(1024)
        self.received: asyncio.Queue[DraftMessage] = asyncio.Queue()

    def send(self, messages: list[DraftMessage]) -> None:
        for message in messages:
            self.received.put_nowait(message)


def open_session(thread: EngineThread) -> Listening:
    session = Listening()
    thread.remote.attach(session, SessionUp(0, VOCAB, "", None))
    thread.remote.submit(session, [open_message([1, 2])])
    return session


def raising(error: Exception) -> Callable[[FrontierNode], Guesses]:
    def guess(node: FrontierNode) -> Guesses:
        raise error

    return guess


class Sick(ScriptedDrafter):
    """A drafter of which even a question for work fails, which is asked each turn."""

    fault: Exception | None = None
    times = 0

    @property
    def has_work(self) -> bool:
        if self.fault is None:
            return False
        self.times += 1
        raise self.fault


async def test_an_engine_whose_device_failed_ends_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    drafter = ScriptedDrafter(raising(torch.AcceleratorError(f"CUDA error: {ILLEGAL_ACCESS}")))
    with caplog.at_level(logging.ERROR, "draft_service"):
        async with engine_thread(drafter, DraftOptions()) as thread:
            open_session(thread)
            await asyncio.wait_for(thread.remote.lost(), 20)
    assert thread.exit_codes == [1]
    (record,) = caplog.records
    assert "the service exits to be restarted" in record.getMessage()


async def test_an_error_of_one_request_ends_no_engine() -> None:
    drafter = ScriptedDrafter(raising(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")))
    async with engine_thread(drafter, DraftOptions()) as thread:
        session = open_session(thread)
        assert isinstance(await asyncio.wait_for(session.received.get(), 20), Decline)
        drafter.guess = evenly
        session = open_session(thread)
        assert not isinstance(await asyncio.wait_for(session.received.get(), 20), Decline)
    assert thread.exit_codes == [0]


async def test_a_fault_of_every_turn_ends_the_engine_and_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = Sick()
    with caplog.at_level(logging.ERROR, "draft_service"):
        async with engine_thread(drafter, DraftOptions()) as thread:
            drafter.fault = ValueError("sick")
            open_session(thread)
            await asyncio.wait_for(thread.remote.lost(), 20)
    assert thread.exit_codes == [1]
    assert 1 < len(caplog.records) == drafter.times < 20
    assert "the service exits to be restarted" in caplog.records[-1].getMessage()


def caused_by(cause: Exception) -> Exception:
    error = ValueError("a result makes no sense")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.AcceleratorError(f"CUDA error: {ILLEGAL_ACCESS}"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), True),
        (RuntimeError(f"Triton Error [CUDA]: {ILLEGAL_ACCESS}"), True),
        (caused_by(torch.AcceleratorError(f"CUDA error: {ILLEGAL_ACCESS}")), True),
        (torch.AcceleratorError("CUDA error: out of memory"), False),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("shapes differ"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_what_is_a_failure_of_the_device(error: Exception, is_one: bool) -> None:
    assert is_device_failure(error) == is_one

"""The engine process with a device that fails in its 12th round, as often as the file named by FAULTS_FILE says."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

from outrider.config.verify import VerifyOptions
from verify_service.engine import worker
from verify_service.engine.build import assemble
from verify_service.engine.engine import VerifyEngine, VerifyInbox
from verify_service.engine.round import Entry, Growth, Pending, Result
from verify_service.engine.worker import VerifyReporter
from verify_service.executors.base import Executor
from verify_service.frames import TargetProfile

FAILING_ROUND = 12


def lives_left() -> bool:
    """Whether this life is one that fails; takes it off the file."""
    file = Path(os.environ["FAULTS_FILE"])
    left = int(file.read_text())
    file.write_text(str(left - 1))
    return left > 0


def fail() -> list[Result]:
    raise RuntimeError("the device has failed")


class Failing:
    """An executor whose device fails."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._num_rounds = 0
        self.forget = executor.forget

    def __getattr__(self, name: str) -> object:
        return getattr(self._executor, name)

    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> Pending:
        self._num_rounds += 1
        pending = self._executor.launch(entries, growth)
        if self._num_rounds == FAILING_ROUND:
            if torch.cuda.is_available():
                # What a kernel with a wrong index does: an assertion on the device, which ends the whole context.
                torch.zeros(4, device="cuda")[torch.full((1,), 99, device="cuda")]
            else:
                pending.wait = fail  # type: ignore[method-assign]
        return pending


def build(options: VerifyOptions, inbox: VerifyInbox, observer: VerifyReporter) -> tuple[VerifyEngine, TargetProfile]:
    engine, served = assemble(options, inbox, observer)
    if lives_left():
        engine._executor = Failing(engine._executor)
    return engine, served


def main(argv: list[str]) -> int:
    worker.assemble = build
    return worker.main(argv)

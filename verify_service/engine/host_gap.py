"""The host's time between two rounds: logs what a long one consists of, and keeps its code warm."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

from outrider.logs import get_logger
from outrider.protocol.generation import GenerationRequest
from outrider.sampling.params import SamplingParams
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Result
from verify_service.engine.scheduler import Scheduler
from verify_service.executors.base import Executor
from verify_service.speculation.drafts import Drafts

log = get_logger(__name__)

LONG_GAP_SECONDS = 5e-3


class GapWatch:
    """Notes the phases between the end of a round and the launch of the next. Does nothing unless DEBUG is logged."""

    def __init__(self) -> None:
        self._on = log.isEnabledFor(logging.DEBUG)
        self._marks: list[tuple[str, float]] = []
        self._before = (0.0, 0)

    def begin(self, now: float) -> None:
        """Note that a round has ended at `now`, on the monotonic clock."""
        if self._on:
            self._marks = [("end", now)]
            self._before = _usage()

    def mark(self, name: str) -> None:
        """Note that the phase called `name` is over."""
        if self._on:
            self._marks.append((name, time.monotonic()))

    def end(self) -> str:
        """Note that the next round is launched; return the phases in between as text, empty unless DEBUG is logged."""
        if not self._on or not self._marks:
            return ""
        self.mark("launch")
        marks, self._marks = self._marks, []
        phases = [f"{name} {(at - before) * 1e3:.2f} ms" for (_, before), (name, at) in pairwise(marks)]
        cpu, switches = (now - then for now, then in zip(_usage(), self._before, strict=True))
        return ", ".join([*phases, f"CPU time {cpu * 1e3:.2f} ms", f"taken off the CPU {switches} times"])


def log_long_gap(gap: float | None, phases: str) -> None:
    """Log a long gap. If it has little CPU time, the engine was not working but kept from running."""
    if phases and gap is not None and gap > LONG_GAP_SECONDS:
        log.debug("the device was idle for %.1f ms: %s", gap * 1e3, phases)


def _usage() -> tuple[float, int]:
    """Return the CPU seconds of this thread, and how often it was taken off the CPU."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_utime + usage.ru_stime, usage.ru_nivcsw


_MIN_PAUSE_SECONDS = 2.5e-4
_PAUSE_PER_RUN = 8
"""Pause between two runs, as a multiple of a run's time: if a round ends during a run, that is seen late."""


class HotPathWarmer:
    """Runs the code between two rounds without effect, now and then, while the engine waits.

    After 5 ms without a run that code took 5 to 8 times as long on an H200's host.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, commit: Callable[[Entry, Result], object]) -> None:
        """`commit`: commits a result as the engine does; it is called for a request that no client has sent."""
        self._scheduler = scheduler
        self._executor = executor
        self._commit = commit
        params = GenerationRequest("", [0], SamplingParams(), max_tokens=1 << 30)
        self._request = Request.begin(params, lambda update: None, vocab_size=1)
        self._drafts = Drafts(vocab_size=1, max_nodes=1)
        """Drafts with `_request` alone."""
        self._drafts.admit(self._request)
        self._result = Result([0])
        self._due_at = 0.0

    def resume(self) -> None:
        """Make the next run due at once, since a round was launched, or waits for drafts."""
        self._due_at = 0.0

    def run(self, entries: Sequence[Entry]) -> None:
        """Go through a round of `entries` without effect, unless that was done a moment ago."""
        now = time.monotonic()
        if now >= self._due_at:
            self._commit_nothing()
            self._scheduler.dry_run(entries)
            self._executor.dry_run(entries)
            self._due_at = now + max(_MIN_PAUSE_SECONDS, _PAUSE_PER_RUN * (time.monotonic() - now))

    def _commit_nothing(self) -> None:
        request = self._request
        self._commit(Entry(request, 1), self._result)
        self._drafts.on_commit(request)
        del request.tokens[1:]
        request.cached_len = 0

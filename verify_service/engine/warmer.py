"""Keeps the code between two rounds warm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import RequestSampler
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Executor, Result
from verify_service.engine.scheduler import Scheduler
from verify_service.frames.submission import Update
from verify_service.speculation.drafts import Drafts

_SECONDS = 2.5e-4
_PAUSE = 8
"""How many times as long as a rehearsal takes lies between two: a round that ends meanwhile is seen late."""


class HotPathWarmer:
    """Commits, plans, chooses nodes and lays a round out for nothing, now and then, while the engine waits.

    After 5 ms without it that code took 5 to 8 times as long on an H200's host.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, commit: Callable[[Entry, Result], object]) -> None:
        """`commit`: what the engine does with a result; here it gets one for a request that is nobody's."""
        self._scheduler = scheduler
        self._executor = executor
        self._commit = commit
        params = SamplingParams()
        self._request = Request(
            "", [0], 1, params, RequestSampler(params, [0], 1), 1 << 30, frozenset(), speculate=True, sink=_nobody
        )
        self._drafts = Drafts(vocab_size=1, max_nodes=1)
        """Its own: those of others know nothing of it."""
        self._drafts.admit(self._request)
        self._result = Result([0])
        self._due_at = 0.0

    def begin(self, at: float) -> None:
        """A wait has begun; nothing is rehearsed before the time `at`, on the monotonic clock."""
        self._due_at = at

    def rehearse(self, entries: Sequence[Entry]) -> None:
        """Rehearse a round of these entries, if it is time to."""
        now = time.monotonic()
        if now >= self._due_at:
            self._rehearse_commit()
            self._scheduler.rehearse(entries)
            self._executor.rehearse(entries)
            self._due_at = now + max(_SECONDS, _PAUSE * (time.monotonic() - now))

    def _rehearse_commit(self) -> None:
        request = self._request
        self._commit(Entry(request, 1), self._result)
        self._drafts.committed(request)
        del request.tokens[1:]
        request.cached_len = 0


def _nobody(update: Update) -> None:
    """Where updates go that there are none of."""

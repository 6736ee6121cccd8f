"""The thread that owns requests and drafter."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import TypeVar

from prometheus_client import Counter

from draft_service.drafters.base import AnyDrafter
from draft_service.metrics import DraftMetrics
from draft_service.requests import Requests
from draft_service.session import Session
from outrider.config.draft import DraftOptions
from outrider.logs import get_logger
from outrider.tree.messages import Features, VerifyMessage

_logger = get_logger(__name__)

_SLICE_SECONDS = 0.001
"""Growth between two looks at what to send; a burst after a miss fits in."""
_MAX_ORDERS_PER_TURN = 64
_COUNT_EVERY = 16
"""Turns between two looks at what was counted, while there is something to grow."""
_WORK_EVERY = 8
"""Turns that growth may take before the drafter's other work gets one."""

_Order = Callable[[], None]
_Key = TypeVar("_Key")


class Engine:
    """Follows commits, grows trees ahead of them, and sends what has grown.

    A turn takes what arrived, grows for a slice or until more arrives, and sends; with nothing to grow the thread
    sleeps in its inbox. The public methods only put orders there, so that any thread may call them.
    """

    def __init__(self, drafter: AnyDrafter, options: DraftOptions, metrics: DraftMetrics) -> None:
        self.drafter = drafter
        self.requests = Requests(drafter, options)
        """The thread's own; others may only look at counts."""
        self._metrics = metrics
        self._inbox: SimpleQueue[_Order] = SimpleQueue()
        self._stopping = False
        self._turns = 0
        self._on_drained: list[Callable[[], object]] = []
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._inbox.put(self._stop)
        self._thread.join()

    def submit(self, session: Session, messages: Sequence[VerifyMessage]) -> None:
        """Apply a batch of an admitted session's messages."""
        self._inbox.put(lambda: self._apply(session, messages))

    def submit_features(
        self,
        session: Session,
        pieces: Sequence[Features],
        done: Callable[[], None],
        fetch: Callable[[], Sequence[Features]] | None = None,
    ) -> None:
        """Apply features of a session that came together; `done` is called, in the engine's thread, when their memory
        is free.

        `fetch`, called there too, gives the same with their `rows`, where they lie elsewhere.
        """
        self._inbox.put(lambda: self._apply_features(session, pieces, done, fetch))

    def post(self, action: Callable[[], None]) -> None:
        """Do something in the engine's thread after all that was submitted before."""
        self._inbox.put(action)

    def detach(self, session: Session) -> None:
        """Free everything of a session."""
        self._inbox.put(lambda: self.requests.detach(session))

    def forget_target(self) -> None:
        """The next sessions are of another target."""
        self._inbox.put(self.requests.growth.forget_target)

    def drain(self, on_drained: Callable[[], object]) -> None:
        """Open no more requests; call `on_drained`, in the engine's thread, once none is open."""
        self._inbox.put(lambda: self._drain(on_drained))

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except Exception as error:
                _logger.error("a turn of the engine failed", exc_info=error)

    def _turn(self) -> None:
        growth = self.requests.growth
        is_busy = growth.has_work or growth.ledger.has_news or bool(growth.declined)
        self._take_orders(wait=growth.idle and not is_busy)
        if not growth.idle:
            began = perf_counter()
            growth.grow(began + _SLICE_SECONDS, self._interrupted)
            if growth.pressed and self._interrupted():
                self._take_orders(wait=False)
                growth.grow(perf_counter() + _SLICE_SECONDS, self._interrupted)
            self._metrics.growth_seconds.observe(perf_counter() - began)
        self._turns += 1
        if growth.has_work and (growth.idle or self._turns % _WORK_EVERY == 0):
            self.requests.work(perf_counter() + _SLICE_SECONDS)
        self.requests.tell()
        if growth.idle or self._turns % _COUNT_EVERY == 0:
            self._count()
        if self._on_drained and not len(self.requests):
            for callback in self._on_drained:
                callback()
            self._on_drained.clear()

    def _take_orders(self, *, wait: bool) -> None:
        try:
            for _ in range(_MAX_ORDERS_PER_TURN):
                self._inbox.get(block=wait)()
                wait = False
        except Empty:
            pass

    def _interrupted(self) -> bool:
        return not self._inbox.empty()

    def _apply(self, session: Session, messages: Sequence[VerifyMessage]) -> None:
        for message in () if session.closed else messages:
            try:
                self.requests.handle(session, message)
            except Exception as error:
                _logger.error("a message could not be handled", exc_info=error)
                self.requests.fail(session, message)
        session.batch_done()

    def _apply_features(
        self,
        session: Session,
        pieces: Sequence[Features],
        done: Callable[[], None],
        fetch: Callable[[], Sequence[Features]] | None,
    ) -> None:
        try:
            for features in () if session.closed else self._fetched(session, pieces, fetch):
                try:
                    self.requests.handle(session, features)
                except Exception as error:
                    _logger.error("features could not be handled", exc_info=error)
                    self.requests.fail(session, features)
        finally:
            done()

    def _fetched(
        self, session: Session, pieces: Sequence[Features], fetch: Callable[[], Sequence[Features]] | None
    ) -> Sequence[Features]:
        try:
            return pieces if fetch is None else fetch()
        except Exception as error:
            _logger.error("features could not be read", exc_info=error)
            for features in pieces:
                self.requests.fail(session, features)
            return ()

    def _drain(self, on_drained: Callable[[], object]) -> None:
        self.requests.draining = True
        self._on_drained.append(on_drained)

    def _stop(self) -> None:
        self._stopping = True

    def _count(self) -> None:
        """Move what was counted in plain numbers to the metrics."""
        requests, metrics = self.requests, self._metrics
        requests.growth.count_into(metrics.count)
        _move(requests.growth.ledger.grown, metrics.nodes_grown)
        _move(requests.commits, metrics.commits)
        _move(requests.declines, metrics.declines)
        _move(requests.dropped, metrics.dropped)


def _move(counts: collections.Counter[_Key], counters: Mapping[_Key, Counter]) -> None:
    for key, count in counts.items():
        counters[key].inc(count)
    counts.clear()

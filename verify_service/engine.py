"""The engine: one thread that owns model, pages, trees and requests, and turns rounds into committed tokens."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from outrider.errors import InternalError, OutriderError, OverloadedError, UnavailableError
from outrider.logs import get_logger
from outrider.tokens import TokenOrigin
from outrider.tree.messages import DraftMessage, Grow
from verify_service.budget import Budget, CostModel
from verify_service.drafts import DraftPort, Drafts
from verify_service.hold import HoldPolicy
from verify_service.memory import Memory
from verify_service.request import Request, Update
from verify_service.round import Entry, Result
from verify_service.scheduler import Scheduler

log = get_logger(__name__)

_IDLE_SECONDS = 0.25
"""How often an engine without requests looks after its peers."""

_MAX_UNREAD = 65536
"""Nodes of one draft, and 16 for each message, that may lie unread in the inbox: about 0.1 s of work."""


class Executor(Protocol):
    """Runs a round's forward, sampling walk and KV compaction."""

    def run(self, entries: Sequence[Entry]) -> list[Result]:
        """Results in the order of the entries."""


class Observer(Protocol):
    """Is told of every round, on the engine thread."""

    def round(self, entries: Sequence[Entry], updates: Sequence[Update], seconds: float, held: float) -> None:
        """A round took `seconds`, after holding for `held` seconds. `updates` are what it brought each request."""


@dataclass(frozen=True)
class EngineLimits:
    """What an engine is built for."""

    vocab_size: int
    context_length: int
    max_running: int = 64
    max_waiting: int = 1024
    chunk_size: int = 256
    """Prompt tokens computed in one round at most, over all requests."""
    max_nodes: int = 64
    """Tree nodes in one round at most, over all requests."""
    max_hold_seconds: float = 0.02


class Engine:
    """Runs rounds on a thread of its own. Other threads talk to it through `submit`, `cancel` and `draft_*` alone."""

    def __init__(
        self, executor: Executor, memory: Memory, cost: CostModel, limits: EngineLimits, observer: Observer
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.drafts = Drafts(limits.vocab_size, max_nodes=4 * max(limits.max_nodes, 16))
        self.budget = Budget(cost, limits.max_nodes)
        self.scheduler = Scheduler(memory, self.drafts, self.budget, limits.max_running, limits.chunk_size)
        self._hold = HoldPolicy(self.budget, limits.max_hold_seconds)
        self._executor = executor
        self._observer = observer
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._num_submitted = 0
        self._unfinished: set[Request] = set()
        self._unread: Counter[DraftPort] = Counter()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to run rounds."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the round in progress; unfinished requests get UnavailableError."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether the thread runs rounds. A thread that died takes the service with it."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, request: Request) -> None:
        """Queue a request. Raises OverloadedError when the queue is full, UnavailableError when stopping."""
        with self._wake:
            if self._stopping:
                raise UnavailableError("the verify service is stopping")
            if len(self._unfinished) >= self.limits.max_running + self.limits.max_waiting:
                raise OverloadedError(
                    f"{self.limits.max_waiting} requests are waiting already, the most allowed; try again later"
                )
            self._unfinished.add(request)
            self._num_submitted += 1
            request.arrival = self._num_submitted
            request.arrived_at = time.monotonic()
            self._post(lambda: self.scheduler.add(request))

    def cancel(self, request: Request) -> None:
        """End a request without a further update; its pages are free before the next round."""
        self._post(lambda: self._end(request))

    def draft_connected(self, port: DraftPort) -> None:
        """A session with a draft service began."""
        self._post(lambda: self.drafts.connected(port))

    def draft_disconnected(self, port: DraftPort) -> None:
        """A session with a draft service ended."""
        self._post(lambda: self.drafts.disconnected(port))

    def draft_received(self, port: DraftPort, messages: Sequence[DraftMessage]) -> None:
        """A draft service sent messages. One that sends more than it has credit for loses its session."""
        # They may lie in the inbox for a whole round, which is no fault of the draft.
        arrived_at = time.monotonic()
        weight = sum(16 + len(message.token_ids) if isinstance(message, Grow) else 16 for message in messages)

        def receive() -> None:
            with self._wake:
                self._unread[port] -= weight
                if not self._unread[port]:
                    del self._unread[port]
            self.drafts.receive(port, messages, arrived_at)

        with self._wake:
            flooded = self._unread[port] + weight > _MAX_UNREAD
            if not flooded:
                self._unread[port] += weight
                self._post(receive)
        if flooded:
            log.warning("draft %s floods the engine; its session is reset", port.address)
            port.reset()

    def ask(self, question: Callable[[], None]) -> None:
        """Run something on the engine thread between two rounds."""
        self._post(question)

    def _post(self, action: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._take_inbox(wait=None if self._busy else _IDLE_SECONDS)
                self.drafts.attend()
                if self._busy:
                    self._step()
                self.drafts.flush()
        except Exception:
            log.exception("the engine failed; the service must be restarted")
            self._abandon(InternalError("the verify engine failed; the service restarts"))
        else:
            self._abandon(UnavailableError("the verify service stopped before the answer was complete"))

    @property
    def _busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def _take_inbox(self, wait: float | None) -> bool:
        """Do what other threads posted, after waiting for it up to `wait` seconds; whether there was anything."""
        with self._wake:
            if wait is not None and not self._inbox and not self._stopping:
                self._wake.wait(wait)
            count = len(self._inbox)
        for _ in range(count):
            self._inbox.popleft()()
        return bool(count)

    def _step(self) -> None:
        entries = self.scheduler.plan()
        if not entries:
            return
        held = self._hold_round(entries)
        entries = [entry for entry in entries if not entry.request.finished]
        if not entries:
            return
        self.scheduler.add_nodes(entries)
        start = time.monotonic()
        results = self._executor.run(entries)
        seconds = time.monotonic() - start
        if sum(entry.num_extend for entry in entries) == len(entries):
            self.budget.cost.observe(sum(entry.num_tokens for entry in entries), seconds)
        updates = [self._commit(entry, result) for entry, result in zip(entries, results, strict=True)]
        self._observer.round(entries, updates, seconds, held)

    def _hold_round(self, entries: Sequence[Entry]) -> float:
        """Wait for drafts as long as that pays; returns the seconds spent."""
        start = time.monotonic()
        self.drafts.flush()
        useful = [entry.request for entry in entries if entry.samples and entry.request.draft_room]
        links = [link for request in useful if (link := self.drafts.link(request)) is not None]
        if not links:
            return 0.0
        num_extend = sum(entry.num_extend for entry in entries)
        while not self._stopping:
            scores = np.concatenate([link.mirror.path_scores for link in links])
            probs = np.exp(np.sort(scores)[::-1][: self.limits.max_nodes])
            seconds = self._hold.seconds(links, num_extend, sum(entry.samples for entry in entries), probs)
            if not seconds or time.monotonic() - start > self.limits.max_hold_seconds:
                break
            self._take_inbox(wait=seconds)
        return time.monotonic() - start

    def _commit(self, entry: Entry, result: Result) -> Update:
        """Commit what may be committed of a result; returns what the request was told."""
        request = entry.request
        if result.error is not None:
            failed = Update(error=result.error)
            self._end(request, failed)
            return failed
        if not entry.samples:
            request.cached_len += entry.num_extend
            return Update()
        tokens, finish = request.cut(result.token_ids)
        request.cached_len += entry.num_extend + len(tokens) - 1
        request.tokens.extend(tokens)
        request.sampler.commit(tokens)
        own = TokenOrigin.BONUS if len(entry.nodes) else TokenOrigin.PLAIN
        update = Update(
            token_ids=tokens,
            origins=[TokenOrigin.ACCEPTED if i < result.num_accepted else own for i in range(len(tokens))],
            logprobs=result.logprobs[: len(tokens)],
            num_draft_tokens=len(entry.nodes),
            num_accepted_tokens=min(result.num_accepted, len(tokens)),
            num_cached_prompt_tokens=request.num_cached_prompt_tokens or 0,
            finish=finish,
        )
        if finish is None:
            self.drafts.committed(request, len(tokens), self._credit())
            request.sink(update)
        else:
            self._end(request, update)
        return update

    def _credit(self) -> int:
        """Live nodes that a request's draft may hold: four times its share of a round."""
        share = self.limits.max_nodes // max(len(self.scheduler.running), 1)
        return 4 * max(share, 4)

    def _end(self, request: Request, update: Update | None = None) -> None:
        if request.finished:
            return
        request.finished = True
        try:
            self.scheduler.remove(request)
        finally:
            with self._wake:
                self._unfinished.discard(request)
            if update is not None:
                request.sink(update)

    def _abandon(self, error: OutriderError) -> None:
        with self._wake:
            # From here on `submit` refuses, so that nobody comes behind those who are told.
            self._stopping = True
            self._inbox.clear()
            unfinished = sorted(self._unfinished, key=lambda request: request.arrival)
        for request in unfinished:
            try:
                self._end(request, Update(error=error))
            except Exception:
                log.exception("request %s could not be ended cleanly", request.request_id)
        self.drafts.flush()

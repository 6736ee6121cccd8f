"""The engine: it owns model, pages, trees and requests, and turns rounds into committed tokens."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from outrider.errors import InternalError, OutriderError, OverloadedError, UnavailableError
from outrider.logs import get_logger
from outrider.tree.messages import DraftMessage
from verify_service.budget import Budget, CostModel
from verify_service.drafts import DraftPort, Drafts
from verify_service.hold import HoldPolicy
from verify_service.inbox import MAX_UNREAD, Inbox, ThreadInbox, unread_weight
from verify_service.limits import EngineLimits
from verify_service.memory import Memory
from verify_service.outcome import Commit, RoundDone
from verify_service.request import Request
from verify_service.round import Entry, Executor, Pending, Result
from verify_service.scheduler import Offer, Scheduler
from verify_service.submission import Update

log = get_logger(__name__)

_IDLE_SECONDS = 0.25
"""How often an engine without requests looks after its peers."""

_SLEEP_SHARE = 0.75
"""Part of a round's expected time after which the engine looks for its end without sleeping."""

_REHEARSAL_SECONDS = 2.5e-4
"""How often the choice of nodes is rehearsed then. After 5 ms without it its code took 5 times as long as when warm."""


class Observer(Protocol):
    """Is told of every round, on the engine's thread, while the next one runs."""

    def round(
        self,
        entries: Sequence[Entry],
        updates: Sequence[Update],
        seconds: float,
        held: float,
        gap: float | None = None,
        gpu: float | None = None,
    ) -> None:
        """A round took `seconds`, after holding for `held` seconds. `updates` are what it brought each request.

        `gap`: seconds that the device had nothing to do before it, holding aside; None after a pause. `gpu`: seconds
        that the device worked on it; None where nobody measures.
        """

    def flush(self) -> None:
        """All updates of a round were given out, or nothing is left to do."""


class Engine:
    """Runs rounds on one thread. Others talk to it through `submit`, `cancel`, `draft_*` and `ask` alone.

    Between the end of a round and the launch of the next lies only what that launch needs: commit, plan, choice of
    nodes. All that others are told, and all that others say, is dealt with while a round runs.
    """

    def __init__(
        self,
        executor: Executor,
        memory: Memory,
        cost: CostModel,
        limits: EngineLimits,
        observer: Observer,
        inbox: Inbox | None = None,
    ) -> None:
        self.limits = limits
        self.memory = memory
        self.drafts = Drafts(limits.vocab_size, max_nodes=4 * max(limits.max_nodes, 16))
        self.budget = Budget(cost, limits.max_nodes)
        self.scheduler = Scheduler(memory, self.drafts, self.budget, limits, executor.forget)
        self._hold = HoldPolicy(self.budget, limits.max_hold_seconds)
        self._executor = executor
        self._observer = observer
        self._inbox = inbox if inbox is not None else ThreadInbox()
        self._lock = threading.Lock()
        self._stopping = False
        self._num_submitted = 0
        self._unfinished: set[Request] = set()
        self._unread: Counter[DraftPort] = Counter()
        self._done: RoundDone | None = None
        self._ended_at: float | None = None
        self._prefilled = False
        self._alive = False
        self._thread: threading.Thread | None = None
        cost.prepare(limits.max_running + limits.max_nodes + 1)

    def start(self) -> None:
        """Begin to run rounds on a thread of its own."""
        self._alive = True
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Run rounds on the calling thread until `stop`; unfinished requests get UnavailableError."""
        self._alive = True
        try:
            while not self._stopping:
                self._step()
        except OutriderError as error:
            log.exception("the engine failed; the service must be restarted")
            self._abandon(error)
        except Exception:
            log.exception("the engine failed; the service must be restarted")
            self._abandon(InternalError("the verify engine failed; the service restarts"))
        else:
            self._abandon(UnavailableError("the verify service stopped before the answer was complete"))
        finally:
            self._alive = False

    def stop(self) -> None:
        """End after the round in progress; waits for the thread that `start` made."""
        self._stopping = True
        self._inbox.post(lambda: None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """Whether rounds are run. An engine that died takes the service with it."""
        return self._alive and not self._stopping

    def submit(self, request: Request) -> None:
        """Queue a request. Raises OverloadedError when the queue is full, UnavailableError when stopping."""
        with self._lock:
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
            self._inbox.post(lambda: self.scheduler.add(request))

    def cancel(self, request: Request) -> None:
        """End a request without a further update; its pages are free before the next round."""
        self._inbox.post(lambda: self._cancel(request))

    def draft_connected(self, port: DraftPort) -> None:
        """A session with a draft service began."""
        self._inbox.post(lambda: self.drafts.connected(port))

    def draft_disconnected(self, port: DraftPort) -> None:
        """A session with a draft service ended."""
        self._inbox.post(lambda: self.drafts.disconnected(port))

    def draft_received(self, port: DraftPort, messages: Sequence[DraftMessage]) -> None:
        """A draft service sent messages. One that sends more than it has credit for loses its session."""
        # They may lie in the inbox for a whole round, which is no fault of the draft.
        arrived_at = time.monotonic()
        weight = unread_weight(messages)

        def receive() -> None:
            with self._lock:
                self._unread[port] -= weight
                if not self._unread[port]:
                    del self._unread[port]
            self.drafts.receive(port, messages, arrived_at)

        with self._lock:
            flooded = self._unread[port] + weight > MAX_UNREAD
            if not flooded:
                self._unread[port] += weight
                self._inbox.post(receive)
        if flooded:
            log.warning("draft %s floods the engine; its session is reset", port.address)
            port.reset()

    def ask(self, question: Callable[[], None]) -> None:
        """Run something on the engine's thread between two rounds."""
        self._inbox.post(question)

    def _step(self) -> None:
        """One round, or a wait for something to do."""
        entries = self.scheduler.plan()
        held = 0.0
        if entries:
            entries, held = self._choose(entries)
        if entries:
            self._round(entries, held)
            return
        self._ended_at = None
        self._catch_up()
        busy = self.scheduler.running or self.scheduler.waiting
        self._take_inbox(None if busy else _IDLE_SECONDS)
        self._attend()
        self._observer.flush()

    def _choose(self, entries: list[Entry]) -> tuple[list[Entry], float]:
        """Add tree nodes to a planned round, holding it for drafts as long as that pays.

        Returns the entries whose requests have not ended meanwhile, and the seconds spent holding.
        """
        offer = self.scheduler.choose(entries)
        held = 0.0
        if offer.awaited:
            start = time.monotonic()
            while (seconds := self._hold_seconds(offer)) and held < self.limits.max_hold_seconds and not self._stopping:
                # A draft cannot answer what it has not been told.
                self._catch_up()
                self._take_inbox(seconds)
                self.drafts.flush()
                entries = [entry for entry in entries if not entry.request.finished]
                offer = self.scheduler.choose(entries)
                held = time.monotonic() - start
        self.scheduler.take(offer)
        return entries, held

    def _hold_seconds(self, offer: Offer) -> float:
        choice = offer.choice
        return self._hold.seconds(offer.awaited, offer.num_tokens, choice.expected, choice.seconds, offer.beside)

    def _round(self, entries: Sequence[Entry], held: float) -> None:
        """Run a round and commit what it brings; what others are to know of it waits for `_catch_up`."""
        num_tokens = sum(entry.num_tokens for entry in entries)
        num_decoded = sum(entry.num_tokens for entry in entries if not self.scheduler.is_apart(entry))
        prefills = any(entry.prefills for entry in entries)
        start = time.monotonic()
        pending = self._executor.launch(entries)
        self._catch_up()
        self._take_inbox(None)
        self._attend()
        self._watch(pending, entries, start + _SLEEP_SHARE * self.budget.cost.seconds(num_decoded))
        results = pending.wait()
        end = time.monotonic()
        if self._take_inbox(None):
            self._attend()
        commits = [self._commit(entry, result) for entry, result in zip(entries, results, strict=True)]
        gap = None if self._ended_at is None else start - self._ended_at - held
        self._done = RoundDone(entries, commits, pending, num_tokens, prefills, end - start, held, gap)
        self._ended_at = end

    def _watch(self, pending: Pending, entries: Sequence[Entry], sleep_until: float) -> None:
        """Deal with what comes in until the round has ended."""
        rehearse_at = sleep_until
        while not pending.done():
            now = time.monotonic()
            if self._take_inbox(sleep_until - now if sleep_until > now else None):
                self._attend()
            elif now >= rehearse_at:
                self.scheduler.rehearse(entries)
                rehearse_at = now + _REHEARSAL_SECONDS

    def _commit(self, entry: Entry, result: Result) -> Commit | None:
        """Commit what may be committed of a result; None if the request was cancelled while the round ran."""
        request = entry.request
        if request.finished:
            return None
        tokens: Sequence[int] = ()
        finish = None
        if result.error is not None:
            request.finished = True
        elif not entry.samples:
            request.cached_len += entry.num_extend
        else:
            tokens, finish = request.cut(result.token_ids)
            request.cached_len += entry.num_extend + len(tokens) - 1
            request.tokens.extend(tokens)
            request.finished = finish is not None
            self.drafts.committed(request)
        if request.finished:
            self.scheduler.end(request)
        return Commit(entry, result, tokens, finish)

    def _catch_up(self) -> None:
        """Tell drafts, clients and metrics of the last round, and learn from it. The inbox is never taken before."""
        done, self._done = self._done, None
        if done is None:
            return
        credit = self._credit()
        for commit in done.commits:
            if commit is not None and commit.tokens and not commit.entry.request.finished:
                self.drafts.report(commit.entry.request, len(commit.tokens), credit)
        self.drafts.flush()
        updates = [self._tell(commit) for commit in done.commits]
        self.scheduler.release_ended()
        self._observer.round(done.entries, updates, done.seconds, done.held, done.gap, done.pending.gpu_seconds)
        self._observer.flush()
        self.drafts.learn()
        # Behind a round with prefill the device may still be busy with it.
        if not done.prefills and not self._prefilled:
            self.budget.cost.observe(done.num_tokens, done.seconds + (done.host_gap or 0.0))
        self._prefilled = done.prefills

    def _tell(self, commit: Commit | None) -> Update:
        """Send a request what the round did for it, if anything."""
        update = Update() if commit is None else commit.update()
        if commit is not None and update.last:
            with self._lock:
                self._unfinished.discard(commit.entry.request)
        if commit is not None and (update.token_ids or update.last):
            commit.entry.request.sink(update)
        return update

    def _take_inbox(self, timeout: float | None) -> bool:
        """Do what others ask, after waiting for it up to `timeout` seconds; whether there was anything."""
        actions = self._inbox.take(timeout)
        for action in actions:
            action()
        return bool(actions)

    def _attend(self) -> None:
        """Look after drafts and the queue, once all that came in was taken."""
        self.drafts.attend()
        self.scheduler.admit()
        self.drafts.flush()

    def _credit(self) -> int:
        """Live nodes that a request's draft may hold: four times its share of a round."""
        share = self.limits.max_nodes // max(len(self.scheduler.running), 1)
        return 4 * max(share, 4)

    def _cancel(self, request: Request) -> None:
        if not request.finished:
            request.finished = True
            with self._lock:
                self._unfinished.discard(request)
            self.scheduler.end(request)
            self.scheduler.release_ended()

    def _abandon(self, error: OutriderError) -> None:
        """Tell all unfinished requests how it ended."""
        with self._lock:
            # From here on `submit` refuses, so that nobody comes behind those who are told.
            self._stopping = True
        self._in_any_case(self._catch_up)
        for request in sorted(self._unfinished, key=lambda request: request.arrival):
            request.finished = True
            self.scheduler.end(request)
            self._in_any_case(self.scheduler.release_ended)
            self._in_any_case(partial(request.sink, Update(error=error)))
        self._unfinished.clear()
        self._in_any_case(self.drafts.flush)
        self._in_any_case(self._observer.flush)

    def _in_any_case(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("the engine could not end cleanly")

"""The engine: it owns model, pages, trees and requests, and turns rounds into committed tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from outrider.errors import InternalError, OutriderError, UnavailableError
from outrider.grammar.compiler import GrammarVocabulary
from outrider.host.garbage import Garbage
from outrider.logs import get_logger
from outrider.protocol.messages import DraftMessage
from outrider.tree.handshake import Terms
from verify_service.engine.grammars import POLL_SECONDS, Grammars
from verify_service.engine.host_gap import GapWatch, HotPathWarmer
from verify_service.engine.inbox import Action, ThreadInbox, Unread, VerifyInbox, unread_weight
from verify_service.engine.memory import Memory
from verify_service.engine.observer import Observer
from verify_service.engine.postprocessor import Commit, RoundDone, RoundPostprocessor
from verify_service.engine.request import ActiveRequests, Request
from verify_service.engine.round import Entry, Executor, Pending, Result
from verify_service.engine.scheduler import EngineLimits, Offer, Scheduler
from verify_service.features.sender import FeatureSender
from verify_service.frames.submission import Update
from verify_service.speculation.budget import Budget, CostModel
from verify_service.speculation.draft_wait import DraftWaitPolicy
from verify_service.speculation.drafts import CREDIT_ROUNDS, Drafts
from verify_service.speculation.link import DraftPort, SpeculativeRequest

log = get_logger(__name__)

_IDLE_SECONDS = 0.25
"""How often an engine without requests looks after its peers."""

_CALM_SECONDS = 0.25
"""Without a round for so long, an engine takes up work that requests would wait for: clients often ask again soon."""

_SLEEP_SHARE = 0.75
"""Part of a round's expected time after which the engine looks for its end without sleeping, if it ever sleeps."""

_MOST_LEFT = 2
"""Actions a request, and for two at least, that may wait over a round's start; with more, slow hosts fall behind."""


class VerifyEngine:
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
        inbox: VerifyInbox | None = None,
        vocabulary: GrammarVocabulary | None = None,
    ) -> None:
        """`vocabulary`: the tokenizer as grammars see it; without one requests with a grammar are refused."""
        self.limits = limits
        self.memory = memory
        self.drafts = Drafts(
            limits.vocab_size,
            CREDIT_ROUNDS * max(limits.max_nodes, 16),
            lockstep=limits.lockstep,
            turns=limits.turns,
        )
        self.budget = Budget(cost, limits.max_nodes, fixed=limits.lockstep)
        self.grammars = Grammars(vocabulary, self.drafts, patient=not limits.spin)
        self.scheduler = Scheduler(memory, self.drafts, self.budget, limits, executor.forget, self.grammars)
        self.features = FeatureSender(self.drafts, memory, executor, piecewise=limits.spin)
        self._hold = DraftWaitPolicy(self.budget, limits.max_hold_seconds, limits.lockstep, limits.turns)
        self._executor = executor
        self._rehearsal = HotPathWarmer(self.scheduler, executor, self._commit)
        self._observer = observer
        self._inbox = inbox if inbox is not None else ThreadInbox()
        self._stopping = False
        self._unfinished, self._unread = ActiveRequests(limits.max_running, limits.max_waiting), Unread()
        self._arrived: deque[Action] = deque()
        """Taken from the inbox and not done yet."""
        self._garbage = Garbage()
        self._gaps = GapWatch()
        self._aftermath = RoundPostprocessor(
            self.scheduler, self.drafts, self.features, self._unfinished, observer, cost, limits.max_nodes
        )
        self._ended_at: float | None = None
        self._alive, self._worked_at = False, float("-inf")
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
        if self._stopping:
            raise UnavailableError("the verify service is stopping")
        self._unfinished.add(request, self._begin, self._inbox)

    def cancel(self, request: Request) -> None:
        """End a request without a further update; its pages are free before the next round."""
        self._inbox.post(lambda: self._cancel(request))

    def draft_connected(self, port: DraftPort, terms: Terms | None = None) -> None:
        """A session with a draft service began."""

        def connect() -> None:
            self.drafts.connected(port, terms)
            self.features.connected(port)

        self._inbox.post(connect)

    def draft_disconnected(self, port: DraftPort) -> None:
        """A session with a draft service ended."""

        def disconnect() -> None:
            self.features.disconnected(port)
            self.drafts.disconnected(port)

        self._inbox.post(disconnect)

    def draft_received(self, port: DraftPort, messages: Sequence[DraftMessage]) -> None:
        """A draft service sent messages. One that sends more than it has credit for loses its session."""
        # They may lie in the inbox for a whole round, which is no fault of the draft.
        arrived_at = time.monotonic()
        weight = unread_weight(messages)

        def receive() -> None:
            self._unread.read(port, weight)
            self.drafts.receive(port, messages, arrived_at)

        if self._unread.add(port, weight):
            self._inbox.post(receive)
        else:
            log.warning("draft %s floods the engine; its session is reset", port.address)
            port.reset()

    def ask(self, question: Callable[[], None]) -> None:
        """Run something on the engine's thread between two rounds."""
        self._inbox.post(question)

    def _step(self) -> None:
        """One round, or a wait for something to do."""
        if self.features.preparing:
            self.features.advance()
        entries = self.scheduler.plan()
        self._gaps.mark("plan")
        if entries:
            entries, held, ready = self._choose(entries)
            if entries := self.grammars.mask(entries):
                return self._round(entries, held, ready)
        self._ended_at = None
        self._aftermath.settle()
        self._garbage.idle()
        busy = (self.scheduler.running or self.scheduler.waiting) and not self.scheduler.stalled
        idle_seconds = POLL_SECONDS if self.grammars.compiling else _IDLE_SECONDS
        calm = not busy and time.monotonic() - self._worked_at >= _CALM_SECONDS
        self._take_inbox(None if busy or (calm and self.features.refresh()) else idle_seconds)
        self._attend()
        self.features.work()
        self._observer.flush()

    def _choose(self, entries: list[Entry]) -> tuple[list[Entry], float, int]:
        """Add tree nodes to a planned round, holding it for drafts as long as that pays.

        Returns the entries whose requests have not ended meanwhile, the seconds spent holding, and the nodes that a
        round without hold would have taken.
        """
        offer = self.scheduler.choose(entries)
        held, ready = 0.0, offer.choice.num_nodes
        self._gaps.mark("choose")
        if offer.awaited:
            start = time.monotonic()
            while (seconds := self._hold_seconds(offer)) and held < self.limits.max_hold_seconds and not self._stopping:
                self.drafts.waits_for(offer.awaited)
                # A draft cannot answer what it has not been told.
                self._aftermath.settle()
                self._wait_in_hold(min(seconds, self.limits.max_hold_seconds - held), entries, offer.awaited)
                self.drafts.flush()
                entries = [entry for entry in entries if not entry.request.finished]
                offer = self.scheduler.choose(entries)
                held = time.monotonic() - start
            if self.limits.spin and not offer.choice.num_nodes:
                self._aftermath.tell_few_drafts()
            self._gaps.mark("hold")
        self.scheduler.take(offer)
        self._gaps.mark("take")
        return entries, held, ready

    def _hold_seconds(self, offer: Offer) -> float:
        return self._hold.seconds(offer.awaited, offer.num_tokens, offer.choice, offer.beside)

    def _wait_in_hold(self, seconds: float, entries: Sequence[Entry], awaited: Sequence[SpeculativeRequest]) -> None:
        """Wait for something to come, at most so long, and do it."""
        if not self.limits.spin:
            self._take_inbox(seconds)
            self.features.work()
            return
        # An engine that slept here would launch the round with cold code, and wake some 50 us late.
        now = time.monotonic()
        end = now + seconds
        self._rehearsal.begin(now)
        while not self._hear(None) and now < end and not self._stopping:
            if self.features.busy:  # what the draft answers may depend on them
                self.features.work()
            self._rehearsal.rehearse(entries)
            now = time.monotonic()
        while self._arrived and any(link.expects for link in awaited):
            self._arrived.popleft()()

    def _round(self, entries: Sequence[Entry], held: float, ready: int) -> None:
        """Run a round and commit what it brings; what others are to know waits for `RoundPostprocessor.settle`."""
        start = time.monotonic()
        pending = self._executor.launch(entries)
        self.drafts.launched(start)
        phases = self._gaps.end()
        self._aftermath.settle()
        num_tokens = sum(entry.num_tokens for entry in entries)
        prefills = any(entry.prefills for entry in entries)
        if self.limits.spin:
            # The rest of what `_attend` does waits until all that came was taken, which may be after this round.
            self.scheduler.admit()
            self.drafts.flush()
        else:
            self._take_inbox(None)
            self._attend()
        # On a CPU a round has no other end than its results, and there is no time to spare to wait for.
        if not self.limits.spin or self._garbage.overdue:
            self._garbage.sweep()
        self._watch(pending, entries, start + self._sleep_seconds(entries))
        results = pending.wait()
        end = time.monotonic()
        self._gaps.begin(end)
        # Where the device waits, what has come since is for the round after.
        if not self.limits.spin and self._take_inbox(None):
            self._attend()
        while len(self._arrived) > _MOST_LEFT * max(len(entries), 2):
            self._arrived.popleft()()
        commits = [self._commit(entry, result) for entry, result in zip(entries, results, strict=True)]
        gap = None if self._ended_at is None else start - self._ended_at - held
        self._aftermath.note(
            RoundDone(entries, commits, pending, num_tokens, prefills, end - start, held, gap, ready, phases)
        )
        self._ended_at = self._worked_at = end
        self._gaps.mark("commit")

    def _sleep_seconds(self, entries: Sequence[Entry]) -> float:
        """How long to sleep after the launch of a round, before its end is looked for without sleeping."""
        if self.limits.spin:
            return 0.0
        num_decoded = sum(entry.num_tokens for entry in entries if not self.scheduler.is_apart(entry))
        return _SLEEP_SHARE * self.budget.cost.seconds(num_decoded)

    def _watch(self, pending: Pending, entries: Sequence[Entry], sleep_until: float) -> None:
        """Deal with what comes in, piece by piece, until the round has ended."""
        self._rehearsal.begin(sleep_until)
        attended = False
        # Also of a round that is over by now.
        self._hear(None)
        while not pending.done():
            if self.features.busy:
                self.features.work()
            now = time.monotonic()
            if self._arrived or self._hear(None):
                self._arrived.popleft()()
                attended = False
            elif sleep_until > now and self._hear(sleep_until - now):
                continue
            elif not attended:
                self._attend()
                attended = True
                self._garbage.sweep()
            elif not self.grammars.work(entries):
                self._rehearsal.rehearse(entries)

    def _commit(self, entry: Entry, result: Result) -> Commit | None:
        """Commit what may be committed of a result; None if the request was cancelled while the round ran."""
        request = entry.request
        if request.finished:
            return None
        tokens: Sequence[int] = ()
        finish = None
        if result.prompt_logprobs is not None:
            request.num_scored = result.prompt_logprobs.start - 1 + len(result.prompt_logprobs)
        if entry.error is not None:
            result = Result(error=entry.error)
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

    def _hear(self, timeout: float | None) -> bool:
        """Take what others ask, after waiting for it up to `timeout` seconds; whether anything is to be done."""
        self._arrived += self._inbox.take(timeout)
        return bool(self._arrived)

    def _take_inbox(self, timeout: float | None) -> bool:
        """Do what others ask, after waiting for it up to `timeout` seconds; whether there was anything."""
        heard = self._hear(None if self._arrived else timeout)
        while self._arrived:
            self._arrived.popleft()()
        return heard

    def _attend(self) -> None:
        """Look after drafts and the queue, once all that came in was taken."""
        self.grammars.poll()
        self.drafts.attend()
        self.scheduler.admit()
        self.drafts.flush()

    def _begin(self, request: Request) -> None:
        """Schedule a request, once its grammar is compiled if it has one."""
        self.grammars.open(request, self.scheduler.add, self._fail)

    def _fail(self, request: Request, error: OutriderError) -> None:
        """End a request that was not scheduled."""
        request.finished = True
        self._unfinished.discard(request)
        request.sink(Update(error=error))

    def _cancel(self, request: Request) -> None:
        if not request.finished:
            request.finished = True
            self._unfinished.discard(request)
            self.scheduler.end(request)
            self.scheduler.release_ended()

    def _abandon(self, error: OutriderError) -> None:
        """Tell all unfinished requests how it ended."""
        self._stopping = True
        self.grammars.stop()
        self._unfinished.refuse()
        # What broke the engine may have been the device, which must keep nobody from hearing what is committed.
        self._in_any_case(partial(self._aftermath.settle, with_features=False))
        for request in self._unfinished.take():
            request.finished = True
            self.scheduler.end(request)
            self._in_any_case(self.scheduler.release_ended)
            self._in_any_case(partial(request.sink, Update(error=error)))
        self._in_any_case(self.drafts.flush)
        self._in_any_case(self._observer.flush)

    def _in_any_case(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("the engine could not end cleanly")

"""The engine: it owns model, pages, trees and requests, and turns rounds into committed tokens."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from outrider.errors import OutriderError, UnavailableError
from outrider.grammar.compiler import GrammarVocabulary
from outrider.host.worker import GarbageCollector
from outrider.logs import get_logger
from outrider.protocol.generation import GenerationUpdate
from outrider.tree.handshake import Terms
from verify_service.engine.grammars import POLL_SECONDS, Grammars
from verify_service.engine.host_gap import GapWatch, HotPathWarmer
from verify_service.engine.memory import Memory
from verify_service.engine.postprocessor import Observer, RoundCommit, RoundDone, RoundPostprocessor
from verify_service.engine.request import Request
from verify_service.engine.round import Batch, Entry, Pending, Result
from verify_service.engine.round_growth import RoundGrowth
from verify_service.engine.scheduler import EngineLimits, NodePlan, Scheduler
from verify_service.executors.base import Executor
from verify_service.features.sender import FeatureSender
from verify_service.frames import ENGINE_FAILED, ENGINE_STOPPED
from verify_service.speculation.budget import Budget, CostModel
from verify_service.speculation.colocated_draft import ColocatedDraft
from verify_service.speculation.draft_rest import DraftRest
from verify_service.speculation.draft_wait import DraftWaitMode, DraftWaitPolicy, DraftWaitState
from verify_service.speculation.drafts import CREDIT_ROUNDS, Drafts
from verify_service.speculation.replica import DraftConnection

log = get_logger(__name__)

_IDLE_POLL_SECONDS = 0.25
"""How often an engine without requests looks after its drafts."""

_CALM_SECONDS = 0.25
"""Without a round for so long, an engine takes up work that requests would wait for: clients often ask again soon."""

_AHEAD_SHARE = 0.5
"""Part of a round's expected time after which the next one is launched, if it need not wait for this one's end: what
has come by then is part of it."""

_DRAFT_WORK_SHARE = 0.1
"""Part of a round's expected time that a colocated draft may take before it for work that no round waits for."""

_MAX_DEFERRED_ACTIONS = 2
"""Actions for each request of a round, two requests at least, that may wait until the next one is launched.

With more of them slow hosts would fall behind."""
_NOTHING = Batch([], 0.0, 0)


Action = Callable[[], None]
"""What a message asks of the engine."""


class VerifyInbox(Protocol):
    """Actions for the engine, in the order in which they came. The engine takes them between two rounds."""

    def post(self, action: Action) -> None:
        """Leave an action."""

    def take(self, timeout: float | None) -> list[Action]:
        """All actions that have come since the last call; the engine runs them in order.

        None does not wait; a number waits up to so many seconds for something to come, and returns as soon as it has.
        """


class VerifyEngine:
    """Runs rounds on one thread, which alone calls it: what a message asks through `submit`, `cancel` and `draft_*` is
    done when the engine next takes its inbox.

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
        inbox: VerifyInbox,
        vocabulary: GrammarVocabulary | None = None,
        growth: RoundGrowth | None = None,
        colocated: ColocatedDraft | None = None,
    ) -> None:
        """`vocabulary`: the tokenizer as grammars see it; without one requests with a grammar are refused.

        `growth`: for an executor that drafts on its own device. `colocated`: drafts on the engine's thread, where
        rounds wait for drafts without spinning.
        """
        self.limits = limits
        self.memory = memory
        mode = DraftWaitMode(limits.lockstep, limits.shares_cores)
        self.drafts = Drafts(limits.vocab_size, CREDIT_ROUNDS * max(limits.max_nodes, 16), mode=mode)
        self.budget = Budget(cost, limits.max_nodes, fixed=limits.lockstep)
        self.grammars = Grammars(vocabulary, self.drafts, patient=not limits.spin)
        self.scheduler = Scheduler(memory, self.drafts, self.budget, limits, executor.forget, self.grammars)
        self.features = FeatureSender(self.drafts, memory, executor, piecewise=limits.spin)
        self._draft_wait = DraftWaitPolicy(self.budget, limits.max_hold_seconds, mode)
        self._executor = executor
        self._growth = growth
        self._colocated = colocated
        self._warmer = HotPathWarmer(self.scheduler, executor, self._commit)
        self._observer = observer
        self._inbox = inbox
        self._stopping = False
        self._active_requests: set[Request] = set()
        """Requests whose last update has not been sent."""
        self._num_submitted = 0
        self._actions: deque[Action] = deque()
        """Actions of messages that were received and not processed yet."""
        self._garbage = GarbageCollector()
        self._gaps = GapWatch()
        # Elsewhere plain rounds take what rounds with drafts do, nodes and waits aside, and the budget knows that.
        may_rest = executor.launches_ahead and growth is None and not limits.lockstep
        self._postprocessor = RoundPostprocessor(
            self.scheduler, self.drafts, self.features, self._active_requests, observer, cost, limits.max_nodes, growth,
            DraftRest(cost) if may_rest else None,
        )  # fmt: skip
        self._ahead: tuple[Batch, Pending] | None = None
        """The round behind the one that runs, if it was launched."""
        self._ended_at: float | None = None
        self._worked_at = float("-inf")
        cost.prepare(limits.max_running + limits.max_nodes + 1)
        if colocated is not None:
            colocated.join(self.drafts, self.features)

    def run(self) -> None:
        """Run rounds until `stop`; unfinished requests get UnavailableError."""
        try:
            while not self._stopping:
                self._step()
        except OutriderError as error:
            log.exception("the engine failed; the service must be restarted")
            self._fail_all(UnavailableError(f"{error.message}; the service restarts"))
        except Exception:
            log.exception("the engine failed; the service must be restarted")
            self._fail_all(UnavailableError(ENGINE_FAILED))
        else:
            self._fail_all(UnavailableError(ENGINE_STOPPED))

    def stop(self) -> None:
        """End after the round in progress."""
        self._stopping = True

    def submit(self, request: Request) -> None:
        """Queue a request; the door bounds how many there are. Raises UnavailableError when stopping."""
        if self._stopping:
            raise UnavailableError("the verify service is stopping")
        self._num_submitted += 1
        request.arrival, request.arrived_at = self._num_submitted, time.monotonic()
        self._active_requests.add(request)
        self._inbox.post(partial(self._begin, request))

    def cancel(self, request: Request) -> None:
        """End a request without a further update; its pages are free before the next round."""
        self._inbox.post(lambda: self._cancel(request))

    def draft_connected(self, connection: DraftConnection, terms: Terms | None = None) -> None:
        """A session with a draft service began."""

        if terms is not None and (left := self.limits.left_by(terms)):
            log.warning("draft %s guesses nothing for %s", connection.address, left)

        def connect() -> None:
            self._postprocessor.draft_came()
            self.drafts.connected(connection, terms)
            self.features.connected(connection)

        self._inbox.post(connect)

    def draft_disconnected(self, connection: DraftConnection) -> None:
        """A session with a draft service ended."""

        def disconnect() -> None:
            self.features.disconnected(connection)
            self.drafts.disconnected(connection)

        self._inbox.post(disconnect)

    def _step(self) -> None:
        """One round: schedule it, launch it, finish the one before and receive while it runs, commit its tokens.

        Messages are received behind the launch, so that the device has work meanwhile; without a round to run, `_idle`
        waits for them. Where the next round needs nothing of this one but its roots, which the device knows, it is
        launched before this one is over:

            host      | n-1's updates, messages | launch n+1 | ... read n | n's updates, messages | launch n+2 | ...
            device    |            round n                 |            round n+1                            | ...
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._ended_at is not None:
            (batch, pending), start = ahead, self._ended_at
        else:
            batch = self._schedule()
            if not batch.entries:
                return self._idle()
            start = time.monotonic()
            pending = self._executor.launch(batch.entries, batch.growth)
        self.drafts.on_launch(start)
        phases = self._gaps.end()
        self._postprocessor.process()
        num_tokens = sum(entry.num_tokens for entry in batch.entries) + (batch.taken.num_nodes if batch.taken else 0)
        prefills = any(entry.prefills for entry in batch.entries)
        self._receive_beside(pending, batch, start)
        results = pending.wait()
        end = time.monotonic()
        self._gaps.begin(end)
        self._receive_behind(len(batch.entries))
        commits = [self._commit(entry, result) for entry, result in zip(batch.entries, results, strict=True)]
        gap = None if self._ended_at is None else start - self._ended_at - batch.wait_seconds
        self._postprocessor.add(
            RoundDone(batch, results, commits, pending, num_tokens, prefills, end - start, gap, phases)
        )
        self._ended_at = self._worked_at = end
        self._gaps.mark("commit")

    def _schedule(self) -> Batch:
        """The next round, its tree nodes and grammar masks included; without entries if there is nothing to run."""
        if self.features.preparing:
            self.features.advance()
        entries = self.scheduler.plan()
        self._gaps.mark("plan")
        if not entries:
            return _NOTHING
        num_grown = self._growth.num_grown if self._growth is not None else 0
        plan = self.scheduler.choose(entries, num_grown)
        wait_seconds, num_ready = 0.0, plan.choice.num_nodes
        self._gaps.mark("choose")
        # Where trees have grown for the round, there is no need to wait for others.
        if plan.awaited and not num_grown:
            entries, plan, wait_seconds = self._wait_for_drafts(entries, plan)
            self._gaps.mark("draft wait")
        # A round before may have been dealt with in the wait, and drafts rest since.
        resting = self.drafts.resting
        self.scheduler.take(plan)
        self._gaps.mark("take")
        if self._growth is not None:
            self._growth.fetch(entries, self.grammars.allowed)
            self._gaps.mark("fetch")
        entries = self.grammars.mask(entries)
        if self._growth is None:
            return Batch(entries, wait_seconds, num_ready, resting=resting)
        taken = self._growth.take(entries)
        return Batch(entries, wait_seconds, num_ready, self._growth.plan(entries), taken, resting)

    def _launch_ahead(self, batch: Batch) -> None:
        """Launch the round behind the one that runs this batch, unless it is better laid out when that one is over.

        What comes in from now on is in time for the round after it.
        """
        if self._stopping or self._ahead is not None or self.features.preparing or batch.growth is not None:
            return
        entries = self.scheduler.plan_ahead(batch.entries)
        if not entries or (self._growth is not None and not self._growth.rests(entries)):
            return
        growth = None if self._growth is None else self._growth.plan(entries)
        batch = Batch(entries, 0.0, 0, growth, resting=self.drafts.resting)
        self._ahead = batch, self._executor.launch(entries, growth)

    def _wait_for_drafts(self, entries: list[Entry], plan: NodePlan) -> tuple[list[Entry], NodePlan, float]:
        """Wait for nodes of drafts as long as that pays.

        Returns the entries whose requests have not ended meanwhile, what they take now, and the seconds waited.
        """
        start = time.monotonic()
        waited, longest = 0.0, self.limits.max_hold_seconds
        while waited < longest and not self._stopping:
            seconds = self._draft_wait.wait_seconds(
                plan.awaited, plan.num_tokens, plan.choice, plan.prefill_seconds, now=start + waited
            )
            if not seconds:
                break
            for state in plan.awaited:
                state.on_wait()
            # A draft cannot answer what it has not been told.
            self._postprocessor.process()
            self.drafts.tell_awaited(entry.request for entry in entries)
            self._receive_for(min(seconds, longest - waited), entries, plan.awaited)
            self.drafts.flush()
            entries = [entry for entry in entries if not entry.request.finished]
            plan = self.scheduler.choose(entries)
            waited = time.monotonic() - start
        if self.limits.spin and not plan.choice.num_nodes:
            self._postprocessor.send_commits_early()
        return entries, plan, waited

    def _receive_for(self, seconds: float, entries: Sequence[Entry], awaited: Sequence[DraftWaitState]) -> None:
        """Wait for messages, at most so long, and do what they ask, or enough of it that no draft is awaited.

        A colocated draft grows meanwhile.
        """
        if not self.limits.spin:
            has_grown = self._colocated is not None and self._colocated.grow(seconds, self._is_called)
            is_waiting = not has_grown and any(state.expects for state in awaited)
            self._process_messages(seconds if is_waiting else None)
            self.features.work()
            return
        # An engine that slept here would launch the round with cold code, and wake some 50 us late.
        now = time.monotonic()
        end = now + seconds
        self._warmer.resume()
        while not self._receive(None) and now < end and not self._stopping:
            if self.features.busy:  # what the draft answers may depend on them
                self.features.work()
            else:
                self._warmer.run(entries)
            now = time.monotonic()
        while self._actions and any(state.expects for state in awaited):
            self._actions.popleft()()

    def _receive_beside(self, pending: Pending, batch: Batch, launched_at: float) -> None:
        """Receive and do all that needs no results of the round, piece by piece, until it has ended.

        The next one is launched meanwhile if it can be, not before this one is half over.
        """
        entries = batch.entries
        seconds = self.budget.cost.seconds(sum(entry.num_tokens for entry in entries))
        ahead_at = launched_at + _AHEAD_SHARE * seconds if self._executor.launches_ahead else math.inf
        if self.limits.spin:
            # The rest of what `_maintain` does waits until all that came was taken, which may be after this round.
            self.scheduler.admit()
            self.drafts.flush()
            if self._garbage.overdue:
                self._garbage.collect_young()
        else:
            if self._colocated is not None:
                self._colocated.work(_DRAFT_WORK_SHARE * seconds, self._is_called)
            self._process_messages(None)
            self._maintain()
            # On a CPU a round has no other end than its results, and there is no time to spare to wait for.
            self._garbage.collect_young()
        self._warmer.resume()
        is_maintained = False
        # Also for a round that is over by now.
        self._receive(None)
        while not pending.done():
            if self.features.busy:
                self.features.work()
            now = time.monotonic()
            if self._actions or self._receive(None):
                self._actions.popleft()()
                is_maintained = False
            elif now >= ahead_at:
                self._launch_ahead(batch)
                ahead_at = math.inf
            elif self.features.busy:
                continue  # a draft may wait for features, and for nothing that follows
            elif not is_maintained:
                self._maintain()
                is_maintained = True
                self._garbage.collect_young()
            elif not self.grammars.work(entries):
                self._warmer.run(entries)
        if ahead_at < math.inf:
            self._launch_ahead(batch)

    def _receive_behind(self, num_entries: int) -> None:
        """Receive what came until the round's end: where a device waits, no more of it is done than must be."""
        if not self.limits.spin and self._process_messages(None):
            self._maintain()
        while len(self._actions) > _MAX_DEFERRED_ACTIONS * max(num_entries, 2):
            self._actions.popleft()()

    def _idle(self) -> None:
        """Finish the last round, wait for messages, and do what requests would have to wait for if there were any."""
        self._ended_at = None
        self._postprocessor.process()
        self._garbage.collect_all()
        busy = (self.scheduler.running or self.scheduler.waiting) and not self.scheduler.stalled
        timeout = POLL_SECONDS if self.grammars.compiling else _IDLE_POLL_SECONDS
        if self._colocated is not None:
            self._colocated.work(math.inf, self._is_called, is_idle=True)
        calm = not busy and time.monotonic() - self._worked_at >= _CALM_SECONDS
        self._process_messages(None if busy or (calm and self.features.refresh()) else timeout)
        self._maintain()
        self.features.work()
        self._observer.flush()

    def _commit(self, entry: Entry, result: Result) -> RoundCommit | None:
        """Commit what may be committed of a result; None if the request was cancelled while the round ran."""
        request = entry.request
        if request.finished:
            return None  # also one that the round before ended with a stop token
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
            self.drafts.on_commit(request)
        if request.finished:
            self.scheduler.end(request)
        return RoundCommit(entry, result, tokens, finish)

    def _receive(self, timeout: float | None) -> bool:
        """Take messages, after waiting for one up to `timeout` seconds; whether any are to be processed."""
        self._actions += self._inbox.take(timeout)
        return bool(self._actions)

    def _is_called(self) -> bool:
        """Whether messages have come, or the engine is to end."""
        return self._stopping or self._receive(None)

    def _process_messages(self, timeout: float | None) -> bool:
        """Do what messages ask, after waiting for one up to `timeout` seconds; whether there was any."""
        received = self._receive(None if self._actions else timeout)
        while self._actions:
            self._actions.popleft()()
        return received

    def _maintain(self) -> None:
        """Look after grammars, drafts and the queue, once all messages that came in were processed."""
        self.grammars.poll()
        self.drafts.check_replicas()
        self.scheduler.admit()
        self.drafts.flush()

    def _begin(self, request: Request) -> None:
        """Schedule a request, once its grammar is compiled if it has one."""
        self.grammars.open(request, self.scheduler.waiting.add, self._fail)

    def _fail(self, request: Request, error: OutriderError) -> None:
        """End a request that was not scheduled."""
        request.finished = True
        self._active_requests.discard(request)
        request.sink(GenerationUpdate(error=error))

    def _cancel(self, request: Request) -> None:
        if not request.finished:
            request.finished = True
            self._active_requests.discard(request)
            self.scheduler.end(request)
            self.scheduler.release_ended()

    def _fail_all(self, error: OutriderError) -> None:
        """Tell all unfinished requests how it ended."""
        self._stopping = True
        self.grammars.stop()
        # What broke the engine may have been the device, which must keep nobody from hearing what is committed.
        self._try(partial(self._postprocessor.process, with_features=False))
        for request in sorted(self._active_requests, key=lambda request: request.arrival):
            request.finished = True
            self.scheduler.end(request)
            self._try(self.scheduler.release_ended)
            self._try(partial(request.sink, GenerationUpdate(error=error)))
        self._try(self.drafts.flush)
        self._try(self._observer.flush)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            log.exception("the engine could not end cleanly")

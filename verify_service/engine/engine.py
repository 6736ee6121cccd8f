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
from verify_service.frames import ENGINE_FAILED, ENGINE_STOPPED, SERVICE_ENDS
from verify_service.speculation.budget import Budget, CostModel
from verify_service.speculation.colocated_draft import ColocatedDraft
from verify_service.speculation.draft_rest import DraftRest
from verify_service.speculation.draft_wait import DraftWaitMode, DraftWaitPolicy, DraftWaitState
from verify_service.speculation.drafts import CREDIT_ROUNDS, Drafts
from verify_service.speculation.replica import DraftConnection

log = get_logger(__name__)

_IDLE_POLL_SECONDS = 0.25
"""How often an engine without requests checks its drafts."""

_CALM_SECONDS = 0.25
"""Time without a round before an engine does work that would make requests wait: clients often ask again soon."""

_AHEAD_SHARE = 0.5
"""Part of a round's expected time after which the next one is launched, if it need not wait for this one's end. The
next round takes account of all messages that have come by then."""

_DRAFT_WORK_SHARE = 0.1
"""Part of a round's expected time that a colocated draft may spend, before the round, on work that no round awaits."""

_MAX_DEFERRED_ACTIONS = 2
"""Most actions per request of a round that may wait until the next round is launched; one request counts as two.

With more of them slow hosts would fall behind."""
_NOTHING = Batch([], 0.0, 0)


Action = Callable[[], None]
"""Something that a message asks the engine to do."""


class VerifyInbox(Protocol):
    """Actions for the engine, in the order in which they came. The engine takes them between two rounds."""

    def post(self, action: Action) -> None:
        """Queue an action."""

    def take(self, timeout: float | None) -> list[Action]:
        """Return all actions that have come since the last call; the engine runs them in order.

        `timeout`: seconds to wait, at most, for something to come; None does not wait.
        """


class VerifyEngine:
    """Runs rounds on one thread, which alone calls it. `submit`, `cancel` and `draft_*` leave actions in the inbox,
    which the engine runs when it next takes them.

    Between the end of a round and the launch of the next, the engine does only what that launch needs: commit, plan,
    choice of nodes. It sends and handles all messages while a round runs.
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
        """`vocabulary`: what grammars are compiled for; without it, requests with a grammar are refused.

        `growth`: for an executor that drafts on its own device. `colocated`: drafts on the engine's thread; only for
        engines that do not spin (`EngineLimits.spin`).
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
        """Actions of messages that were received but not processed yet."""
        self._garbage = GarbageCollector()
        self._gaps = GapWatch()
        # If rounds are not launched ahead, drafts only cost nodes and waits, which the budget accounts for.
        may_rest = executor.launches_ahead and growth is None and not limits.lockstep
        self._postprocessor = RoundPostprocessor(
            self.scheduler, self.drafts, self.features, self._active_requests, observer, cost, limits.max_nodes, growth,
            DraftRest(cost) if may_rest else None,
        )  # fmt: skip
        self._ahead: tuple[Batch, Pending] | None = None
        """The round after the one that runs, if it was launched already."""
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
        except Exception as error:
            log.exception("the engine failed; %s", SERVICE_ENDS)
            message = f"{error.message}; {SERVICE_ENDS}" if isinstance(error, OutriderError) else ENGINE_FAILED
            self._fail_all(UnavailableError(message))
        else:
            self._fail_all(UnavailableError(ENGINE_STOPPED))

    def stop(self) -> None:
        """End after the round in progress."""
        self._stopping = True

    def submit(self, request: Request) -> None:
        """Queue a request; the door limits their number."""
        self._num_submitted += 1
        request.arrival, request.arrived_at = self._num_submitted, time.monotonic()
        self._active_requests.add(request)
        self._inbox.post(partial(self._begin, request))

    def cancel(self, request: Request) -> None:
        """End a request without a further update; its pages are free before the next round."""
        self._inbox.post(lambda: self._cancel(request))

    def draft_connected(self, connection: DraftConnection, terms: Terms | None = None) -> None:
        """Add a draft service whose session began."""

        if terms is not None and (left := self.limits.unserved_by(terms)):
            log.warning("draft %s guesses nothing for %s", connection.address, left)

        def connect() -> None:
            self._postprocessor.on_draft_connected()
            self.drafts.connected(connection, terms)
            self.features.connected(connection)

        self._inbox.post(connect)

    def draft_disconnected(self, connection: DraftConnection) -> None:
        """Drop a draft service whose session ended."""

        def disconnect() -> None:
            self.features.disconnected(connection)
            self.drafts.disconnected(connection)

        self._inbox.post(disconnect)

    def _step(self) -> None:
        """Run one round: schedule and launch it, finish the one before and receive while it runs, commit its tokens.

        Messages are received after the launch, so that the device has work meanwhile; without a round to run, `_idle`
        waits for them. If the next round needs only its roots from this one, which the device has, it is launched
        before this one is over:

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
        self._receive_during_round(pending, batch, start)
        results = pending.wait()
        end = time.monotonic()
        self._gaps.begin(end)
        self._receive_after_round(len(batch.entries))
        commits = [self._commit(entry, result) for entry, result in zip(batch.entries, results, strict=True)]
        gap = None if self._ended_at is None else start - self._ended_at - batch.wait_seconds
        self._postprocessor.add(
            RoundDone(batch, results, commits, pending, num_tokens, prefills, end - start, gap, phases)
        )
        self._ended_at = self._worked_at = end
        self._gaps.mark("commit")

    def _schedule(self) -> Batch:
        """Lay out the next round, with tree nodes and grammar masks; it has no entries if there is nothing to run."""
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
        # If trees have grown for the round, it need not wait for drafts.
        if plan.awaited and not num_grown:
            entries, plan, wait_seconds = self._wait_for_drafts(entries, plan)
            self._gaps.mark("draft wait")
        # The wait may have processed the round before, and with that begun a rest of the drafts.
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
        """Launch the round after `batch`, which runs now, unless it must or should be laid out when `batch` is over.

        Messages that come in from now on affect the round after it.
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

        Returns the entries whose requests have not ended meanwhile, their new plan, and the seconds waited.
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
            # A draft cannot answer a commit that was not sent.
            self._postprocessor.process()
            self.drafts.send_awaited_commits(entry.request for entry in entries)
            self._receive_for(min(seconds, longest - waited), entries, plan.awaited)
            self.drafts.flush()
            entries = [entry for entry in entries if not entry.request.finished]
            plan = self.scheduler.choose(entries)
            waited = time.monotonic() - start
        if self.limits.spin and not plan.choice.num_nodes:
            self._postprocessor.send_commits_early()
        return entries, plan, waited

    def _receive_for(self, seconds: float, entries: Sequence[Entry], awaited: Sequence[DraftWaitState]) -> None:
        """Wait up to `seconds` for messages and run their actions, or enough of them that no draft is awaited.

        A colocated draft grows meanwhile.
        """
        if not self.limits.spin:
            has_grown = self._colocated is not None and self._colocated.grow(seconds, self._is_interrupted)
            is_waiting = not has_grown and any(state.expects for state in awaited)
            self._process_messages(seconds if is_waiting else None)
            self.features.work()
            return
        # If the engine slept here, it would launch the round with cold code, and wake some 50 us late.
        now = time.monotonic()
        end = now + seconds
        self._warmer.resume()
        while not self._receive(None) and now < end and not self._stopping:
            if self.features.busy:  # a draft's answer may depend on them
                self.features.work()
            else:
                self._warmer.run(entries)
            now = time.monotonic()
        while self._actions and any(state.expects for state in awaited):
            self._actions.popleft()()

    def _receive_during_round(self, pending: Pending, batch: Batch, launched_at: float) -> None:
        """Receive messages and do all that needs no results of the round, piece by piece, until it has ended.

        The next round is launched meanwhile if possible, but not before this one is half over.
        """
        entries = batch.entries
        seconds = self.budget.cost.seconds(sum(entry.num_tokens for entry in entries))
        ahead_at = launched_at + _AHEAD_SHARE * seconds if self._executor.launches_ahead else math.inf
        if self.limits.spin:
            # The rest of `_maintain` waits until all messages were processed, which may be after this round.
            self.scheduler.admit()
            self.drafts.flush()
            if self._garbage.overdue:
                self._garbage.collect_young()
        else:
            if self._colocated is not None:
                self._colocated.work(_DRAFT_WORK_SHARE * seconds, self._is_interrupted)
            self._process_messages(None)
            self._maintain()
            # On a CPU the round runs in `wait`, so there is no spare time later to collect in.
            self._garbage.collect_young()
        self._warmer.resume()
        is_maintained = False
        # Receive even if the round is over by now.
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
                continue  # a draft may wait for features, but for none of the work below
            elif not is_maintained:
                self._maintain()
                is_maintained = True
                self._garbage.collect_young()
            elif not self.grammars.work(entries):
                self._warmer.run(entries)
        if ahead_at < math.inf:
            self._launch_ahead(batch)

    def _receive_after_round(self, num_entries: int) -> None:
        """Receive the messages that came until the round's end; if a device waits, process no more than necessary."""
        if not self.limits.spin and self._process_messages(None):
            self._maintain()
        while len(self._actions) > _MAX_DEFERRED_ACTIONS * max(num_entries, 2):
            self._actions.popleft()()

    def _idle(self) -> None:
        """Finish the last round, wait for messages, and do work that would otherwise make requests wait."""
        self._ended_at = None
        self._postprocessor.process()
        self._garbage.collect_all()
        busy = (self.scheduler.running or self.scheduler.waiting) and not self.scheduler.stalled
        timeout = POLL_SECONDS if self.grammars.compiling else _IDLE_POLL_SECONDS
        if self._colocated is not None:
            self._colocated.work(math.inf, self._is_interrupted, is_idle=True)
        calm = not busy and time.monotonic() - self._worked_at >= _CALM_SECONDS
        self._process_messages(None if busy or (calm and self.features.refresh()) else timeout)
        self._maintain()
        self.features.work()
        self._observer.flush()

    def _commit(self, entry: Entry, result: Result) -> RoundCommit | None:
        """Commit the tokens of a result that its request may take; None if the request has ended meanwhile."""
        request = entry.request
        if request.finished:
            return None  # it was cancelled, or ended by a stop token in the round before
        tokens: Sequence[int] = ()
        finish = None
        if result.prompt_logprobs is not None:
            request.num_scored = result.prompt_logprobs.start - 1 + len(result.prompt_logprobs)
        if entry.error is not None:
            result = Result(error=entry.error)
        if result.error is not None and not result.token_ids:
            request.finished = True
        elif not entry.samples:
            request.cached_len += entry.num_extend
        else:
            tokens, finish = request.cut(result.token_ids)
            request.cached_len += entry.num_extend + len(tokens) - 1
            request.tokens.extend(tokens)
            request.finished = finish is not None or result.error is not None
            self.drafts.on_commit(request)
        if request.finished:
            self.scheduler.end(request)
        return RoundCommit(entry, result, tokens, finish)

    def _receive(self, timeout: float | None) -> bool:
        """Take messages, after waiting up to `timeout` seconds for one. Returns whether any are to be processed."""
        self._actions += self._inbox.take(timeout)
        return bool(self._actions)

    def _is_interrupted(self) -> bool:
        """Whether messages have come, or the engine is to end."""
        return self._stopping or self._receive(None)

    def _process_messages(self, timeout: float | None) -> bool:
        """Run the actions of messages, after waiting up to `timeout` seconds for one. Returns whether any came."""
        received = self._receive(None if self._actions else timeout)
        while self._actions:
            self._actions.popleft()()
        return received

    def _maintain(self) -> None:
        """Check grammars and drafts and admit requests, once all messages that came have been processed."""
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
        """Stop, and end all unfinished requests with `error`."""
        self._stopping = True
        self.grammars.stop()
        # Features need the device, which may be broken; clients must get their committed tokens all the same.
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

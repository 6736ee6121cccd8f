"""Growth with a draft model: bursts of several steps over the trees of all requests, one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter

from outrider.drafting.growth import Limits
from outrider.drafting.model.batch_manager import BatchManager
from outrider.drafting.model.burst import BurstResult, BurstRunner, PendingBurst
from outrider.drafting.model.drafter import PART_SECONDS, GrowthOptions
from outrider.drafting.model.forest import DraftForest
from outrider.drafting.model.planner import Plan, Planner
from outrider.drafting.model.publisher import NodePublisher
from outrider.drafting.tree import Grower, Ledger, Tree
from outrider.errors import raise_device_failure
from outrider.logs import get_logger
from outrider.protocol.messages import Features

_logger = get_logger(__name__)

_NEWS = 0.05
_MOST_HOST_SECONDS = 0.002
_FEW_ROWS = 4
"""Requests whose commits are worth a look at what could be told of them before the next part has landed."""
_FIRST_NODES = 32
"""Nodes of a request in the first answer to a commit."""


@dataclass(slots=True)
class _Flight:
    """A burst that is under way."""

    plan: Plan
    pending: PendingBurst
    """The part of it that lands next."""
    began: float
    more: PendingBurst | None = None
    """The part behind that one, if it is queued."""
    is_outdated: bool = False
    """Whether the forest has followed commits that it cannot be told of."""


def _at_once() -> bool:
    return True


class BurstGrowth(Grower):
    """Keeps one burst under way; while it runs, what the one before brought is appended to the authors' trees.

    What arrives while a burst runs waits for its result, but for commits whose path the forest holds: it follows them
    at once, and the device is told of them when it goes on. A burst ends for what cannot be told.
    """

    def __init__(self, runner: BurstRunner, limits: Limits, ledger: Ledger, options: GrowthOptions) -> None:
        super().__init__(ledger)
        shape = runner.shape
        self.counts: defaultdict[str, float] = defaultdict(float)
        """Figures since someone emptied this, by name."""
        self._runner = runner
        self._shape = shape
        self._options = options
        capacity = options.max_entries or max(8192, 512 * shape.num_rows)
        self._forest = DraftForest(shape, limits.path_score, max(capacity, 4 * shape.most_entries))
        self._roster = BatchManager(runner, self._forest, limits, options, self.declined)
        self._keeper = self._roster.keeper
        self._planner = Planner(self._forest, self._roster.rows, self._keeper, shape, options)
        is_blind = not options.takes_in
        self._announcer = NodePublisher(self._forest, self._roster.rows, limits, ledger, is_blind=is_blind)
        self._flight: _Flight | None = None
        self._host_seconds = PART_SECONDS
        self._over_at = 0.0  # when the part ended that is being dealt with; 0 for none
        self._resting = True  # whether the last look found nothing to run

    @property
    def idle(self) -> bool:
        """Whether no burst is under way, and nothing is worth one."""
        if not self._resting or self._flight or not self._announcer.done:
            return False
        return not self._roster.has_news() and not self._roster.is_leaving

    @property
    def pressed(self) -> bool:
        """Whether a device that has something to do has nothing to do yet."""
        return self._flight is None and not self._resting

    def open(self, tree: Tree) -> None:
        """A tree gets its row once the burst under way has ended."""
        self._roster.open(tree)
        if not self._shape.lag:  # verify sends no features before it was answered
            self._withhold(tree)

    def follow(self, tree: Tree, known: int, *, missed: bool) -> None:
        """The forest follows while the burst under way runs, if it can, or else once that has ended."""
        self._withhold(tree)
        if self._flight is not None:
            self.ledger.expecting.add(tree.handle)

    def changed(self, tree: Tree) -> None:
        """Look again once the burst under way has ended."""
        self._roster.change(tree)

    def found(self, tree: Tree) -> None:
        """Take in what another grower appended, if that is done."""
        if not self._options.takes_in:
            return
        context = self._roster.find(tree.handle)
        if context is not None and context.seen < tree.author.next_id:
            self._roster.change(tree)

    def close(self, tree: Tree) -> None:
        """Its row and its pages are free once the burst under way has ended."""
        self.ledger.withheld.discard(tree.handle)
        self._roster.close(tree)

    def take_features(self, tree: Tree, features: Features) -> None:
        """Keep true features until their tokens are run with them."""
        self._roster.take_features(tree, features)
        self._resting = False

    def grow(self, deadline: float, interrupted: Callable[[], bool], *, wait: bool = True) -> None:
        """Take what the burst under way brought, launch the next one, and append to the authors while that runs."""
        self._grow(deadline, interrupted, wait)
        waiting = self.ledger.untold if self._flight is not None else ()
        self.ledger.expecting = {handle for handle in waiting if self._roster.expects(handle)}

    def _grow(self, deadline: float, interrupted: Callable[[], bool], wait: bool) -> None:
        flight = self._flight
        if flight is not None and self._follow_ahead(flight):
            # Before the answer, which takes longer than there is time.
            if flight.more is None and flight.pending.nearly(_at_once):
                flight.more = self._go_on(flight)
            if len(flight.plan.rows) <= _FEW_ROWS:
                self._announcer.prepare()
        elif flight is None or self._announcer.done or flight.pending.done():
            if flight is not None:
                may_wait = wait or flight.pending.done()
                self._note_host_work()
                if not flight.pending.nearly(interrupted if may_wait else _at_once):
                    return
                if flight.more is None:
                    flight.more = self._go_on(flight)
                if (not wait and not flight.pending.done()) or not flight.pending.over(interrupted):
                    return
                if flight.more is not None:
                    self._over_at = perf_counter()
                    self._take(flight, flight.more)
                else:
                    self._land()
                    if interrupted():  # what the next burst runs may depend on it
                        return
            if self._flight is None:
                self._apply()
                self._launch()
            self._announcer.prepare()
        if self._options.withholds:  # the whole tree in one message
            self._announcer.run(inf, lambda: False)
            self._release()
        else:
            # The first answer to a commit is awaited: it goes with the best nodes, and the others behind it.
            owing = sum(tree.author.owes_answer for tree in self.ledger.untold.values())
            self._announcer.run(deadline, interrupted, _FIRST_NODES * owing)

    def _note_host_work(self) -> None:
        """What a part brought is dealt with: see how long that took."""
        if self._over_at:
            taken = perf_counter() - self._over_at
            self._host_seconds += _NEWS * (min(taken, _MOST_HOST_SECONDS) - self._host_seconds)
            self._over_at = 0.0

    def _follow_ahead(self, flight: _Flight) -> bool:
        """Follow commits while the burst under way runs: answers leave earlier, and less is left for its end."""
        if not self._roster.has_news() or self._options.lockstep_steps:
            return False
        # What a part brought is taken in first, if the device has something to do meanwhile.
        if flight.pending.done() and (flight.more is not None or not self._options.most_steps):
            return False
        plan, planner = flight.plan, self._planner
        excluded = {one.context for one in plan.forced}
        moved = self._roster.follow_ahead(excluded, misses=self._options.most_steps > 0 and not self._forest.may_know)
        for context in moved:
            if not planner.follows(plan, context):
                flight.is_outdated = True
                continue
            plan.moved.add(context.row)
            if planner.lacks(plan, context):
                self._roster.unsettle(context)
        return bool(moved)

    def _withhold(self, tree: Tree) -> None:
        if self._options.withholds:
            self.ledger.withheld.add(tree.handle)

    def _release(self) -> None:
        """Have complete trees told, and those that do not grow.

        While prompts take more than a further chunk, their commits are acknowledged without a tree after each chunk:
        verify takes a draft that answers nothing for two seconds for lost, and a session that is dialled anew would
        begin with the same prompts.
        """
        withheld = [context for handle in self.ledger.withheld if (context := self._roster.find(handle)) is not None]
        behind = {context for context in withheld if len(context.between) > self._shape.region // 8}
        if sum(len(context.between) for context in behind) <= self._options.prompt_chunk:
            behind.clear()
        for context in withheld:
            follows = context.known == context.tree.author.committed_len
            is_complete = follows and not context.steps_left
            if is_complete or context in behind or not self._forest.quotas[context.row]:
                self.ledger.withheld.discard(context.tree.handle)

    def forget_target(self) -> None:
        """Nothing is kept of a target."""

    def count_into(self, count: Callable[[str, float], None]) -> None:
        """Tell bursts and what they were made of."""
        if self._keeper.num_extended:
            self.counts["prompt_tokens"] += self._keeper.num_extended
            self._keeper.num_extended = 0
        for name, value in self.counts.items():
            count(name, value)
        self.counts.clear()

    def _go_on(self, flight: _Flight) -> PendingBurst | None:
        """Have the device go on with the burst under way; None where something waits for its end."""
        plan, planner, roster = flight.plan, self._planner, self._roster
        if roster.is_leaving:
            plan.gone.update(row for row in roster.take_closed() if row in plan.rows)
        if flight.is_outdated or roster.has_news({one.context for one in plan.forced}):
            return None
        needy = roster.to_run(planner.needs_run)
        if len(needy) < roster.num_unsettled:  # some have tokens that are computed apart
            return None
        seconds = (flight.pending.step_seconds, self._host_seconds)
        steps = planner.more_steps(plan, *seconds, forced=bool(needy))
        if not steps:
            return None
        # The others wait for these, or, if there is no place for any, for the end.
        told = planner.force(plan, needy)
        if needy and not told and not plan.forced:
            return None
        try:
            more = flight.pending.go_on(steps, planner.reroots(plan))
        except Exception as error:
            raise_device_failure(error)
            _logger.error("a burst of %d requests cannot go on", len(plan.rows), exc_info=error)
            more = None
        for context in told:
            roster.settle(context)
        if more is None:  # it is not asked again: its end says what became of it
            plan.most_steps = plan.queued_steps
        else:
            plan.queued_steps += steps
        return more

    def _take(self, flight: _Flight, more: PendingBurst) -> None:
        """Take what a part of the burst under way brought, while the next one runs. Entries keep their numbers."""
        try:
            for context in self._planner.take(flight.plan, flight.pending.wait()):
                self._roster.unsettle(context)
            self._roster.find_run()
        except Exception as error:
            self._flight = None
            self._announcer.forget()
            with suppress(Exception):
                more.wait()
            self._fail_burst(flight.plan, error)
            return
        flight.pending, flight.more = more, None

    def _land(self) -> None:
        """Wait for the burst under way, and take what it brought into the forest."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._announcer.forget()
        try:
            result = flight.pending.wait()
            self._planner.land(flight.plan, result)
        except Exception as error:
            self._fail_burst(flight.plan, error)
            return
        plan, burst = flight.plan, flight.plan.burst
        self.counts["bursts"] += 1
        self.counts["burst_steps"] += plan.queued_steps
        self.counts["burst_nodes"] += plan.num_nodes
        self.counts["burst_places"] += plan.queued_steps * burst.width
        self.counts["burst_seconds"] += perf_counter() - flight.began
        self._update(plan, result)

    def _update(self, plan: Plan, result: BurstResult) -> None:
        """Bring the requests of a burst that landed up to date."""
        if self._options.lockstep_steps:
            num_steps = int((result.picked >= 0).any(1).sum()) if result.cut else plan.burst.num_steps
            # Committed tokens of which the root was not one are no part of a tree.
            self._roster.spend((row for row in plan.rows if self._roster.rows[row].root_run), num_steps)
        self._roster.leave()  # others may need their pages now
        self._roster.look_at(one for one in plan.contexts if one.between or one.lag or not one.root_run)

    def _apply(self) -> None:
        """Do what waited for the burst to end."""
        self._announcer.forget()
        self._roster.admit()
        if self._roster.has_changes:
            self._resting = False
            self._roster.follow()

    def _launch(self) -> None:
        """Compute a chunk of a prompt, and start the next burst."""
        extended = self._roster.extend()
        needy = self._roster.to_run(self._planner.needs_run)
        self._resting = not extended
        if not self._forest.make_room(self._shape.most_entries):
            return
        plan = self._planner.plan(needy)
        if self._options.lockstep_steps:
            self._roster.complete(plan.rows if plan else ())
        if plan is None:
            return
        self._resting = False
        for one in plan.forced:
            self._roster.settle(one.context)
        began = perf_counter()
        try:
            self._flight = _Flight(plan, self._runner.launch(plan.burst), began)
        except Exception as error:
            self._fail_burst(plan, error)

    def _fail_burst(self, plan: Plan, error: Exception) -> None:
        raise_device_failure(error)
        _logger.error("a burst of %d requests failed", len(plan.rows), exc_info=error)
        self._roster.fail_rows(plan.rows)

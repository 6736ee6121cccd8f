"""Growth with a draft model: bursts of several steps over the trees of all requests, one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING

from outrider.drafting.model.batch_manager import BatchManager
from outrider.drafting.model.burst import BurstResult
from outrider.drafting.model.drafter import PART_SECONDS, GrowthOptions
from outrider.drafting.model.forest import DraftForest
from outrider.drafting.model.planner import BurstPlan, Planner
from outrider.drafting.model.publisher import NodePublisher
from outrider.drafting.tree_growth import Grower, Tree, TreeGrowth, TreeLimits
from outrider.errors import raise_device_failure
from outrider.logs import get_logger
from outrider.protocol.speculation import Features

if TYPE_CHECKING:
    from outrider.drafting.model.runner import BurstRunner, PendingBurst

_logger = get_logger(__name__)

_EMA_WEIGHT = 0.05
_MAX_HOST_SECONDS = 0.002
_FEW_ROWS = 4
"""Most requests in a burst for which entries are published again at once when commits were followed."""
_FIRST_ANSWER_NODES = 32
"""Nodes of each request in the first answer to a commit; the others follow."""


@dataclass(slots=True)
class _ActiveBurst:
    """A running burst."""

    plan: BurstPlan
    pending: PendingBurst
    """The burst's part that lands next."""
    began: float
    more: PendingBurst | None = None
    """The part after `pending`, if it is queued."""
    is_outdated: bool = False
    """Whether the forest has followed commits that cannot be passed to the burst."""


def _immediately() -> bool:
    return True


class BurstGrower(Grower):
    """Keeps one burst running, and appends the nodes that earlier parts brought to the authors' trees.

    While a burst runs, the forest follows commits at once if it can, and the device gets them with the next
    part. The burst ends if anything else waits.
    """

    def __init__(self, runner: BurstRunner, growth: TreeGrowth, limits: TreeLimits, options: GrowthOptions) -> None:
        super().__init__(growth, limits)
        shape = runner.shape
        self.counts: defaultdict[str, float] = defaultdict(float)
        """Counts by name, since the last `take_counts`."""
        self._runner = runner
        self._shape = shape
        self._options = options
        capacity = max(8192, 512 * shape.num_rows, 4 * shape.most_entries)
        self._forest = DraftForest(shape, limits.path_score, capacity)
        # A root that is run again brings candidates that may be entries already.
        self._forest.has_foreign_nodes = options.renews_roots
        self._batch_manager = BatchManager(runner, self._forest, self, options)
        self._kv_manager = self._batch_manager.kv_manager
        self._planner = Planner(self._forest, self._batch_manager.rows, self._kv_manager, shape, options)
        self._publisher = NodePublisher(self._forest, self._batch_manager.rows, limits, growth, options)
        self._active: _ActiveBurst | None = None
        self._landed: tuple[BurstPlan, BurstResult] | None = None
        """A burst that has landed, and whose requests must still be updated."""
        self._withheld: set[int] = set()  # lockstep: handles of trees that are not sent until they are complete
        self._host_seconds = PART_SECONDS
        """The host's time for a part, without queueing the next one."""
        self._part_ended_at = 0.0  # when the part ended whose result is published now; 0 for none
        self._nothing_to_run = True  # whether the last attempt to launch found nothing to run

    @property
    def idle(self) -> bool:
        """Whether no burst is running, and nothing is worth one."""
        if not self._nothing_to_run or self._active or not self._publisher.done:
            return False
        return not self._batch_manager.has_updates() and not self._batch_manager.has_closed

    @property
    def is_behind(self) -> bool:
        """Whether requests wait for rows, or for tokens to be computed in separate forwards."""
        return self._batch_manager.is_behind

    @property
    def device_idle(self) -> bool:
        """Whether there is something to run and no burst is running."""
        return self._active is None and not self._nothing_to_run

    def open(self, tree: Tree) -> None:
        """Begin to grow a tree; it gets its row when the running burst has ended."""
        self._batch_manager.open(tree)
        if not self._shape.lag:  # verify sends no features before the first answer
            self._withhold(tree)

    def follow(self, tree: Tree, known: int, *, missed: bool) -> None:
        """Note a commit, which the forest follows with the next call of `grow`, or when the running burst has ended.

        On a CPU, a burst that was launched and has not begun is ended at once, since it would run outdated nodes.
        """
        self._withhold(tree)
        if self._active is not None and not self._active.pending.ran:
            self._active.pending.cut = True
            self._land(self._active)

    def changed(self, tree: Tree) -> None:
        """Look at a tree again with the next call of `grow`, or when the running burst has ended."""
        self._batch_manager.change(tree)

    def foreign_nodes_added(self, tree: Tree) -> None:
        """Make entries of nodes that another grower appended, if the options say so."""
        if not self._options.adopts_foreign_nodes:
            return
        context = self._batch_manager.find(tree.handle)
        if context is not None and context.seen < tree.author.next_id:
            self._batch_manager.change(tree)

    def close(self, tree: Tree) -> None:
        """Free a tree's row and pages when the running burst has ended."""
        self._withheld.discard(tree.handle)
        self._batch_manager.close(tree)

    def holds_back(self, tree: Tree) -> bool:
        """Whether nothing is sent of a tree yet: in lockstep it is not complete, or the answer to a commit waits for
        nodes from the running burst, or from a burst that waits for features."""
        if tree.handle in self._withheld:
            return True
        if tree.author.has_untaken:
            return False
        manager = self._batch_manager
        return manager.owes_block(tree.handle) or (self._active is not None and manager.expects(tree.handle))

    def take_features(self, tree: Tree, features: Features) -> None:
        """Keep the target's features until the tokens behind them are run with them."""
        self._batch_manager.take_features(tree, features)
        self._nothing_to_run = False

    def grow(self, deadline: float, interrupted: Callable[[], bool], *, wait: bool = True) -> None:
        """Take in a part that has ended, queue the next part or launch the next burst, and publish meanwhile."""
        active = self._active
        if active is not None and self._follow_ahead(active):
            # Queue the next part before publishing, which takes longer than the rest of the part that is nearly over.
            if active.more is None and active.pending.wait_until_nearly_over(_immediately):
                active.more = self._go_on(active)
            if len(active.plan.rows) <= _FEW_ROWS:
                self._publisher.prepare()
        elif active is None or self._publisher.done or active.pending.done():
            if active is not None:
                may_wait = wait or active.pending.done()
                self._note_host_work()
                if not active.pending.wait_until_nearly_over(interrupted if may_wait else _immediately):
                    return
                if active.more is None:
                    active.more = self._go_on(active)
                if (not wait and not active.pending.done()) or not active.pending.wait_until_over(interrupted):
                    return
                if active.more is not None:
                    self._part_ended_at = perf_counter()
                    self._take(active, active.more)
                else:
                    self._land(active)
                    if self._batch_manager.is_lone:
                        # Nothing more grows for now, so the answer leaves before anything else is done.
                        self._publisher.prepare()
                        self._publisher.run(deadline, interrupted, _FIRST_ANSWER_NODES)
                        return
                    if interrupted():  # the message may change what the next burst runs
                        return
            if self._active is None:
                self._apply()
                self._launch()
            self._publisher.prepare()
        if self._options.withholds:  # the whole tree in one message
            self._publisher.run(inf, lambda: False)
            self._release()
        else:
            # Verify waits for the first answer to a commit: send it with the best nodes, and the others behind it.
            owing = sum(tree.author.owes_answer for tree in self.growth.unsent.values())
            self._publisher.run(deadline, interrupted, _FIRST_ANSWER_NODES * owing)

    def _note_host_work(self) -> None:
        """Measure the host's time for the part before."""
        if self._part_ended_at:
            taken = perf_counter() - self._part_ended_at
            self._host_seconds += _EMA_WEIGHT * (min(taken, _MAX_HOST_SECONDS) - self._host_seconds)
            self._part_ended_at = 0.0

    def _follow_ahead(self, active: _ActiveBurst) -> bool:
        """Follow commits while a burst runs, so that answers leave earlier; returns whether any was followed."""
        if not self._batch_manager.has_updates() or self._options.lockstep_steps:
            return False
        # A part that has ended is taken in first, unless the device would wait meanwhile.
        if active.pending.done() and (active.more is not None or not self._options.most_steps):
            return False
        plan, planner = active.plan, self._planner
        excluded = {one.context for one in plan.forced}
        followed = self._batch_manager.follow_ahead(excluded, misses=self._options.most_steps > 0)
        for context in followed:
            if not planner.follows(plan, context):
                active.is_outdated = True
                continue
            plan.rerooted_rows.add(context.row)
            if planner.needs_seeds(plan, context):
                self._batch_manager.mark_incomplete(context)
        return bool(followed)

    def _withhold(self, tree: Tree) -> None:
        if self._options.withholds:
            self._withheld.add(tree.handle)

    def _release(self) -> None:
        """Lockstep: send trees that are complete, and those that do not grow.

        While prompts need more than one further chunk, their commits are acknowledged without a tree after each chunk:
        verify gives up a session that is silent for two seconds, and a new one would begin with the same prompts.
        """
        found = map(self._batch_manager.find, self._withheld)
        withheld = [context for context in found if context is not None]
        behind = {context for context in withheld if len(context.uncached) > self._shape.region // 8}
        if sum(len(context.uncached) for context in behind) <= self._options.prompt_chunk:
            behind.clear()
        for context in withheld:
            follows = context.known == context.tree.author.committed_len
            is_complete = follows and not context.steps_left
            if is_complete or context in behind or not self._forest.quotas[context.row]:
                self._withheld.discard(context.tree.handle)

    def take_counts(self) -> dict[str, float]:
        """Return counts of bursts, of their steps and nodes, and of prompt tokens since the last call."""
        counts, self.counts = self.counts, defaultdict(float)
        if self._kv_manager.num_extended:
            counts["prompt_tokens"] = self._kv_manager.num_extended
            self._kv_manager.num_extended = 0
        return dict(counts)

    def _go_on(self, active: _ActiveBurst) -> PendingBurst | None:
        """Queue the next part of the running burst; None if something waits for the burst's end."""
        plan, planner, batch_manager = active.plan, self._planner, self._batch_manager
        plan.closed_rows.update(row for row in batch_manager.take_closed_rows() if row in plan.rows)
        if active.is_outdated or batch_manager.has_updates({one.context for one in plan.forced}):
            return None
        needy = batch_manager.to_run(planner.needs_run)
        if len(needy) < batch_manager.num_incomplete:  # some need a separate forward
            return None
        host_seconds = self._host_seconds + self._runner.launch_seconds
        steps = planner.more_steps(plan, active.pending.step_seconds, host_seconds, forced=bool(needy))
        if not steps:
            return None
        # Requests that do not fit wait until others are done, or the burst has ended.
        forced = planner.force(plan, needy)
        if needy and not forced and not plan.forced:
            return None
        try:
            more = active.pending.go_on(steps, planner.reroots(plan, forced))
        except Exception as error:
            raise_device_failure(error)
            _logger.error("a burst of %d requests cannot go on", len(plan.rows), exc_info=error)
            more = None
        for one in forced:
            batch_manager.mark_scheduled(one.context)
        if more is None:  # the burst ends with the steps that are queued
            plan.most_steps = plan.queued_steps
        else:
            plan.queued_steps += steps
        return more

    def _take(self, active: _ActiveBurst, more: PendingBurst) -> None:
        """Take in a part of the running burst while the next part runs. Entries keep their numbers."""
        try:
            for context in self._planner.take(active.plan, active.pending.wait()):
                self._batch_manager.mark_incomplete(context)
            self._batch_manager.note_root_runs()
        except Exception as error:
            self._active = None
            self._publisher.forget()
            with suppress(Exception):
                more.wait()
            self._fail_burst(active.plan, error)
            return
        self._note_answers(active.plan, "burst")
        active.pending, active.more = more, None

    def _land(self, active: _ActiveBurst) -> None:
        """Wait for the last part of the running burst, and take it in."""
        self._active = None
        self._publisher.forget()
        try:
            result = active.pending.wait()
            self._planner.land(active.plan, result)
        except Exception as error:
            self._fail_burst(active.plan, error)
            return
        plan, burst = active.plan, active.plan.burst
        self._note_answers(plan, "burst")
        self.counts["bursts"] += 1
        self.counts["burst_steps"] += plan.queued_steps
        self.counts["burst_nodes"] += plan.num_nodes
        self.counts["burst_places"] += plan.queued_steps * burst.width
        self.counts["burst_seconds"] += perf_counter() - active.began
        self._landed = plan, result

    def _apply(self) -> None:
        """Do the work that waited for the end of a burst."""
        manager = self._batch_manager
        self._publisher.forget()
        if self._landed is not None:
            (plan, result), self._landed = self._landed, None
            if self._options.lockstep_steps:
                num_steps = int((result.picked >= 0).any(1).sum()) if result.cut else plan.burst.num_steps
                # Uncached tokens that were run without the root do not count as steps of a tree.
                manager.spend((row for row in plan.rows if manager.rows[row].root_run), num_steps)
            manager.release_closed()  # others may need their pages now
            manager.update(one for one in plan.contexts if one.uncached or one.lag or not one.root_run)
        manager.admit()
        if manager.has_changes:
            self._nothing_to_run = False
            manager.follow()

    def _launch(self) -> None:
        """Compute a chunk of prompts, and launch the next burst."""
        extended = self._batch_manager.extend()
        needy = self._batch_manager.to_run(self._planner.needs_run)
        self._nothing_to_run = not extended
        if not self._forest.make_room(self._shape.most_entries):
            return
        plan = self._planner.plan(needy)
        if self._options.lockstep_steps:
            self._batch_manager.complete(plan.rows if plan else ())
        if plan is None:
            return
        self._nothing_to_run = False
        for one in plan.forced:
            self._batch_manager.mark_scheduled(one.context)
        began = perf_counter()
        try:
            self._active = _ActiveBurst(plan, self._runner.launch(plan.burst), began)
        except Exception as error:
            self._fail_burst(plan, error)
        else:
            self._note_answers(plan, "launch")

    def _note_answers(self, plan: BurstPlan, phase: str) -> None:
        """End a phase of the answers that requests of a burst owe."""
        for row in plan.rows:
            self.growth.answer_phases.note(self._batch_manager.rows[row].tree.handle, phase)

    def _fail_burst(self, plan: BurstPlan, error: Exception) -> None:
        raise_device_failure(error)
        _logger.error("a burst of %d requests failed", len(plan.rows), exc_info=error)
        self._batch_manager.fail_rows(plan.rows)

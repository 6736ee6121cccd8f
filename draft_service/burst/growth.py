"""Growth with a draft model: bursts of several steps over the trees of all requests, one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter

from draft_service.burst.announce import Announcer
from draft_service.burst.context import DraftContext
from draft_service.burst.forest import DraftForest
from draft_service.burst.keeper import ContextKeeper, DeclinedError
from draft_service.burst.launch import Plan, Planner
from draft_service.burst.options import GrowthOptions
from draft_service.burst.plan import BurstRunner, PendingBurst
from draft_service.burst.reroot import Step, Walked, reroot
from draft_service.tree import Grower, Ledger, Refusal, Tree
from draft_service.tree_growth import Limits
from outrider.logs import get_logger
from outrider.tree.messages import DeclineReason, Features

_logger = get_logger(__name__)

_RUN_PER_CREDIT = 2
"""Nodes run for each that may be sent: a wide burst also runs some that turn out not to be among the best."""
_FAILED = Refusal(DeclineReason.UNSPECIFIED, "the draft model failed")


@dataclass(slots=True)
class _Flight:
    """A burst that is under way."""

    plan: Plan
    pending: PendingBurst
    """The part of it that lands next."""
    began: float
    more: PendingBurst | None = None
    """The part behind that one, if it is queued."""


def _at_once() -> bool:
    return True


class BurstGrowth(Grower):
    """Keeps one burst under way; while it runs, what the one before brought is appended to the authors' trees.

    What arrives while a burst runs waits for its result: authors follow commits at once, the forest behind them.
    """

    def __init__(self, runner: BurstRunner, limits: Limits, ledger: Ledger, options: GrowthOptions) -> None:
        super().__init__(ledger)
        shape = runner.shape
        self.counts: defaultdict[str, float] = defaultdict(float)
        """Figures since someone emptied this, by name."""
        self._runner = runner
        self._shape = shape
        self._limits = limits
        self._options = options
        self._burst_entries = shape.max_seeds + shape.max_steps * shape.max_width * shape.branching
        capacity = options.max_entries or max(8192, 512 * shape.num_rows)
        self._rows: dict[int, DraftContext] = {}
        self._forest = DraftForest(shape, limits.path_score, max(capacity, 4 * self._burst_entries))
        self._keeper = ContextKeeper(runner, self._forest.slots, options)
        self._planner = Planner(self._forest, self._rows, self._keeper, shape, options)
        self._announcer = Announcer(self._forest, self._rows, limits, ledger)
        self._free_rows = list(range(shape.num_rows - 1, -1, -1))
        self._contexts: dict[int, DraftContext] = {}  # by handle
        self._opening: dict[int, Tree] = {}
        self._early: defaultdict[int, list[tuple[int, int, object]]] = defaultdict(list)  # features before that
        self._closing: list[DraftContext] = []
        self._changed: dict[int, DraftContext] = {}
        self._unsettled: dict[int, DraftContext] = {}  # those whose root or context may have to be run
        self._flight: _Flight | None = None
        self._resting = True  # whether the last look found nothing to run

    @property
    def idle(self) -> bool:
        """Whether no burst is under way, and nothing is worth one."""
        waiting = self._flight or self._opening or self._closing or self._changed
        return self._resting and not waiting and self._announcer.done

    @property
    def pressed(self) -> bool:
        """Whether a device that has something to do has nothing to do yet."""
        return self._flight is None and not self._resting

    def open(self, tree: Tree) -> None:
        """A tree gets its row once the burst under way has ended."""
        self._opening[tree.handle] = tree
        if not self._shape.lag:  # verify sends no features before it was answered
            self._withhold(tree)

    def follow(self, tree: Tree, known: int, *, missed: bool) -> None:
        """The forest follows once the burst under way has ended."""
        self._withhold(tree)

    def changed(self, tree: Tree) -> None:
        """Look again once the burst under way has ended."""
        context = self._contexts.get(tree.handle)
        if context is not None:
            self._changed[tree.handle] = context

    def found(self, tree: Tree) -> None:
        """Take in what another grower appended."""
        context = self._contexts.get(tree.handle)
        if context is not None and context.seen < tree.author.next_id:
            self._changed[tree.handle] = context

    def close(self, tree: Tree) -> None:
        """Its row and its pages are free once the burst under way has ended."""
        self.declined.pop(tree.handle, None)
        self.ledger.withheld.discard(tree.handle)
        self._opening.pop(tree.handle, None)
        self._early.pop(tree.handle, None)
        self._changed.pop(tree.handle, None)
        self._unsettled.pop(tree.handle, None)
        context = self._contexts.pop(tree.handle, None)
        if context is not None:
            # What is left of it must not be appended to a tree that nobody follows.
            context.known = -1
            self._closing.append(context)

    def take_features(self, tree: Tree, features: Features) -> None:
        """Keep true features until their tokens are run with them."""
        context = self._contexts.get(tree.handle)
        if not self._shape.lag or (context is None and tree.handle not in self._opening):
            return
        if features.start + features.count > self._options.max_positions:  # nothing bounds them but their tokens
            return
        part = (features.start, features.count, self._runner.project(features))
        if context is None:
            self._early[tree.handle].append(part)
        else:
            context.features.add(*part, since=context.end - 1)
            self._changed[tree.handle] = context

    def grow(self, deadline: float, interrupted: Callable[[], bool], *, wait: bool = True) -> None:
        """Take what the burst under way brought, launch the next one, and append to the authors while that runs."""
        flight = self._flight
        if flight is None or self._announcer.done or flight.pending.done():
            if flight is not None:
                may_wait = wait or flight.pending.done()
                if not flight.pending.nearly(interrupted if may_wait else _at_once):
                    return
                if flight.more is None:
                    flight.more = self._go_on(flight)
                if (not wait and not flight.pending.done()) or not flight.pending.over(interrupted):
                    return
                if flight.more is not None:
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
            self._announcer.run(deadline, interrupted)

    def _withhold(self, tree: Tree) -> None:
        if self._options.withholds:
            self.ledger.withheld.add(tree.handle)

    def _release(self) -> None:
        """Have complete trees told, and those that do not grow."""
        for handle in list(self.ledger.withheld):
            context = self._contexts.get(handle)
            if context is None:
                continue
            follows = context.known == context.tree.author.committed_len
            if (follows and not context.steps_left) or not self._forest.quotas[context.row]:
                self.ledger.withheld.discard(handle)

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
        if self._changed or self._opening or self._closing or self._unsettled:
            return None
        plan = flight.plan
        steps = self._planner.more_steps(plan)
        if not steps:
            return None
        try:
            more = flight.pending.go_on(steps)
        except Exception as error:
            _logger.error("a burst of %d requests cannot go on", len(plan.rows), exc_info=error)
            more = None
        if more is None:  # it is not asked again: its end says what became of it
            plan.most_steps = plan.queued_steps
        else:
            plan.queued_steps += steps
        return more

    def _take(self, flight: _Flight, more: PendingBurst) -> None:
        """Take what a part of the burst under way brought, while the next one runs. Entries keep their numbers."""
        try:
            self._planner.take(flight.plan, flight.pending.wait())
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
        if self._options.lockstep_steps:
            for row in flight.plan.rows:
                context = self._rows[row]
                num_steps = int((result.picked >= 0).any(1).sum()) if result.cut else burst.num_steps
                context.steps_left = max(0, context.steps_left - num_steps)
                self._set_bounds(context)
        for one in flight.plan.forced:
            if one.context.between or one.context.lag or not one.context.root_run:
                self._look_at(one.context)
        self._keeper.free_slots()

    def _apply(self) -> None:
        """Do what waited for the burst to end."""
        self._announcer.forget()
        for context in self._closing:
            self._leave(context)
        self._closing.clear()
        for tree in self._opening.values():
            self._enter(tree)
        self._opening.clear()
        if self._changed:
            changed = list(self._changed.values())
            self._changed.clear()
            self._resting = False
            self._follow(changed)
            self._forest.tidy()

    def _enter(self, tree: Tree) -> None:
        author, options = tree.author, self._options
        if author.committed_len > options.max_positions:
            detail = f"{author.committed_len} tokens, at most {options.max_positions}"
            self.declined[tree.handle] = Refusal(DeclineReason.TOO_LONG, detail)
            return
        if not self._free_rows:
            detail = f"{self._shape.num_rows} requests are open"
            self.declined[tree.handle] = Refusal(DeclineReason.OVERLOADED, detail)
            return
        row, root, lag = self._free_rows.pop(), author.committed_len - 1, self._shape.lag
        context = DraftContext(tree, row, lag, author.sampling, root, end=lag, steps_left=options.lockstep_steps)
        context.begin(author.committed_len, author.epoch)
        for part in self._early.pop(tree.handle, ()):
            context.features.add(*part, since=context.end - 1)
        self._contexts[tree.handle] = self._rows[row] = context
        self._forest.set_root(row, author.tokens[-1], root, author.root)
        try:
            self._keeper.open(context)
        except Exception as error:
            self._fail(context, error)
            return
        self._changed[tree.handle] = context

    def _leave(self, context: DraftContext) -> None:
        del self._rows[context.row]
        self._forest.close(context.row)
        self._free_rows.append(context.row)
        with suppress(Exception):
            self._keeper.close(context)

    def _follow(self, contexts: Iterable[DraftContext]) -> None:
        """Have the forest follow the authors of these, and see what is to be done for them now."""
        moving: list[DraftContext] = []
        steps: list[Step] = []
        for context in contexts:
            author = context.tree.author
            if author.committed_len > self._options.max_positions:
                detail = f"{author.committed_len} tokens, at most {self._options.max_positions}"
                self._fail(context, DeclinedError(DeclineReason.TOO_LONG, detail))
            elif author.committed_len > context.known:
                tokens = author.tokens[context.known :]
                restarted, afresh = author.epoch != context.epoch, self._options.lockstep_steps > 0
                moving.append(context)
                steps.append(Step(context.row, tokens, author.root, restarted, afresh))
        if steps:
            for context, step, walked in zip(moving, steps, reroot(self._forest, steps), strict=True):
                self._note_step(context, step, walked)
        for context in contexts:
            self._look_at(context)
        self._keeper.free_slots()

    def _note_step(self, context: DraftContext, step: Step, walked: Walked) -> None:
        root_slot = self._forest.entries.slots[self._forest.roots[context.row]]
        context.follow(walked.slots, len(step.tokens), root_run=bool(root_slot >= 0))
        context.epoch = context.tree.author.epoch
        context.steps_left = self._options.lockstep_steps
        if step.restarted or not walked.found:
            context.seen = 1

    def _look_at(self, context: DraftContext) -> None:
        """Bring a request up to date whose root, tree, credit or features may have changed."""
        if context.tree.handle not in self._contexts or context.tree.handle in self.declined:
            return
        try:
            self._keeper.settle(context)
        except Exception as error:
            self._fail(context, error)
            return
        if context.seen < context.tree.author.next_id:
            self._announcer.take_in(context)
        self._set_bounds(context)
        self._unsettled[context.tree.handle] = context

    def _set_bounds(self, context: DraftContext) -> None:
        options, limits, forest, row = self._options, self._limits, self._forest, context.row
        region = self._shape.region
        wanted = _RUN_PER_CREDIT * min(context.tree.author.credit, limits.num_nodes)
        quota = min(wanted, region - region // 4 - 8)
        is_done = options.lockstep_steps > 0 and not context.steps_left
        reach = max(options.fresh_steps, options.most_steps)
        at_end = context.root + reach >= options.max_positions
        forest.quotas[row] = 0 if context.tree.paused or is_done or at_end or quota <= 0 else quota + 1
        forest.last_positions[row] = min(context.root + limits.depth, options.max_positions - reach) - 1

    def _launch(self) -> None:
        """Compute a chunk of a prompt, and start the next burst."""
        extended = self._extend()
        roots = [context for context in list(self._unsettled.values()) if self._wants_root(context)]
        self._resting = not extended
        if not self._forest.make_room(self._burst_entries):
            return
        plan = self._planner.plan(roots)
        if self._options.lockstep_steps:
            self._end_lockstep(plan.rows if plan else [])
        if plan is None:
            return
        self._resting = False
        for one in plan.forced:
            self._unsettled.pop(one.context.tree.handle, None)
        began = perf_counter()
        try:
            self._flight = _Flight(plan, self._runner.launch(plan.burst), began)
        except Exception as error:
            self._fail_burst(plan, error)

    def _end_lockstep(self, growing: list[int]) -> None:
        """Trees that have nothing more to run are complete."""
        for row, context in self._rows.items():
            if context.root_run and context.steps_left and row not in growing:
                context.steps_left = 0

    def _extend(self) -> bool:
        """Compute one chunk of the first request that needs it."""
        for context in list(self._unsettled.values()):
            if context.tree.paused or not self._keeper.num_extendable(context):
                continue
            self._unsettled[context.tree.handle] = self._unsettled.pop(
                context.tree.handle
            )  # others come first next time
            try:
                self._keeper.extend(context, self._options.prompt_chunk)
            except Exception as error:
                self._fail(context, error)
            return True
        return False

    def _wants_root(self, context: DraftContext) -> bool:
        """Whether its root is to be run now; if nothing is to be done for it, it is settled."""
        if self._keeper.num_extendable(context):
            return False
        if self._forest.quotas[context.row] > 0 and self._planner.needs_root(context):
            return True
        del self._unsettled[context.tree.handle]
        return False

    def _fail_burst(self, plan: Plan, error: Exception) -> None:
        """Give up the requests of a burst; what became of their KV is not known."""
        _logger.error("a burst of %d requests failed", len(plan.rows), exc_info=error)
        for row in plan.rows:
            context = self._rows[row]
            if context.tree.handle in self._contexts:
                self._set_aside(context, _FAILED)

    def _fail(self, context: DraftContext, error: Exception) -> None:
        """Give up one request."""
        if isinstance(error, DeclinedError):
            self._set_aside(context, error.refusal)
        else:
            _logger.error("request %d: the draft model failed", context.tree.author.request, exc_info=error)
            self._set_aside(context, _FAILED)

    def _set_aside(self, context: DraftContext, refusal: Refusal) -> None:
        """It waits to be closed."""
        handle = context.tree.handle
        self.declined[handle] = refusal
        self._forest.quotas[context.row] = 0
        self._changed.pop(handle, None)
        self._unsettled.pop(handle, None)

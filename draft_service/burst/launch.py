"""Lays out a burst from a forest, and takes what comes of it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from draft_service.burst.context import Between, DraftContext
from draft_service.burst.entries import Ints
from draft_service.burst.forest import DraftForest
from draft_service.burst.harvest import Harvest
from draft_service.burst.keeper import ContextKeeper
from draft_service.burst.options import GrowthOptions
from draft_service.burst.plan import (
    FORCED,
    NUM_SEED_FIELDS,
    Burst,
    BurstResult,
    BurstShape,
    Reroots,
    RowStates,
    Seeds,
)
from draft_service.burst.slots import Int32s, Lent

_LEVELS = 2
"""Nodes of a step for each request, as a multiple of a node's candidates."""
_FRESH_LEVELS = 4
_WIDE = 32
"""Nodes of a step at most, but for many requests: one of 64 takes a quarter longer, and depth is worth more."""
_ROW_WIDTH = 4
"""Nodes of a step for each of many requests."""
_SPREAD_STEPS = 4
"""Steps in which what there is to run spreads from a root to the width of a step."""
_ENOUGH = 4
"""A burst goes on while a step finds at least this part of the nodes that it may run: narrow ones are hardly faster."""
_FAIR = 4
"""Nodes of a burst that a request may have, as a multiple of its even share."""


@dataclass(slots=True)
class Forced:
    """A request's tokens that a burst must run: some of those between context and root, or the root, or both."""

    context: DraftContext
    indices: list[int]
    """Of each in `between`, in order; the root's is one past the last."""
    slots: list[int]
    """Tree slot of each."""
    taken: list[bool]
    """Whether the slot was free before."""
    num_true: int
    """How many of them, from the first on, are run with true features."""

    @property
    def has_root(self) -> bool:
        """Whether the root is among them."""
        return self.indices[-1] == len(self.context.between)


@dataclass(slots=True)
class Plan:
    """A burst, and what is needed to understand its result."""

    burst: Burst
    rows: list[int]
    """Of the runner, those of `burst.rows`."""
    forced: list[Forced]
    harvest: Harvest
    """Of its seeds, committed tokens are no entries."""
    lent: Lent
    most_steps: int
    """Steps at most, with those of further parts."""
    fair: int
    """Tree slots that a request may have to fill at any time."""
    num_lent: int
    """Tree slots that it was told to fill, in all."""
    queued_steps: int
    landed_steps: int = 0
    num_nodes: int = 0
    """Nodes that landed parts ran."""
    contexts: list[DraftContext] = field(default_factory=list)
    """Of all that is or was in `forced`."""
    is_full: bool = True
    """Whether the last step that landed found as many nodes as it may run, as far as that can be expected."""
    ran: list[bool] = field(default_factory=list)
    """Of each forced seed, whether a part that landed ran it."""
    moved: set[int] = field(default_factory=set)
    """Rows of the runner with new roots that the device is not told of yet."""
    spreads_from: int = 0
    """The step from which on what there is to run spreads from a root."""


class Planner:
    """Chooses what a burst runs."""

    def __init__(
        self,
        forest: DraftForest,
        contexts: Mapping[int, DraftContext],
        keeper: ContextKeeper,
        shape: BurstShape,
        options: GrowthOptions,
    ) -> None:
        """`contexts` by row of the runner; its owner keeps it up to date."""
        self._keeper = keeper
        self._forest = forest
        self._contexts = contexts
        self._shape = shape
        self._options = options
        self._index = np.zeros(shape.num_rows, np.int32)  # place in the burst of each row

    def needs_run(self, context: DraftContext) -> bool:
        """Whether the root is to be run, or committed tokens once more with true features, and could be.

        A root that was run with the draft's own features is left as it is until it is no root any more: what it would
        bring is there already, and to find that out takes the place of a whole burst.
        """
        if context.root_run:
            return not self._options.own_features and bool(context.to_run(root=False)[0])
        if not context.lag:
            return True
        if context.root < context.lag:
            return False
        if context.num_true > len(context.between):
            return True
        if self._options.lockstep_steps and not self._options.own_features:
            return False
        # Without true features it takes its parent's own, which lie in the parent's tree slot.
        return max(context.num_true, context.first_unrun) > 0

    def plan(self, contexts: Sequence[DraftContext]) -> Plan | None:
        """A burst that runs what `contexts` need, as many as fit, and the best of the forest; None if nothing is."""
        forest, options = self._forest, self._options
        forced, num_forced = self._force(contexts)
        num_fresh = sum(one.has_root for one in forced)
        max_nodes = self._shape.max_width * max(options.fresh_steps, options.most_steps)
        # A burst that goes on past commits finds all in its pool that they make worth running.
        goes_on = options.most_steps > 0
        chosen = forest.choose(min(self._shape.max_seeds - num_forced, max_nodes), beyond=goes_on)
        num_worth = int(np.count_nonzero(forest.entries.ranks[chosen] >= forest.floor)) if goes_on else len(chosen)
        if not forced and not num_worth:
            return None
        there = np.zeros(self._shape.num_rows, np.bool_)
        there[forest.entries.rows[chosen[:num_worth]]] = True
        left = forest.quotas - forest.num_run
        for one in forced:
            there[one.context.row] = True
            left[one.context.row] -= one.has_root
        if num_worth < len(chosen):
            chosen = chosen[there[forest.entries.rows[chosen]]]
        columns = forest.entries.columns[:, chosen]
        rows = there.nonzero()[0].astype(np.int32)
        num_steps = self._num_steps(num_fresh, rows)
        left = np.maximum(left[rows], 0)
        most_steps = max(num_steps, options.most_steps)
        width = self._width(num_forced, num_fresh, num_worth, len(rows), int(left.sum()))
        fair = max(self._shape.branching, _FAIR * width * (num_steps + most_steps) // (2 * len(rows)))
        fair = min(fair, width * most_steps)
        lent = forest.slots.lend(rows, np.minimum(left, fair))
        forest.shifts[rows] = 0.0
        self._index[rows] = np.arange(len(rows))
        fields = np.empty((NUM_SEED_FIELDS, num_forced + len(chosen)), np.int32)
        entries = np.empty(num_forced + len(chosen), np.intp)
        parts = self._lay_out(forced, fields, entries) if forced else []
        fields[:4, num_forced:] = columns
        fields[0, num_forced:] = self._index[columns[0]]
        fields[4:6, num_forced:] = -1
        fields[6:, num_forced:].view(np.float32)[:] = forest.entries.scores[chosen]
        entries[num_forced:] = chosen
        slots = forest.slots
        lens = self._keeper.context_lens[rows]
        states = RowStates(rows, lens, slots.live[rows], slots.stacks[rows], lent.starts, lent.ends)
        burst = Burst(states, Seeds(fields), num_steps, width, forest.floor, parts, options.least_chance)
        ran = [False] * num_forced
        return Plan(
            burst,
            rows.tolist(),
            forced,
            Harvest(entries),
            lent,
            most_steps,
            fair,
            lent.num_slots,
            num_steps,
            ran=ran,
            contexts=[one.context for one in forced],
        )

    def more_steps(self, plan: Plan, step_seconds: float, host_seconds: float) -> int:
        """Steps by which the burst should go on behind those that are queued; 0 if there may be no more to do."""
        part = self._options.part_steps(len(plan.rows), step_seconds, host_seconds)
        steps = min(part, plan.most_steps - plan.queued_steps)
        running = (plan.queued_steps - plan.landed_steps) * plan.burst.width
        is_able = plan.num_lent > plan.num_nodes + running or plan.moved or len(self._spent(plan))
        return steps if plan.is_full and is_able else 0

    def follows(self, plan: Plan, context: DraftContext) -> bool:
        """Whether a burst under way can go on below a request's new root: it has all that is needed for that."""
        forest, row = self._forest, context.row
        if not self._options.most_steps or forest.may_know or forest.quotas[row] <= 0 or row not in plan.rows:
            return False
        if self._keeper.is_long(context):
            return False
        # What takes true features is run by bursts that are told of these.
        return context.root_run or (not context.lag and plan.harvest.index_of(int(forest.roots[row])) >= 0)

    def reroots(self, plan: Plan) -> Reroots | None:
        """What the device is to be told of new roots when the burst goes on; None for nothing.

        Trees that may grow and have no slot left are told their old roots again, for the slots that come with them.
        """
        forest, spent = self._forest, self._spent(plan)
        if not plan.moved and not len(spent):
            return None
        if plan.moved:
            plan.spreads_from = plan.queued_steps
        rows = np.union1d(np.array(list(plan.moved), np.int32), spent)
        plan.moved.clear()
        roots = forest.roots[rows]
        slots = forest.entries.slots[roots]
        indices = [plan.harvest.index_of(root) if slot < 0 else -1 for root, slot in zip(roots, slots, strict=True)]
        left = np.minimum(forest.quotas[rows] - forest.num_run[rows], plan.fair).tolist()
        free = [forest.slots.lend_more(row, count) for row, count in zip(rows.tolist(), left, strict=True)]
        plan.num_lent += sum(map(len, free))
        shifts = forest.shifts[rows].astype(np.float32)
        forest.shifts[rows] = 0.0
        return Reroots(self._index[rows], np.array(indices, np.int32), slots, shifts, free)

    def _spent(self, plan: Plan) -> Int32s:
        """Rows that may run more nodes, and have slots for them, but were lent none that is not filled.

        What a burst runs below nodes that have died by then takes slots from what is left of a tree.
        """
        forest, rows = self._forest, plan.burst.rows.rows
        able = (forest.quotas > forest.num_run)[rows] & (forest.slots.num_free[rows] > 0)
        able &= forest.entries.slots[forest.roots[rows]] >= 0
        if not able.any():
            return rows[:0]
        rows = rows[able & ~forest.slots.is_lent(rows)]
        # Committed tokens that are still to be run hang below no root.
        waiting = {one.context.row for one in plan.forced}
        return rows[[row not in waiting for row in rows.tolist()]] if waiting else rows

    def take(self, plan: Plan, result: BurstResult) -> None:
        """Take a part of a burst's result into the forest."""
        self._forest.merge(plan.harvest, result)
        ran = result.picked >= 0
        plan.num_nodes += int(np.count_nonzero(ran))
        is_spread = plan.landed_steps + len(ran) - plan.spreads_from >= _SPREAD_STEPS
        enough = max(plan.burst.width // _ENOUGH, 1) if is_spread else 1
        plan.is_full = int(np.count_nonzero(ran[-1])) >= enough
        if plan.forced and not all(plan.ran):
            self._note_forced(plan, result)
            if all(plan.ran):
                self._land_forced(plan)
        plan.landed_steps += len(ran)

    def land(self, plan: Plan, result: BurstResult) -> None:
        """The same for the last part, and for what waited for it."""
        self.take(plan, result)
        self._forest.slots.settle(plan.lent)
        self._land_forced(plan)

    def _force(self, contexts: Sequence[DraftContext]) -> tuple[list[Forced], int]:
        forced: list[Forced] = []
        count = 0
        if not contexts:
            return forced, count
        limit = min(self._shape.max_width, self._shape.max_seeds)
        root_slots = self._forest.entries.slots[self._forest.roots].tolist()
        num_free = self._forest.slots.num_free.tolist()
        for context in contexts:
            indices, num_true = context.to_run(root=not context.root_run)
            places = [slot for slot, _ in context.between] + [root_slots[context.row]]
            slots = [places[index] for index in indices]
            length = len(slots)
            if count + length > limit or length > num_free[context.row]:
                continue
            taken = [slot < 0 for slot in slots]
            if any(taken):
                fresh = iter(self._forest.slots.take(context.row, sum(taken)))
                slots = [next(fresh) if slot < 0 else slot for slot in slots]
            forced.append(Forced(context, indices, slots, taken, num_true))
            count += length
        return forced, count

    def _num_steps(self, num_fresh: int, rows: Int32s) -> int:
        options = self._options
        if options.lockstep_steps:
            return min(options.fresh_steps, *(max(1, self._contexts[row].steps_left) for row in rows.tolist()))
        if 2 * num_fresh >= len(rows):
            return options.fresh_steps
        return options.part_steps(len(rows)) if options.most_steps else options.steady_steps

    def _width(self, num_forced: int, num_fresh: int, num_chosen: int, num_rows: int, left: int) -> int:
        """Nodes of a step: as many as are worth it by now, and room for their children."""
        if self._options.lockstep_steps:
            want = self._options.lockstep_width * num_rows
        else:
            roomy = self._shape.branching * (_FRESH_LEVELS * num_fresh + _LEVELS * (num_rows - num_fresh))
            want = min(max(num_chosen, roomy), left, max(_WIDE, _ROW_WIDTH * num_rows))
        return max(num_forced, min(want, self._shape.max_width), 1)

    def _lay_out(self, forced: list[Forced], fields: Int32s, entries: Ints) -> list[object]:
        """Write the fields and the entries of forced seeds; returns their features."""
        rows: list[int] = []
        parents: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        features: list[int] = []
        roots: list[int] = []  # where each root lies among the seeds
        parts: list[object] = []
        num_features = 0
        for one in forced:
            context, count = one.context, len(one.slots)
            run = dict(zip(one.indices, one.slots, strict=True))
            places = [run.get(index, slot) for index, (slot, _) in enumerate(context.between)]
            rows += [context.row] * count
            parents += [places[index - 1] if index else -1 for index in one.indices]
            tokens += [context.tree.author.tokens[context.end + index] for index in one.indices]
            positions += [context.end + index for index in one.indices]
            slots += one.slots
            if one.has_root:
                roots.append(len(rows) - 1)
            if context.lag:
                features += range(num_features, num_features + one.num_true)
                features += [-1] * (count - one.num_true)
                num_features += one.num_true
                parts += [part for first, past in _runs(one) for _, _, part in context.features.cut(first, past)]
            else:
                features += [-1] * count
        end = len(rows)
        fields[:6, :end] = (rows, parents, tokens, positions, slots, features)
        owners = fields[0, roots]
        entries[:end] = -1
        entries[roots] = self._forest.roots[owners]
        scores, bases = fields[6:, :end].view(np.float32)
        scores[:] = FORCED
        bases[:] = -np.inf
        bases[roots] = 0.0
        fields[0, :end] = self._index[fields[0, :end]]
        return parts

    def _note_forced(self, plan: Plan, result: BurstResult) -> None:
        """See which forced seeds a part ran: one that takes its parent's own feature comes a step behind it."""
        picked = result.picked.reshape(-1)
        for index in picked[(picked >= 0) & (picked < len(plan.ran))].tolist():
            plan.ran[index] = True

    def _land_forced(self, plan: Plan) -> None:
        slots, got = self._forest.slots, plan.ran
        unused_rows: list[int] = []
        unused_slots: list[int] = []
        at = 0
        for one in plan.forced:
            context, root = one.context, len(one.context.between)
            context.is_due = False
            for place, (index, slot, taken) in enumerate(zip(one.indices, one.slots, one.taken, strict=True)):
                is_true = place < one.num_true
                if not got[at + place]:
                    if taken:
                        unused_rows.append(context.row)
                        unused_slots.append(slot)
                elif index == root:
                    context.root_run, context.root_settled = True, is_true
                    context.fresh = False
                else:
                    slots.live[context.row, slot] = True
                    context.between[index] = Between(slot, is_true)
            at += len(one.slots)
        plan.forced = []
        if unused_rows:
            slots.free(np.array(unused_rows, np.int32), np.array(unused_slots, np.int32))


def _runs(one: Forced) -> Iterator[tuple[int, int]]:
    """First position and one past the last of features that forced tokens take, an unbroken run at a time."""
    start = one.context.end - 1
    taking = one.indices[: one.num_true]
    for place, index in enumerate(taking):
        if not place or taking[place - 1] != index - 1:
            first = index
        if place + 1 == len(taking) or taking[place + 1] != index + 1:
            yield start + first, start + index + 1

"""Lays out a burst from a forest, and takes what comes of it back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.model.burst import (
    FORCED,
    NUM_SEED_FIELDS,
    Burst,
    BurstResult,
    BurstShape,
    Reroots,
    RowStates,
    Seeds,
    StepBuckets,
)
from outrider.drafting.model.context import DraftContext, UncachedToken
from outrider.drafting.model.drafter import GrowthOptions
from outrider.drafting.model.entries import BurstCollector, Ints
from outrider.drafting.model.forest import DraftForest
from outrider.drafting.model.kv import ContextKVManager, Int32s, SlotLease


@dataclass(slots=True)
class ForcedTokens:
    """A request's tokens that a burst must run: some of those between context and root, or the root, or both."""

    context: DraftContext
    indices: list[int]
    """Of each in `uncached`, in order; the root's is one past the last."""
    slots: list[int]
    """Tree slot of each."""
    taken: list[bool]
    """Whether the slot was free before."""
    num_with_features: int
    """How many of them, from the first on, are run with true features."""
    first: int
    """Pool index of the first; the others follow it."""
    ran: list[bool] = field(default_factory=list)
    """Of each, whether a part that landed ran it."""

    @property
    def has_root(self) -> bool:
        """Whether the root is among them."""
        return self.indices[-1] == len(self.context.uncached)

    def note(self, picked: AbstractSet[int]) -> bool:
        """See which of them a part ran, by the pool indices of what it ran; whether all were run by now.

        One that takes its parent's own feature comes a step behind it.
        """
        self.ran = [ran or self.first + place in picked for place, ran in enumerate(self.ran)]
        return all(self.ran)


def force(
    forest: DraftForest, contexts: Sequence[DraftContext], first: int, limit: int, *, cuts: bool = False
) -> list[ForcedTokens]:
    """What these requests need run, at most `limit` seeds in all, from pool index `first` on; it takes tree slots.

    A request that does not fit is left out. `cuts`: `limit` is all that there ever is, so that of one that needs more
    the first tokens are taken, if all of those have true features; others wait for theirs.
    """
    forced: list[ForcedTokens] = []
    if not contexts:
        return forced
    end = first + limit
    root_slots = forest.entries.slots[forest.roots].tolist()
    num_free = forest.slots.num_free.tolist()
    for context in contexts:
        indices, num_with_features = context.to_run(root=not context.root_run)
        if cuts and len(indices) > limit <= num_with_features:
            indices, num_with_features = indices[:limit], limit
        places = [slot for slot, _ in context.uncached] + [root_slots[context.row]]
        slots = [places[index] for index in indices]
        length = len(slots)
        if first + length > end or length > num_free[context.row]:
            continue
        taken = [slot < 0 for slot in slots]
        if any(taken):
            fresh = iter(forest.slots.take(context.row, sum(taken)))
            slots = [next(fresh) if slot < 0 else slot for slot in slots]
        forced.append(ForcedTokens(context, indices, slots, taken, num_with_features, first, [False] * length))
        first += length
    return forced


@dataclass(slots=True)
class ForcedSeeds:
    """Forced seeds as a burst is told of them."""

    fields: Int32s
    """[8, N], see Seeds."""
    entries: Ints
    """[N] entry of each; -1 for those that are none, which are all but roots."""
    features: list[object]
    """See Burst.features."""


def lay_out(forest: DraftForest, forced: Sequence[ForcedTokens], index: Int32s) -> ForcedSeeds:
    """`index`: place in the burst of each row."""
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
        places = [run.get(place, slot) for place, (slot, _) in enumerate(context.uncached)]
        rows += [context.row] * count
        parents += [places[place - 1] if place else -1 for place in one.indices]
        tokens += [context.tree.author.tokens[context.end + place] for place in one.indices]
        positions += [context.end + place for place in one.indices]
        slots += one.slots
        if one.has_root:
            roots.append(len(rows) - 1)
        if context.lag:
            features += range(num_features, num_features + one.num_with_features)
            features += [-1] * (count - one.num_with_features)
            num_features += one.num_with_features
            parts += [part for first, past in _runs(one) for _, _, part in context.features.cut(first, past)]
        else:
            features += [-1] * count
    fields = np.empty((NUM_SEED_FIELDS, len(rows)), np.int32)
    fields[:6] = (rows, parents, tokens, positions, slots, features)
    entries = np.full(len(rows), -1, np.intp)
    entries[roots] = forest.roots[fields[0, roots]]
    scores, bases = fields[6:].view(np.float32)
    scores[:] = FORCED
    bases[:] = -np.inf
    bases[roots] = 0.0
    fields[0] = index[fields[0]]
    return ForcedSeeds(fields, entries, parts)


def land(forest: DraftForest, one: ForcedTokens) -> None:
    """Take what was run of a request's tokens; slots that were taken for others are free again."""
    context, root = one.context, len(one.context.uncached)
    context.root_in_burst = False
    unused: list[int] = []
    for place, (index, slot, taken, ran) in enumerate(zip(one.indices, one.slots, one.taken, one.ran, strict=True)):
        is_true = place < one.num_with_features
        if not ran:
            unused += [slot] if taken else []
        elif index == root:
            context.root_run, context.root_final = True, is_true
        else:
            forest.slots.live[context.row, slot] = True
            context.uncached[index] = UncachedToken(slot, is_true)
    if unused:
        forest.slots.free_of(context.row, unused)


def _runs(one: ForcedTokens) -> Iterator[tuple[int, int]]:
    """First position and one past the last of features that forced tokens take, an unbroken run at a time."""
    start = one.context.end - 1
    taking = one.indices[: one.num_with_features]
    for place, index in enumerate(taking):
        if not place or taking[place - 1] != index - 1:
            first = index
        if place + 1 == len(taking) or taking[place + 1] != index + 1:
            yield start + first, start + index + 1


_CHILDREN_PER_REQUEST = 2
"""Nodes of a step for each request, as a multiple of a node's candidates."""
_CHILDREN_PER_FRESH_REQUEST = 4
_MAX_STEP_NODES = 32
"""Nodes of a step at most, but for many requests: one of 64 takes a quarter longer, and depth is worth more."""
_STEP_NODES_PER_ROW = 4
"""Nodes of a step for each of many requests."""
_SPREAD_STEPS = 4
"""Steps in which what there is to run spreads from a root to the width of a step."""
_FULL_STEP_PART = 4
"""A burst goes on while a step finds at least this part of the nodes that it may run: narrow ones are hardly faster."""
_MAX_EVEN_SHARES = 4
"""Nodes of a burst that a request may have, as a multiple of its even share."""
_RESERVED_SEED_PART = 3
"""A burst that goes on keeps this part of its seeds for committed tokens that nobody knows yet."""


@dataclass(slots=True)
class BurstPlan:
    """A burst, and what is needed to understand its result."""

    burst: Burst
    rows: list[int]
    """Of the runner, those of `burst.rows`."""
    forced: list[ForcedTokens]
    """Those that were not all run yet."""
    collector: BurstCollector
    """Of its seeds, committed tokens are no entries."""
    leased: SlotLease
    most_steps: int
    """Steps at most, with those of further parts."""
    slot_limit: int
    """Tree slots that a request may have to fill at any time."""
    num_leased: int
    """Tree slots that it was told to fill, in all."""
    queued_steps: int
    landed_steps: int = 0
    num_nodes: int = 0
    """Nodes that landed parts ran."""
    contexts: list[DraftContext] = field(default_factory=list)
    """Of all that is or was in `forced`."""
    unsent: list[ForcedTokens] = field(default_factory=list)
    """Those of `forced` that the device is not told of yet."""
    is_full: bool = True
    """Whether the last step that landed found as many nodes as it may run, as far as that can be expected."""
    rerooted_rows: set[int] = field(default_factory=set)
    """Rows of the runner with new roots that the device is not told of yet."""
    closed_rows: set[int] = field(default_factory=set)
    """Rows that were closed, which it is not told of yet."""
    spreads_from: int = 0
    """The step from which on what there is to run spreads from a root."""

    @property
    def num_forced(self) -> int:
        """Forced seeds of requests of which some were not run yet."""
        return sum(len(one.slots) for one in self.forced)


class Planner:
    """Chooses what a burst runs."""

    def __init__(
        self,
        forest: DraftForest,
        contexts: Mapping[int, DraftContext],
        kv_manager: ContextKVManager,
        shape: BurstShape,
        options: GrowthOptions,
    ) -> None:
        """`contexts` by row of the runner; its owner keeps it up to date."""
        self._kv_manager = kv_manager
        self._forest = forest
        self._contexts = contexts
        self._shape = shape
        self._options = options
        self._buckets = StepBuckets(shape)
        self._index = np.zeros(shape.num_rows, np.int32)  # place in the burst of each row

    def needs_run(self, context: DraftContext) -> bool:
        """Whether the root is to be run, or committed tokens once more with true features, and could be.

        A root that was run with the draft's own features is left as it is until it is no root any more: what it would
        bring is there already, and to find that out takes the place of a whole burst.
        """
        if context.root_run:
            return bool(context.to_run(root=False)[0])
        if not context.lag:
            return True
        if context.root < context.lag:
            return False
        if context.num_with_features > len(context.uncached):
            return True
        if self._options.lockstep_steps:
            return False
        # Without true features it takes its parent's own, which lie in the parent's tree slot.
        return max(context.num_with_features, context.first_unrun) > 0

    def plan(self, contexts: Sequence[DraftContext]) -> BurstPlan | None:
        """A burst that runs what `contexts` need, as many as fit, and the best of the forest; None if nothing is."""
        forest, options, max_seeds = self._forest, self._options, self._shape.max_seeds
        forced = force(forest, contexts, 0, min(self._shape.max_width, max_seeds), cuts=True)
        num_forced = sum(len(one.slots) for one in forced)
        num_fresh = sum(one.has_root for one in forced)
        max_nodes = self._shape.max_width * max(options.fresh_steps, options.most_steps)
        # A burst that goes on past commits finds all in its pool that they make worth running.
        goes_on = options.most_steps > 0
        room = max_seeds - max_seeds // _RESERVED_SEED_PART if goes_on else max_seeds
        chosen = forest.choose(min(max(room - num_forced, 0), max_nodes), beyond=goes_on)
        chosen_rows = forest.entries.rows[chosen]
        there, num_worth = self._rows_of(chosen, chosen_rows, goes_on=goes_on)
        if not forced and not num_worth:
            return None
        left = forest.quotas - forest.num_run
        for one in forced:
            there[one.context.row] = True
            left[one.context.row] -= one.has_root
        if goes_on and np.count_nonzero(kept := there[chosen_rows]) < len(chosen):
            chosen, chosen_rows = chosen[kept], chosen_rows[kept]
        rows = there.nonzero()[0]
        num_steps = self._num_steps(num_fresh, rows)
        left = np.maximum(left[rows], 0)
        most_steps = max(num_steps, options.most_steps)
        branching = self._buckets.branching(len(rows))
        width = self._width(num_forced, num_fresh, num_worth, len(rows), sum(left.tolist()))
        slot_limit = max(branching, _MAX_EVEN_SHARES * width * (num_steps + most_steps) // (2 * len(rows)))
        slot_limit = min(slot_limit, width * most_steps)
        leased = forest.slots.lease(rows, np.minimum(left, slot_limit))
        forest.shifts[rows] = 0.0
        self._index[rows] = np.arange(len(rows))
        fields = np.empty((NUM_SEED_FIELDS, num_forced + len(chosen)), np.int32)
        entries = np.empty(num_forced + len(chosen), np.intp)
        parts: list[object] = []
        if forced:
            layout = lay_out(forest, forced, self._index)
            fields[:, :num_forced], entries[:num_forced], parts = layout.fields, layout.entries, layout.features
        self._lay_out_chosen(chosen, chosen_rows, fields[:, num_forced:])
        entries[num_forced:] = chosen
        slots = forest.slots
        num_indices = max_seeds + most_steps * width * branching
        lens = self._kv_manager.context_lens[rows]
        states = RowStates(
            rows.astype(np.int32), lens, slots.live[rows], slots.stacks[rows], leased.starts, leased.ends
        )
        burst = Burst(states, Seeds(fields), num_steps, width, forest.floor, parts, options.least_chance)
        return BurstPlan(
            burst,
            rows.tolist(),
            forced,
            BurstCollector(entries, int(rows[0]) if len(rows) == 1 else -1, num_indices),
            leased,
            most_steps,
            slot_limit,
            leased.num_slots,
            num_steps,
            contexts=[one.context for one in forced],
        )

    def _lay_out_chosen(self, chosen: Ints, rows: Int32s, fields: Int32s) -> None:
        """Entries and their rows as seeds; `fields` [8, N] as in Seeds."""
        entries = self._forest.entries
        fields[0] = self._index[rows]
        fields[1] = entries.slots[entries.parents[chosen]]
        fields[2] = entries.tokens[chosen]
        fields[3] = entries.positions[chosen]
        fields[4:6] = -1
        fields[6:].view(np.float32)[:] = entries.scores[chosen]

    def _rows_of(self, chosen: Ints, rows: Int32s, *, goes_on: bool) -> tuple[NDArray[np.bool_], int]:
        """[R] rows that a burst of these entries holds, its forced ones aside; how many of them are worth running now.

        One that goes on holds all trees that may grow: commits may come to any of them. `rows`: of the entries.
        """
        forest = self._forest
        there = np.zeros(self._shape.num_rows, np.bool_)
        if goes_on:
            able = (forest.quotas > forest.num_run)[rows]
            rows = rows[able & (forest.entries.ranks[chosen] >= forest.floor)]
            for row, context in self._contexts.items():
                there[row] = context.root_run and forest.quotas[row] > 0
        there[rows] = True
        return there, len(rows)

    def more_steps(self, plan: BurstPlan, step_seconds: float, host_seconds: float, *, forced: bool) -> int:
        """Steps by which the burst should go on behind those that are queued; 0 if there may be no more to do.

        `forced`: there are committed tokens that it must run.
        """
        part = self._options.part_steps(len(plan.rows), step_seconds, host_seconds)
        steps = min(part, plan.most_steps - plan.queued_steps)
        if forced or plan.rerooted_rows or steps <= 0:
            return steps
        running = (plan.queued_steps - plan.landed_steps) * plan.burst.width
        is_able = plan.num_leased > plan.num_nodes + running or bool(self._rows_without_lease(plan))
        return steps if plan.is_full and is_able else 0

    def follows(self, plan: BurstPlan, context: DraftContext) -> bool:
        """Whether a burst under way can go on below a request's new root."""
        forest, row = self._forest, context.row
        if not self._options.most_steps or forest.has_foreign_nodes or forest.quotas[row] <= 0 or row not in plan.rows:
            return False
        # What could be run with its true feature is not left to be run without; whether it is being run is not known.
        is_waiting = context.lag > 0 and not context.root_run and self._is_known(plan, context)
        return not is_waiting and not self._kv_manager.is_full(context)

    def needs_seeds(self, plan: BurstPlan, context: DraftContext) -> bool:
        """Whether that burst has to be given committed tokens of the request: what it could run does not hold them."""
        return self._kv_manager.has_stale_kv(context) if context.root_run else not self._is_known(plan, context)

    def _is_known(self, plan: BurstPlan, context: DraftContext) -> bool:
        return plan.collector.index_of(int(self._forest.roots[context.row])) >= 0

    def force(self, plan: BurstPlan, contexts: Sequence[DraftContext]) -> list[DraftContext]:
        """Have the burst run what these requests need when it goes on; those that fit, the first ones first."""
        if not contexts:
            return []
        first, forest = len(plan.collector.seeds), self._forest
        limit = min(plan.burst.width - plan.num_forced, self._shape.max_seeds - first)
        rows = set(plan.rows)
        plan.unsent = force(forest, [context for context in contexts if context.row in rows], first, limit)
        return [one.context for one in plan.unsent]

    def reroots(self, plan: BurstPlan) -> Reroots | None:
        """What the device is to be told of new roots when the burst goes on; None for nothing.

        Trees that may grow and have no slot left are told their old roots again, for the slots that come with them.
        """
        forest, spent = self._forest, self._rows_without_lease(plan)
        if not (plan.rerooted_rows or plan.unsent or plan.closed_rows or spent):
            return None
        if plan.rerooted_rows or plan.unsent:
            plan.spreads_from = plan.queued_steps
        rows = np.array(sorted({*plan.rerooted_rows, *plan.closed_rows, *spent}), np.intp)
        roots = forest.roots[rows]
        slots = forest.entries.slots[roots]
        if plan.closed_rows:
            slots[[row in plan.closed_rows for row in rows.tolist()]] = -1
        unknown = {one.context.row for one in plan.unsent if one.has_root} | plan.closed_rows
        indices = [
            plan.collector.index_of(root) if slot < 0 and row not in unknown else -1
            for row, root, slot in zip(rows.tolist(), roots.tolist(), slots.tolist(), strict=True)
        ]
        free = forest.slots.lease_more(rows, np.minimum(forest.quotas[rows] - forest.num_run[rows], plan.slot_limit))
        plan.num_leased += sum(map(len, free))
        shifts = forest.shifts[rows].astype(np.float32)
        forest.shifts[rows] = 0.0
        told = Reroots(self._index[rows], np.array(indices, np.int32), slots, shifts, free)
        plan.rerooted_rows.clear()
        plan.closed_rows.clear()
        if plan.unsent:
            self._add_forced(plan, told)
        return told

    def _add_forced(self, plan: BurstPlan, told: Reroots) -> None:
        layout = lay_out(self._forest, plan.unsent, self._index)
        told.seeds, told.first_seed, told.features = Seeds(layout.fields), len(plan.collector.seeds), layout.features
        plan.collector.add(layout.entries)
        plan.contexts += [one.context for one in plan.unsent]
        plan.forced += plan.unsent
        plan.unsent = []

    def _rows_without_lease(self, plan: BurstPlan) -> list[int]:
        """Rows that may run more nodes, and have slots for them, but were lent none that is not filled.

        What a burst runs below nodes that have died by then takes slots from what is left of a tree.
        """
        return [row for row in plan.rows if not self._forest.slots.is_leased(row) and self._can_run_more(plan, row)]

    def _can_run_more(self, plan: BurstPlan, row: int) -> bool:
        forest = self._forest
        if forest.quotas[row] <= forest.num_run[row] or not forest.slots.num_free[row]:
            return False
        # Committed tokens that are still to be run hang below no root.
        is_waiting = any(one.context.row == row for one in plan.forced)
        return bool(forest.entries.slots[forest.roots[row]] >= 0) and not is_waiting

    def take(self, plan: BurstPlan, result: BurstResult) -> list[DraftContext]:
        """Take a part of a burst's result into the forest; returns requests that lack more than it was to run."""
        self._forest.merge(plan.collector, result)
        ran = [len(step) - step.count(-1) for step in result.picked.tolist()]
        plan.num_nodes += sum(ran)
        plan.landed_steps += len(ran)
        is_spread = plan.landed_steps - plan.spreads_from >= _SPREAD_STEPS
        # A chain never has more than a node for each request.
        most = self._buckets.branching(len(plan.rows)) * len(plan.rows)
        enough = max(min(plan.burst.width // _FULL_STEP_PART, most), 1) if is_spread else 1
        plan.is_full = ran[-1] >= enough
        return self._land_forced(plan, result) if plan.forced else []

    def land(self, plan: BurstPlan, result: BurstResult) -> None:
        """The same for the last part, and for what waited for it."""
        self.take(plan, result)
        self._forest.slots.settle(plan.leased)
        for one in (*plan.forced, *plan.unsent):
            land(self._forest, one)
        plan.forced, plan.unsent = [], []

    def _land_forced(self, plan: BurstPlan, result: BurstResult) -> list[DraftContext]:
        """Land those requests of which a part has run the last token; returns those whose root was left out."""
        picked = result.picked.reshape(-1)
        seeds = set(picked[(picked >= 0) & (picked < self._shape.max_seeds)].tolist())
        waiting, lacking = [], []
        for one in plan.forced:
            if not one.note(seeds):
                waiting.append(one)
                continue
            left_out = not one.has_root and not one.context.root_run
            land(self._forest, one)
            if left_out:
                lacking.append(one.context)
        plan.forced = waiting
        return lacking

    def _num_steps(self, num_fresh: int, rows: Ints) -> int:
        options = self._options
        if options.lockstep_steps:
            return min(options.fresh_steps, *(max(1, self._contexts[row].steps_left) for row in rows.tolist()))
        if 2 * num_fresh >= len(rows):
            return options.fresh_steps
        return options.part_steps(len(rows)) if options.most_steps else options.steady_steps

    def _width(self, num_forced: int, num_fresh: int, num_chosen: int, num_rows: int, left: int) -> int:
        """Nodes of a step: as many as are worth it by now, and room for their children.

        As many as the runner's steps have: they take what they find, and what a burst may run in all counts with that.
        """
        if self._options.lockstep_steps:
            want = self._options.lockstep_width * num_rows
        else:
            roomy = self._buckets.branching(num_rows) * (
                _CHILDREN_PER_FRESH_REQUEST * num_fresh + _CHILDREN_PER_REQUEST * (num_rows - num_fresh)
            )
            want = min(max(num_chosen, roomy), left, max(_MAX_STEP_NODES, _STEP_NODES_PER_ROW * num_rows))
        width = max(num_forced, min(want, self._shape.max_width), 1)
        return self._buckets.fit(width, num_rows).width

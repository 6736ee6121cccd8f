"""Lays out bursts from a forest, and takes their results back into it."""

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
    Int32s,
    Ints,
    Reroots,
    RowStates,
    Seeds,
    StepBuckets,
)
from outrider.drafting.model.context import DraftContext, UncachedToken
from outrider.drafting.model.drafter import GrowthOptions
from outrider.drafting.model.entries import BurstCollector
from outrider.drafting.model.forest import DraftForest
from outrider.drafting.model.kv import ContextKVManager

_WIDTH_FACTOR, _FRESH_WIDTH_FACTOR = 2, 4
"""Nodes of a step for each request, as a multiple of a node's candidates; the second value is for after a miss."""
_MAX_STEP_NODES = 32
"""Most nodes of a step for few requests: 64 take a quarter longer than 32, and depth is worth more."""
_STEP_NODES_PER_ROW = 4
"""Most nodes of a step for each of many requests."""
_SPREAD_STEPS = 4
"""Steps until the nodes to run have spread from a root to the width of a step."""
_FULL_STEP_PART = 4
"""A burst goes on while a step fills a fourth of its width: narrower steps are hardly faster."""
_MAX_EVEN_SHARES = 4
"""Most tree slots of a burst that a request may fill, as a multiple of its even share."""
_RESERVED_SEED_PART = 3
"""A burst that goes on keeps a third of its seeds for tokens that are not committed yet."""


@dataclass(slots=True)
class ForcedTokens:
    """Seeds of a request that a burst must run: some of its uncached tokens, or the root, or both."""

    context: DraftContext
    indices: list[int]
    """Index of each token in `DraftContext.uncached`, ascending; the root's is one past the last."""
    slots: list[int]
    """Tree slot of each token."""
    taken: list[bool]
    """Whether each token's slot was free before."""
    num_with_features: int
    """How many tokens, from the first on, are run with the target's features."""
    first: int
    """Pool index of the first token; the others follow it."""
    ran: list[bool] = field(default_factory=list)
    """Whether a part that landed has run each token."""

    @property
    def has_root(self) -> bool:
        """Whether the root is among the tokens."""
        return self.indices[-1] == len(self.context.uncached)

    def note(self, picked: AbstractSet[int]) -> bool:
        """Note which tokens a part ran, given the pool indices of its nodes; returns whether all were run by now.

        A token that takes the feature computed at its parent is run a step after the parent.
        """
        self.ran = [ran or self.first + place in picked for place, ran in enumerate(self.ran)]
        return all(self.ran)


def take_forced(
    forest: DraftForest, contexts: Sequence[DraftContext], first: int, limit: int, *, cuts: bool = False
) -> list[ForcedTokens]:
    """Return the tokens that these requests need run: at most `limit` seeds, from pool index `first` on.

    Takes tree slots. A request that does not fit is left out. `cuts`: no burst takes more than `limit` seeds, so if a
    request needs more, only its first tokens are taken, provided that those have the target's features.
    """
    forced: list[ForcedTokens] = []
    if not contexts:
        return forced
    end = first + limit
    root_slots = forest.entries.slots[forest.roots].tolist()
    num_free = forest.slots.num_free.tolist()
    for context in contexts:
        indices, num_with_features = context.to_run(root=not context.root_run or context.is_root_stale)
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


def encode_forced(
    forest: DraftForest, forced: Sequence[ForcedTokens], index: Int32s
) -> tuple[Int32s, Ints, list[object]]:
    """Return forced seeds in the format of a burst; `index` has each row's place in the burst.

    Returns fields [8, N], see Seeds; entries [N] of roots, -1 for other tokens, which have none; see Burst.features.
    """
    rows: list[int] = []
    parents: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    features: list[int] = []
    roots: list[int] = []  # places of the roots among the seeds
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
            parts += [part for first, past in _runs(one) for _, part in context.features.cut(first, past)]
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
    return fields, entries, parts


def land_forced(forest: DraftForest, one: ForcedTokens) -> None:
    """Note which of a request's forced tokens were run, and free the slots that were taken for the others."""
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
        forest.slots.free(context.row, np.array(unused, np.int32))


def _runs(one: ForcedTokens) -> Iterator[tuple[int, int]]:
    """Yield the first position, and one past the last, of each unbroken run of features that forced tokens take."""
    start = one.context.end - 1
    taking = one.indices[: one.num_with_features]
    for place, index in enumerate(taking):
        if not place or taking[place - 1] != index - 1:
            first = index
        if place + 1 == len(taking) or taking[place + 1] != index + 1:
            yield start + first, start + index + 1


@dataclass(slots=True)
class BurstPlan:
    """A burst, and what is needed to interpret its result."""

    burst: Burst
    rows: list[int]
    """Rows of the runner, in the order of `burst.rows`."""
    forced: list[ForcedTokens]
    """Forced tokens of requests of which some were not run yet."""
    collector: BurstCollector
    """Entries by pool index."""
    most_steps: int
    """Most steps of all parts."""
    slot_limit: int
    """Most tree slots that a request may have leased and not filled at any time."""
    num_leased: int
    """Tree slots leased to the burst so far."""
    queued_steps: int
    landed_steps: int = 0
    num_nodes: int = 0
    """Nodes that landed parts ran."""
    contexts: list[DraftContext] = field(default_factory=list)
    """Requests of all tokens that are or were in `forced`."""
    is_full: bool = True
    """Whether the last step that landed ran enough nodes to make further steps worth it."""
    rerooted_rows: set[int] = field(default_factory=set)
    """Rows of the runner with new roots, which the device gets with the next part."""
    closed_rows: set[int] = field(default_factory=set)
    """Rows of the runner that were closed, which is passed to the device with the next part."""
    spreads_from: int = 0
    """The step at which the device last got a new root; at first, few nodes below that can be run."""


class Planner:
    """Lays out bursts, and takes their results into forest and contexts."""

    def __init__(
        self,
        forest: DraftForest,
        contexts: Mapping[int, DraftContext],
        kv_manager: ContextKVManager,
        shape: BurstShape,
        options: GrowthOptions,
    ) -> None:
        """`contexts`: requests by row of the runner; the caller keeps the mapping up to date."""
        self._kv_manager = kv_manager
        self._forest = forest
        self._contexts = contexts
        self._shape = shape
        self._options = options
        self._buckets = StepBuckets(shape)
        self._index = np.zeros(shape.num_rows, np.int32)  # each row's place in the burst

    def needs_run(self, context: DraftContext) -> bool:
        """Whether the root, or uncached tokens with the target's features, must be run and can be.

        A root that was run with the draft's own feature is not run again while it is the root: it has its children
        already, and the run would replace a whole burst. A block head's root is run again, which gives a new block.
        """
        if context.is_root_stale:
            return True
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
        # Without the target's feature, the root takes the one computed at its parent, from the parent's tree slot.
        return max(context.num_with_features, context.first_unrun) > 0

    def plan(self, contexts: Sequence[DraftContext]) -> BurstPlan | None:
        """Plan a burst of the tokens that `contexts` need, if they fit, and of the best entries; None without any."""
        forest, options, max_seeds = self._forest, self._options, self._shape.max_seeds
        if not contexts and not np.count_nonzero(forest.quotas):
            return None
        forced = take_forced(forest, contexts, 0, min(self._shape.max_width, max_seeds), cuts=True)
        num_forced = sum(len(one.slots) for one in forced)
        num_fresh = sum(one.has_root for one in forced)
        max_nodes = self._shape.max_width * max(options.fresh_steps, options.most_steps)
        # A burst that goes on past commits needs entries in its pool that those commits make worth running.
        goes_on = options.most_steps > 0
        room = max_seeds - max_seeds // _RESERVED_SEED_PART if goes_on else max_seeds
        chosen = forest.choose(min(max(room - num_forced, 0), max_nodes), beyond=goes_on)
        chosen_rows = forest.entries.rows[chosen]
        if again := [one.context.row for one in forced if one.has_root and one.context.root_run]:
            # A root that is run again brings its children again. If the old ones were in the pool, both would be run.
            kept = ~np.isin(chosen_rows, again)
            chosen, chosen_rows = chosen[kept], chosen_rows[kept]
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
        branching = self._shape.branching_of(len(rows))
        width = self._width(num_forced, num_fresh, num_worth, len(rows), sum(left.tolist()))
        slot_limit = max(branching, _MAX_EVEN_SHARES * width * (num_steps + most_steps) // (2 * len(rows)))
        slot_limit = min(slot_limit, width * most_steps)
        starts, ends = forest.slots.lease(rows, np.minimum(left, slot_limit))
        forest.shifts[rows] = 0.0
        self._index[rows] = np.arange(len(rows))
        fields = np.empty((NUM_SEED_FIELDS, num_forced + len(chosen)), np.int32)
        entries = np.empty(num_forced + len(chosen), np.intp)
        parts: list[object] = []
        if forced:
            fields[:, :num_forced], entries[:num_forced], parts = encode_forced(forest, forced, self._index)
        self._encode_chosen(chosen, chosen_rows, fields[:, num_forced:])
        entries[num_forced:] = chosen
        slots = forest.slots
        num_indices = max_seeds + most_steps * width * branching
        lens = self._kv_manager.context_lens[rows]
        states = RowStates(rows.astype(np.int32), lens, slots.live[rows], slots.stacks[rows], starts, ends)
        burst = Burst(states, Seeds(fields), num_steps, width, forest.floor, parts, options.min_chance)
        return BurstPlan(
            burst,
            rows.tolist(),
            forced,
            BurstCollector(entries, num_indices, int(rows[0]) if len(rows) == 1 else -1),
            most_steps,
            slot_limit,
            int((ends - starts).sum()),
            num_steps,
            contexts=[one.context for one in forced],
        )

    def _encode_chosen(self, chosen: Ints, rows: Int32s, fields: Int32s) -> None:
        """Write entries, whose rows are `rows`, as seeds to `fields` [8, N]; see Seeds."""
        entries = self._forest.entries
        fields[0] = self._index[rows]
        fields[1] = entries.slots[entries.parents[chosen]]
        fields[2] = entries.tokens[chosen]
        fields[3] = entries.positions[chosen]
        fields[4:6] = -1
        fields[6:].view(np.float32)[:] = entries.scores[chosen]

    def _rows_of(self, chosen: Ints, rows: Int32s, *, goes_on: bool) -> tuple[NDArray[np.bool_], int]:
        """Return a mask [R] of the rows of a burst of these entries, and how many entries are worth running now.

        A burst that goes on holds all trees that may grow, since any may get a commit. `rows`: rows of the entries.
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
        """Return the steps of the next part; 0 if the burst should end. `forced`: there are tokens that it must run."""
        part = self._options.part_steps(len(plan.rows), step_seconds, host_seconds)
        steps = min(part, plan.most_steps - plan.queued_steps)
        if forced or plan.rerooted_rows or steps <= 0:
            return steps
        running = (plan.queued_steps - plan.landed_steps) * plan.burst.width
        is_able = plan.num_leased > plan.num_nodes + running or bool(self._rows_without_lease(plan))
        return steps if plan.is_full and is_able else 0

    def follows(self, plan: BurstPlan, context: DraftContext) -> bool:
        """Whether the running burst can go on below a request's new root."""
        forest, row = self._forest, context.row
        if not self._options.most_steps or forest.quotas[row] <= 0 or row not in plan.rows:
            return False
        # A root that is in the pool may run without the target's feature, although the feature is here now.
        is_waiting = context.lag > 0 and not context.root_run and self._is_known(plan, context)
        return not is_waiting and not self._kv_manager.is_full(context)

    def needs_seeds(self, plan: BurstPlan, context: DraftContext) -> bool:
        """Whether the running burst needs uncached tokens of a request as forced seeds."""
        return self._kv_manager.has_stale_kv(context) if context.root_run else not self._is_known(plan, context)

    def _is_known(self, plan: BurstPlan, context: DraftContext) -> bool:
        return plan.collector.index_of(int(self._forest.roots[context.row])) >= 0

    def force(self, plan: BurstPlan, contexts: Sequence[DraftContext]) -> list[ForcedTokens]:
        """Return the tokens that these requests need run in the next part, as many as fit, in order; see `reroots`."""
        if not contexts:
            return []
        first, forest = len(plan.collector.seeds), self._forest
        # Together with forced tokens of requests that are not done yet, they must fit in one step.
        num_forced = sum(len(one.slots) for one in plan.forced)
        limit = min(plan.burst.width - num_forced, self._shape.max_seeds - first)
        rows = set(plan.rows)
        return take_forced(forest, [context for context in contexts if context.row in rows], first, limit)

    def reroots(self, plan: BurstPlan, forced: Sequence[ForcedTokens]) -> Reroots | None:
        """Return the new roots and forced tokens to pass to the device with the next part; None if there are none.

        Trees that may grow and have no leased slot left get their roots again, along with new slots.
        """
        forest, spent = self._forest, self._rows_without_lease(plan)
        if not (plan.rerooted_rows or forced or plan.closed_rows or spent):
            return None
        if plan.rerooted_rows or forced:
            plan.spreads_from = plan.queued_steps
        rows = np.array(sorted({*plan.rerooted_rows, *plan.closed_rows, *spent}), np.intp)
        roots = forest.roots[rows]
        slots = forest.entries.slots[roots]
        if plan.closed_rows:
            slots[[row in plan.closed_rows for row in rows.tolist()]] = -1
        unknown = {one.context.row for one in forced if one.has_root} | plan.closed_rows
        indices = [
            plan.collector.index_of(root) if slot < 0 and row not in unknown else -1
            for row, root, slot in zip(rows.tolist(), roots.tolist(), slots.tolist(), strict=True)
        ]
        free = forest.slots.lease_more(rows, np.minimum(forest.quotas[rows] - forest.num_run[rows], plan.slot_limit))
        plan.num_leased += sum(map(len, free))
        shifts = forest.shifts[rows].astype(np.float32)
        forest.shifts[rows] = 0.0
        reroots = Reroots(self._index[rows], np.array(indices, np.int32), slots, shifts, free)
        plan.rerooted_rows.clear()
        plan.closed_rows.clear()
        if forced:
            fields, entries, reroots.features = encode_forced(forest, forced, self._index)
            reroots.seeds, reroots.first_seed = Seeds(fields), len(plan.collector.seeds)
            plan.collector.add(entries)
            plan.contexts += [one.context for one in forced]
            plan.forced += forced
        return reroots

    def _rows_without_lease(self, plan: BurstPlan) -> list[int]:
        """Return rows that may run more nodes and have free slots, but no leased slot that is not filled.

        This happens because nodes that a burst runs below dead nodes also take slots of their tree.
        """
        return [row for row in plan.rows if not self._forest.slots.is_leased(row) and self._can_run_more(plan, row)]

    def _can_run_more(self, plan: BurstPlan, row: int) -> bool:
        forest = self._forest
        if forest.quotas[row] <= forest.num_run[row] or not forest.slots.num_free[row]:
            return False
        # Forced tokens hang below no root: telling the device a root again would drop those still to be run.
        is_waiting = any(one.context.row == row for one in plan.forced)
        return bool(forest.entries.slots[forest.roots[row]] >= 0) and not is_waiting

    def take(self, plan: BurstPlan, result: BurstResult) -> list[DraftContext]:
        """Take the result of a part into the forest; returns requests whose root must still be run."""
        self._forest.merge(plan.collector, result)
        ran = [len(step) - step.count(-1) for step in result.picked.tolist()]
        plan.num_nodes += sum(ran)
        plan.landed_steps += len(ran)
        is_spread = plan.landed_steps - plan.spreads_from >= _SPREAD_STEPS
        # A chain never has more than a node for each request.
        most = self._shape.branching_of(len(plan.rows)) * len(plan.rows)
        enough = max(min(plan.burst.width // _FULL_STEP_PART, most), 1) if is_spread else 1
        plan.is_full = ran[-1] >= enough
        return self._land_forced(plan, result) if plan.forced else []

    def land(self, plan: BurstPlan, result: BurstResult) -> None:
        """Take the result of the last part, and end leases and forced tokens."""
        self.take(plan, result)
        self._forest.slots.end_leases(plan.burst.rows.rows)
        for one in plan.forced:
            land_forced(self._forest, one)
        plan.forced = []

    def _land_forced(self, plan: BurstPlan, result: BurstResult) -> list[DraftContext]:
        """Land requests whose forced tokens have all been run; returns those whose root has not been run."""
        picked = result.picked.reshape(-1)
        seeds = set(picked[(picked >= 0) & (picked < self._shape.max_seeds)].tolist())
        waiting, lacking = [], []
        for one in plan.forced:
            if not one.note(seeds):
                waiting.append(one)
                continue
            lacks_root = not one.has_root and not one.context.root_run
            land_forced(self._forest, one)
            if lacks_root:
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
        """Return the nodes of a step: as many as are worth it, with room for their children, rounded up to a bucket."""
        is_narrow = self._options.lone_nodes > 0 and len(self._contexts) == 1  # depth counts, and few nodes are sent
        if self._options.lockstep_steps or is_narrow:
            want = self._options.lockstep_width * num_rows
        else:
            roomy = self._shape.branching_of(num_rows) * (
                _FRESH_WIDTH_FACTOR * num_fresh + _WIDTH_FACTOR * (num_rows - num_fresh)
            )
            want = min(max(num_chosen, roomy), left, max(_MAX_STEP_NODES, _STEP_NODES_PER_ROW * num_rows))
        width = max(num_forced, min(want, self._shape.max_width), 1)
        return self._buckets.fit(width, num_rows).width

"""Lays out a burst from a forest, and takes what comes of it back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from draft_service.burst.context import Between, DraftContext
from draft_service.burst.entries import Ints
from draft_service.burst.forest import DraftForest
from draft_service.burst.options import GrowthOptions
from draft_service.burst.plan import FORCED, Burst, BurstResult, BurstShape, RowState, Seeds
from draft_service.burst.slots import Int32s, Lent

_LEVELS = 2
"""Nodes of a step for each request, as a multiple of a node's candidates."""
_FRESH_LEVELS = 4
_FAIR = 4
"""Nodes of a burst that a request may have, as a multiple of its even share."""


@dataclass(frozen=True, slots=True)
class Forced:
    """A request's tokens that a burst must run: some of those between context and root, and the root."""

    context: DraftContext
    first: int
    """Index in `between` of the first of them."""
    slots: list[int]
    """Tree slot of each."""
    taken: list[bool]
    """Whether the slot was free before."""
    true_features: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A burst, and what is needed to understand its result."""

    burst: Burst
    rows: list[int]
    """Of the runner, those of `burst.rows`."""
    forced: list[Forced]
    seeds: Ints
    """Entry of each seed; -1 for a committed token."""
    lent: Lent


class Planner:
    """Chooses what a burst runs."""

    def __init__(
        self, forest: DraftForest, contexts: Mapping[int, DraftContext], shape: BurstShape, options: GrowthOptions
    ) -> None:
        """`contexts` by row of the runner; its owner keeps it up to date."""
        self._forest = forest
        self._contexts = contexts
        self._shape = shape
        self._options = options
        self._index = np.zeros(shape.num_rows, np.int32)  # place in the burst of each row

    def needs_root(self, context: DraftContext) -> bool:
        """Whether the root is to be run, for the first time or with true features, and could be."""
        if not context.lag:
            return not context.root_run
        if context.root < context.lag:
            return False
        if context.feature_end > context.root:
            return not context.root_run or not (context.root_settled or self._options.own_features)
        first = context.first_unrun
        # Without true features it takes its parent's own, which lie in the parent's tree slot.
        return not context.root_run and first > 0

    def plan(self, contexts: Sequence[DraftContext]) -> Plan | None:
        """A burst that runs the roots of `contexts`, as many as fit, and the best of the forest; None if nothing is."""
        forest, options = self._forest, self._options
        forced, num_forced = self._force(contexts)
        reruns = any(one.context.root_run for one in forced)
        forest.may_know |= reruns
        max_nodes = self._shape.max_width * options.fresh_steps
        chosen = forest.choose(min(self._shape.max_seeds - num_forced, max_nodes))
        if not forced and not len(chosen):
            return None
        there = np.zeros(self._shape.num_rows, np.bool_)
        there[forest.entries.rows[chosen]] = True
        left = forest.quotas - forest.num_run
        for one in forced:
            there[one.context.row] = True
            left[one.context.row] -= not one.context.root_run
        rows = np.flatnonzero(there).astype(np.int32)
        num_steps = self._num_steps(forced, rows, reruns)
        left = np.maximum(left[rows], 0)
        width = self._width(num_forced, len(forced), len(chosen), len(rows), int(left.sum()))
        fair = max(self._shape.branching, _FAIR * width * num_steps // len(rows))
        lent = forest.slots.lend(rows, np.minimum(left, min(fair, width * num_steps)))
        self._index[rows] = np.arange(len(rows))
        seeds, parts = self._seeds(forced, num_forced, chosen)
        states = self._row_states(rows, lent)
        burst = Burst(states, seeds, num_steps, width, forest.floor, parts)
        entries = np.full(num_forced + len(chosen), -1, np.intp)
        entries[num_forced:] = chosen
        at = -1
        for one in forced:
            at += len(one.slots)
            entries[at] = forest.roots[one.context.row]
        return Plan(burst, rows.tolist(), forced, entries, lent)

    def land(self, plan: Plan, result: BurstResult) -> int:
        """Take a burst's result into the forest; returns the nodes that were run."""
        forest = self._forest
        forest.merge(plan.seeds, result)
        self._land_forced(plan.forced, result)
        forest.slots.settle(plan.lent)
        return int(np.count_nonzero(result.picked >= 0))

    def _force(self, contexts: Sequence[DraftContext]) -> tuple[list[Forced], int]:
        forced: list[Forced] = []
        count = 0
        for context in contexts:
            true_features = not context.lag or context.feature_end > context.root
            first = 0 if true_features else context.first_unrun
            tokens = [*context.between[first:], Between(self._root_slot(context), False)]
            num_free = int(self._forest.slots.num_free[context.row])
            if count + len(tokens) > min(self._shape.max_width, self._shape.max_seeds) or len(tokens) > num_free:
                continue
            slots = [token.slot for token in tokens]
            taken = [slot < 0 for slot in slots]
            fresh = iter(self._forest.slots.take(context.row, sum(taken)))
            slots = [next(fresh) if slot < 0 else slot for slot in slots]
            forced.append(Forced(context, first, slots, taken, true_features))
            count += len(tokens)
        return forced, count

    def _root_slot(self, context: DraftContext) -> int:
        return int(self._forest.entries.slots[self._forest.roots[context.row]])

    def _num_steps(self, forced: list[Forced], rows: Int32s, reruns: bool) -> int:
        options = self._options
        if options.lockstep_steps:
            return min(options.fresh_steps, *(max(1, self._contexts[row].steps_left) for row in rows.tolist()))
        if reruns:  # its candidates are mostly known, which the device cannot see: it would run them again
            return 1
        return options.fresh_steps if 2 * len(forced) >= len(rows) else options.steady_steps

    def _width(self, num_forced: int, num_fresh: int, num_chosen: int, num_rows: int, left: int) -> int:
        """Nodes of a step: as many as are worth it by now, and room for their children."""
        if self._options.lockstep_steps:
            want = self._options.lockstep_width * num_rows
        else:
            roomy = self._shape.branching * (_FRESH_LEVELS * num_fresh + _LEVELS * (num_rows - num_fresh))
            want = min(max(num_chosen, roomy), left)
        return max(num_forced, min(want, self._shape.max_width), 1)

    def _seeds(self, forced: list[Forced], num_forced: int, chosen: Ints) -> tuple[Seeds, list[object]]:
        entries = self._forest.entries
        count = num_forced + len(chosen)
        fields = np.full((6, count), -1, np.int32)
        rows, parents, tokens, positions, slots, features = fields
        scores = np.full(count, FORCED, np.float32)
        parts: list[object] = []
        at = num_features = 0
        for one in forced:
            context, end = one.context, at + len(one.slots)
            start = context.end + one.first
            rows[at:end] = self._index[context.row]
            parents[at] = context.between[one.first - 1].slot if one.first else -1
            parents[at + 1 : end] = one.slots[:-1]
            tokens[at:end] = context.tree.author.tokens[start : context.root + 1]
            positions[at:end] = np.arange(start, context.root + 1)
            slots[at:end] = one.slots
            if context.lag and one.true_features:
                features[at:end] = np.arange(num_features, num_features + len(one.slots))
                num_features += len(one.slots)
                parts += [values for _, _, values in context.features.cut(start - 1, context.root)]
            at = end
        if len(chosen):
            rows[at:] = self._index[entries.rows[chosen]]
            parents[at:] = entries.slots[entries.parents[chosen]]
            tokens[at:] = entries.tokens[chosen]
            positions[at:] = entries.positions[chosen]
            scores[at:] = entries.scores[chosen]
        return Seeds(rows, parents, tokens, positions, scores, slots, features), parts

    def _row_states(self, rows: Int32s, lent: Lent) -> list[RowState]:
        live = self._forest.slots.live[rows]
        numbers = rows.tolist()
        context_lens = [self._contexts[row].kv_len for row in numbers]
        free = lent.slots.tolist()
        bounds = pairwise(accumulate(lent.counts, initial=0))
        return [
            RowState(row, context_len, slots, free[start:end])
            for row, context_len, slots, (start, end) in zip(numbers, context_lens, live, bounds, strict=True)
        ]

    def _land_forced(self, forced: list[Forced], result: BurstResult) -> None:
        slots = self._forest.slots
        if not forced:
            return
        num_forced = sum(len(one.slots) for one in forced)
        ran = np.zeros(num_forced, np.bool_)
        picked = result.picked.reshape(-1)
        ran[picked[(picked >= 0) & (picked < num_forced)]] = True
        got = ran.tolist()
        at = 0
        for one in forced:
            context, last = one.context, len(one.slots) - 1
            for index, (slot, taken) in enumerate(zip(one.slots, one.taken, strict=True)):
                if not got[at + index]:
                    if taken:
                        slots.free(np.array([context.row], np.int32), np.array([slot], np.int32))
                elif index == last:
                    context.root_run, context.root_settled = True, one.true_features
                    context.fresh = False
                else:
                    slots.live[context.row, slot] = True
                    context.between[one.first + index] = Between(slot, one.true_features)
            at += last + 1

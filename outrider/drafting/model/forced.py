"""Committed tokens that a burst must run, because their KV is missing or not yet what the context should hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np

from outrider.drafting.model.context import DraftContext, UncachedToken
from outrider.drafting.model.entries import Ints
from outrider.drafting.model.forest import DraftForest
from outrider.drafting.model.plan import FORCED, NUM_SEED_FIELDS
from outrider.drafting.model.slots import Int32s


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
    first: int
    """Pool index of the first; the others follow it."""
    ran: list[bool] = field(default_factory=list)
    """Of each, whether a part that landed ran it."""

    @property
    def has_root(self) -> bool:
        """Whether the root is among them."""
        return self.indices[-1] == len(self.context.between)

    def note(self, picked: AbstractSet[int]) -> bool:
        """See which of them a part ran, by the pool indices of what it ran; whether all were run by now.

        One that takes its parent's own feature comes a step behind it.
        """
        self.ran = [ran or self.first + place in picked for place, ran in enumerate(self.ran)]
        return all(self.ran)


def force(
    forest: DraftForest, contexts: Sequence[DraftContext], first: int, limit: int, *, cuts: bool = False
) -> list[Forced]:
    """What these requests need run, at most `limit` seeds in all, from pool index `first` on; it takes tree slots.

    A request that does not fit is left out. `cuts`: `limit` is all that there ever is, so that of one that needs more
    the first tokens are taken, if all of those have true features; others wait for theirs.
    """
    forced: list[Forced] = []
    if not contexts:
        return forced
    end = first + limit
    root_slots = forest.entries.slots[forest.roots].tolist()
    num_free = forest.slots.num_free.tolist()
    for context in contexts:
        indices, num_true = context.to_run(root=not context.root_run)
        if cuts and len(indices) > limit <= num_true:
            indices, num_true = indices[:limit], limit
        places = [slot for slot, _ in context.between] + [root_slots[context.row]]
        slots = [places[index] for index in indices]
        length = len(slots)
        if first + length > end or length > num_free[context.row]:
            continue
        taken = [slot < 0 for slot in slots]
        if any(taken):
            fresh = iter(forest.slots.take(context.row, sum(taken)))
            slots = [next(fresh) if slot < 0 else slot for slot in slots]
        forced.append(Forced(context, indices, slots, taken, num_true, first, [False] * length))
        first += length
    return forced


@dataclass(slots=True)
class Layout:
    """Forced seeds as a burst is told of them."""

    fields: Int32s
    """[8, N], see Seeds."""
    entries: Ints
    """[N] entry of each; -1 for those that are none, which are all but roots."""
    features: list[object]
    """See Burst.features."""


def lay_out(forest: DraftForest, forced: Sequence[Forced], index: Int32s) -> Layout:
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
        places = [run.get(place, slot) for place, (slot, _) in enumerate(context.between)]
        rows += [context.row] * count
        parents += [places[place - 1] if place else -1 for place in one.indices]
        tokens += [context.tree.author.tokens[context.end + place] for place in one.indices]
        positions += [context.end + place for place in one.indices]
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
    fields = np.empty((NUM_SEED_FIELDS, len(rows)), np.int32)
    fields[:6] = (rows, parents, tokens, positions, slots, features)
    entries = np.full(len(rows), -1, np.intp)
    entries[roots] = forest.roots[fields[0, roots]]
    scores, bases = fields[6:].view(np.float32)
    scores[:] = FORCED
    bases[:] = -np.inf
    bases[roots] = 0.0
    fields[0] = index[fields[0]]
    return Layout(fields, entries, parts)


def land(forest: DraftForest, one: Forced) -> None:
    """Take what was run of a request's tokens; slots that were taken for others are free again."""
    context, root = one.context, len(one.context.between)
    context.is_due = False
    unused: list[int] = []
    for place, (index, slot, taken, ran) in enumerate(zip(one.indices, one.slots, one.taken, one.ran, strict=True)):
        is_true = place < one.num_true
        if not ran:
            unused += [slot] if taken else []
        elif index == root:
            context.root_run, context.root_settled = True, is_true
            context.fresh = False
        else:
            forest.slots.live[context.row, slot] = True
            context.between[index] = UncachedToken(slot, is_true)
    if unused:
        forest.slots.free_of(context.row, unused)


def _runs(one: Forced) -> Iterator[tuple[int, int]]:
    """First position and one past the last of features that forced tokens take, an unbroken run at a time."""
    start = one.context.end - 1
    taking = one.indices[: one.num_true]
    for place, index in enumerate(taking):
        if not place or taking[place - 1] != index - 1:
            first = index
        if place + 1 == len(taking) or taking[place + 1] != index + 1:
            yield start + first, start + index + 1

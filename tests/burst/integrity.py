"""Whether the arrays of a forest and of its tree slots agree."""

from __future__ import annotations

import numpy as np

from outrider.drafting.model.entries import DEAD, REFUSED
from outrider.drafting.model.forest import DraftForest
from outrider.drafting.model.kv import TreeSlots


def check_forest(forest: DraftForest) -> None:
    """Raise RuntimeError if arrays and counts disagree. No burst may be pending."""
    entries, count = forest.entries, forest.entries.count
    alive = np.flatnonzero(entries.scores[:count] > DEAD)
    num_run = np.zeros_like(forest.num_run)
    seen: set[tuple[int, int]] = set()
    for entry in alive.tolist():
        row, parent, slot = int(entries.rows[entry]), int(entries.parents[entry]), int(entries.slots[entry])
        if slot >= 0:
            num_run[row] += 1
            if not forest.slots.live[row, slot]:
                raise RuntimeError(f"entry {entry} was run in slot {slot}, which is not live")
        if parent < 0:
            if forest.roots[row] != entry or entries.scores[entry] != 0.0:
                raise RuntimeError(f"entry {entry} is a second root, or scores {entries.scores[entry]}")
            continue
        known = entries.may_have_children[parent] or entries.slots[parent] >= 0
        if (parent, int(entries.tokens[entry])) in seen or not known:
            raise RuntimeError(f"entry {entry} is there twice, or its parent does not know of it")
        seen.add((parent, int(entries.tokens[entry])))
        if parent >= entry or entries.rows[parent] != row or not DEAD < entries.scores[entry] <= entries.scores[parent]:
            raise RuntimeError(f"entry {entry} does not hang below entry {parent}")
        if entries.positions[entry] != entries.positions[parent] + 1:
            raise RuntimeError(f"entry {entry} is not one further than entry {parent}")
        ready = slot < 0 <= entries.slots[parent]
        ready = ready and entries.nodes[entry] != REFUSED
        if (entries.ranks[entry] > DEAD) != ready or (slot >= 0 > entries.slots[parent]):
            raise RuntimeError(f"entry {entry} has rank {entries.ranks[entry]} and slot {slot}")
        if entries.nodes[entry] >= 0 > entries.nodes[parent]:
            raise RuntimeError(f"entry {entry} is in the author's tree and its parent is not")
    if (num_run != forest.num_run).any():
        raise RuntimeError(f"{num_run} entries were run, {forest.num_run} are counted")


def check_slots(slots: TreeSlots) -> None:
    """Raise RuntimeError unless every slot that is not live is free once. Nothing may be lent or taken."""
    for row, count in enumerate(slots.num_free.tolist()):
        free = set(slots.stacks[row, :count].tolist())
        if len(free) != count or free != set(np.flatnonzero(~slots.live[row]).tolist()) or slots._leased[row].any():
            raise RuntimeError(f"row {row}: {count} free tree slots do not match {slots.live[row].sum()} live ones")

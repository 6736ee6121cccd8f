"""The trees of all requests of a draft model: which nodes to run next, and what a burst brought."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draft_service.burst.entries import DEAD, Entries, Ints
from draft_service.burst.plan import BurstResult, BurstShape
from draft_service.burst.slots import TreeSlots

_NO_FLOOR = -1e9
"""Above DEAD, so that no dead entry is worth anything."""
_FEW_DEAD = 512
"""Dead entries that cost less than dropping them."""


class DraftForest:
    """Entries of all trees and the slots of their regions. One row a request; every open row has a root entry.

    Path scores count from the row's root. An entry that was run has a slot, and so have its ancestors up to the root.

    Attributes:
        roots: intp [R], entry of the root; -1 for a row that is not open.
        root_positions: int32 [R], its position in the sequence.
        num_run: intp [R], entries that were run, the root included.
        quotas: int32 [R], entries that may be run; 0 while the tree is not to grow.
        last_positions: int32 [R], position of the deepest node that may be run.
    """

    def __init__(self, shape: BurstShape, floor: float, max_entries: int) -> None:
        """`floor`: least path score of a node worth growing. `max_entries`: of all trees."""
        rows = shape.num_rows
        self.entries = Entries(max_entries)
        self.slots = TreeSlots(rows, shape.region)
        self.floor = max(floor, _NO_FLOOR)
        self.roots = np.full(rows, -1, np.intp)
        self.root_positions = np.zeros(rows, np.int32)
        self.num_run = np.zeros(rows, np.intp)
        self.quotas = np.zeros(rows, np.int32)
        self.last_positions = np.zeros(rows, np.int32)
        self.may_know = False
        """Whether what a burst brings may be there already: others append to the trees, or roots are run again."""

    def set_root(self, row: int, token: int, position: int, node: int) -> None:
        """A tree begins with its root, node `node` of the author; the row has no other. No burst may be pending."""
        self.make_room(1)
        self.roots[row] = self.entries.append(row, -1, token, position, 0.0, node)
        self.root_positions[row] = position

    def close(self, row: int) -> None:
        """A tree is gone."""
        entries = self.entries
        entries.kill(np.flatnonzero(entries.rows[: entries.count] == row))
        self.slots.reset(row)
        self.roots[row] = -1
        self.num_run[row] = 0
        self.quotas[row] = 0

    def choose(self, limit: int) -> Ints:
        """The best entries that may be run next, at most `limit`, the best first."""
        entries = self.entries
        found = np.flatnonzero(entries.ranks[: entries.count] >= self.floor)
        if not len(found):
            return found
        rows = entries.rows[found]
        left = self.quotas - self.num_run
        last = np.where(left > 0, self.last_positions, -1)
        found = found[entries.positions[found] <= last[rows]]
        if not len(found):
            return found
        worst_first = entries.ranks[found]
        if len(found) > limit:
            best = worst_first.argpartition(len(found) - limit)[-limit:]
            found, worst_first = found[best], worst_first[best]
        found = found[worst_first.argsort()[::-1]]
        rows = entries.rows[found]
        counts = np.bincount(rows, minlength=len(left))
        if (counts <= left).all():
            return found
        order = rows.argsort(kind="stable")
        grouped = rows[order]
        within = np.arange(len(rows)) - (counts.cumsum() - counts)[grouped]
        order = order[within < left[grouped]]
        order.sort()
        return found[order]

    def best_unrun(self) -> NDArray[np.float64]:
        """[R] path score of each tree's best entry that may be run next; DEAD if there is none."""
        entries = self.entries
        best = np.full(len(self.roots), DEAD)
        found = np.flatnonzero(entries.ranks[: entries.count] >= self.floor)
        rows = entries.rows[found]
        allowed = (entries.positions[found] <= self.last_positions[rows]) & (self.quotas > self.num_run)[rows]
        np.maximum.at(best, rows[allowed], entries.ranks[found[allowed]])
        return best

    def merge(self, seeds: Ints, result: BurstResult) -> None:
        """Take in what a burst brought; there must be room for all of it.

        `seeds` [N] are the entries of its seeds; -1 for one that is no entry, whose candidates are dropped.
        """
        entries, count = self.entries, len(seeds)
        num_steps, width, branching = result.tokens.shape
        picked, tokens = result.picked.reshape(-1), result.tokens.reshape(-1)
        # What is hopeless from this root may be worth it from the next one, below a node that is likely by then.
        keep = (result.scores >= self.floor).reshape(-1)
        places = np.full(count + len(tokens) + 1, -1, np.intp)  # entry of each pool index; the last is nobody's
        places[:count] = seeds
        if count and int(seeds.min()) < 0:
            parents_here = np.ones(len(places), np.bool_)
            parents_here[:count] = seeds >= 0
            keep &= parents_here[picked].repeat(branching)
        if self.may_know:
            for step in range(num_steps):
                self._find_known(count, step, result, keep, places)
        kept = np.flatnonzero(keep)
        places[kept + count] = np.arange(entries.count, entries.count + len(kept))
        nodes = places[picked]
        before = nodes[(nodes >= 0) & (nodes < entries.count)] if self.may_know else nodes[:0]
        edges = result.scores.reshape(-1)[kept]
        bounds = kept.searchsorted(np.arange(num_steps + 1) * (width * branching)).tolist()
        entries.append_children(nodes[kept // branching], tokens[kept], edges, bounds)
        self._ran(nodes, result.slots.reshape(-1))
        if len(before):
            self._admit_children(before[entries.parental[before]])

    def make_room(self, count: int) -> bool:
        """Have room for so many entries: dead ones go, then the least promising; False if that does not do."""
        if self.entries.room >= count:
            return True
        self._compact()
        if self.entries.room >= count + self.entries.capacity // 4:
            return True
        self._evict(count + self.entries.capacity // 2 - self.entries.room)
        self._compact()
        return self.entries.room >= count

    def tidy(self) -> None:
        """Drop dead entries when they are many. No burst may be pending."""
        if self.entries.num_dead > _FEW_DEAD + self.entries.count // 2:
            self._compact()

    def _find_known(self, count: int, step: int, result: BurstResult, keep: NDArray[np.bool_], places: Ints) -> None:
        """Candidates of a step that were there before the burst: they are no new entries, but may be run by it."""
        entries, branching = self.entries, result.tokens.shape[2]
        above = places[result.picked[step]]
        asked = np.flatnonzero((above >= 0) & entries.parental[above])
        if not len(asked):
            return
        above = above[asked]
        known = np.flatnonzero(np.isin(entries.parents[: entries.count], above))
        if not len(known):
            return
        first = step * len(result.picked[step])
        offered = ((first + asked)[:, None] * branching + np.arange(branching)).reshape(-1)
        keys = above.repeat(branching).astype(np.int64) << 32 | result.tokens[step, asked].reshape(-1)
        known_keys = entries.parents[known].astype(np.int64) << 32 | entries.tokens[known]
        order = known_keys.argsort()
        at = np.searchsorted(known_keys, keys, sorter=order)
        matches = order[np.minimum(at, len(known) - 1)]
        same = known_keys[matches] == keys
        keep[offered[same]] = False
        places[offered[same] + count] = known[matches[same]]

    def _ran(self, nodes: Ints, slots: NDArray[np.int32]) -> None:
        """These entries were run in these slots; -1 for none. One that was run before keeps its slot."""
        entries = self.entries
        there = np.flatnonzero(nodes >= 0)
        nodes, slots = nodes[there], slots[there]
        if self.may_know:
            first = entries.slots[nodes] < 0
            nodes, slots = nodes[first], slots[first]
        entries.slots[nodes] = slots
        entries.ranks[nodes] = DEAD
        rows = entries.rows[nodes]
        self.slots.live[rows, slots] = True
        self.num_run += np.bincount(rows, minlength=len(self.num_run))

    def _admit_children(self, parental: Ints) -> None:
        """What hung below entries before they were run may be run now."""
        entries, count = self.entries, self.entries.count
        waiting = np.flatnonzero((entries.slots[:count] < 0) & np.isin(entries.parents[:count], parental))
        waiting = waiting[entries.slots[entries.parents[waiting]] >= 0]
        entries.ranks[waiting] = entries.scores[waiting]

    def _compact(self) -> None:
        places = self.entries.compact()
        self.roots = places[self.roots]

    def _evict(self, count: int) -> None:
        """Drop `count` entries that hold no KV and are not in the author's tree, the least promising first."""
        entries = self.entries
        end = entries.count
        idle = (entries.slots[:end] < 0) & (entries.nodes[:end] < 0) & (entries.parents[:end] >= 0)
        loose = np.flatnonzero(idle & ~entries.parental[:end] & (entries.scores[:end] > DEAD))
        order = loose[entries.scores[loose].argsort(kind="stable")]
        entries.kill(order[:count])

    def check_integrity(self) -> None:
        """Raise RuntimeError if arrays and counts disagree. No burst may be pending."""
        entries, count = self.entries, self.entries.count
        alive = np.flatnonzero(entries.scores[:count] > DEAD)
        num_run = np.zeros_like(self.num_run)
        seen: set[tuple[int, int]] = set()
        for entry in alive.tolist():
            row, parent, slot = int(entries.rows[entry]), int(entries.parents[entry]), int(entries.slots[entry])
            if slot >= 0:
                num_run[row] += 1
                if not self.slots.live[row, slot]:
                    raise RuntimeError(f"entry {entry} was run in slot {slot}, which is not live")
            if parent < 0:
                if self.roots[row] != entry or entries.scores[entry] != 0.0:
                    raise RuntimeError(f"entry {entry} is a second root, or scores {entries.scores[entry]}")
                continue
            if (parent, int(entries.tokens[entry])) in seen or not entries.parental[parent]:
                raise RuntimeError(f"entry {entry} is there twice, or its parent does not know of it")
            seen.add((parent, int(entries.tokens[entry])))
            if (
                parent >= entry
                or entries.rows[parent] != row
                or not DEAD < entries.scores[entry] <= entries.scores[parent]
            ):
                raise RuntimeError(f"entry {entry} does not hang below entry {parent}")
            if entries.positions[entry] != entries.positions[parent] + 1:
                raise RuntimeError(f"entry {entry} is not one further than entry {parent}")
            ready = slot < 0 <= entries.slots[parent]
            if (entries.ranks[entry] > DEAD) != ready or (slot >= 0 > entries.slots[parent]):
                raise RuntimeError(f"entry {entry} has rank {entries.ranks[entry]} and slot {slot}")
            if entries.nodes[entry] >= 0 > entries.nodes[parent]:
                raise RuntimeError(f"entry {entry} is in the author's tree and its parent is not")
        if (num_run != self.num_run).any():
            raise RuntimeError(f"{num_run} entries were run, {self.num_run} are counted")

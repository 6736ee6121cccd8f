"""The trees of all requests of a draft model: which nodes to run next, results of bursts, and re-rooting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.model.burst import BurstResult, BurstShape, Int32s, Ints
from outrider.drafting.model.entries import DEAD, BurstCollector, Entries
from outrider.drafting.model.kv import TreeSlots
from outrider.tree.author import TreeAuthor

_NO_FLOOR = -1e9
"""Lowest floor of path scores; above DEAD."""
_ROUNDING = 1e-3
"""Bound of the error of path scores in float32."""
_MAX_DEAD = 512
"""Dead entries that are kept, however few live ones there are."""

_NO_ENTRY = -2
"""An index that is no entry's parent; the parent of roots is -1."""


def places_within(groups: NDArray[np.integer[Any]], counts: Ints) -> Ints:
    """Return, for N items, how many earlier items are in the same group: [N]. `counts`: sizes of all groups."""
    order = groups.argsort(kind="stable")
    places = np.empty(len(groups), np.intp)
    places[order] = np.arange(len(groups)) - (counts.cumsum() - counts).repeat(counts)
    return places


class DraftForest:
    """Entries of all trees and their tree slots. Each request has a row; every open row has a root entry.

    Path scores count from the row's root. An entry that was run has a slot, and so have its ancestors up to the root.

    Attributes:
        roots: intp [R], entry of the root; -1 for a row that is not open.
        root_positions: int32 [R], position of the root in the sequence.
        num_run: intp [R], entries that were run, the root included.
        quotas: intp [R], entries that may be run, the root included; 0 while the tree must not grow.
        last_positions: int32 [R], position of the deepest node that may be run.
        shifts: float64 [R], path score of the root, counted from the root that the running burst got last.
    """

    def __init__(self, shape: BurstShape, floor: float, max_entries: int) -> None:
        """`floor`: least path score of a node worth growing. `max_entries`: most entries in all trees."""
        rows = shape.num_rows
        self.entries = Entries(max_entries)
        self.slots = TreeSlots(rows, shape.region)
        self.floor = max(floor, _NO_FLOOR)
        # Entries below the floor are kept, since they may pass it once the root has moved, but not if their edge alone
        # is below it. The device shifts scores in float32, so it may run a child whose edge is just below the floor.
        self._least_edge = self.floor - _ROUNDING
        self.roots = np.full(rows, -1, np.intp)
        self.root_positions = np.zeros(rows, np.int32)
        self.num_run = np.zeros(rows, np.intp)
        self.quotas = np.zeros(rows, np.intp)
        self.last_positions = np.zeros(rows, np.int32)
        self.shifts = np.zeros(rows)
        self.has_foreign_nodes = False
        """Whether candidates of a burst may be entries already, for instance because other growers append nodes."""

    def set_root(self, row: int, token: int, position: int, node: int) -> None:
        """Begin a tree with its root, which is node `node` of the author. No burst may be pending."""
        self.set_roots(np.array([row]), [token], np.array([position]), [node])

    def set_roots(self, rows: Ints, tokens: list[int], positions: NDArray[Any], nodes: list[int]) -> None:
        """As `set_root`, for several rows."""
        self.make_room(len(rows))
        self.roots[rows] = self.entries.append_roots(rows, tokens, positions, nodes)
        self.root_positions[rows] = positions

    def close(self, row: int) -> None:
        """Drop a tree."""
        entries = self.entries
        entries.kill(np.flatnonzero(entries.rows[: entries.count] == row))
        self.slots.reset(row)
        self.roots[row] = -1
        self.num_run[row] = 0
        self.quotas[row] = 0

    def choose(self, limit: int, *, beyond: bool = False) -> Ints:
        """Return the best entries that may be run next, at most `limit`, best first.

        `beyond`: include entries below the floor or beyond a quota, which a commit may make worth running.
        """
        entries, ranks = self.entries, self.entries.ranks[: self.entries.count]
        found = (ranks > DEAD if beyond else ranks >= self.floor).nonzero()[0]
        if not len(found):
            return found
        left = self.quotas if beyond else self.quotas - self.num_run
        last = np.where(left > 0, self.last_positions, -1)
        within = entries.positions[found] <= last[entries.rows[found]]
        if np.count_nonzero(within) < len(within):
            found = found[within]
        worst_first = entries.ranks[found]
        if len(found) > limit:
            best = worst_first.argpartition(len(found) - limit)[-limit:]
            found, worst_first = found[best], worst_first[best]
        found = found[worst_first.argsort()[::-1]]
        if beyond:
            return found
        rows = entries.rows[found]
        counts = np.bincount(rows, minlength=len(left))
        if not np.count_nonzero(counts > left):
            return found
        return found[places_within(rows, counts) < left[rows]]

    def best_unrun(self) -> NDArray[np.float64]:
        """Return the path score of each tree's best entry that may be run next: [R], DEAD if there is none."""
        entries = self.entries
        best = np.full(len(self.roots), DEAD)
        found = (entries.ranks[: entries.count] >= self.floor).nonzero()[0]
        rows = entries.rows[found]
        last = np.where(self.quotas > self.num_run, self.last_positions, -1)
        allowed = entries.positions[found] <= last[rows]
        np.maximum.at(best, rows[allowed], entries.ranks[found[allowed]])
        return best

    def merge(self, collector: BurstCollector, result: BurstResult) -> None:
        """Take in the result of a burst or of its next part; there must be room for all its candidates."""
        entries, first, start = self.entries, result.first, self.entries.count
        num_steps, width, branching = result.tokens.shape
        picked, slots = result.picked.reshape(-1), result.slots.reshape(-1)
        tokens, edges = result.tokens.reshape(-1), result.scores.reshape(-1)
        keep = edges >= self._least_edge
        places = collector.places
        if collector.num_context_seeds:
            is_context = np.zeros(len(places), np.bool_)
            is_context[: len(collector.seeds)] = collector.seeds < 0
            is_context = is_context[picked]
            collector.num_context_seeds -= int(np.count_nonzero(is_context))
            keep &= ~is_context.repeat(branching)
        if self.has_foreign_nodes:
            self._find_known(result, picked, tokens, keep, places)
        kept = keep.nonzero()[0]
        collector.add_part(start, first, kept)
        nodes, bounds = places[picked], [(0, len(kept))]
        if num_steps > 1:
            ends = kept.searchsorted(np.arange(num_steps + 1) * (width * branching)).tolist()
            bounds = list(pairwise(ends))
        entries.append_children(nodes.repeat(branching)[kept], tokens[kept], edges[kept], bounds)
        if self.has_foreign_nodes:
            self._note_run_again(nodes, slots, start)
        else:
            self._note_run(nodes, slots, collector.row)

    def adopt(self, row: int, author: TreeAuthor, first: int) -> None:
        """Add entries for nodes that other growers appended to a row's author, from id `first` on, if there is room."""
        if not self.make_room(author.num_live):
            return
        self.has_foreign_nodes = True
        entries = self.entries
        here = np.flatnonzero((entries.rows[: entries.count] == row) & (entries.scores[: entries.count] > DEAD))
        known = dict(zip(entries.nodes[here].tolist(), here.tolist(), strict=True))
        edges = zip(entries.parents[here].tolist(), entries.tokens[here].tolist(), strict=True)
        children = dict(zip(edges, here.tolist(), strict=True))
        for node_id in range(first, author.next_id):
            if node_id in known or not author.is_live(node_id):
                continue
            node = author.node(node_id)
            parent = known.get(node.parent)
            if parent is None:
                continue
            entry = children.get((parent, node.token))
            if entry is None:
                entry = entries.append(parent, node.token, node.score, node_id)
            entries.nodes[entry] = node_id
            known[node_id] = entry

    def make_room(self, count: int) -> bool:
        """Make room for `count` entries: drop dead ones, then the least promising; False if that is not enough."""
        if self.entries.room >= count:
            return True
        self._compact()
        if self.entries.room >= count + self.entries.capacity // 4:
            return True
        self._evict(count + self.entries.capacity // 2 - self.entries.room)
        self._compact()
        return self.entries.room >= count

    def tidy(self) -> None:
        """Drop dead entries if there are many. No burst may be pending."""
        count = self.entries.count
        num_dead = count - np.count_nonzero(self.entries.scores[:count] > DEAD)
        if num_dead > _MAX_DEAD + count // 2:
            self._compact()

    def _find_known(
        self, result: BurstResult, picked: Int32s, tokens: Int32s, keep: NDArray[np.bool_], places: Ints
    ) -> None:
        """Map candidates that were entries before the burst to these entries, and clear them in `keep`."""
        entries, count, branching = self.entries, self.entries.count, result.tokens.shape[2]
        asked = np.zeros(len(picked), np.bool_)
        while True:  # once for each level of the tree from before
            above = places[picked]
            more = ((above >= 0) & (entries.may_have_children[above] | (entries.slots[above] >= 0)) & ~asked).nonzero()[
                0
            ]
            if not len(more):
                return
            asked[more] = True
            above = above[more]
            wanted = np.zeros(count + 1, np.bool_)
            wanted[above] = True
            known = wanted[entries.parents[:count]].nonzero()[0]
            if not len(known):
                return
            offered = (more[:, None] * branching + np.arange(branching)).reshape(-1)
            keys = above.repeat(branching) << 32 | tokens[offered]
            known_keys = entries.parents[known] << 32 | entries.tokens[known]
            order = known_keys.argsort()
            at = known_keys.searchsorted(keys, sorter=order)
            matches = order[np.minimum(at, len(known) - 1)]
            same = known_keys[matches] == keys
            offered, matches = offered[same], known[matches[same]]
            keep[offered] = False
            places[offered + result.first] = matches

    def _note_run(self, nodes: Ints, slots: Int32s, row: int = -1) -> None:
        """Note that entries were run in these slots. Slots of dead entries are freed.

        `nodes` are -1 where nothing was run. `row`: see BurstCollector.
        """
        entries = self.entries
        alive = entries.scores[nodes] > DEAD
        if np.count_nonzero(alive) < len(alive):
            dead = (~alive & (nodes >= 0)).nonzero()[0]
            if len(dead):
                self.slots.free_dead(row if row >= 0 else entries.rows[nodes[dead]], slots[dead])
            nodes, slots = nodes[alive], slots[alive]
        if row >= 0:
            self.slots.fill(row, slots)
            self.num_run[row] += len(nodes)
        else:
            rows = entries.rows[nodes]
            self.slots.fill(rows, slots)
            self.num_run += np.bincount(rows, minlength=len(self.num_run))
        entries.slots[nodes] = slots
        entries.ranks[nodes] = DEAD

    def _note_run_again(self, nodes: Ints, slots: Int32s, count: int) -> None:
        """As `_note_run`, but entries may have been run before, and may have children.

        Entries are run again only below a block head's root that is run again. Its nodes attend to no tree node, so a
        node may move to another slot. Its children must take the state that it leaves in that slot.
        """
        entries = self.entries
        alive = entries.scores[nodes] > DEAD
        nodes, slots = nodes[alive], slots[alive]
        known = entries.slots[nodes]
        fresh, moved = known < 0, (known >= 0) & (known != slots)
        if np.count_nonzero(moved):
            rows = entries.rows[nodes[moved]]
            self.slots.free(rows, known[moved])
            self.slots.fill(rows, slots[moved])
            entries.slots[nodes[moved]] = slots[moved]
        self._note_run(nodes[fresh], slots[fresh])
        before = nodes[nodes < count]
        if len(before):
            self._admit_children(before)

    def _admit_children(self, parents: Ints) -> None:
        """Let children run that entries had before they were run themselves."""
        entries, count = self.entries, self.entries.count
        wanted = np.zeros(count + 1, np.bool_)
        wanted[parents] = True
        waiting = (wanted[entries.parents[:count]] & (entries.slots[:count] < 0)).nonzero()[0]
        entries.ranks[waiting] = entries.scores[waiting]

    def _compact(self) -> None:
        places = self.entries.compact()
        self.roots = places[self.roots]

    def _evict(self, count: int) -> None:
        """Drop up to `count` entries without KV that are not in the author's tree, the least promising first."""
        entries = self.entries
        end = entries.count
        idle = (entries.slots[:end] < 0) & (entries.nodes[:end] < 0) & (entries.parents[:end] >= 0)
        loose = np.flatnonzero(idle & ~entries.may_have_children[:end] & (entries.scores[:end] > DEAD))
        order = loose[entries.scores[loose].argsort(kind="stable")]
        entries.kill(order[:count])


@dataclass(slots=True)
class RerootStep:
    """Newly committed tokens of a tree."""

    row: int
    tokens: Sequence[int]
    """At least one, in order."""
    node: int
    """Id of the new root in the author's tree."""
    restarted: bool
    """Whether the author began a new epoch, in which verify knows no nodes."""
    discards: bool = False
    """Whether to keep nothing below the new root."""


@dataclass(slots=True)
class RerootResult:
    """The result of a RerootStep."""

    slots: list[int]
    """Tree slots of the old root and of the committed tokens behind it whose nodes were found, without the new root; -1
    for a node that was not run. Slots of committed nodes stay live; the caller frees them."""
    found: bool
    """Whether the new root is the node of the old tree, with its children; else it is a new entry."""


def reroot(forest: DraftForest, steps: Sequence[RerootStep]) -> list[RerootResult]:
    """Re-root trees of different rows along committed tokens; afterwards, nodes off the path are dead."""
    entries, touched = forest.entries, _entries_of(forest, steps)
    parents = entries.parents[touched]
    # Entries that may have children.
    inner = entries.slots[touched] >= 0
    if forest.has_foreign_nodes:
        inner |= entries.may_have_children[touched]
    if len(steps) == 1:
        slots, last = _walk_one(forest, touched, parents, steps[0])
    else:
        slots, last = _walk_many(forest, touched, parents, steps)
    found = [place >= 0 and not step.discards for place, step in zip(last, steps, strict=True)]
    dead = _off_path(touched, parents, inner, [place for place, there in zip(last, found, strict=True) if there])
    _kill(forest, touched[dead], steps)
    _rebase(forest, touched[~dead], steps, touched[last].tolist(), found)
    fresh = [step for step, there in zip(steps, found, strict=True) if not there]
    if fresh:
        rows = np.array([step.row for step in fresh])
        positions = forest.root_positions[rows] + np.array([len(step.tokens) for step in fresh])
        forest.set_roots(rows, [step.tokens[-1] for step in fresh], positions, [step.node for step in fresh])
    return [RerootResult(*one) for one in zip(slots, found, strict=True)]


def has_path(forest: DraftForest, row: int, tokens: Sequence[int]) -> bool:
    """Whether the tree of a row has the path along these tokens."""
    entries, count, above = forest.entries, forest.entries.count, int(forest.roots[row])
    for token in tokens:
        below = (entries.parents[:count] == above).nonzero()[0]
        below = below[(entries.tokens[below] == token) & (entries.scores[below] > DEAD)]
        if not len(below):
            return False
        above = int(below[0])
    return True


def _entries_of(forest: DraftForest, steps: Sequence[RerootStep]) -> Ints:
    """Return the T live entries of the trees of these steps, ascending."""
    entries, count = forest.entries, forest.entries.count
    alive = entries.scores[:count] > DEAD
    if len(steps) < np.count_nonzero(forest.roots >= 0):
        committing = np.zeros(len(forest.roots), np.bool_)
        committing[[step.row for step in steps]] = True
        alive &= committing[entries.rows[:count]]
    return alive.nonzero()[0]


def _walk_one(forest: DraftForest, touched: Ints, parents: Ints, step: RerootStep) -> tuple[list[list[int]], list[int]]:
    """As `_walk_many`, for a single step and with few numpy calls."""
    entries, last = forest.entries, -1
    path = [int(forest.roots[step.row])]
    for token in step.tokens:
        places = (parents == path[-1]).nonzero()[0]
        below = touched[places]
        tokens = entries.tokens[below].tolist()
        if token not in tokens:
            last = -1
            break
        child = tokens.index(token)
        last = int(places[child])
        path.append(int(below[child]))
    above = path[: len(step.tokens)]
    slots = entries.slots[above].tolist()
    entries.slots[above] = -1
    return [slots], [last]


def _walk_many(
    forest: DraftForest, touched: Ints, parents: Ints, steps: Sequence[RerootStep]
) -> tuple[list[list[int]], list[int]]:
    """Return, for each step, `RerootResult.slots` and the place of the new root among the touched entries, or -1."""
    stepped = np.array([step.row for step in steps])
    lengths = np.array([len(step.tokens) for step in steps])
    paths = _walk(forest, touched, parents, steps, int(lengths.max()))[stepped]
    roots = paths[np.arange(len(steps)), lengths]
    last = np.where(roots < 0, -1, touched.searchsorted(roots))
    return _take_slots(forest.entries, paths, lengths), last.tolist()


def _walk(forest: DraftForest, touched: Ints, parents: Ints, steps: Sequence[RerootStep], longest: int) -> Ints:
    """Return the entries along the tokens of each row's step, root first: [R, longest + 1], -1 where there is none."""
    entries, num_rows = forest.entries, len(forest.roots)
    tokens, rows = entries.tokens[touched], entries.rows[touched]
    wanted = np.full((longest, num_rows), -1, np.int32)
    for step in steps:
        wanted[: len(step.tokens), step.row] = step.tokens
    paths = np.full((num_rows, longest + 1), -1, np.intp)
    paths[:, 0] = forest.roots
    above = forest.roots.copy()
    for depth in range(longest):
        # Rows whose walk has ended have _NO_ENTRY here, which has no children.
        below = (parents == above[rows]).nonzero()[0]
        below = below[tokens[below] == wanted[depth, rows[below]]]
        if not len(below):
            break
        hits, where = touched[below], rows[below]
        paths[where, depth + 1] = hits
        above.fill(_NO_ENTRY)
        above[where] = hits
    return paths


def _take_slots(entries: Entries, paths: Ints, lengths: Ints) -> list[list[int]]:
    """Take the tree slots off the committed entries above the new roots, and return them; the slots stay live."""
    above = (paths >= 0) & (np.arange(paths.shape[1]) < lengths[:, None])
    flat = paths[above]
    slots = entries.slots[flat].tolist()
    entries.slots[flat] = -1
    ends = np.count_nonzero(above, axis=1).cumsum().tolist()
    return [slots[start:end] for start, end in pairwise([0, *ends])]


def _off_path(touched: Ints, parents: Ints, inner: NDArray[np.bool_], where: list[int]) -> NDArray[np.bool_]:
    """Return a mask [T] of the touched entries that are neither new roots, at places `where`, nor below one.

    `inner`: mask of entries that may have children, which are few; the others share their parent's fate.
    """
    if not where:
        return np.ones(len(touched), np.bool_)
    inner[where] = True
    those = touched[inner]
    count = len(those)
    places = np.empty(int(touched[-1]) + 2, np.intp)  # among inner entries; the last is for no entry
    places[-1] = count
    places[those] = np.arange(count)
    # For each inner entry its ancestor 1, then 2, then 4 levels up, ...; `count` stands for no entry.
    above = places[parents]
    ups = np.empty(count + 1, np.intp)
    ups[:count], ups[count] = above[inner], count
    tops = places[touched[where]]
    ups[tops] = tops  # new roots: every other path up ends at no entry
    for _ in range(count.bit_length()):
        ups = ups[ups]
    dead: NDArray[np.bool_] = ups[above] == count
    dead[where] = False
    return dead


def _kill(forest: DraftForest, dead: Ints, steps: Sequence[RerootStep]) -> None:
    entries = forest.entries
    entries.kill(dead)
    slots = entries.slots[dead]
    ran = (slots >= 0).nonzero()[0]
    forest.slots.free(steps[0].row if len(steps) == 1 else entries.rows[dead[ran]], slots[ran])


def _rebase(forest: DraftForest, alive: Ints, steps: Sequence[RerootStep], roots: list[int], found: list[bool]) -> None:
    """Shift path scores of the survivors to their new roots, if those were `found`, and count the entries run."""
    entries, num_rows = forest.entries, len(forest.roots)
    bases = [float(entries.scores[root]) if there else 0.0 for root, there in zip(roots, found, strict=True)]
    ran = entries.slots[alive] >= 0
    if len(steps) == 1:
        shifts: NDArray[np.float64] | float = bases[0]
        counts = [int(np.count_nonzero(ran))]
    else:
        stepped, rows, base = [step.row for step in steps], entries.rows[alive], np.zeros(num_rows)
        base[stepped] = bases
        shifts = base[rows]
        counts = np.bincount(rows[ran], minlength=num_rows)[stepped].tolist()
    entries.scores[alive] -= shifts
    entries.ranks[alive] -= shifts
    for step, root, there, shift, count in zip(steps, roots, found, bases, counts, strict=True):
        row = step.row
        if step.restarted:
            entries.nodes[alive[entries.rows[alive] == row]] = -1
        forest.num_run[row], forest.roots[row] = count, root if there else -1
        if there:
            forest.root_positions[row] = entries.positions[root]
            forest.shifts[row] += shift
            entries.parents[root], entries.edges[root] = -1, 0.0
            entries.ranks[root], entries.nodes[root] = DEAD, step.node

"""Appends the best entries of a forest to the authors' trees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf, log
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.model.burst import Ints
from outrider.drafting.model.context import DraftContext
from outrider.drafting.model.drafter import GrowthOptions
from outrider.drafting.model.entries import DEAD, REFUSED
from outrider.drafting.model.forest import DraftForest, places_within
from outrider.drafting.tree_growth import TreeGrowth, TreeLimits

_NODES_PER_CHECK = 64
"""Nodes between two looks at the clock."""
_LIKELY_SCORE = log(0.0025)
"""Path score at which a node is sent at once, although better ones may follow. Verify commits a token as unlikely as
this in about every other round; if its node was held back, it comes a round too late."""
_NOTHING = np.empty(0, np.intp)
_LARGE_CREDIT = 256
"""Least credit for which `_LIKELY_SCORE` applies: a smaller credit is only for the best nodes."""
_Room = tuple[int, int, float]
"""How many nodes of a request may be appended in any case; how many if they are ready; path score of a likely node.

A node is ready if it is likely, or if no node that is still to be run can have a better path score."""


class NodePublisher:
    """Appends entries to the authors' trees, best first over all requests, in slices of time."""

    def __init__(
        self,
        forest: DraftForest,
        contexts: Mapping[int, DraftContext],
        limits: TreeLimits,
        growth: TreeGrowth,
        options: GrowthOptions,
    ) -> None:
        self._forest = forest
        self._contexts = contexts
        self._limits = limits
        self._growth = growth
        self._source = limits.sources.start
        # Whether others append nodes that do not become entries.
        self._skips_foreign = limits.shared and not options.adopts_foreign_nodes
        self._most_sent = options.lone_nodes
        self._queue = _NOTHING  # entries, the best first
        self._is_ready = np.empty(0, np.bool_)  # of each in `_queue`; a row's ready entries come before its others
        self._must_repeat = False  # whether more entries may be appended than the queue held

    @property
    def done(self) -> bool:
        """Whether nothing is left to append."""
        return not len(self._queue)

    def prepare(self) -> None:
        """Queue entries that may be appended now. Entries must keep their numbers until `forget`."""
        self._queue, self._must_repeat = _NOTHING, False
        if not self._growth.has_memory:
            return
        rooms = {row: room for row, context in self._contexts.items() if (room := self._room(context))[1] > 0}
        if len(rooms) == 1:
            self._prepare_row(*rooms.popitem())
        elif rooms:
            self._prepare_rows(rooms)

    def _prepare_row(self, row: int, room: _Room) -> None:
        """As `prepare`, when only one request has room."""
        base_room, ready_room, likely = room
        ready_score = self._ready_score(row, likely) if base_room <= 0 else self._forest.floor
        found = self._find(ready_score)
        if len(self._contexts) > 1:
            found = found[self._forest.entries.rows[found] == row]
        if len(found) <= base_room or base_room == ready_room:
            self._queue = found[:base_room]
            self._is_ready = np.zeros(len(self._queue), np.bool_)
            return
        if base_room > 0:
            ready_score = self._ready_score(row, likely)
        is_ready = self._forest.entries.scores[found] >= ready_score
        limit = max(base_room, min(ready_room, int(np.count_nonzero(is_ready))))
        self._queue, self._is_ready = found[:limit], is_ready[:limit]

    def _prepare_rows(self, rooms: dict[int, _Room]) -> None:
        forest, entries, num_rows = self._forest, self._forest.entries, len(self._forest.roots)
        base_rooms, ready_rooms = np.zeros((2, num_rows), np.intp)
        likely, least = np.full((2, num_rows), np.inf)
        for row, room in rooms.items():
            base_rooms[row], ready_rooms[row], likely[row] = room
        ready_scores = np.maximum(np.minimum(forest.best_unrun(), likely), forest.floor)
        there = list(rooms)
        least[there] = np.where(base_rooms > 0, forest.floor, ready_scores)[there]
        found = self._find(float(least.min()))
        rows = entries.rows[found]
        worth = entries.scores[found] >= least[rows]
        found, rows = found[worth], rows[worth]
        is_ready = entries.scores[found] >= ready_scores[rows]
        counts = np.bincount(rows, minlength=num_rows)
        if np.count_nonzero(counts > np.where(base_rooms > 0, base_rooms, ready_rooms)):
            worth = np.where(is_ready, ready_rooms[rows], base_rooms[rows]) > places_within(rows, counts)
            found, is_ready = found[worth], is_ready[worth]
        self._queue, self._is_ready = found, is_ready

    def _find(self, least: float) -> Ints:
        """Return entries of at least this path score that are in no author's tree, best first.

        A burst may run deeper than trees may be. Deeper entries wait until a commit has brought the root closer.
        """
        forest, entries, count = self._forest, self._forest.entries, self._forest.entries.count
        found: Ints = ((entries.nodes[:count] == -1) & (entries.scores[:count] >= least)).nonzero()[0]
        deepest = forest.root_positions + self._limits.depth
        found = found[entries.positions[found] <= deepest[entries.rows[found]]]
        # Among entries of equal score the parent, which has the lower number, comes first.
        found = found[(-entries.scores[found]).argsort(kind="stable")]
        return found

    def _ready_score(self, row: int, likely: float) -> float:
        """Return the least path score of a row's ready nodes."""
        forest, entries = self._forest, self._forest.entries
        best = int(entries.ranks[: entries.count].argmax())
        is_next = entries.rows[best] == row and entries.positions[best] <= forest.last_positions[row]
        if is_next and forest.num_run[row] < forest.quotas[row]:
            unrun = float(entries.ranks[best])
        else:
            unrun = float(forest.best_unrun()[row])
        return max(min(unrun, likely), forest.floor)

    def forget(self) -> None:
        """Empty the queue, since entries may get other numbers."""
        self._queue = _NOTHING

    def run(self, deadline: float, interrupted: Callable[[], bool], max_nodes: int = 0) -> None:
        """Append until the queue is empty, the deadline has passed, or `max_nodes` entries were tried (0: no limit)."""
        while len(self._queue):
            self._run(deadline, interrupted, max_nodes)
            if len(self._queue) or not self._must_repeat:
                return
            self.prepare()  # some entries were in the trees already, or forbidden, which leaves room for others

    def _run(self, deadline: float, interrupted: Callable[[], bool], max_nodes: int) -> None:
        left = max_nodes or len(self._queue)
        while len(self._queue) and self._growth.has_memory:
            count = min(_NODES_PER_CHECK, left)
            found, self._queue = self._queue[:count], self._queue[count:]
            is_ready, self._is_ready = self._is_ready[:count], self._is_ready[count:]
            self._append(found, is_ready)
            left -= count
            if not left or perf_counter() >= deadline or interrupted():
                return
        self.forget()

    def _append(self, found: Ints, is_ready: NDArray[np.bool_]) -> None:
        """Append entries; those of a row in one call, if possible."""
        entries, growth, source = self._forest.entries, self._growth, self._source
        # The forest may have followed a commit since `prepare`; an entry that became a root has its id already.
        alive = (entries.scores[found] > DEAD) & (entries.nodes[found] == -1)
        if np.count_nonzero(alive) < len(alive):
            found, is_ready = found[alive], is_ready[alive]
            if not len(found):
                return
        if self._skips_foreign:
            unknown = self._find_known(found)
            found, is_ready = found[unknown], is_ready[unknown]
            if not len(found):
                return
        starts, ends, groups = [0], [len(found)], list(self._contexts.values())
        if len(groups) > 1:
            rows = entries.rows[found]
            order = rows.argsort(kind="stable")
            found, is_ready, rows = found[order], is_ready[order], rows[order]
            starts += ((rows[1:] != rows[:-1]).nonzero()[0] + 1).tolist()
            ends = starts[1:] + ends
            groups = [self._contexts[row] for row in rows[starts].tolist()]
        # Set the ids first, then look up the parents' ids: some parents are among these entries.
        ids: list[int] = []
        for context, start, end in zip(groups, starts, ends, strict=True):
            first = context.tree.author.next_id
            ids += range(first, first + end - start)
        entries.nodes[found] = ids
        above, ready_flags = entries.nodes[entries.parents[found]].tolist(), is_ready.tolist()
        tokens, edges = entries.tokens[found].tolist(), entries.edges[found].tolist()
        has_foreign_nodes = self._forest.has_foreign_nodes
        for context, start, end in zip(groups, starts, ends, strict=True):
            tree, count = context.tree, end - start
            room = min(self._room(context)[ready_flags[end - 1]], growth.max_nodes - growth.num_live)
            if (
                count <= room
                and not (has_foreign_nodes and tree.author.num_live)
                and (self._skips_foreign or context.seen == tree.author.next_id)
                and growth.extend(tree, above[start:end], tokens[start:end], edges[start:end], source)
            ):
                context.seen += count
                context.num_sent += count
            else:
                entries.nodes[found[start:end]] = -1
                self._append_each(context, found[start:end].tolist(), ready_flags[start:end])

    def _find_known(self, found: Ints) -> NDArray[np.bool_]:
        """Set the ids of entries whose nodes other growers have appended; returns a mask of those in no tree yet."""
        entries, unknown = self._forest.entries, np.ones(len(found), np.bool_)
        above = entries.parents[found]
        columns = (found.tolist(), above.tolist(), entries.nodes[above].tolist(), entries.tokens[found].tolist())
        # If the forest has not followed the author yet, its node ids may be of an epoch that is over.
        authors = {row: one.tree.author for row, one in self._contexts.items() if one.epoch == one.tree.author.epoch}
        ids: dict[int, int] = {}
        for place, (entry, parent, node, token, row) in enumerate(
            zip(*columns, entries.rows[found].tolist(), strict=True)
        ):
            author = authors.get(row)
            known = None if author is None else author.settled_child(ids.get(parent, node), token)
            if known is not None:
                ids[entry] = known
                unknown[place] = False
        if ids:
            entries.nodes[list(ids)] = list(ids.values())
            self._must_repeat = True
        return unknown

    def _append_each(self, context: DraftContext, found: list[int], ready_flags: list[bool]) -> None:
        """Append entries of a row one by one: some may be in the tree already, forbidden, or too many."""
        entries, growth = self._forest.entries, self._growth
        tree, author = context.tree, context.tree.author
        room = list(self._room(context)[:2])
        for entry, is_ready in zip(found, ready_flags, strict=True):
            above, token = int(entries.nodes[entries.parents[entry]]), int(entries.tokens[entry])
            if above >= 0 and room[is_ready] > 0 and growth.has_memory:
                added = growth.append(tree, above, token, float(entries.edges[entry]), self._source)
                if added is not None:
                    context.num_sent += 1
                    room[0] -= 1
                    room[1] -= 1
                    if context.seen == added:
                        context.seen += 1
                else:
                    known = author.child(above, token)
                    added = -1 if known is None else known
                    self._must_repeat |= known is not None
                entries.nodes[entry] = added
                if added < 0 and author.forbids(above, token):
                    self._refuse(entry)
            elif above == REFUSED:
                self._refuse(entry)

    def _refuse(self, entry: int) -> None:
        """Mark an entry that the author forbids: it is not sent, and nothing is drafted below it."""
        self._forest.entries.nodes[entry] = REFUSED
        self._forest.entries.ranks[entry] = DEAD
        self._must_repeat = True

    def _room(self, context: DraftContext) -> _Room:
        """Return the request's `_Room`; no nodes while the forest has not followed the author.

        Half of the credit is for ready nodes: at first there are few nodes to choose from.
        """
        author = context.tree.author
        if context.known != len(author.tokens) or context.epoch != author.epoch or context.steps_left > 0:
            return 0, 0, inf
        limit, num_live = self._growth.most_nodes(context.tree, self._limits), author.num_live
        if self._most_sent and len(self._contexts) == 1:
            # All nodes that will come are here.
            left = self._most_sent - context.num_sent if context.root_final else 0
            room = min(limit - num_live, left)
            return room, room, inf
        return (limit + 1) // 2 - num_live, limit - num_live, _LIKELY_SCORE if limit >= _LARGE_CREDIT else inf

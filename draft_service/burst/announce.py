"""Appends the best entries of a forest to the authors' trees."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from draft_service.burst.context import DraftContext
from draft_service.burst.entries import DEAD, REFUSED, Ints
from draft_service.burst.forest import DraftForest, places_within
from draft_service.tree import Ledger
from draft_service.tree_growth import Limits

_LOOK_EVERY = 32
"""Nodes between two looks at the clock."""
_LIKELY = math.log(0.0025)
"""Path score of a node that is told at once. Better ones may come behind it, but verify commits a token that was this
unlikely in about every other round: what it lacks then was there, and would come a round too late."""
_ROOMY = 256
"""Credit from which on that is so: a smaller one is for the best alone."""


class Announcer:
    """Goes over what is to be appended, best first over all requests, in slices of time."""

    def __init__(
        self, forest: DraftForest, contexts: Mapping[int, DraftContext], limits: Limits, ledger: Ledger
    ) -> None:
        self._forest = forest
        self._contexts = contexts
        self._limits = limits
        self._ledger = ledger
        self._source = limits.sources.start
        self._queue: list[tuple[int, int, int, int, float, bool]] = []  # the best last; see `prepare`
        self._again = False  # whether there may be more than the queue held

    @property
    def done(self) -> bool:
        """Whether nothing is left to append."""
        return not self._queue

    def prepare(self) -> None:
        """Look over the forest anew. Entries keep their numbers until `forget`."""
        forest, entries = self._forest, self._forest.entries
        self._queue, self._again = [], False
        rooms, late_rooms, likely = self._rooms()
        if not self._ledger.has_memory or not rooms.any():
            return
        count = entries.count
        found = ((entries.nodes[:count] == -1) & (entries.scores[:count] >= forest.floor)).nonzero()[0]
        rows = entries.rows[found]
        last = np.where(rooms > 0, forest.root_positions + self._limits.depth, -1)
        found = found[entries.positions[found] <= last[rows]]
        scores = entries.scores[found]
        # Of equal ones the parent, which has the lower number, comes last in the list and is taken first.
        order = (-scores).argsort(kind="stable")
        found, scores = found[order], scores[order]
        rows = entries.rows[found]
        ripe = scores >= np.minimum(forest.best_unrun(), likely)[rows]
        within = places_within(rows, np.bincount(rows, minlength=len(rooms)))
        worth = np.where(ripe, rooms[rows], late_rooms[rows]) > within
        found, ripe = found[worth][::-1], ripe[worth][::-1]
        columns = (entries.rows[found], entries.parents[found], entries.tokens[found], entries.edges[found], ripe)
        self._queue = list(zip(found.tolist(), *(column.tolist() for column in columns), strict=True))

    def forget(self) -> None:
        """Drop what is left: entries may get other numbers."""
        self._queue = []

    def run(self, deadline: float, interrupted: Callable[[], bool], most: int = 0) -> None:
        """Append until there is nothing left, it is time, or, unless `most` is 0, so many were looked at."""
        while self._queue:
            self._run(deadline, interrupted, most)
            if self._queue or not self._again:
                return
            self.prepare()  # some were there already, and left room for others

    def _run(self, deadline: float, interrupted: Callable[[], bool], most: int) -> None:
        queue, nodes, ledger, source = self._queue, self._forest.entries.nodes, self._ledger, self._source
        share = ledger.share
        # Of each row, nodes that it may have more than it has: ripe ones, and others.
        rooms: dict[int, list[int]] = {}
        left, count = ledger.max_nodes - ledger.num_live, 0
        while queue and left > 0:
            entry, row, parent, token, edge, is_ripe = queue.pop()
            context = self._contexts[row]
            room = rooms.get(row)
            if room is None:
                room = rooms[row] = self._room(context, share)
            above = int(nodes[parent])
            if above >= 0 and room[is_ripe] > 0:
                author = context.tree.author
                added = author.add(above, token, edge, source)
                if added is not None:
                    room[0] -= 1
                    room[1] -= 1
                    left -= 1
                    ledger.appended(context.tree, source)
                    if context.seen == added:
                        context.seen += 1
                else:
                    known = author.child(above, token)
                    added = -1 if known is None else known
                    self._again |= known is not None
                nodes[entry] = added
                if added < 0 and author.forbids(above, token):
                    self._refuse(entry)
            elif above == REFUSED:
                self._refuse(entry)
            count += 1
            if count % _LOOK_EVERY == 0 and (perf_counter() >= deadline or interrupted()):
                return
            if count == most:
                return
        self._queue = []

    def _refuse(self, entry: int) -> None:
        """A grammar forbids the entry: neither is it sent nor are drafts made below it."""
        self._forest.entries.nodes[entry] = REFUSED
        self._forest.entries.ranks[entry] = DEAD
        self._again = True

    def _rooms(self) -> tuple[Ints, Ints, NDArray[np.float64]]:
        """[R] three times: room for ripe nodes and for others, see `_room`, and the path score of likely ones."""
        share, num_rows = self._ledger.share, len(self._forest.roots)
        rooms, late_rooms = np.zeros(num_rows, np.intp), np.zeros(num_rows, np.intp)
        likely = np.full(num_rows, np.inf)
        for row, context in self._contexts.items():
            late_rooms[row], rooms[row] = self._room(context, share)
            if self._limit(context, share) >= _ROOMY:
                likely[row] = _LIKELY
        return rooms, late_rooms, likely

    def _room(self, context: DraftContext, share: int) -> list[int]:
        """Nodes that may be appended, unripe ones and ripe ones; none while the forest has not followed the author.

        Half of the credit is for nodes that are likely, or that nothing better can come behind: at first there are few
        to choose from.
        """
        tree = context.tree
        author = tree.author
        if (
            context.known != author.committed_len
            or context.epoch != author.epoch
            or tree.paused
            or context.steps_left > 0
        ):
            return [0, 0]
        limit, num_live = self._limit(context, share), author.num_live
        return [(limit + 1) // 2 - num_live, limit - num_live]

    def _limit(self, context: DraftContext, share: int) -> int:
        """Nodes that the request may have."""
        return min(context.tree.author.credit, self._limits.num_nodes, share)

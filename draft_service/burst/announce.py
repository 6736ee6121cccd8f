"""Appends the best entries of a forest to the authors' trees, and takes in what others appended there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np

from draft_service.burst.context import DraftContext
from draft_service.burst.entries import DEAD
from draft_service.burst.forest import DraftForest
from draft_service.tree import Ledger
from draft_service.tree_growth import Limits
from outrider.tree.author import TreeAuthor

_LOOK_EVERY = 32
"""Nodes between two looks at the clock."""


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

    @property
    def done(self) -> bool:
        """Whether nothing is left to append."""
        return not self._queue

    def prepare(self) -> None:
        """Look over the forest anew. Entries keep their numbers until `forget`."""
        forest, entries = self._forest, self._forest.entries
        self._queue = []
        if not self._ledger.has_memory:
            return
        share = self._ledger.share
        rooms = np.zeros(len(forest.roots), np.int32)
        for row, context in self._contexts.items():
            rooms[row] = self._room(context, share)
        found = np.flatnonzero((entries.nodes[: entries.count] < 0) & (entries.scores[: entries.count] >= forest.floor))
        rows = entries.rows[found]
        depths = entries.positions[found] - forest.root_positions[rows]
        found = found[(rooms[rows] > 0) & (depths <= self._limits.depth)]
        # Of equal ones the parent, which has the lower number, comes last in the list and is taken first.
        found = found[(-entries.scores[found]).argsort(kind="stable")][::-1]
        ripe = entries.scores[found] >= forest.best_unrun()[entries.rows[found]]
        columns = (entries.rows[found], entries.parents[found], entries.tokens[found], entries.edges[found], ripe)
        self._queue = list(zip(found.tolist(), *(column.tolist() for column in columns), strict=True))

    def forget(self) -> None:
        """Drop what is left: entries may get other numbers."""
        self._queue = []

    def run(self, deadline: float, interrupted: Callable[[], bool]) -> None:
        """Append until there is nothing left, or it is time."""
        queue, nodes, ledger = self._queue, self._forest.entries.nodes, self._ledger
        count, share = 0, ledger.share
        while queue and ledger.has_memory:
            entry, row, parent, token, edge, is_ripe = queue.pop()
            context = self._contexts[row]
            above = int(nodes[parent])
            if above >= 0 and self._room(context, share, is_ripe=is_ripe) > 0:
                nodes[entry] = self._add(context, above, token, edge)
            count += 1
            if count % _LOOK_EVERY == 0 and (perf_counter() >= deadline or interrupted()):
                return
        self._queue = []

    def take_in(self, context: DraftContext) -> None:
        """Nodes of the author that other growers appended become entries."""
        author, entries, row = context.tree.author, self._forest.entries, context.row
        first, context.seen = context.seen, author.next_id
        if first >= author.next_id or not self._forest.make_room(author.num_live):
            return
        self._forest.may_know = True
        here = np.flatnonzero((entries.rows[: entries.count] == row) & (entries.scores[: entries.count] > DEAD))
        known = dict(zip(entries.nodes[here].tolist(), here.tolist(), strict=True))
        parents, tokens = entries.parents[here].tolist(), entries.tokens[here].tolist()
        edges = dict(zip(zip(parents, tokens, strict=True), here.tolist(), strict=True))
        for node_id in range(first, author.next_id):
            if node_id not in known and author.is_live(node_id):
                self._take_in(row, author, node_id, known, edges)

    def _take_in(
        self, row: int, author: TreeAuthor, node_id: int, known: dict[int, int], edges: dict[tuple[int, int], int]
    ) -> None:
        entries, node = self._forest.entries, author.node(node_id)
        parent = known.get(node.parent)
        if parent is None:
            return
        entry = edges.get((parent, node.token))
        if entry is None:
            position = int(entries.positions[parent]) + 1
            entry = entries.append(row, parent, node.token, position, node.score, node_id)
        else:
            entries.nodes[entry] = node_id
        known[node_id] = entry

    def _room(self, context: DraftContext, share: int, *, is_ripe: bool = True) -> int:
        """Nodes that may be appended; none while the forest has not followed the author.

        Half of the credit is for nodes that nothing better can come behind: at first there are few to choose from.
        """
        author = context.tree.author
        behind = context.known != author.committed_len or context.epoch != author.epoch
        if behind or context.tree.paused or context.steps_left > 0:
            return 0
        limit = min(author.credit, self._limits.num_nodes, share)
        return (limit if is_ripe else (limit + 1) // 2) - author.num_live

    def _add(self, context: DraftContext, parent: int, token: int, edge: float) -> int:
        """Append a node; returns its id, that of the node which is there already, or -1."""
        tree = context.tree
        added = tree.author.add(parent, token, edge, self._source)
        if added is not None:
            self._ledger.appended(tree, self._source)
            if context.seen == added:
                context.seen += 1
            return added
        known = tree.author.child(parent, token)
        return -1 if known is None else known

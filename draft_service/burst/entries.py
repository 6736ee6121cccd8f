"""The candidates and nodes of all trees, in arrays."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.intp]

DEAD = -np.inf
"""Path score of an entry that is in no tree any more."""


class Entries:
    """A row an entry, of whatever tree; parents come before their children. Dead ones stay until `compact`.

    Attributes:
        count: rows in use; only these count in the arrays.
        num_dead: those of them that are dead.
        rows: int32, the runner's row of its request.
        parents: intp, entry of its parent; -1 for a root.
        tokens, positions: int32, the token and its position in the sequence.
        edges: float32, natural-log chance of the token after its parent.
        scores: float64, that of the path from the root, at most 0; DEAD.
        ranks: float64, the same where the entry may be run next: its parent was, and it was not. -inf elsewhere.
        slots: int32, tree slot of its KV; -1 if it was not run.
        nodes: int64, id in the author's tree; -1 if it is not there.
        parental: bool, whether entries may hang below it.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.num_dead = 0
        self.rows = np.zeros(capacity, np.int32)
        self.parents = np.zeros(capacity, np.intp)
        self.tokens = np.zeros(capacity, np.int32)
        self.positions = np.zeros(capacity, np.int32)
        self.edges = np.zeros(capacity, np.float32)
        self.scores = np.zeros(capacity, np.float64)
        self.ranks = np.zeros(capacity, np.float64)
        self.slots = np.full(capacity, -1, np.int32)
        self.nodes = np.full(capacity, -1, np.int64)
        self.parental = np.zeros(capacity, np.bool_)

    @property
    def room(self) -> int:
        """Entries that fit."""
        return self.capacity - self.count

    def append_children(
        self,
        parents: Ints,
        tokens: NDArray[np.int32],
        edges: NDArray[np.float32],
        bounds: list[int],
    ) -> None:
        """Add candidates below entries that were run. Those from one bound to the next have parents before them."""
        first = self.count
        self.count = end = first + len(parents)
        for low, high in pairwise(bounds):
            above = parents[low:high]
            self.rows[first + low : first + high] = self.rows[above]
            self.positions[first + low : first + high] = self.positions[above] + 1
            self.scores[first + low : first + high] = self.scores[above] + edges[low:high]
        self.parents[first:end] = parents
        self.tokens[first:end] = tokens
        self.edges[first:end] = edges
        self.ranks[first:end] = self.scores[first:end]
        self.parental[parents] = True

    def append(self, row: int, parent: int, token: int, position: int, edge: float, node: int) -> int:
        """Add one entry, a root if `parent` is -1, and return it. A child of a run entry may be run next."""
        entry = self.count
        self.count += 1
        self.rows[entry] = row
        self.parents[entry] = parent
        self.tokens[entry] = token
        self.positions[entry] = position
        self.edges[entry] = edge
        self.nodes[entry] = node
        self.scores[entry] = 0.0
        self.ranks[entry] = DEAD
        if parent >= 0:
            self.scores[entry] = score = self.scores[parent] + edge
            self.parental[parent] = True
            if self.slots[parent] >= 0:
                self.ranks[entry] = score
        return entry

    def kill(self, entries: Ints) -> None:
        """Take entries, and with them all below, out of their trees."""
        self.num_dead += int(np.count_nonzero(self.scores[entries] > DEAD))
        self.scores[entries] = DEAD
        self.ranks[entries] = DEAD

    def compact(self) -> Ints:
        """Drop dead entries; returns where each entry went, [count before + 1], -1 for gone, and for the last one."""
        count = self.count
        kept = np.flatnonzero(self.scores[:count] > DEAD)
        places = np.full(count + 1, -1, np.intp)
        places[kept] = np.arange(len(kept))
        self.count = end = len(kept)
        self.num_dead = 0
        self.parents[:end] = places[self.parents[kept]]
        for column in self._columns():
            column[:end] = column[kept]
        # Rows that are not in use have these as new entries do.
        self.slots[end:count] = -1
        self.nodes[end:count] = -1
        self.parental[end:count] = False
        return places

    def _columns(self) -> _Columns:
        return _Columns(
            self.rows,
            self.tokens,
            self.positions,
            self.edges,
            self.scores,
            self.ranks,
            self.slots,
            self.nodes,
            self.parental,
        )


class _Columns(NamedTuple):
    rows: NDArray[np.int32]
    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    edges: NDArray[np.float32]
    scores: NDArray[np.float64]
    ranks: NDArray[np.float64]
    slots: NDArray[np.int32]
    nodes: NDArray[np.int64]
    parental: NDArray[np.bool_]

"""The candidates and nodes of all trees in arrays, and their places in the pool of a burst."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.model.burst import Ints

REFUSED = -2
"""Stands in place of a node's id: the author forbids the node, and all nodes below it."""
DEAD = -np.inf
"""Path score of an entry that is in no tree any more."""


class Entries:
    """Candidates and nodes of all trees, one index each; parents before children. Dead entries stay until `compact`.

    Attributes:
        count: entries in use, the first ones of each array.
        columns: int32 [3, capacity], of which the next three are views.
        rows: int32, the runner's row of the entry's request.
        tokens, positions: int32, the entry's token and its position in the sequence.
        parents: intp, the parent's entry; -1 for a root.
        edges: float32, natural-log chance of the token after its parent.
        scores: float64 [capacity + 1], path score from the root, at most 0, or DEAD; always DEAD for entry -1.
        ranks: float64, the path score if the entry may be run next: its parent was run, and itself was not. Else -inf.
        slots: int32, tree slot of the entry's KV; -1 if the entry was not run.
        nodes: int64, id in the author's tree; -1 if the entry is not in that tree, REFUSED if the author forbids it.
        may_have_children: bool, whether entries may hang below this one although it was not run.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.columns = np.zeros((3, capacity), np.int32)
        self.rows, self.tokens, self.positions = self.columns
        self.parents = np.zeros(capacity, np.intp)
        self.edges = np.zeros(capacity, np.float32)
        self.scores = np.zeros(capacity + 1, np.float64)
        self.scores[-1] = DEAD
        self.ranks = np.zeros(capacity, np.float64)
        self.slots = np.full(capacity, -1, np.int32)
        self.nodes = np.full(capacity, -1, np.int64)
        self.may_have_children = np.zeros(capacity, np.bool_)

    @property
    def room(self) -> int:
        """Number of further entries that fit."""
        return self.capacity - self.count

    def append_children(
        self, parents: Ints, tokens: NDArray[np.int32], edges: NDArray[np.float32], bounds: Sequence[tuple[int, int]]
    ) -> None:
        """Add candidates below entries that were run; candidates below dead entries are dead.

        `bounds`: slices of the candidates; parents of a slice existed before the call or are in earlier slices.
        """
        first = self.count
        self.count = end = first + len(parents)
        rows, positions, scores = self.rows, self.positions, self.scores
        for low, high in bounds:
            above, new = parents[low:high], slice(first + low, first + high)
            rows[new] = rows[above]
            positions[new] = positions[above] + 1
            scores[new] = scores[above] + edges[low:high]
        self.parents[first:end] = parents
        self.tokens[first:end] = tokens
        self.edges[first:end] = edges
        self.ranks[first:end] = scores[first:end]

    def append_roots(self, rows: Ints, tokens: list[int], positions: NDArray[Any], nodes: list[int]) -> Ints:
        """Add roots, and return their entries."""
        first = self.count
        self.count = end = first + len(rows)
        self.rows[first:end] = rows
        self.tokens[first:end] = tokens
        self.positions[first:end] = positions
        self.parents[first:end] = -1
        self.edges[first:end] = 0.0
        self.scores[first:end] = 0.0
        self.ranks[first:end] = DEAD
        self.nodes[first:end] = nodes
        return np.arange(first, end)

    def append(self, parent: int, token: int, edge: float, node: int) -> int:
        """Add one entry and return its index. If its parent was run, the entry may be run next."""
        entry = self.count
        self.count += 1
        self.rows[entry] = self.rows[parent]
        self.parents[entry] = parent
        self.tokens[entry] = token
        self.positions[entry] = self.positions[parent] + 1
        self.edges[entry] = edge
        self.nodes[entry] = node
        self.scores[entry] = score = self.scores[parent] + edge
        self.may_have_children[parent] = True
        self.ranks[entry] = score if self.slots[parent] >= 0 else DEAD
        return entry

    def kill(self, entries: Ints) -> None:
        """Remove entries from their trees. All entries below them must be given, too."""
        self.scores[entries] = DEAD
        self.ranks[entries] = DEAD

    def compact(self) -> Ints:
        """Drop dead entries; returns new indices [count before + 1], -1 for dropped entries and in the last place."""
        count = self.count
        kept = np.flatnonzero(self.scores[:count] > DEAD)
        places = np.full(count + 1, -1, np.intp)
        places[kept] = np.arange(len(kept))
        self.count = end = len(kept)
        self.parents[:end] = places[self.parents[kept]]
        self.columns[:, :end] = self.columns[:, kept]
        for column in (self.edges, self.scores, self.ranks, self.slots, self.nodes, self.may_have_children):
            column[:end] = column[kept]
        # Unused indices must have the initial values of new entries.
        self.slots[end:count] = -1
        self.nodes[end:count] = -1
        self.may_have_children[end:count] = False
        return places


class BurstCollector:
    """Maps the pool indices of a burst to entries, as long as entries keep their numbers."""

    def __init__(self, seeds: Ints, num_indices: int, row: int = -1) -> None:
        """`seeds` [N]: entry of each seed; -1 for an uncached token, whose candidates are dropped.

        `num_indices`: most pool indices of the burst. `row`: row of all entries, if there is only one.
        """
        self.seeds = seeds
        self.row = row
        self.num_context_seeds = int(np.count_nonzero(seeds < 0))
        """Uncached tokens among the seeds that were not run yet."""
        self._num_indices = num_indices
        self._parts: list[tuple[int, int, Ints]] = []  # see `add_part`

    @cached_property
    def places(self) -> Ints:
        """[num_indices + 1] entry of each pool index, -1 for none; the last one stands for no index.

        May be written to. The array is made on first use, when the burst runs already.
        """
        places = np.full(self._num_indices + 1, -1, np.intp)
        places[: len(self.seeds)] = self.seeds
        return places

    def add(self, entries: Ints) -> None:
        """Append further seeds."""
        self.places[len(self.seeds) :][: len(entries)] = entries
        self.seeds = np.concatenate([self.seeds, entries])
        self.num_context_seeds += int(np.count_nonzero(entries < 0))

    def add_part(self, start: int, first: int, kept: Ints) -> None:
        """Add entries `start`, `start` + 1, ... that a part brought; their pool indices are `first` + `kept`."""
        self.places[first:][kept] = np.arange(start, start + len(kept))
        self._parts.append((start, first, kept))

    def index_of(self, entry: int) -> int:
        """Return an entry's pool index, the newest if it was a seed more than once; -1 if it is not in the pool."""
        found = (self.seeds == entry).nonzero()[0]
        if len(found):
            return int(found[-1])
        part = bisect_right(self._parts, entry, key=lambda part: part[0]) - 1
        if part < 0:
            return -1
        start, first, kept = self._parts[part]
        return first + int(kept[entry - start]) if entry < start + len(kept) else -1

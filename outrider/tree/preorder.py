"""A tree in rows so that every subtree is a slice; nodes that are added cost what they are, not what is there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

_TOKEN, _UP, _DEPTH, _SIZE, _SLOT, _ID, _SOURCE = range(7)
_PATH, _EDGE = range(2)


class Preorder:
    """A root and nodes below it: each row is followed by everything below it, siblings in the order in which they came.

    A node keeps its slot while rows move: the root has 0, and nodes count on as they come, until `keep`.

    Attributes:
        nodes: int64 [3, num_rows]: token, number of rows up to the parent, and depth.
        path_scores: float64 [num_rows]: sums of the edges from the root.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: rows at most, the root's included."""
        self.capacity = capacity
        self._row_of: Int64s = np.zeros(capacity, np.int64)
        self.restart(0)

    def restart(self, token: int) -> None:
        """Begin anew with nothing but a root."""
        columns: Int64s = np.zeros((7, 1), np.int64)
        columns[_TOKEN], columns[_SIZE] = token, 1
        self._row_of[0] = 0
        self._set(columns, np.zeros((2, 1)))

    def _set(self, columns: Int64s, scores: Float64s) -> None:
        # All int64: arrays of few numbers take longer to convert than to work with.
        self._columns, self._scores = columns, scores
        self.nodes = columns[: _DEPTH + 1]
        self.path_scores: Float64s = scores[_PATH]

    def __len__(self) -> int:
        return len(self.path_scores)

    @property
    def ids(self) -> Int64s:
        """Of each row."""
        ids: Int64s = self._columns[_ID]
        return ids

    @property
    def scores(self) -> Float64s:
        """Edge scores as sent, of each row."""
        scores: Float64s = self._scores[_EDGE]
        return scores

    @property
    def sources(self) -> Int64s:
        """Of each row."""
        sources: Int64s = self._columns[_SOURCE]
        return sources

    @property
    def parent_slots(self) -> Int64s:
        """Of rows 1, 2, ..., shape [num_rows - 1]."""
        slots: Int64s = self._columns[_SLOT][np.arange(1, len(self)) - self._columns[_UP, 1:]]
        return slots

    def row(self, slot: int) -> int:
        """Where a node lies."""
        return self._row_of.item(slot)

    def slot(self, row: int) -> int:
        """Of the node in a row."""
        return self._columns.item(_SLOT, row)

    def end(self, row: int) -> int:
        """One past the last row below a row."""
        return row + self._columns.item(_SIZE, row)

    def keep(self, root: int) -> None:
        """Drop all rows but `root` and what is below it; that is the root from now on. Slots are rows then."""
        live = slice(root, self.end(root))
        columns, scores = self._columns[:, live].copy(), self._scores[:, live].copy()
        columns[_UP, 0] = 0
        columns[_DEPTH] -= columns[_DEPTH, 0]
        scores[_PATH] -= scores[_PATH, 0]
        columns[_SLOT] = self._row_of[: columns.shape[1]] = np.arange(columns.shape[1])
        self._set(columns, scores)

    def add(
        self,
        parents: list[int],
        ids: list[int],
        token_ids: list[int],
        scores: list[float],
        sources: list[int],
        edges: Float64s,
    ) -> None:
        """Add nodes, [N] of each, N >= 1. `parents` are slots, of nodes that are here or come before.

        `edges`, at most 0, are what path scores are sums of. Rows must not become more than `capacity`.
        """
        columns, row_of, sizes = self._columns, self._row_of, self._columns[_SIZE]
        old, new = columns.shape[1], len(parents)
        slots = slice(old, old + new)
        # A parent that is new itself has no row yet; what is read of row 0 instead is not used.
        row_of[slots] = 0
        parent_slots = np.array(parents)
        hosts = row_of[parent_slots]
        # Runs go behind what is below their hosts; of those that go to the same place, what hangs deeper comes first.
        keys = (hosts + sizes[hosts]) * self.capacity - hosts
        added, added_scores = np.empty((7, new), np.int64), np.empty((2, new))
        added[_TOKEN], added[_ID], added[_SOURCE] = token_ids, ids, sources
        added[_DEPTH], added[_SIZE] = columns[_DEPTH][hosts] + 1, 1
        added_scores[_PATH], added_scores[_EDGE] = self.path_scores[hosts] + edges, scores
        if max(parents) < old:
            order = keys.argsort(kind="stable")
        else:
            order = _nest([parent - old for parent in parents], hosts, keys, added, added_scores[_PATH], edges)

        added[_SLOT] = np.arange(old, old + new)
        self._weave(order, hosts, added, added_scores)
        rows = row_of[slots]
        self.nodes[_UP][rows] = rows - row_of[parent_slots]

    def _weave(self, order: Int64s, hosts: Int64s, added: Int64s, added_scores: Float64s) -> None:
        """Move rows apart, and put new ones between them: in `order`, each behind what is below its host."""
        columns, sizes = self._columns, self._columns[_SIZE]
        old, new = columns.shape[1], added.shape[1]
        every, is_old = np.arange(old + new), np.ones(old + new, np.bool_)
        rows = (hosts + sizes[hosts])[order] + every[:new]
        is_old[rows] = False
        moved, before = is_old.nonzero()[0], every[:old]
        taken = np.empty(old + new, np.int64)
        taken[moved], taken[rows] = before, order + old
        # Of old rows whatever depends on where others lie.
        columns[_UP] = moved - moved[before - columns[_UP]]
        fresh = np.bincount(hosts + 1, minlength=old + 1).cumsum()
        sizes += fresh[before + sizes] - fresh[:old]
        columns = np.concatenate((columns, added), axis=1).take(taken, axis=1)
        self._row_of[columns[_SLOT]] = every
        self._set(columns, np.concatenate((self._scores, added_scores), axis=1).take(taken, axis=1))

    def check_integrity(self) -> None:
        """Raise RuntimeError if the columns disagree."""
        slots = self._columns[_SLOT]
        if sorted(slots.tolist()) != list(range(len(self))) or (self._row_of[slots] != np.arange(len(self))).any():
            raise RuntimeError("a slot is not that of its row")
        if len(self) > self.capacity or self.end(0) != len(self):
            raise RuntimeError(f"{len(self)} rows of {self.capacity}, {self.end(0)} of them below the root")
        for row in range(1, len(self)):
            parent = row - int(self.nodes[1, row])
            if not 0 <= parent < row < self.end(row) <= self.end(parent):
                raise RuntimeError(f"row {row} does not hang below row {parent}")
            if self.nodes[2, row] != self.nodes[2, parent] + 1:
                raise RuntimeError(f"row {row} is not one deeper than its parent")
            if self.path_scores[row] > self.path_scores[parent]:
                raise RuntimeError(f"row {row} scores above its parent")


def _nest(parents: list[int], hosts: Int64s, keys: Int64s, added: Int64s, paths: Float64s, edges: Float64s) -> Int64s:
    """The order of new nodes some of which hang below others, and their depths, sizes, paths and hosts, put right.

    `parents` are indices of new nodes, or negative for one that has a row.
    """
    host_list, depths, path_list, edge_list = hosts.tolist(), added[_DEPTH].tolist(), paths.tolist(), edges.tolist()
    below: dict[int, list[int]] = {}
    tops: list[int] = []
    for node, parent in enumerate(parents):
        if parent < 0:
            tops.append(node)
            continue
        host_list[node] = host_list[parent]
        depths[node] = depths[parent] + 1
        path_list[node] = path_list[parent] + edge_list[node]
        if parent in below:
            below[parent].append(node)
        else:
            below[parent] = [node]
    sizes = [1] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            sizes[parents[node]] += sizes[node]
    # The last one first, as they are taken from the end.
    tops.sort(key=keys.tolist().__getitem__)
    tops.reverse()
    order: list[int] = []
    while tops:
        node = tops.pop()
        order.append(node)
        if node in below:
            tops += reversed(below[node])
    hosts[:], added[_DEPTH], added[_SIZE], paths[:] = host_list, depths, sizes, path_list
    return np.array(order)

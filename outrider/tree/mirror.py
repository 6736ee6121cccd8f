"""Verify's side of the replicated tree: takes what a draft sends, trusts nothing, and re-roots (docs/protocol.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from outrider.tree.messages import Float32s, Grow, Int32s, UInt8s

_MAX_ID = 2**32 - 1
"""Node ids travel as uint32."""

Calibrate = Callable[[Float32s, UInt8s], NDArray[np.float64]]
"""Edge scores and sources, shape [N], to calibrated edge log-probabilities, shape [N], at most 0."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Children of a committed token and which of them was committed next; shape [N] each."""

    scores: Float32s
    sources: UInt8s
    hits: NDArray[np.bool_]


def _as_sent(scores: Float32s, sources: UInt8s) -> NDArray[np.float64]:
    return scores.astype(np.float64)


class TreeMirror:
    """The tree of one request as verify knows it.

    Rows hold live nodes in an order where parents come first; row 0 is the deepest committed node known. `token`,
    `parent` (a row), `path_score` (calibrated, from row 0, at most 0), `depth` and `source` are arrays over
    `[num_rows]`. While committed tokens below row 0 are unresolved the tree offers nothing.

    `tokens` is the request's own list of committed tokens; the engine appends to it and then calls `commit`.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, max_nodes: int, calibrate: Calibrate = _as_sent) -> None:
        self.tokens = tokens
        self.dropped: Counter[str] = Counter()
        self.observations: list[Observation] = []
        self._vocab_size = vocab_size
        self._capacity = max_nodes + 1
        self.calibrate = calibrate
        self.ids = np.zeros(self._capacity, np.int64)
        self.parent = np.zeros(self._capacity, np.int32)
        self.token = np.zeros(self._capacity, np.int32)
        self.score = np.zeros(self._capacity, np.float32)
        self.path_score = np.zeros(self._capacity, np.float64)
        self.depth = np.zeros(self._capacity, np.int32)
        self.source = np.zeros(self._capacity, np.uint8)
        self.forget()

    def forget(self) -> None:
        """Drop the tree and its epoch, as when a session ends."""
        self._begin(epoch=0, base_len=len(self.tokens))

    def _begin(self, epoch: int, base_len: int) -> None:
        self.epoch = epoch
        self.base_len = base_len
        self.received_through = 0
        self.acked_len = 0
        self.num_rows = 1
        self.root_len = base_len
        """Committed tokens up to and including row 0."""
        self._row_of = {0: 0}
        self._children: dict[tuple[int, int], int] = {}
        self._num_observed = 1
        self.ids[0] = 0

    @property
    def num_unresolved(self) -> int:
        """Committed tokens below row 0 whose nodes are not here (yet)."""
        return len(self.tokens) - self.root_len

    @property
    def resolved_root(self) -> int | None:
        """Node id of the root; None while it is unresolved or no tree was received."""
        return int(self.ids[0]) if self.epoch and not self.num_unresolved else None

    @property
    def num_nodes(self) -> int:
        """Nodes below the root that a round may take."""
        return 0 if self.num_unresolved else self.num_rows - 1

    @property
    def path_scores(self) -> NDArray[np.float64]:
        """Calibrated path scores of the nodes that a round may take, parents first, shape [num_nodes]."""
        return self.path_score[1 : self.num_nodes + 1]

    def insert(self, grow: Grow) -> int:
        """Take a message; returns how many nodes entered. What is illegal is dropped and counted in `dropped`."""
        count = len(grow.token_ids)
        if not self._accepts(grow, count):
            return 0
        before = self.num_rows
        legal = self._legal(grow, count)
        edges = self.calibrate(np.where(legal, grow.scores, np.float32(0)), grow.sources)
        for index, (parent_id, token) in enumerate(zip(grow.parents.tolist(), grow.token_ids.tolist(), strict=True)):
            if legal[index]:
                self._append(grow, index, parent_id, token, edges[index])
        entered = self.num_rows - before
        self.received_through = max(self.received_through, grow.first_id + count - 1)
        self.acked_len = max(self.acked_len, min(grow.acked_len, len(self.tokens)))
        self._resolve()
        return entered

    def commit(self) -> None:
        """Follow tokens that were appended to `tokens` since the last call."""
        self._resolve()

    def child(self, row: int, token: int) -> int | None:
        """Row of the child of `row` that holds `token`."""
        return self._children.get((row, token))

    def _accepts(self, grow: Grow, count: int) -> bool:
        sizes = {len(grow.parents), len(grow.scores), len(grow.sources), count}
        # An id past the last would be told back in a commit that no message can carry.
        if len(sizes) > 1 or grow.first_id < 1 or grow.epoch < 1 or grow.first_id + count - 1 > _MAX_ID:
            return self._drop("malformed", max(count, 1))
        if grow.epoch < self.epoch:
            return self._drop("stale_epoch", count)
        if grow.epoch > self.epoch:
            if not 1 <= grow.base_len <= len(self.tokens):
                return self._drop("base_len", max(count, 1))
            self._begin(grow.epoch, grow.base_len)
        elif grow.base_len != self.base_len:
            return self._drop("base_len", max(count, 1))
        return True

    def _legal(self, grow: Grow, count: int) -> NDArray[np.bool_]:
        ids = np.arange(grow.first_id, grow.first_id + count)
        token_ok = (grow.token_ids >= 0) & (grow.token_ids < self._vocab_size)
        score_ok = (grow.scores <= 0) & np.isfinite(grow.scores)
        order_ok = grow.parents < ids
        self._drop("token", count - int(token_ok.sum()))
        self._drop("score", int((token_ok & ~score_ok).sum()))
        self._drop("parent_order", int((token_ok & score_ok & ~order_ok).sum()))
        legal: NDArray[np.bool_] = token_ok & score_ok & order_ok
        return legal

    def _append(self, grow: Grow, index: int, parent_id: int, token: int, edge: float) -> None:
        parent = self._row_of.get(parent_id)
        node_id = grow.first_id + index
        if parent is None:
            self._drop("dead_parent" if parent_id <= self.received_through else "unknown_parent", 1)
        elif node_id in self._row_of or (parent, token) in self._children:
            self._drop("duplicate", 1)
        elif self.num_rows == self._capacity:
            self._drop("too_many", 1)
        else:
            row = self.num_rows
            self.num_rows += 1
            self._row_of[node_id] = row
            self._children[parent, token] = row
            self.ids[row] = node_id
            self.parent[row] = parent
            self.token[row] = token
            self.score[row] = grow.scores[index]
            self.source[row] = grow.sources[index]
            self.path_score[row] = self.path_score[parent] + min(edge, 0.0)
            self.depth[row] = self.depth[parent] + 1

    def _drop(self, reason: str, count: int) -> bool:
        if count:
            self.dropped[reason] += count
        return False

    def _resolve(self) -> None:
        """Walk from row 0 along the committed tokens as far as nodes are known, and drop what lies off the path."""
        row = 0
        while self.root_len < len(self.tokens):
            token = self.tokens[self.root_len]
            below = self._children.get((row, token))
            self._observe(row, token)
            if below is None:
                break
            row = below
            self.root_len += 1
            self._num_observed = 1
        if row:
            self._reroot(row)

    def _observe(self, row: int, token: int) -> None:
        """Note which children of a committed node were right, once each, also when they come late."""
        rows = np.flatnonzero(self.parent[1 : self.num_rows] == row) + 1
        rows = rows[rows >= self._num_observed]
        if rows.size and self.epoch:
            hits = self.token[rows] == token
            self.observations.append(Observation(self.score[rows], self.source[rows], hits))
        self._num_observed = self.num_rows

    def _reroot(self, root: int) -> None:
        parents = self.parent[: self.num_rows].tolist()
        keep = [root]
        new_row = {root: 0}
        for row in range(root + 1, self.num_rows):
            if parents[row] in new_row:
                new_row[row] = len(keep)
                keep.append(row)
        rows = np.array(keep)
        count = len(keep)
        for array in (self.ids, self.token, self.score, self.source):
            array[:count] = array[rows]
        self.path_score[:count] = self.path_score[rows] - self.path_score[root]
        self.depth[:count] = self.depth[rows] - self.depth[root]
        self.parent[1:count] = [new_row[parents[row]] for row in keep[1:]]
        self.parent[0] = 0
        self._row_of = {node_id: row for row, node_id in enumerate(self.ids[:count].tolist())}
        pairs = zip(self.parent[1:count].tolist(), self.token[1:count].tolist(), strict=True)
        self._children = {pair: row for row, pair in enumerate(pairs, start=1)}
        self.num_rows = count
        if self._num_observed > count:
            self._num_observed = count

    def check_integrity(self) -> None:
        """Raise RuntimeError if the arrays and the indices over them disagree."""
        count = self.num_rows
        if any(later <= earlier for earlier, later in pairwise(sorted(self._row_of.values()))):
            raise RuntimeError("two ids share a row")
        if len(self._row_of) != count or len(self._children) != count - 1:
            raise RuntimeError(f"{count} rows, {len(self._row_of)} ids, {len(self._children)} children")
        for row in range(1, count):
            parent = int(self.parent[row])
            if not parent < row or self.depth[row] != self.depth[parent] + 1:
                raise RuntimeError(f"row {row} does not hang below row {parent}")
            if self.path_score[row] > self.path_score[parent]:
                raise RuntimeError(f"row {row} scores above its parent")


def token_array(tokens: Sequence[int]) -> Int32s:
    """Committed tokens as a message carries them."""
    return np.fromiter(tokens, np.int32, len(tokens))

"""Verify's side of the replicated tree: takes what a draft sends, trusts nothing, and re-roots (docs/protocol.md)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from outrider.tree.messages import Grow, Int32s
from outrider.tree.preorder import Float64s, Int64s, Preorder

_MAX_ID = 2**32 - 1
"""Node ids travel as uint32."""

_MOST_DEAD = 64
"""Rows more than live ones that may be dead: to drop them takes as long as to lay out a message."""

Calibrate = Callable[[Float64s, Int64s], Float64s]
"""Edge scores and sources, shape [N], to calibrated edge log-probabilities, shape [N], at most 0."""


class Observation(NamedTuple):
    """A child of a committed token, and whether it was committed next."""

    score: float
    """Edge score as sent."""
    source: int
    hit: bool


class _Entering(NamedTuple):
    """Nodes that get rows: what `Preorder.add` takes but for their edges."""

    parents: list[int]
    ids: list[int]
    token_ids: list[int]
    scores: list[float]
    sources: list[int]


def _as_sent(scores: Float64s, sources: Int64s) -> Float64s:
    return scores


class TreeMirror:
    """The tree of one request as verify knows it.

    Rows hold nodes in preorder, so a node's subtree is a run of rows: following a commit moves `root` along, and the
    tree is then rows `root` to `end`. Rows outside are dead, and go once they are many. While committed tokens
    below the root are unresolved the tree offers nothing. A node's slot is the same until rows are dropped.

    `tokens` is the request's own list of committed tokens; the engine appends to it and then calls `commit`.

    Attributes:
        root, end: row of the deepest committed node known; one past the last row of its tree.
        path_scores: float64 [num_rows], calibrated; less `root_score` it is the path's log-probability, at most 0.
        estranged: the two copies disagree about which epoch it is, which no honest draft's do. Nothing mends that but
            to open the request anew.
        nodes: int64 [3, num_rows]: token, number of rows up to the parent, and depth, from which `root_depth` goes off.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, max_nodes: int, calibrate: Calibrate = _as_sent) -> None:
        self.tokens = tokens
        self.dropped: Counter[str] = Counter()
        self.calibrate = calibrate
        self._vocab_size = vocab_size
        self._observations: list[Observation] = []
        self._capacity = max_nodes + 1
        self._rows = Preorder(2 * self._capacity + _MOST_DEAD)
        self._unread: list[Grow] = []
        self.root, self.root_score, self.root_depth, self._root_slot = 0, 0.0, 0, 0
        self.forget()

    def forget(self) -> None:
        """Drop the tree and its epoch, as when a session ends."""
        self._opened_len = len(self.tokens)
        self.estranged = False
        self._begin(epoch=0, base_len=len(self.tokens))

    def _begin(self, epoch: int, base_len: int) -> None:
        self.epoch = epoch
        self.base_len = base_len
        self.received_through = 0
        self.acked_len = 0
        self._claimed = 0
        self._unread.clear()
        self.num_unread = 0
        """Nodes that wait for `settle`."""
        self.root_len = base_len
        """Committed tokens up to and including the root."""
        self._steps: list[tuple[int, int]] = []
        self._observed: set[int] = set()
        self._rows.restart(self.tokens[base_len - 1] if base_len else 0)
        self._index()

    @property
    def ids(self) -> Int64s:
        """Node ids, of each row."""
        return self._rows.ids

    @property
    def scores(self) -> Float64s:
        """Edge scores as sent, of each row."""
        return self._rows.scores

    @property
    def sources(self) -> Int64s:
        """Who found the node, of each row."""
        return self._rows.sources

    @property
    def num_unresolved(self) -> int:
        """Committed tokens below the root whose nodes are not here (yet)."""
        return len(self.tokens) - self.root_len

    @property
    def resolved_root(self) -> int | None:
        """Node id of the root; None while it is unresolved or no tree was received."""
        return int(self.ids[self.root]) if self.epoch and not self.num_unresolved else None

    @property
    def num_nodes(self) -> int:
        """Nodes below the root that a round may take."""
        return 0 if len(self.tokens) > self.root_len else self.end - self.root - 1

    @property
    def log_probs(self) -> Float64s:
        """Of the paths to the nodes that a round may take, parents first, shape [num_nodes]."""
        first = self.root + 1
        log_probs: Float64s = self.path_scores[first : first + self.num_nodes] - self.root_score
        return log_probs

    def commit(self) -> None:
        """Follow tokens that were appended to `tokens` since the last call: a look into a dict for each of them."""
        self._walk()
        if self.num_unread and not self.num_nodes:
            self.settle()

    def insert(self, grow: Grow) -> int:
        """Take a message, and lay out all that waits; returns how many nodes entered."""
        entered = self.take(grow)
        return entered + self.settle() if self.num_unread else entered

    def take(self, grow: Grow) -> int:
        """Take a message; returns how many nodes entered. What is illegal is dropped and counted in `dropped`.

        Its nodes may wait for `settle`, as if it lay unread, but only while there are others that a round may take: so
        rows are laid out once for several messages, and when there is time.
        """
        count = len(grow.token_ids)
        if not self._accepts(grow, count):
            return 0
        if count:
            self._unread.append(grow)
            self.num_unread += count
        self._claimed = max(self._claimed, grow.first_id + count - 1)
        if not self._unread:
            self.received_through = self._claimed
        self.acked_len = max(self.acked_len, min(grow.acked_len, len(self.tokens)))
        return 0 if self.num_nodes and self.num_unread < self._capacity else self.settle()

    def settle(self) -> int:
        """Give nodes that wait their rows; returns how many entered."""
        self._observe()
        entered = self._enter() if self._unread else 0
        self._unread.clear()
        self.num_unread = 0
        self.received_through = self._claimed
        self._walk()
        return entered

    def _walk(self) -> None:
        slot, tokens, start = self._root_slot, self.tokens, self.root_len
        while self.root_len < len(tokens):
            token = tokens[self.root_len]
            self._steps.append((slot, token))
            below = self._children.get(slot << 32 | token)
            if below is None:
                break
            slot = below
            self.root_len += 1
        if slot != self._root_slot:
            self._root_slot = slot
            self.root = self._rows.row(slot)
            self.end = self._rows.end(self.root)
            self.root_score = self.path_scores.item(self.root)
            self.root_depth += self.root_len - start

    def child(self, row: int, token: int) -> int | None:
        """Row of the child of `row` that holds `token`."""
        slot = self._children.get(self._rows.slot(row) << 32 | token)
        return None if slot is None else self._rows.row(slot)

    def children(self, row: int) -> Iterator[int]:
        """Rows of the nodes right below a node."""
        child, end = row + 1, self._rows.end(row)
        while child < end:
            yield child
            child = self._rows.end(child)

    def take_observations(self) -> list[Observation]:
        """What commits have shown since the last call: each child of a committed token once, also when it came late."""
        self._observe()
        taken, self._observations = self._observations, []
        return taken

    def _accepts(self, grow: Grow, count: int) -> bool:
        sizes = {len(grow.parents), len(grow.scores), len(grow.sources), count}
        # An id past the last would be told back in a commit that no message can carry.
        if len(sizes) > 1 or grow.first_id < 1 or grow.epoch < 1 or grow.first_id + count - 1 > _MAX_ID:
            return self._drop("malformed", max(count, 1))
        if grow.epoch < self.epoch:
            return self._drop("stale_epoch", count)
        # What no draft can mean is no sign that the two have parted.
        if not 1 <= grow.base_len <= len(self.tokens):
            return self._drop("base_len", max(count, 1))
        if grow.epoch > self.epoch:
            # A draft begins each epoch at a longer base than the one before. One more is for a draft that goes past an
            # epoch which it never began.
            if grow.epoch > 2 + grow.base_len - self._opened_len:
                return self._estrange("epoch", max(count, 1))
            self._observe()
            self._begin(grow.epoch, grow.base_len)
        elif grow.base_len != self.base_len:
            return self._estrange("base_len", max(count, 1))
        return True

    def _enter(self) -> int:
        """Add what waits, as far as it is legal and new, below the live rows; returns how many nodes entered."""
        num_live = self.end - self.root
        if len(self._rows) > 2 * num_live + _MOST_DEAD:
            self._rows.keep(self.root)
            self._index()
        entering = _Entering([], [], [], [], [])
        most = len(self._rows) - num_live + self._capacity
        for grow in self._unread:
            self._admit(grow, entering, most)
            self.received_through = max(self.received_through, grow.first_id + len(grow.token_ids) - 1)
        if entering.parents:
            edges = self.calibrate(np.array(entering.scores), np.array(entering.sources))
            self._rows.add(*entering, edges)
            self._refer()
        return len(entering.parents)

    def _admit(self, grow: Grow, entering: _Entering, most: int) -> None:
        """Give nodes of a message that may enter their slots, which are less than `most`."""
        slots, children, faults, row_of = self._slots, self._children, self.dropped, self._rows.row
        root, end, num_rows = self.root, self.end, len(self._rows)
        parents, ids, token_ids, scores, sources = entering
        slot, vocab_size = len(slots), self._vocab_size
        columns = (grow.parents.tolist(), grow.token_ids.tolist(), grow.scores.tolist(), grow.sources.tolist())
        for node_id, (parent_id, token, score, source) in enumerate(zip(*columns, strict=True), grow.first_id):
            if not 0 <= token < vocab_size:
                faults["token"] += 1
            elif not -math.inf < score <= 0.0:
                faults["score"] += 1
            elif parent_id >= node_id:
                faults["parent_order"] += 1
            elif (parent := slots.get(parent_id)) is None or (parent < num_rows and not root <= row_of(parent) < end):
                faults["dead_parent" if parent_id <= self.received_through else "unknown_parent"] += 1
            elif (edge := parent << 32 | token) in children or node_id in slots:
                faults["duplicate"] += 1
            elif slot == most:
                faults["too_many"] += 1
            else:
                slots[node_id] = children[edge] = slot
                slot += 1
                parents.append(parent)
                ids.append(node_id)
                token_ids.append(token)
                scores.append(score)
                sources.append(source)

    def _index(self) -> None:
        """Find nodes by their ids, and children by their parents and tokens, after rows were dropped."""
        rows = self._rows
        self._slots = dict(zip(rows.ids.tolist(), range(len(rows)), strict=True))
        edges = rows.parent_slots << 32 | rows.nodes[0, 1:]
        self._children = dict(zip(edges.tolist(), range(1, len(rows)), strict=True))
        self._observed.intersection_update(self._slots)
        self.root, self.root_score, self.root_depth, self._root_slot = 0, 0.0, 0, 0
        self._refer()

    def _refer(self) -> None:
        """Rows were laid out anew."""
        self.end = self._rows.end(self.root)
        self.nodes: Int64s = self._rows.nodes
        self.path_scores: Float64s = self._rows.path_scores

    def _estrange(self, reason: str, count: int) -> bool:
        self.estranged = True
        return self._drop(reason, count)

    def _drop(self, reason: str, count: int) -> bool:
        if count:
            self.dropped[reason] += count
        return False

    def _observe(self) -> None:
        """Note which children of the committed nodes on the way were right."""
        if not self._steps:
            return
        rows, observed = self._rows, self._observed
        ids, sources, scores, tokens = rows.ids.item, rows.sources.item, rows.scores.item, rows.nodes[0].item
        for slot, token in self._steps:
            for child in self.children(rows.row(slot)):
                if (node_id := ids(child)) not in observed:
                    observed.add(node_id)
                    self._observations.append(Observation(scores(child), sources(child), tokens(child) == token))
        self._steps.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError if the rows and the indices over them disagree."""
        rows = self._rows
        rows.check_integrity()
        found = {node_id: rows.row(slot) for node_id, slot in self._slots.items()}
        if found != {node_id: row for row, node_id in enumerate(self.ids.tolist())}:
            raise RuntimeError("an id is not that of its row")
        edges = zip(rows.parent_slots.tolist(), self.nodes[0, 1:].tolist(), strict=True)
        if self._children != {slot << 32 | token: rows.slot(row) for row, (slot, token) in enumerate(edges, 1)}:
            raise RuntimeError("a child is not where it is looked for")
        if rows.slot(self.root) != self._root_slot or rows.end(self.root) != self.end:
            raise RuntimeError(f"the root is not in row {self.root}")


def token_array(tokens: Sequence[int]) -> Int32s:
    """Committed tokens as a message carries them."""
    return np.fromiter(tokens, np.int32, len(tokens))

"""Verify's side of the replicated tree: takes what a draft sends, trusts nothing, and re-roots (docs/protocol.md)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.tree.messages import Float32s, Grow, Int32s, UInt8s
from outrider.tree.preorder import preorder

_MAX_ID = 2**32 - 1
"""Node ids travel as uint32."""

_Node = tuple[int, int, float, int, float, int]
"""Id, token, edge score, source, path score, depth."""

Calibrate = Callable[[Float32s, UInt8s], NDArray[np.float64]]
"""Edge scores and sources, shape [N], to calibrated edge log-probabilities, shape [N], at most 0."""


class Observation(NamedTuple):
    """A child of a committed token, and whether it was committed next."""

    score: float
    """Edge score as sent."""
    source: int
    hit: bool


def _as_sent(scores: Float32s, sources: UInt8s) -> NDArray[np.float64]:
    return scores.astype(np.float64)


class TreeMirror:
    """The tree of one request as verify knows it.

    Rows hold nodes in preorder, so a node's subtree is a run of rows: following a commit moves `root` along, and the
    tree is then rows `root` to `end`. Rows outside are dead, and go when nodes are next added. While committed tokens
    below the root are unresolved the tree offers nothing.

    `tokens` is the request's own list of committed tokens; the engine appends to it and then calls `commit`.

    Attributes:
        root: row of the deepest committed node known.
        ids, scores, sources: of each row, node id, edge score as sent, and who found the node.
        path_scores: float64 [num_rows], calibrated; less `root_score` it is the path's log-probability, at most 0.
        estranged: the two copies disagree about which epoch it is, which no honest draft's do. Nothing mends that but
            to open the request anew.
        nodes: int32 [3, num_rows]: token, number of rows up to the parent, and depth, from which `root_depth` goes off.
    """

    def __init__(self, tokens: Sequence[int], vocab_size: int, max_nodes: int, calibrate: Calibrate = _as_sent) -> None:
        self.tokens = tokens
        self.dropped: Counter[str] = Counter()
        self.calibrate = calibrate
        self._vocab_size = vocab_size
        self._capacity = max_nodes + 1
        self._observations: list[Observation] = []
        self.root, self.root_score, self.root_depth = 0, 0.0, 0
        self._children: dict[tuple[int, int], int] = {}
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
        self.root_len = base_len
        """Committed tokens up to and including the root."""
        self._steps: list[tuple[int, int]] = []
        self._observed: set[int] = set()
        self._lay_out([(0, self.tokens[base_len - 1] if base_len else 0, 0.0, 0, 0.0, 0)], [0], [1])

    @property
    def num_unresolved(self) -> int:
        """Committed tokens below the root whose nodes are not here (yet)."""
        return len(self.tokens) - self.root_len

    @property
    def resolved_root(self) -> int | None:
        """Node id of the root; None while it is unresolved or no tree was received."""
        return self.ids[self.root] if self.epoch and not self.num_unresolved else None

    @property
    def end(self) -> int:
        """One past the last row of the tree."""
        return self._ends[self.root]

    @property
    def num_nodes(self) -> int:
        """Nodes below the root that a round may take."""
        return 0 if len(self.tokens) > self.root_len else self._ends[self.root] - self.root - 1

    @property
    def log_probs(self) -> NDArray[np.float64]:
        """Of the paths to the nodes that a round may take, parents first, shape [num_nodes]."""
        first = self.root + 1
        log_probs: NDArray[np.float64] = self.path_scores[first : first + self.num_nodes] - self.root_score
        return log_probs

    def commit(self) -> None:
        """Follow tokens that were appended to `tokens` since the last call: a look into a dict for each of them."""
        row, tokens, start = self.root, self.tokens, self.root_len
        while self.root_len < len(tokens):
            token = tokens[self.root_len]
            self._steps.append((row, token))
            below = self._children.get((row, token))
            if below is None:
                break
            row = below
            self.root_len += 1
        self.root = row
        self.root_score = float(self.path_scores[row])
        self.root_depth += self.root_len - start

    def insert(self, grow: Grow) -> int:
        """Take a message; returns how many nodes entered. What is illegal is dropped and counted in `dropped`."""
        self._observe()
        count = len(grow.token_ids)
        if not self._accepts(grow, count):
            return 0
        entered = self._enter(grow) if count else 0
        self.received_through = max(self.received_through, grow.first_id + count - 1)
        self.acked_len = max(self.acked_len, min(grow.acked_len, len(self.tokens)))
        self.commit()
        return entered

    def child(self, row: int, token: int) -> int | None:
        """Row of the child of `row` that holds `token`."""
        return self._children.get((row, token))

    def children(self, row: int) -> Iterator[int]:
        """Rows of the nodes right below a node."""
        child = row + 1
        while child < self._ends[row]:
            yield child
            child = self._ends[child]

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
            self._begin(grow.epoch, grow.base_len)
        elif grow.base_len != self.base_len:
            return self._estrange("base_len", max(count, 1))
        return True

    def _enter(self, grow: Grow) -> int:
        """Add what is legal and new below the live rows; returns how many nodes entered."""
        root, end = self.root, self.end
        num_live = end - root
        # A node's place: live rows from the root on, then the nodes that enter.
        places: dict[int, int] = {}
        children: set[tuple[int, int]] = set()
        parents: list[int] = []
        entered: list[int] = []
        columns = (grow.parents, grow.token_ids, grow.scores)
        for index, (parent_id, token, score) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            node_id = grow.first_id + index
            if (fault := self._fault(node_id, parent_id, token, score)) is not None:
                self._drop(fault, 1)
                continue
            place = places.get(parent_id)
            if place is None:
                row = self._row_of.get(parent_id, -1)
                if not root <= row < end:
                    self._drop("dead_parent" if parent_id <= self.received_through else "unknown_parent", 1)
                    continue
                place = row - root
            is_known = (place, token) in children or (place < num_live and (place + root, token) in self._children)
            if is_known or node_id in self._row_of:
                self._drop("duplicate", 1)
            elif num_live + len(entered) == self._capacity:
                self._drop("too_many", 1)
            else:
                places[node_id] = num_live + len(entered)
                children.add((place, token))
                parents.append(place)
                entered.append(index)
        if entered:
            self._arrange(grow, entered, parents)
        return len(entered)

    def _fault(self, node_id: int, parent_id: int, token: int, score: float) -> str | None:
        """Why a node is illegal wherever it hangs."""
        if not 0 <= token < self._vocab_size:
            return "token"
        if not -math.inf < score <= 0.0:
            return "score"
        return None if parent_id < node_id else "parent_order"

    def _arrange(self, grow: Grow, entered: list[int], new_parents: list[int]) -> None:
        """Bring the live rows and what enters into preorder, the root in row 0."""
        live = slice(self.root, self.end)
        tokens, ups, depths = self.nodes[:, live].tolist()
        paths = (self.path_scores[live] - self.root_score).tolist()
        nodes = [
            (node_id, token, score, source, path, depth - self.root_depth)
            for node_id, token, score, source, path, depth in zip(
                self.ids[live], tokens, self.scores[live], self.sources[live], paths, depths, strict=True
            )
        ]
        parents = [0, *(place - up for place, up in enumerate(ups[1:], start=1)), *new_parents]
        scores, sources = grow.scores[entered], grow.sources[entered]
        edges = np.minimum(self.calibrate(scores, sources), 0.0).tolist()
        tokens = grow.token_ids[entered].tolist()
        columns = (entered, new_parents, tokens, scores.tolist(), sources.tolist(), edges)
        for index, parent, token, score, source, edge in zip(*columns, strict=True):
            above = nodes[parent]
            nodes.append((grow.first_id + index, token, score, source, above[4] + edge, above[5] + 1))
        rows, ends = preorder(parents)
        ordered = [nodes[0]] * len(nodes)
        ups = [0] * len(nodes)
        for place, row in enumerate(rows):
            ordered[row] = nodes[place]
            ups[row] = row - rows[parents[place]]
        self._lay_out(ordered, ups, ends)

    def _lay_out(self, nodes: Sequence[_Node], ups: list[int], ends: list[int]) -> None:
        """Take nodes in preorder, the root first, the rows up to their parents, and where their subtrees end."""
        self.ids, tokens, self.scores, self.sources, paths, depths = zip(*nodes, strict=True)
        self.root, self.root_score, self.root_depth = 0, 0.0, 0
        self.path_scores: NDArray[np.float64] = np.array(paths)
        self.nodes: NDArray[np.int32] = np.array([tokens, ups, depths], np.int32)
        self._ends = ends
        self._row_of = {node_id: row for row, node_id in enumerate(self.ids)}
        self._children = {(row - up, token): row for row, (up, token) in enumerate(zip(ups, tokens, strict=True)) if up}
        self._observed.intersection_update(self._row_of)

    def _estrange(self, reason: str, count: int) -> bool:
        self.estranged = True
        return self._drop(reason, count)

    def _drop(self, reason: str, count: int) -> bool:
        if count:
            self.dropped[reason] += count
        return False

    def _observe(self) -> None:
        """Note which children of the committed nodes on the way were right."""
        tokens = self.nodes[0]
        for row, token in self._steps:
            for child in self.children(row):
                if self.ids[child] not in self._observed:
                    self._observed.add(self.ids[child])
                    hit = bool(tokens[child] == token)
                    self._observations.append(Observation(self.scores[child], self.sources[child], hit))
        self._steps.clear()

    def check_integrity(self) -> None:
        """Raise RuntimeError if the arrays and the indices over them disagree."""
        if len(self._row_of) != len(self._ends) or len(self._children) != len(self._ends) - 1:
            raise RuntimeError(f"{len(self._ends)} rows, {len(self._row_of)} ids, {len(self._children)} children")
        if sorted(self._row_of.values()) != list(range(len(self._ends))):
            raise RuntimeError("two ids share a row")
        for row in range(self.root + 1, self.end):
            parent = row - int(self.nodes[1, row])
            if not self.root <= parent < row < self._ends[row] <= self._ends[parent]:
                raise RuntimeError(f"row {row} does not hang below row {parent}")
            if self.nodes[2, row] != self.nodes[2, parent] + 1:
                raise RuntimeError(f"row {row} is not one deeper than its parent")
            if self.path_scores[row] > self.path_scores[parent]:
                raise RuntimeError(f"row {row} scores above its parent")


def token_array(tokens: Sequence[int]) -> Int32s:
    """Committed tokens as a message carries them."""
    return np.fromiter(tokens, np.int32, len(tokens))

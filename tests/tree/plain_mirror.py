"""Verify's tree kept in the plainest way: a dict of nodes, laid out from scratch whenever it is looked at."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from outrider.protocol.speculation import Grow


class Row(NamedTuple):
    """What the mirror says of a node."""

    node_id: int
    token: int
    parent_id: int
    depth: int
    log_prob: float
    score: float
    source: int


class PlainMirror:
    """One epoch of a tree whose base is the first token."""

    def __init__(self, tokens: list[int], vocab_size: int, max_nodes: int) -> None:
        self.tokens = tokens
        self.root = 0
        self.root_len = 1
        self.received_through = 0
        self.dropped: Counter[str] = Counter()
        self._vocab_size, self._max_nodes = vocab_size, max_nodes
        # Of each node its parent, token, score and source, in the order in which they came.
        self._nodes: dict[int, tuple[int, int, float, int]] = {0: (-1, tokens[0], 0.0, 0)}

    def insert(self, grow: Grow) -> None:
        """Take a message, node by node."""
        for index in range(len(grow.token_ids)):
            self._add(grow, index)
        self.received_through = max(self.received_through, grow.first_id + len(grow.token_ids) - 1)
        self.walk()

    def walk(self) -> None:
        """Follow committed tokens as far as there are nodes; what is off the path is dead."""
        while self.root_len < len(self.tokens):
            below = self._child(self.root, self.tokens[self.root_len])
            if below is None:
                return
            self.root = below
            self.root_len += 1
            self._nodes = {node: self._nodes[node] for node in self._nodes if self._is_live(node)}

    def rows(self) -> list[Row]:
        """All below the root, each before what is below it, siblings as they came."""
        rows: list[Row] = []
        self._lay_out(self.root, 1, 0.0, rows)
        return rows

    def _lay_out(self, node: int, depth: int, log_prob: float, rows: list[Row]) -> None:
        for child, (parent, token, edge, source) in self._nodes.items():
            if parent == node:
                rows.append(Row(child, token, parent, depth, log_prob + edge, edge, source))
                self._lay_out(child, depth + 1, log_prob + edge, rows)

    def _child(self, parent: int, token: int) -> int | None:
        found = [node for node, (above, held, _, _) in self._nodes.items() if (above, held) == (parent, token)]
        return found[0] if found else None

    def _is_live(self, node: int) -> bool:
        while node != self.root and node in self._nodes:
            node = self._nodes[node][0]
        return node == self.root

    def _add(self, grow: Grow, index: int) -> None:
        node, parent, token = grow.first_id + index, int(grow.parents[index]), int(grow.token_ids[index])
        score = float(grow.scores[index])
        fault = self._fault(grow, node, parent, token, score)
        if fault is None:
            self._nodes[node] = (parent, token, score, int(grow.sources[index]))
        else:
            self.dropped[fault] += 1

    def _fault(self, grow: Grow, node: int, parent: int, token: int, score: float) -> str | None:
        if not 0 <= token < self._vocab_size:
            return "token"
        if math.isnan(score) or score > 0 or math.isinf(score):
            return "score"
        if parent >= node:
            return "parent_order"
        if parent not in self._nodes:
            return "unknown_parent" if self.received_through < parent < grow.first_id else "dead_parent"
        if node in self._nodes or self._child(parent, token) is not None:
            return "duplicate"
        return "too_many" if len(self._nodes) > self._max_nodes else None

"""What could be run in a burst on a CPU: which nodes a step takes, and where. The rules of `kernels.frontier`."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import exp, inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.model.plan import FORCED, Burst

_Entry = tuple[float, int, int, int, int, int, int, int, float]
"""Minus the score, pool index, row of the burst, parent's slot, token, position, slot or -1, feature or -1, base."""


class Node(NamedTuple):
    """A node of a step."""

    place: int
    """Index in the pool."""
    row: int
    """Of the burst."""
    parent: int
    """Tree slot; -1 where all before the token is context."""
    token: int
    position: int
    slot: int
    feature: int
    """Row of the given features; -1 for what the parent's step returned."""
    base: float
    """Path score from which its candidates count."""


class HostFrontier:
    """The pool of one burst.

    `masks[row][slot]`, by row of the runner, are the tree slots that the node in a slot sees, itself included, as bits
    of an integer. They outlive the burst.
    """

    def __init__(self, burst: Burst, width: int, masks: list[list[int]], pool: tuple[int, int], lag: int) -> None:
        """`width`: nodes of a step. `pool`: index of the first candidate, and candidates of a node."""
        self._masks = masks
        self._rows = burst.rows.rows.tolist()
        self._floor, self._lag = burst.floor, lag
        self._width = width
        self._first, self.branching = pool
        self._free = [
            burst.rows.free[row, start:end].tolist()[::-1]
            for row, (start, end) in enumerate(zip(burst.rows.free_starts, burst.rows.free_ends, strict=True))
        ]
        for row, live in zip(self._rows, burst.rows.live, strict=True):
            bits = int.from_bytes(np.packbits(live, bitorder="little").tobytes(), "little")
            masks[row] = [mask & bits for mask in masks[row]]
        fields = burst.seeds.fields[:6].T.tolist()
        scores, bases = burst.seeds.fields[6:].view(np.float32).tolist()
        self._heap: list[_Entry] = [
            (-score, index, *seed, base)
            for index, (seed, score, base) in enumerate(zip(fields, scores, bases, strict=True))
        ]
        heapify(self._heap)

    def take(self) -> list[Node]:
        """The nodes of the next step, row by row, parents before children; they are in the pool no more."""
        heap = self._heap
        later: list[_Entry] = []
        taken: list[Node] = []
        own: set[tuple[int, int]] = set()
        late: set[tuple[int, int]] = set()
        while heap and len(taken) + len(later) < self._width and -heap[0][0] >= self._floor:
            entry = heappop(heap)
            _, index, row, parent, token, position, slot, feature, base = entry
            if (row, parent) in late or (self._lag and feature < 0 and (row, parent) in own):
                # It takes what its parent's step returns, which is this one.
                if slot >= 0:
                    late.add((row, slot))
                later.append(entry)
                continue
            if slot < 0:
                if not self._free[row]:
                    continue
                slot = self._free[row].pop()
            own.add((row, slot))
            masks = self._masks[self._rows[row]]
            masks[slot] = (masks[parent] if parent >= 0 else 0) | 1 << slot
            taken.append(Node(index, row, parent, token, position, slot, feature, base))
        for entry in later:
            heappush(heap, entry)
        taken.sort(key=lambda node: node.row)
        return taken

    def add(self, nodes: list[Node], place: int, tokens: list[list[int]], edges: list[list[float]]) -> None:
        """Candidates of a step's nodes; `place`: nodes of the steps before it, padding included."""
        for number, (node, children, scores) in enumerate(zip(nodes, tokens, edges, strict=True)):
            index = self._first + (place + number) * self.branching
            for child, (token, edge) in enumerate(zip(children, scores, strict=True)):
                score = node.base + edge
                if token >= 0 and score >= self._floor and score > -inf:
                    entry = (-score, index + child, node.row, node.slot, token, node.position + 1, -1, -1, score)
                    heappush(self._heap, entry)

    def sees(self, nodes: list[Node], region: int) -> NDArray[np.bool_]:
        """Which tree slots each node sees, bool [M, region]."""
        data = b"".join(self._masks[self._rows[node.row]][node.slot].to_bytes(region // 8, "little") for node in nodes)
        bits = np.frombuffer(data, np.uint8).reshape(len(nodes), -1)
        return np.unpackbits(bits, axis=1, bitorder="little").astype(np.bool_)

    @property
    def chance(self) -> float:
        """Sum of the chances of the nodes that the next step would take; infinite while one must be run."""
        best = sorted(self._heap)[: self._width]
        if best and -best[0][0] >= FORCED:
            return inf
        return sum(exp(-entry[0]) for entry in best)

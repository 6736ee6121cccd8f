"""The draft service's device in virtual time: its memory and its pool of nodes.

Pool, tree slots and masks follow the rules of `kernels.reference.frontier`. See `benchmarks.simulate.split`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulate.language import ORIGIN, Language
from outrider.drafting.model.burst import FORCED, Burst, BurstShape, Reroots, StepBucket

CONTEXT = 4096
_WORD = 64


class BurstMemory:
    """Memory that outlives a burst: for each row the states of its context and of its tree slots, and the slots' masks.

    `masks[row, slot]` has the slots that a node sees, its own included, as bits of words.
    """

    def __init__(self, shape: BurstShape, language: Language) -> None:
        self.language = language
        self.context = np.zeros((shape.num_rows, CONTEXT), np.uint64)
        self.states = np.zeros((shape.num_rows, shape.region), np.uint64)
        self.masks = np.zeros((shape.num_rows, shape.region, shape.region // _WORD), np.uint64)

    def extend(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Add tokens to the context."""
        before = self.context[row, start - 1 : start] if start else ORIGIN
        self.context[row, start : start + len(tokens)] = self.language.states(before, tokens)

    def write(self, nodes: NDArray[np.int64]) -> None:
        """Run nodes [5, N]: row, parent's slot or -1, token, position and slot. None is the parent of another one."""
        rows, parents, tokens, positions, slots = nodes
        inside = parents >= 0
        # Nothing comes before a first token; contexts have no position -1.
        above = np.where(positions > 0, self.context[rows, positions - 1], ORIGIN)
        above[inside] = self.states[rows[inside], parents[inside]]
        self.states[rows, slots] = self.language.follow(above, tokens)
        masks = np.where(inside[:, None], self.masks[rows, parents], np.uint64(0))
        masks[np.arange(len(slots)), slots // _WORD] |= np.uint64(1) << (slots % _WORD).astype(np.uint64)
        self.masks[rows, slots] = masks


class Pool:
    """The nodes that a burst could run, as a device keeps them: see kernels.reference.frontier."""

    def __init__(self, burst: Burst, bucket: StepBucket, shape: BurstShape, memory: BurstMemory) -> None:
        self._memory, self._shape, self._bucket = memory, shape, bucket
        capacity = shape.max_seeds + shape.max_steps * bucket.num_candidates
        self._entries = np.full((5, capacity), -1, np.int64)
        """Row of the burst, parent's slot, token, position, slot."""
        self._scores, self._bases = np.full((2, capacity), -np.inf, np.float32)
        self._floor, self._step = burst.floor, 0
        states = burst.rows
        self._rows = states.rows.astype(np.intp)
        self._free, self._next, self._end = states.free.copy(), states.free_starts.copy(), states.free_ends.copy()
        live = np.packbits(states.live, axis=1, bitorder="little").view(np.uint64)
        memory.masks[self._rows] &= live[:, None, :]
        self.add_seeds(0, burst.seeds.fields)

    def add_seeds(self, first: int, fields: NDArray[np.int32]) -> None:
        """Put seeds into the pool from index `first` on, forced ones included; `fields` are as in plan.Seeds.fields."""
        where = slice(first, first + fields.shape[1])
        self._entries[:, where] = fields[:5]
        self._scores[where], self._bases[where] = fields[6:].view(np.float32)

    def reroot(self, reroots: Reroots) -> None:
        """Do the same as reroot_pool, followed by add_seeds."""
        limit = self._shape.max_seeds + self._step * self._bucket.num_candidates
        scores, bases = self._scores[:limit], self._bases[:limit]
        ran = scores == -np.inf
        roots = zip(
            reroots.rows.tolist(),
            reroots.indices.tolist(),
            reroots.slots.tolist(),
            reroots.shifts,
            reroots.free,
            strict=True,
        )
        for row, root, slot, shift, free in roots:
            self._free[row, (np.arange(len(free)) + self._end[row]) % self._free.shape[1]] = free
            self._end[row] += len(free)
            if root >= 0:
                slot = int(self._entries[4, root]) if ran[root] else -1
            there = ((self._entries[0, :limit] == row) & ~ran).nonzero()[0]
            alive = there == root
            if slot >= 0:
                parents = self._entries[1, there]
                words = self._memory.masks[self._rows[row], parents, slot // _WORD]
                alive |= (parents >= 0) & ((words >> np.uint64(slot % _WORD)) & np.uint64(1)).astype(np.bool_)
            scores[there[~alive]] = -np.inf
            stays = there[alive]
            scores[stays] = np.minimum(scores[stays] - shift, 0.0)
            bases[stays] = np.minimum(bases[stays] - shift, 0.0)
        if reroots.seeds is not None:
            self.add_seeds(reroots.first_seed, reroots.seeds.fields)

    def run(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """Run a step. Return pool indices and slots [M], tokens and edges [M, k] of its nodes; -1 and -inf for none."""
        width, branching = self._bucket.width, self._bucket.branching
        picked, slots = np.full((2, width), -1, np.int32)
        tokens, edges = np.full((width, branching), -1, np.int32), np.full((width, branching), -np.inf, np.float32)
        chosen = self._place(self._choose())
        count = len(chosen)
        first = self._shape.max_seeds + self._step * width * branching
        self._step += 1
        if not count:
            return picked, slots, tokens, edges
        nodes = self._entries[:, chosen].copy()
        nodes[0] = self._rows[nodes[0]]
        self._write(nodes, self._scores[chosen])
        self._scores[chosen] = -np.inf
        picked[:count], slots[:count] = chosen, nodes[4]
        tokens[:count], chances = self._memory.language.candidates(self._memory.states[nodes[0], nodes[4]], branching)
        edges[:count] = self._memory.language.scores(chances)
        end = first + count * branching
        rows, positions = self._entries[0, chosen], self._entries[3, chosen]
        for field, values in ((0, rows), (1, nodes[4]), (3, positions + 1)):
            self._entries[field, first:end] = values.repeat(branching)
        self._entries[2, first:end] = tokens[:count].reshape(-1)
        scores = (self._bases[chosen][:, None] + edges[:count]).reshape(-1)
        self._scores[first:end] = self._bases[first:end] = scores
        return picked, slots, tokens, edges

    def _choose(self) -> NDArray[np.intp]:
        """Do the same as choose_entries."""
        limit = self._shape.max_seeds + self._step * self._bucket.num_candidates
        scores = self._scores[:limit]
        found = ((scores >= self._floor) & (scores > -np.inf)).nonzero()[0]
        full = (self._next >= self._end)[self._entries[0, found]]
        found = found[(self._entries[4, found] >= 0) | ~full]
        best: NDArray[np.intp] = found[(-scores[found]).argsort(kind="stable")[: self._bucket.width]]
        return best

    def _place(self, chosen: NDArray[np.intp]) -> NDArray[np.intp]:
        """Do the same as place_entries: keep the nodes that find a slot, row by row."""
        rows, slots = self._entries[0, chosen], self._entries[4, chosen]
        kept = np.ones(len(chosen), np.bool_)
        for row in np.unique(rows[slots < 0]).tolist():
            mine = ((rows == row) & (slots < 0)).nonzero()[0]
            start, room = int(self._next[row]), int(self._end[row] - self._next[row])
            kept[mine[room:]] = False
            mine = mine[:room]
            slots[mine] = self._free[row, (start + np.arange(len(mine))) % self._free.shape[1]]
            self._next[row] += len(mine)
        self._entries[4, chosen] = np.where(kept, slots, -1)
        order = rows[kept].argsort(kind="stable")
        placed: NDArray[np.intp] = chosen[kept][order]
        return placed

    def _write(self, nodes: NDArray[np.int64], scores: NDArray[np.float32]) -> None:
        """Run the chosen nodes, forced chains one token after the other."""
        forced = (scores >= FORCED).nonzero()[0].tolist()
        waves = np.zeros(nodes.shape[1], np.intp)
        for before, here in pairwise(forced):
            if nodes[0, before] == nodes[0, here] and nodes[1, here] == nodes[4, before]:
                waves[here] = waves[before] + 1
        for wave in range(int(waves.max()) + 1):
            self._memory.write(nodes[:, waves == wave])

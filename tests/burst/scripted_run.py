"""One burst of a scripted runner: what a device would choose, place and bring, and what the host must not have done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scripted_rows import NONE, Cell, check, feature_of

from benchmarks.split.bursts import RowState, row_list
from outrider.drafting.model.burst import (
    FORCED,
    NUM_SEED_FIELDS,
    Burst,
    BurstResult,
    Reroots,
    Seeds,
)

if TYPE_CHECKING:
    from scripted_runner import ScriptedRunner


@dataclass
class Candidate:
    row: int
    parent: int
    token: int
    position: int
    score: float
    slot: int = -1
    feature: float | None = None
    base: float | None = None
    """Path score that its candidates count from; None: they do not enter the pool."""


class Run:
    """One burst, run at once."""

    def __init__(self, runner: ScriptedRunner, burst: Burst) -> None:
        self.runner, self.burst, self.shape = runner, burst, runner.shape
        self.branching = runner.shape.branching_of(len(burst.rows))
        self.states = [runner.rows[state.row] for state in row_list(burst.rows)]
        self.free = [list(state.free) for state in row_list(burst.rows)]
        check(len({state.row for state in row_list(burst.rows)}) == len(burst.rows), "a row twice")
        for state in row_list(burst.rows):
            self._begin(state)
        self.num_seeds = 0
        self.pool: list[Candidate | None] = []
        self._add_seeds(burst.seeds, burst.features)
        self.pool += [None] * (self.shape.max_seeds - len(self.pool))
        self.first_step = 0
        self.ran_in: dict[int, int] = {}  # by pool index, the tree slot
        check(np.isfinite(burst.floor), "nothing is below the floor")
        check(0 < burst.num_steps <= self.shape.max_steps, f"{burst.num_steps} steps")
        check(0 < burst.width <= self.shape.max_width, f"width {burst.width}")

    def _begin(self, state: RowState) -> None:
        row = self.runner.rows[state.row]
        check(state.live.shape == (self.shape.region,), "live has another shape")
        check(state.context_len == len(row.context), f"{len(row.context)} context tokens, told {state.context_len}")
        live = set(np.flatnonzero(state.live).tolist())
        check(live <= row.cells.keys(), f"live slots {live - row.cells.keys()} hold nothing")
        check(all(0 <= slot < self.shape.region for slot in state.free), "a free slot is outside the region")
        check(not live & set(state.free) and len(set(state.free)) == len(state.free), "a live slot is called free")
        row.cells = {slot: cell for slot, cell in row.cells.items() if slot in live}
        for cell in row.cells.values():
            cell.ancestors &= live

    def _add_seeds(self, seeds: Seeds, parts: Sequence[object]) -> None:
        """They follow those that there are."""
        burst, count, first = self.burst, len(seeds.rows), self.num_seeds
        features = [float(value) for part in parts for value in np.asarray(part)[:, 0]]
        self.num_seeds += count
        check(self.num_seeds <= self.shape.max_seeds, f"{self.num_seeds} seeds")
        check(seeds.fields.shape == (NUM_SEED_FIELDS, count), "seeds of another shape")
        forced = seeds.scores >= FORCED
        waiting = sum(node is not None and node.score >= FORCED for node in self.pool)
        check(int(forced.sum()) + waiting <= burst.width, "more forced seeds than a step takes")
        for index in range(count):
            row, feature = int(seeds.rows[index]), int(seeds.features[index])
            score = float(seeds.scores[index])
            last = index + 1 == count or not forced[index + 1] or seeds.rows[index + 1] != row
            check(bool(forced[index]) == (seeds.slots[index] >= 0), "only forced seeds have slots")
            check(forced[index] or score <= 0.0, f"seed score {score}")
            # Committed tokens bring nothing; the root, if it is there, comes behind them.
            is_root = forced[index] and last and seeds.bases[index] != NONE
            base = (0.0 if is_root else None) if forced[index] else score
            check(seeds.bases[index] == (NONE if base is None else base), f"base {seeds.bases[index]}")
            check(seeds.slots[index] not in self.free[row], "a forced slot is called free")
            value = features[feature] if feature >= 0 else None
            seed = Candidate(
                row, int(seeds.parents[index]), int(seeds.tokens[index]), int(seeds.positions[index]), score,
                int(seeds.slots[index]), value, base,
            )  # fmt: skip
            self.pool[first + index : first + index + 1] = [seed]
            held = self.states[row].cells.get(seed.slot)
            if held is not None and (held.token, held.position) != (seed.token, seed.position):
                del self.states[row].cells[seed.slot]  # of a node that died

    def result(self, num_steps: int = 0) -> BurstResult:
        """What so many more steps bring; the burst's own if 0."""
        burst, branching = self.burst, self.branching
        num_steps = num_steps or burst.num_steps
        self.first_step += num_steps
        first = len(self.pool)
        size = (num_steps, burst.width)
        picked, slots = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        tokens = np.full((*size, branching), -1, np.int32)
        scores = np.full((*size, branching), NONE, np.float32)
        for step in range(num_steps):
            found: list[Candidate | None] = []
            placed: set[tuple[int, int]] = set()
            for place, index in enumerate(self._choose()):
                node = self.pool[index]
                # What takes its parent's own feature runs in a later step than the parent.
                is_late = node is not None and self.shape.lag and node.feature is None
                if node is None or (is_late and (node.row, node.parent) in placed):
                    if node is not None and node.slot >= 0:
                        placed.add((node.row, node.slot))
                    continue
                if not self._place(node):
                    continue
                placed.add((node.row, node.slot))
                picked[step, place], slots[step, place] = index, node.slot
            for place in range(burst.width):
                found += self._children(int(picked[step, place]), tokens[step, place], scores[step, place])
            for index in picked[step].tolist():
                if index >= 0:
                    node = self.pool[index]
                    assert node is not None
                    self.ran_in[index] = node.slot
                    self.pool[index] = None
            self.pool += found
        return BurstResult(first, picked, slots, tokens, scores)

    def reroot(self, reroots: Reroots) -> None:
        """Rows have new roots, and more slots."""
        check(len(set(reroots.rows.tolist())) == len(reroots.rows) == len(reroots.free), "a row twice")
        for row, index, slot, shift, free in zip(
            reroots.rows.tolist(),
            reroots.indices.tolist(),
            reroots.slots.tolist(),
            reroots.shifts.tolist(),
            reroots.free,
            strict=True,
        ):
            self._reroot(row, index, slot, shift, free.tolist())
        if reroots.seeds is not None:
            check(reroots.first_seed == self.num_seeds, f"further seeds from {reroots.first_seed} on")
            check(bool((reroots.seeds.scores >= FORCED).all()), "a further seed that is not forced")
            self._add_seeds(reroots.seeds, reroots.features)

    def _reroot(self, row: int, index: int, slot: int, shift: float, free: list[int]) -> None:
        state = self.states[row]
        check(index < 0 or slot < 0, f"a new root with pool index {index} and slot {slot}")
        check(shift <= 0, f"a new root of score {shift}")
        root = self.ran_in.get(index, -1) if index >= 0 else slot
        check(root < 0 or root in state.cells, f"a new root in slot {root}, which holds nothing")
        for place, node in enumerate(self.pool):
            if node is None or node.row != row:
                continue
            check(node.score < FORCED, "a new root while committed tokens are still to be run")
            seen = state.cells[node.parent].ancestors if node.parent >= 0 else set()
            if (root >= 0 and root in seen) or place == index:
                node.score = min(node.score - shift, 0.0)
                node.base = None if node.base is None else min(node.base - shift, 0.0)
            else:
                self.pool[place] = None
        for one in free:
            check(one not in self.free[row], f"slot {one} is free twice")
            state.cells.pop(one, None)
            check(one != root, "the new root's slot is called free")
        for node in self.pool:
            if node is not None and node.row == row and node.parent >= 0:
                seen = state.cells[node.parent].ancestors if node.parent in state.cells else {-1}
                check(seen <= state.cells.keys(), "a node that may be run sees a slot that is free")
        self.free[row] += free

    def ranked(self, rows: list[int]) -> dict[int, list[tuple[tuple[int, ...], float]]]:
        """By row of the runner, paths and scores of what may be run, best first."""
        found: dict[int, list[tuple[tuple[int, ...], float]]] = {}
        for row in rows:
            nodes = [
                (-node.score, index, node)
                for index, node in enumerate(self.pool)
                if node is not None and node.row == row and node.score >= self.burst.floor
            ]
            paths = [((*self._tokens_above(node), node.token), node.score) for _, _, node in sorted(nodes)]
            found[row_list(self.burst.rows)[row].row] = paths
        return found

    def _tokens_above(self, node: Candidate) -> tuple[int, ...]:
        state = self.states[node.row]
        if node.parent < 0:
            return self.runner._path(state)
        for above in self.pool:  # committed tokens that are still to be run
            if above is not None and (above.row, above.slot) == (node.row, node.parent):
                return (*self._tokens_above(above), above.token)
        cells = [state.cells[slot] for slot in state.cells[node.parent].ancestors]
        return self.runner._path(state) + tuple(cell.token for cell in sorted(cells, key=lambda cell: cell.position))

    def _choose(self) -> list[int]:
        ranked = [
            (-node.score, index)
            for index, node in enumerate(self.pool)
            if node is not None and node.score >= self.burst.floor and (node.slot >= 0 or self.free[node.row])
        ]
        return [index for _, index in sorted(ranked)[: self.burst.width]]

    def _place(self, node: Candidate) -> bool:
        state = self.states[node.row]
        if node.slot < 0:
            if not self.free[node.row]:
                return False
            node.slot = self.free[node.row].pop(0)
            check(node.slot not in state.cells, f"slot {node.slot} is in use")
        ancestors = {node.slot}
        if node.parent >= 0:
            check(node.parent in state.cells, f"parent slot {node.parent} holds nothing")
            ancestors |= state.cells[node.parent].ancestors
        state.cells[node.slot] = Cell(node.token, node.position, ancestors)
        path = self._path(node)
        if node.feature is not None:
            check(node.feature == feature_of(path[:-1]), f"the feature is not that of {path[:-1]}")
        elif self.shape.lag:
            check(node.parent >= 0, "no true feature, and no parent whose own it could take")
        self.runner.ran.append(path)
        return True

    def _path(self, node: Candidate) -> tuple[int, ...]:
        """All tokens that the node sees, which must be those before it, each once."""
        state, lag = self.states[node.row], self.shape.lag
        cells = sorted((state.cells[slot] for slot in state.cells[node.slot].ancestors), key=lambda cell: cell.position)
        length = row_list(self.burst.rows)[node.row].context_len + lag
        positions = [cell.position for cell in cells]
        check(
            positions == list(range(length, node.position + 1)),
            f"a node at {node.position} sees positions {positions} behind a context of {length}",
        )
        return self.runner._path(state) + tuple(cell.token for cell in cells)

    def _children(self, index: int, tokens: NDArray[np.int32], scores: NDArray[np.float32]) -> list[Candidate | None]:
        none: list[Candidate | None] = [None] * self.branching
        if index < 0:
            return none
        node = self.pool[index]
        assert node is not None
        guesses = self.runner.model(self._path(node))[: self.branching]
        for place, (token, score) in enumerate(guesses):
            tokens[place], scores[place] = token, score
            if node.base is not None:
                path = np.float32(node.base) + np.float32(score)
                none[place] = Candidate(node.row, node.slot, token, node.position + 1, float(path), base=float(path))
        return none

"""A runner whose "model" is a function of the token path, so that every result can be checked.

It keeps the tokens where a real one keeps KV, and complains about whatever would have made a real one compute nonsense:
ancestors that are not visible, slots filled twice, pages that are missing, features of the wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draft_service.burst.plan import (
    FORCED,
    NUM_SEED_FIELDS,
    Burst,
    BurstResult,
    BurstShape,
    Extent,
    Reroots,
    RowState,
)
from outrider.sampling.params import SamplingParams
from outrider.tree.messages import Features

Guesses = list[tuple[int, float]]
"""Tokens and their natural-log chances, the best first."""
Model = Callable[[tuple[int, ...]], Guesses]
"""What may follow a path of tokens."""

NONE = -np.inf


class RunnerFault(AssertionError):
    """The host broke the contract."""


def check(condition: object, text: str) -> None:
    if not condition:
        raise RunnerFault(text)


def feature_of(tokens: Sequence[int]) -> float:
    """The target's feature of the last of these tokens."""
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 1000003
    return float(value)


def features_message(request: int, tokens: Sequence[int], start: int, count: int) -> Features:
    """True features of positions start, ... of a sequence."""
    values = np.array([[feature_of(tokens[: start + index + 1])] for index in range(count)], np.float32)
    return Features(request, start, count, False, values.tobytes(), "float32")


@dataclass
class Cell:
    """What a tree slot holds."""

    token: int
    position: int
    ancestors: set[int]


@dataclass
class Row:
    sampling: SamplingParams
    pages: list[int] = field(default_factory=list)
    context: list[int] = field(default_factory=list)
    """Tokens by KV position; for a drafter of features from the second token on."""
    cells: dict[int, Cell] = field(default_factory=dict)


class Pending:
    """A burst whose result is handed out when the test says so."""

    def __init__(self, result: BurstResult | Exception, run: _Run | None = None) -> None:
        self._result = result
        self._run = run
        self.ready = True

    def done(self) -> bool:
        return self.ready

    @property
    def step_seconds(self) -> float:
        return 0.0

    def nearly(self, interrupted: Callable[[], bool]) -> bool:
        return self.over(interrupted)

    def go_on(self, num_steps: int, reroots: Reroots | None = None) -> Pending | None:
        if self._run is None:
            return None
        return self._run.runner.go_on(self, self._run, num_steps, reroots)

    def over(self, interrupted: Callable[[], bool]) -> bool:
        return self.ready or not interrupted()

    def wait(self) -> BurstResult:
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class ScriptedRunner:
    """See BurstRunner."""

    def __init__(self, model: Model, shape: BurstShape, *, first_token: int | None = None) -> None:
        self.shape = shape
        self.model = model
        self.rows: dict[int, Row] = {}
        self.bursts: list[Burst] = []
        self.ran: list[tuple[int, ...]] = []
        """Paths of all nodes that were run, roots and committed tokens included."""
        self.extended: list[tuple[int, int]] = []
        """Rows and tokens."""
        self.forwards: list[int] = []
        """Rows that each forward of them had."""
        self.parts: list[int] = []
        """Steps of further parts of bursts."""
        self.survivors: list[dict[int, list[tuple[tuple[int, ...], float]]]] = []
        """Each time that a burst was told of new roots: by row, paths and scores of what it may run, best first."""
        self.page_owner: dict[int, int] = {}
        self.launch_fault: Exception | None = None
        self.wait_fault: Callable[[Burst], Exception | None] = lambda burst: None
        self.extend_fault: Exception | None = None
        self.pending: Pending | None = None
        self.auto_ready = True
        self.first_tokens: dict[int, int] = {}
        """By row, the token without KV of a drafter of features; the test knows it."""
        self._first_token = first_token

    def open(self, row: int, sampling: SamplingParams) -> None:
        check(0 <= row < self.shape.num_rows and row not in self.rows, f"row {row} is not free")
        self.rows[row] = Row(sampling)

    def close(self, row: int) -> None:
        check(row in self.rows, f"row {row} is not open")
        del self.rows[row]
        self.page_owner = {page: owner for page, owner in self.page_owner.items() if owner != row}

    def set_pages(self, row: int, pages: Sequence[int]) -> None:
        held = self.rows[row].pages
        check(list(pages[: len(held)]) == held, "pages only grow at their end")
        for page in pages:
            check(0 <= page < self.shape.num_pages, f"page {page} is none")
            check(self.page_owner.setdefault(page, row) == row, f"page {page} is another row's")
        self.rows[row].pages = list(pages)

    def extend(self, extents: Sequence[Extent]) -> None:
        if self.extend_fault:
            raise self.extend_fault
        check(len({extent.row for extent in extents}) == len(extents) > 0, "each row once")
        self.forwards.append(len(extents))
        for extent in extents:
            self._extend(*extent)

    def _extend(self, row: int, tokens: Sequence[int], start: int, parts: Sequence[object]) -> None:
        state, lag = self.rows[row], self.shape.lag
        check(len(tokens) > 0, "nothing to extend by")
        check(len(state.context) == start - lag, f"{len(state.context)} context tokens, extended from {start}")
        self._check_room(row, len(state.context) + len(tokens))
        if lag:
            features = np.concatenate([np.asarray(part) for part in parts])
            check(len(features) == len(tokens), "a feature for each token")
            for index, value in enumerate(features[:, 0].tolist()):
                path = self._path(state) + tuple(tokens[:index])
                check(value == feature_of(path), f"feature {value} is not that of {path}")
        else:
            check(not parts, "features for a model that takes none")
        state.context += list(tokens)
        self.extended.append((row, len(tokens)))

    def move(self, row: int, slots: Sequence[int], position: int) -> None:
        state = self.rows[row]
        check(position == len(state.context), f"{len(state.context)} context tokens, moved to {position}")
        self._check_room(row, position + len(slots))
        for slot in slots:
            cell = state.cells[slot]
            check(cell.position - self.shape.lag == len(state.context), "moved to another position")
            state.context.append(cell.token)

    def project(self, features: object) -> object:
        if isinstance(features, Features):
            return np.frombuffer(features.data, np.float32).reshape(features.count, -1).copy()
        return features

    def join(self, parts: Sequence[object]) -> object:
        check(len(parts) > 1, "nothing to join")
        return np.concatenate([np.asarray(part) for part in parts])

    def launch(self, burst: Burst) -> Pending:
        if self.launch_fault:
            raise self.launch_fault
        fault = self.wait_fault(burst)
        self.bursts.append(burst)
        run = None if fault else _Run(self, burst)
        self.pending = Pending(fault or run.result(), run)
        self.pending.ready = self.auto_ready
        return self.pending

    def go_on(self, pending: Pending, run: _Run, num_steps: int, reroots: Reroots | None) -> Pending:
        if self.launch_fault:
            raise self.launch_fault
        check(pending is self.pending, "only the part queued last goes on")
        check(run.first_step + num_steps <= self.shape.max_steps, f"{run.first_step + num_steps} steps")
        self.parts.append(num_steps)
        if reroots is not None:
            run.reroot(reroots)
            self.survivors.append(run.ranked(reroots.rows.tolist()))
        fault = self.wait_fault(run.burst)
        self.pending = Pending(fault or run.result(num_steps), run)
        self.pending.ready = self.auto_ready
        return self.pending

    def _check_room(self, row: int, length: int) -> None:
        check(length <= len(self.rows[row].pages) * self.shape.page_size, f"row {row} has no page for {length} tokens")
        check(length <= self.shape.max_context, f"{length} context tokens")

    def _path(self, state: Row) -> tuple[int, ...]:
        head = (self._first_token,) if self.shape.lag and self._first_token is not None else ()
        return (*head, *state.context)


@dataclass
class _Candidate:
    row: int
    parent: int
    token: int
    position: int
    score: float
    slot: int = -1
    feature: float | None = None
    base: float | None = None
    """Path score that its candidates count from; None: they do not enter the pool."""


class _Run:
    """One burst, run at once."""

    def __init__(self, runner: ScriptedRunner, burst: Burst) -> None:
        self.runner, self.burst, self.shape = runner, burst, runner.shape
        self.states = [runner.rows[state.row] for state in burst.rows]
        self.free = [list(state.free) for state in burst.rows]
        check(len({state.row for state in burst.rows}) == len(burst.rows), "a row twice")
        for state in burst.rows:
            self._begin(state)
        self.features = [float(value) for part in burst.features for value in np.asarray(part)[:, 0]]
        self.pool: list[_Candidate | None] = list(self._seeds())
        self.first_step = 0
        self.ran_in: dict[int, int] = {}  # by pool index, the tree slot
        check(np.isfinite(burst.floor), "nothing is below the floor")
        check(0 < burst.num_steps <= self.shape.max_steps, f"{burst.num_steps} steps")
        check(0 < burst.width <= self.shape.max_width, f"width {burst.width}")
        check(len(self.pool) <= self.shape.max_seeds, f"{len(self.pool)} seeds")

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

    def _seeds(self) -> list[_Candidate]:
        seeds, burst = self.burst.seeds, self.burst
        made = []
        count = len(seeds.rows)
        check(seeds.fields.shape == (NUM_SEED_FIELDS, count), "seeds of another shape")
        forced = seeds.scores >= FORCED
        check(int(forced.sum()) <= burst.width, "more forced seeds than a step takes")
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
            value = self.features[feature] if feature >= 0 else None
            made.append(
                _Candidate(
                    row, int(seeds.parents[index]), int(seeds.tokens[index]), int(seeds.positions[index]), score,
                    int(seeds.slots[index]), value, base,
                )
            )  # fmt: skip
        return made

    def result(self, num_steps: int = 0) -> BurstResult:
        """What so many more steps bring; the burst's own if 0."""
        burst, branching = self.burst, self.shape.branching
        num_steps = num_steps or burst.num_steps
        self.first_step += num_steps
        first = len(self.pool)
        size = (num_steps, burst.width)
        picked, slots = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
        tokens = np.full((*size, branching), -1, np.int32)
        scores = np.full((*size, branching), NONE, np.float32)
        for step in range(num_steps):
            found: list[_Candidate | None] = []
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

    def reroot(self, told: Reroots) -> None:
        """Rows have new roots, and more slots."""
        check(len(set(told.rows.tolist())) == len(told.rows) == len(told.free), "a row twice")
        for row, index, slot, shift, free in zip(
            told.rows.tolist(), told.indices.tolist(), told.slots.tolist(), told.shifts.tolist(), told.free, strict=True
        ):
            self._reroot(row, index, slot, shift, free.tolist())

    def _reroot(self, row: int, index: int, slot: int, shift: float, free: list[int]) -> None:
        state = self.states[row]
        check((index >= 0) != (slot >= 0), f"a new root with pool index {index} and slot {slot}")
        check(shift <= 0, f"a new root of score {shift}")
        root = self.ran_in.get(index, -1) if index >= 0 else slot
        check(root < 0 or root in state.cells, f"a new root in slot {root}, which holds nothing")
        for place, node in enumerate(self.pool):
            if node is None or node.row != row:
                continue
            check(node.score < FORCED, "a new root while committed tokens are still to be run")
            seen = state.cells[node.parent].ancestors if node.parent >= 0 else set()
            if root in seen or place == index:
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
            found[self.burst.rows[row].row] = paths
        return found

    def _tokens_above(self, node: _Candidate) -> tuple[int, ...]:
        state = self.states[node.row]
        cells = [state.cells[slot] for slot in state.cells[node.parent].ancestors] if node.parent >= 0 else []
        tokens = [cell.token for cell in sorted(cells, key=lambda cell: cell.position)]
        return self.runner._path(state) + tuple(tokens)

    def _choose(self) -> list[int]:
        ranked = [
            (-node.score, index)
            for index, node in enumerate(self.pool)
            if node is not None and node.score >= self.burst.floor
        ]
        return [index for _, index in sorted(ranked)[: self.burst.width]]

    def _place(self, node: _Candidate) -> bool:
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

    def _path(self, node: _Candidate) -> tuple[int, ...]:
        """All tokens that the node sees, which must be those before it, each once."""
        state, lag = self.states[node.row], self.shape.lag
        cells = sorted((state.cells[slot] for slot in state.cells[node.slot].ancestors), key=lambda cell: cell.position)
        length = self.burst.rows[node.row].context_len + lag
        positions = [cell.position for cell in cells]
        check(
            positions == list(range(length, node.position + 1)),
            f"a node at {node.position} sees positions {positions} behind a context of {length}",
        )
        return self.runner._path(state) + tuple(cell.token for cell in cells)

    def _children(self, index: int, tokens: NDArray[np.int32], scores: NDArray[np.float32]) -> list[_Candidate | None]:
        none: list[_Candidate | None] = [None] * self.shape.branching
        if index < 0:
            return none
        node = self.pool[index]
        assert node is not None
        guesses = self.runner.model(self._path(node))[: self.shape.branching]
        for place, (token, score) in enumerate(guesses):
            tokens[place], scores[place] = token, score
            if node.base is not None:
                path = np.float32(node.base) + np.float32(score)
                none[place] = _Candidate(node.row, node.slot, token, node.position + 1, float(path), base=float(path))
        return none

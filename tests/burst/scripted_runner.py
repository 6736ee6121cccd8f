"""A runner whose "model" is a function of the token path, so that every result can be checked.

It keeps the tokens where a real one keeps KV, and complains about whatever would have made a real one compute nonsense:
ancestors that are not visible, slots filled twice, pages that are missing, features of the wrong token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
from scripted_rows import Model, Row, check, feature_of
from scripted_run import Run

from outrider.drafting.model.burst import Burst, BurstResult, BurstShape, Extent, Reroots
from outrider.protocol.speculation import Features
from outrider.sampling.params import SamplingParams


class PendingBurst:
    """A burst whose result is handed out when the test says so."""

    ran = True

    def __init__(self, result: BurstResult | Exception, run: Run | None = None) -> None:
        self._result = result
        self._run = run
        self.ready = True

    def done(self) -> bool:
        return self.ready

    @property
    def step_seconds(self) -> float:
        return 0.0 if self._run is None else self._run.runner.step_seconds

    def wait_until_nearly_over(self, interrupted: Callable[[], bool]) -> bool:
        return self.wait_until_over(interrupted)

    def go_on(self, num_steps: int, reroots: Reroots | None = None) -> PendingBurst | None:
        if self._run is None:
            return None
        return self._run.runner.go_on(self, self._run, num_steps, reroots)

    def wait_until_over(self, interrupted: Callable[[], bool]) -> bool:
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
        """Each time that a burst was given new roots: by row, paths and scores of what it may run, best first."""
        self.reroot_steps: list[int] = []
        """Steps of the burst before each of those."""
        self.page_owner: dict[int, int] = {}
        self.launch_seconds = self.step_seconds = 0.0
        """What it takes the host to queue a part, and the device for a step, which is not known yet."""
        self.launch_fault: Exception | None = None
        self.wait_fault: Callable[[Burst], Exception | None] = lambda burst: None
        self.extend_fault: Exception | None = None
        self.pending: PendingBurst | None = None
        self.auto_ready = True
        self.first_tokens: dict[int, int] = {}
        """By row, the token without KV of a drafter of features; the test knows it."""
        self._first_token = first_token

    def at_work(self) -> AbstractContextManager[None]:
        """See BurstRunner."""
        return nullcontext()

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

    def _extend(self, row: int, tokens: Sequence[int], start: int, parts: Sequence[object], gap: int) -> None:
        state, lag = self.rows[row], self.shape.lag
        check(not gap, "what rows know is not cut")
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

    def launch(self, burst: Burst) -> PendingBurst:
        if self.launch_fault:
            raise self.launch_fault
        fault = self.wait_fault(burst)
        self.bursts.append(burst)
        run = None if fault else Run(self, burst)
        self.pending = PendingBurst(fault or run.result(), run)
        self.pending.ready = self.auto_ready
        return self.pending

    def go_on(self, pending: PendingBurst, run: Run, num_steps: int, reroots: Reroots | None) -> PendingBurst:
        if self.launch_fault:
            raise self.launch_fault
        check(pending is self.pending, "only the part queued last goes on")
        check(run.first_step + num_steps <= self.shape.max_steps, f"{run.first_step + num_steps} steps")
        self.parts.append(num_steps)
        if reroots is not None:
            run.reroot(reroots)
            self.survivors.append(run.ranked(reroots.rows.tolist()))
            self.reroot_steps.append(run.first_step)
        fault = self.wait_fault(run.burst)
        self.pending = PendingBurst(fault or run.result(num_steps), run)
        self.pending.ready = self.auto_ready
        return self.pending

    def _check_room(self, row: int, length: int) -> None:
        check(length <= len(self.rows[row].pages) * self.shape.page_size, f"row {row} has no page for {length} tokens")
        check(length <= self.shape.max_context, f"{length} context tokens")

    def _path(self, state: Row) -> tuple[int, ...]:
        head = (self._first_token,) if self.shape.lag and self._first_token is not None else ()
        return (*head, *state.context)

"""Bursts as single rows and columns, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.model.burst import FORCED, NUM_SEED_FIELDS, RowStates, Seeds


@dataclass(frozen=True, slots=True)
class RowState:
    """One request of a burst; see RowStates."""

    row: int
    context_len: int
    live: NDArray[np.bool_]
    free: Sequence[int]


def row_states(states: Sequence[RowState], region: int) -> RowStates:
    """Return the same states as arrays."""
    free = np.zeros((len(states), region), np.int32)
    for target, state in zip(free, states, strict=True):
        target[: len(state.free)] = state.free
    return RowStates(
        rows=np.array([state.row for state in states], np.int32),
        context_lens=np.array([state.context_len for state in states], np.int32),
        live=np.array([state.live for state in states], np.bool_).reshape(len(states), region),
        free=free,
        free_starts=np.zeros(len(states), np.int32),
        free_ends=np.array([len(state.free) for state in states], np.int32),
    )


def row_list(states: RowStates) -> list[RowState]:
    """Return the rows of the arrays."""
    return [
        RowState(int(row), int(length), live, free[start:end].tolist())
        for row, length, live, free, start, end in zip(
            states.rows,
            states.context_lens,
            states.live,
            states.free,
            states.free_starts,
            states.free_ends,
            strict=True,
        )
    ]


def seeds_of(**columns: NDArray[np.int32] | NDArray[np.float32]) -> Seeds:
    """Make seeds from separate columns; `bases` follow from the others."""
    seeds = Seeds(np.empty((NUM_SEED_FIELDS, len(columns["rows"])), np.int32))
    for name, values in columns.items():
        getattr(seeds, name)[:] = values
    forced = seeds.scores >= FORCED
    more = np.zeros_like(forced)
    more[:-1] = forced[1:] & (seeds.rows[1:] == seeds.rows[:-1])
    seeds.bases[:] = np.where(forced, np.where(more, np.float32(-np.inf), np.float32(0.0)), seeds.scores)
    return seeds

"""How far trees grow inside the round, and how many of their nodes a round takes: as much as measured times pay for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verify_service.engine.round import Growth

PROBE_ROUNDS = 48
"""Number of rounds of which one grows the largest tree, to measure what more nodes would bring."""
MAX_PROBE_ROUNDS = 1024
"""Largest such number, reached where drafting has not paid for a long time."""
_PROBE_SHARE = 0.01
"""Part of all time that probes may take: where many tokens cost much, as with experts, they are rarer."""
PROBE_LENGTH = 4
"""Length of such a trial, in rounds, where nothing is grown otherwise."""
TRIAL_ROUNDS = 24
"""Number of first rounds of each size that grow the largest tree."""
LEAST_TRIAL_ROUNDS = 8
"""The same where next to nothing is accepted, and the fewest where such a tree costs much, as with experts."""
_DEAR_TRIAL = 2.0
"""Seconds of a round with the largest tree over those of a plain one, above which there are fewer such rounds."""
_USELESS = 0.05
"""Draft tokens that a request accepts in a round, below which that is so."""
_LOOK_EVERY = 8
"""Rounds between two searches for the best growth: a search takes as long as the choice of a round's nodes."""
_LEARN = 0.02
_LEARN_FROM_PROBES = 0.15
"""Weights of the newest round in the averages, where every round is drafted for and where only probes are."""
_LEARN_COST = 0.05
"""Weight of the newest round in the average time of growth by as many levels."""
_HYSTERESIS = 1.02


@dataclass(frozen=True, slots=True)
class GrowthCost:
    """Device seconds of the drafting behind a round."""

    fixed: float
    """Seconds of the drafter's forward over committed tokens, which gives the first level, and of the choice."""
    step: float
    """Seconds of every further level."""

    def seconds(self, num_steps: int) -> float:
        """Seconds of growth by so many levels; 0 for none."""
        return self.fixed + (num_steps - 1) * self.step if num_steps else 0.0


class _FollowedCost:
    """The cost of growth behind rounds of one size: measured at start, followed while serving.

    Other services may start on the device just then, and make it look dear.
    """

    def __init__(self, measured: GrowthCost, max_steps: int) -> None:
        self.cost = measured
        self._levels = np.arange(max_steps + 1, dtype=np.float64)
        self._seconds: NDArray[np.float64] = np.array([measured.seconds(steps) for steps in range(max_steps + 1)])
        """By levels, the average of what rounds took; as measured, where none have."""
        self._weights: NDArray[np.float64] = np.zeros(max_steps + 1)
        self._weights[[1, max_steps]] = 1.0

    def observe(self, num_steps: int, seconds: float) -> None:
        """Follow the growth behind a round, which took so long."""
        known = self.cost.seconds(num_steps)
        # Now and then the drafter catches up with a prompt meanwhile.
        seconds = min(max(seconds, 0.5 * known), 2.0 * known)
        self._weights[num_steps] = min(self._weights[num_steps] + 1.0, 1.0 / _LEARN_COST)
        self._seconds[num_steps] += (seconds - self._seconds[num_steps]) / self._weights[num_steps]
        self.cost = self._line()

    def _line(self) -> GrowthCost:
        """The line that lies closest to all averages."""
        total = self._weights.sum()
        levels, seconds = (float(self._weights @ values) / total for values in (self._levels, self._seconds))
        beside = self._weights * (self._levels - levels)
        spread = float(beside @ self._levels)
        step = max(float(beside @ self._seconds) / spread, 0.0) if spread else 0.0
        return GrowthCost(max(seconds + (1.0 - levels) * step, 0.0), step)


class VerifiedNodes(NamedTuple):
    """The nodes that a round verified of the trees that had grown for it, of all its requests."""

    scores: Sequence[float]
    """Path scores; -inf for nodes that did not grow on the device."""
    depths: Sequence[int]
    """Below the root, which has 0."""
    accepted: Sequence[int]
    """Indices of those that were accepted, without those that draft services had found."""

    def accepted_within(self, num_steps: int, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """[num_steps + 1, sizes], how many of them had been there had trees grown by fewer levels, or nodes.

        With d levels trees have the best nodes that are no deeper: an accepted node needs none of the others' places.
        """
        levels, depths = np.arange(num_steps + 1), np.array(self.depths, np.int64)
        scores, accepted = np.array(self.scores), np.array(self.accepted, np.int64)
        is_better = scores > scores[accepted][:, None]
        # [accepted, levels], the better ones no deeper than each level.
        ranks = is_better.astype(np.float64) @ (depths[:, None] <= levels)
        is_there = (ranks[:, :, None] < sizes) & (depths[accepted][:, None] <= levels)[:, :, None]
        return np.asarray(is_there.sum(axis=0), np.float64)


class _Table:
    """Draft tokens accepted in rounds of one size, on average, by levels and nodes of growth.

    Those that draft services had found are counted apart: they are accepted with any growth, and with none.
    """

    def __init__(self, num_steps: int, sizes: Sequence[int], cost: GrowthCost, trial_rounds: int) -> None:
        self.sizes = np.array(sizes)
        self.followed = _FollowedCost(cost, num_steps)
        self.trial_rounds = trial_rounds
        self.accepted: NDArray[np.float64] = np.zeros((num_steps + 1, len(sizes)))
        self.num_seen = np.zeros(self.accepted.shape, np.int64)
        self.num_given = 0.0
        """Draft tokens accepted that draft services had found, on average."""
        self.num_rounds = 0
        self.since_probe = 0
        self.probe_every = PROBE_ROUNDS
        self.choice: tuple[int, int] = (num_steps, len(sizes) - 1)
        """The best growth found by the last search: levels, and index of a number of nodes."""
        self.num_new = 0
        """Rounds that were learned from since that search."""

    def learn(self, num_steps: int, size: int, accepted: NDArray[np.float64], num_given: int) -> None:
        """Learn from a round that took the `size`-th number of nodes of `num_steps` levels.

        `accepted`: [levels, sizes], draft tokens that it would have accepted with that growth, beside `num_given`.
        """
        seen = self.num_seen[: num_steps + 1, : size + 1]
        seen += 1
        rate = np.maximum(_LEARN if self.choice[0] else _LEARN_FROM_PROBES, 1.0 / seen)
        known = self.accepted[: num_steps + 1, : size + 1]
        known += rate * (accepted[: num_steps + 1, : size + 1] - known)
        self.num_given += float(rate[0, 0]) * (num_given - self.num_given)

    def is_useless(self, num_rows: int) -> bool:
        """Whether rounds of so many requests have shown that next to nothing is accepted."""
        seen = int(self.num_seen[-1, -1])
        return seen >= LEAST_TRIAL_ROUNDS and float(self.accepted[-1, -1]) < _USELESS * num_rows


class GrowthPolicy:
    """Picks levels and nodes that maximise expected committed tokens over measured time.

    Every round that was drafted for tells what less would have brought: an accepted node of depth d would have been
    there with d levels or more, if it was among the best of all requests' nodes that are no deeper than so many levels.
    What more would bring is tried now and then.
    """

    def __init__(
        self,
        round_seconds: Callable[[int], float],
        costs: Callable[[int], GrowthCost],
        sizes: Callable[[int], Sequence[int]],
        max_steps: int,
        fixed: Growth | None = None,
    ) -> None:
        """`round_seconds`: seconds of a round by its tokens. `costs`: measured cost of growth by a round's requests.

        `sizes`: numbers of nodes that fill rounds of so many requests, ascending. `fixed`: growth of every round, where
        none is to be chosen.
        """
        self._round_seconds = round_seconds
        self._costs = costs
        self._sizes = sizes
        self._max_steps = max_steps
        self._fixed = fixed
        self._tables: dict[int, _Table] = {}

    def plan(self, num_rows: int) -> Growth | None:
        """The growth behind a round of so many requests, for the next round; None for none."""
        sizes = self._sizes(num_rows)
        if not sizes:
            return None
        if self._fixed is not None:
            return Growth(self._fixed.num_steps, min(self._fixed.num_nodes, sizes[-1]))
        table = self._table(num_rows)
        table.num_rounds += 1
        table.since_probe += 1
        is_trial = table.num_rounds <= table.trial_rounds and not table.is_useless(num_rows)
        if is_trial or table.since_probe >= table.probe_every:
            if table.choice[0] or table.since_probe >= table.probe_every + PROBE_LENGTH - 1:
                table.since_probe = 0
            return Growth(self._max_steps, sizes[-1])
        is_over = table.num_rounds == table.trial_rounds + 2
        if is_over and not table.num_seen.any():
            # None of its rounds had a request that could take its tree, which says nothing of the drafter.
            table.num_rounds = 0
            return None
        if table.num_new >= _LOOK_EVERY or is_over:
            table.choice = self._best(table, num_rows)
            table.num_new = 0
            every = PROBE_ROUNDS if table.choice[0] else min(4 * table.probe_every, MAX_PROBE_ROUNDS)
            table.probe_every = max(every, self._least_probe_rounds(table, num_rows))
        steps, size = table.choice
        return Growth(steps, sizes[size]) if steps else None

    def rests(self, num_rows: int, num_rounds: int = 1) -> bool:
        """Whether `plan` would give None so many times, without a look at what was learned. Changes nothing."""
        if not self._sizes(num_rows):
            return True
        table = self._tables.get(num_rows)
        if self._fixed is not None or table is None or table.choice[0] or table.num_new >= _LOOK_EVERY:
            return False
        return table.num_rounds > table.trial_rounds + 1 and table.since_probe + num_rounds < table.probe_every

    def note(
        self,
        growth: Growth,
        num_rows: int,
        nodes: VerifiedNodes,
        num_given: int = 0,
        seconds: float | None = None,
    ) -> None:
        """Learn from a round that verified a growth.

        `num_given`: accepted nodes that draft services had found, over all requests. `seconds`: of the growth, if it
        was measured.
        """
        table = self._table(num_rows)
        if seconds is not None:
            table.followed.observe(growth.num_steps, seconds)
        size = int(np.searchsorted(table.sizes, growth.num_nodes))
        if size >= len(table.sizes):
            return
        table.learn(growth.num_steps, size, nodes.accepted_within(self._max_steps, table.sizes), num_given)
        table.num_new += 1 if table.choice[0] else _LOOK_EVERY

    def _table(self, num_rows: int) -> _Table:
        sizes = self._sizes(num_rows)
        found = self._tables.get(num_rows)
        if found is None or len(found.sizes) != len(sizes):
            useless = [table for rows, table in self._tables.items() if table.is_useless(rows)]
            cost = self._costs(num_rows)
            dear = self._largest_seconds(num_rows, sizes[-1], cost) / (_DEAR_TRIAL * self._round_seconds(num_rows))
            trial_rounds = max(LEAST_TRIAL_ROUNDS, round(TRIAL_ROUNDS / max(dear, 1.0)))
            found = self._tables[num_rows] = _Table(self._max_steps, sizes, cost, trial_rounds)
            if useless:
                # What is useless in some rounds is so in all: it is tried now and then, and not at first.
                found.num_rounds, found.choice = found.trial_rounds + 2, (0, 0)
                found.probe_every = max(table.probe_every for table in useless)
        return found

    def _largest_seconds(self, num_rows: int, most_nodes: int, cost: GrowthCost) -> float:
        """Seconds of a round that grows the largest tree, and verifies as large a one."""
        return self._round_seconds(num_rows + most_nodes) + cost.seconds(self._max_steps)

    def _least_probe_rounds(self, table: _Table, num_rows: int) -> int:
        """Rounds from one probe to the next in which probes take no more than their share of the time."""
        cost, (steps, size) = table.followed.cost, table.choice
        usual = self._round_seconds(num_rows + int(table.sizes[size]) if steps else num_rows) + cost.seconds(steps)
        probe = self._largest_seconds(num_rows, int(table.sizes[-1]), cost)
        return round((1 if steps else PROBE_LENGTH) * (probe / usual - 1.0) / _PROBE_SHARE)

    def _best(self, table: _Table, num_rows: int) -> tuple[int, int]:
        cost = table.followed.cost
        drafting = np.array([cost.seconds(steps) for steps in range(self._max_steps + 1)])
        verifying = np.array([self._round_seconds(num_rows + int(size)) for size in table.sizes])
        committed = num_rows + table.num_given
        rates = (committed + table.accepted) / (drafting[:, None] + verifying[None, :])
        rates[table.num_seen == 0] = 0.0
        rates[0] = committed / self._round_seconds(num_rows)
        steps, size = np.unravel_index(int(rates.argmax()), rates.shape)
        if rates[table.choice] * _HYSTERESIS >= rates[steps, size]:
            return table.choice
        return int(steps), int(size)

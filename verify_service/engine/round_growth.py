"""Trees that grow inside the round: which of them the next round takes, and what is grown behind it.

`GrowthPolicy` decides, by measurements alone, how far trees grow and how many of their nodes pay; `RoundGrowth` decides
whose trees grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verify_service.engine.memory import Memory
from verify_service.engine.round import Entry, Growth, Nodes, Result, TakenTrees, count_given, follow
from verify_service.engine.scheduler import EngineLimits
from verify_service.executors.round_drafts import GrowthCost, RoundDrafts

PROBE_ROUNDS = 48
"""One of this many rounds, the probe, grows the largest tree, to measure what more nodes would bring."""
MAX_PROBE_ROUNDS = 1024
"""Largest number of rounds from probe to probe, reached if drafting has not paid for a long time."""
_PROBE_SHARE = 0.01
"""Part of all time that probes may take: if many tokens cost much, as with experts, probes are rarer."""
PROBE_LENGTH = 4
"""Length of a probe, in rounds, if nothing is grown otherwise."""
TRIAL_ROUNDS = 24
"""Number of first rounds of each size that grow the largest tree."""
LEAST_TRIAL_ROUNDS = 8
"""Least number of these: if next to nothing is accepted, or such a tree costs much, as with experts."""
_COSTLY_TRIAL = 2.0
"""Cost of a round with the largest tree, in plain rounds, above which there are fewer first rounds."""
_USELESS = 0.05
"""Draft tokens accepted per request and round, below which next to nothing is accepted."""
_SEARCH_EVERY = 8
"""Rounds between two searches for the best growth: a search takes as long as the choice of a round's nodes."""
_LEARN = 0.02
_LEARN_FROM_PROBES = 0.15
"""Weights of the newest round in the averages: if every round is drafted for, and if only probes are."""
_LEARN_COST = 0.05
"""Weight of the newest round in the average time of growth by as many levels."""
_HYSTERESIS = 1.02

_LEAST_SHARE = 8
"""Least value of the limit on the nodes of one request among many, if that many grew."""
_SHARE_FACTOR = 4
"""Limit on the nodes of one request among many, as a multiple of an even share."""
WARM_ROUNDS = 64
"""Rounds before a probe that store features though nothing grows, so that the drafter has those of recent tokens."""
_MASKED_NODES = 32
"""Most nodes of a round that the host masks while the device waits: some 15 us each, in a round of some 5 ms."""

Allowed = Callable[[Sequence[Entry], Sequence[Nodes]], Sequence[Nodes]]
"""Returns those of each entry's nodes that the entry may have."""


class _FollowedCost:
    """The cost of growth behind rounds of one size: measured at start, followed while serving.

    Other services may start on the device during the measurement, and make growth look expensive.
    """

    def __init__(self, measured: GrowthCost, max_steps: int) -> None:
        self.cost = measured
        self._levels = np.arange(max_steps + 1, dtype=np.float64)
        self._seconds: NDArray[np.float64] = np.array([measured.seconds(steps) for steps in range(max_steps + 1)])
        """Average time of growth by levels; as measured at start if no round has grown as many."""
        self._weights: NDArray[np.float64] = np.zeros(max_steps + 1)
        self._weights[[1, max_steps]] = 1.0

    def observe(self, num_steps: int, seconds: float) -> None:
        """Learn that growth by `num_steps` levels behind a round took so long."""
        known = self.cost.seconds(num_steps)
        # Now and then the drafter catches up with a prompt in that time.
        seconds = min(max(seconds, 0.5 * known), 2.0 * known)
        self._weights[num_steps] = min(self._weights[num_steps] + 1.0, 1.0 / _LEARN_COST)
        self._seconds[num_steps] += (seconds - self._seconds[num_steps]) / self._weights[num_steps]
        self.cost = self._line()

    def _line(self) -> GrowthCost:
        """Fit a line to all averages."""
        total = self._weights.sum()
        levels, seconds = (float(self._weights @ values) / total for values in (self._levels, self._seconds))
        beside = self._weights * (self._levels - levels)
        spread = float(beside @ self._levels)
        step = max(float(beside @ self._seconds) / spread, 0.0) if spread else 0.0
        return GrowthCost(max(seconds + (1.0 - levels) * step, 0.0), step)


class VerifiedNodes(NamedTuple):
    """The nodes that a round verified for all requests whose trees had grown for it."""

    scores: Sequence[float]
    """Path scores; -inf for nodes that did not grow on the device."""
    depths: Sequence[int]
    """Depths below the root, which has 0."""
    accepted: Sequence[int]
    """Indices of the accepted nodes, without those that draft services had found."""

    def accepted_within(self, num_steps: int, sizes: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return [num_steps + 1, sizes]: how many nodes would be accepted had trees grown by fewer levels or nodes.

        With d levels, a round has the best of the nodes that are no deeper: deeper ones take no places from them.
        """
        levels, depths = np.arange(num_steps + 1), np.array(self.depths, np.int64)
        scores, accepted = np.array(self.scores), np.array(self.accepted, np.int64)
        is_better = scores > scores[accepted][:, None]
        # [accepted, levels]: how many better nodes are no deeper than each level.
        ranks = is_better.astype(np.float64) @ (depths[:, None] <= levels)
        is_there = (ranks[:, :, None] < sizes) & (depths[accepted][:, None] <= levels)[:, :, None]
        return np.asarray(is_there.sum(axis=0), np.float64)


class _AcceptanceTable:
    """Average draft tokens accepted in rounds of one size, by levels and nodes of growth.

    Tokens that draft services had found are counted apart: they are accepted with any growth, and with none.
    """

    def __init__(self, num_steps: int, sizes: Sequence[int], cost: GrowthCost, trial_rounds: int) -> None:
        self.sizes = np.array(sizes)
        self.followed = _FollowedCost(cost, num_steps)
        self.trial_rounds = trial_rounds
        self.accepted: NDArray[np.float64] = np.zeros((num_steps + 1, len(sizes)))
        self.num_seen = np.zeros(self.accepted.shape, np.int64)
        self.num_given = 0.0
        """Average draft tokens accepted that draft services had found."""
        self.num_rounds = 0
        self.since_probe = 0
        self.probe_every = PROBE_ROUNDS
        self.choice: tuple[int, int] = (num_steps, len(sizes) - 1)
        """The best growth found by the last search: levels, and index of a number of nodes."""
        self.num_new = 0
        """Rounds learned from since that search; if only probes are drafted for, each counts as `_SEARCH_EVERY`."""

    def learn(self, num_steps: int, size: int, accepted: NDArray[np.float64], num_given: int) -> None:
        """Learn from a round that took the `size`-th number of nodes of `num_steps` levels.

        `accepted`: [levels, sizes], draft tokens that the round would have accepted with each growth, beside
        `num_given`.
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


@dataclass(eq=False, repr=False)
class GrowthPolicy:
    """Picks levels and nodes that maximise expected committed tokens over measured time.

    Every round that was drafted for shows what less growth would have brought: with fewer levels and nodes, an accepted
    node would have been there if it is no deeper than the levels, and among the best of all requests' nodes that are no
    deeper either. What more growth would bring is tried now and then.
    """

    round_seconds: Callable[[int], float]
    """Seconds of a round by its tokens."""
    costs: Callable[[int], GrowthCost]
    """Measured cost of growth by the number of a round's requests."""
    sizes: Callable[[int], Sequence[int]]
    """Numbers of nodes that fill rounds of so many requests, ascending."""
    max_steps: int
    fixed: Growth | None = None
    """Growth of every round, if it is not to be chosen."""
    _tables: dict[int, _AcceptanceTable] = field(default_factory=dict)

    def plan(self, num_rows: int) -> Growth | None:
        """Return the growth behind a round of `num_rows` requests, for the next round; None for no growth."""
        sizes = self.sizes(num_rows)
        if not sizes:
            return None
        if self.fixed is not None:
            return Growth(self.fixed.num_steps, min(self.fixed.num_nodes, sizes[-1]))
        table = self._table(num_rows)
        table.num_rounds += 1
        table.since_probe += 1
        is_trial = table.num_rounds <= table.trial_rounds and not table.is_useless(num_rows)
        if is_trial or table.since_probe >= table.probe_every:
            if table.choice[0] or table.since_probe >= table.probe_every + PROBE_LENGTH - 1:
                table.since_probe = 0
            return Growth(self.max_steps, sizes[-1])
        is_over = table.num_rounds == table.trial_rounds + 2
        if is_over and not table.num_seen.any():
            # In none of these rounds could a request take its tree, which says nothing about the drafter.
            table.num_rounds = 0
            return None
        if table.num_new >= _SEARCH_EVERY or is_over:
            table.choice = self._best(table, num_rows)
            table.num_new = 0
            every = PROBE_ROUNDS if table.choice[0] else min(4 * table.probe_every, MAX_PROBE_ROUNDS)
            table.probe_every = max(every, self._least_probe_rounds(table, num_rows))
        steps, size = table.choice
        return Growth(steps, sizes[size]) if steps else None

    def rests(self, num_rows: int, num_rounds: int = 1) -> bool:
        """Whether the next `num_rounds` calls of `plan` would return None, without a new search. Changes nothing."""
        if not self.sizes(num_rows):
            return True
        table = self._tables.get(num_rows)
        if self.fixed is not None or table is None or table.choice[0] or table.num_new >= _SEARCH_EVERY:
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

        `num_given`: accepted nodes that draft services had found, over all requests. `seconds`: time of the growth, if
        measured.
        """
        table = self._table(num_rows)
        if seconds is not None:
            table.followed.observe(growth.num_steps, seconds)
        size = int(np.searchsorted(table.sizes, growth.num_nodes))
        table.learn(growth.num_steps, size, nodes.accepted_within(self.max_steps, table.sizes), num_given)
        table.num_new += 1 if table.choice[0] else _SEARCH_EVERY

    def _table(self, num_rows: int) -> _AcceptanceTable:
        found = self._tables.get(num_rows)
        if found is None:
            useless = [table for rows, table in self._tables.items() if table.is_useless(rows)]
            sizes, cost = self.sizes(num_rows), self.costs(num_rows)
            relative_cost = self._largest_seconds(num_rows, sizes[-1], cost) / (
                _COSTLY_TRIAL * self.round_seconds(num_rows)
            )
            trial_rounds = max(LEAST_TRIAL_ROUNDS, round(TRIAL_ROUNDS / max(relative_cost, 1.0)))
            found = self._tables[num_rows] = _AcceptanceTable(self.max_steps, sizes, cost, trial_rounds)
            if useless:
                # A drafter that is useless in rounds of one size is so in all: try it now and then, but not at first.
                found.num_rounds, found.choice = found.trial_rounds + 2, (0, 0)
                found.probe_every = max(table.probe_every for table in useless)
        return found

    def _largest_seconds(self, num_rows: int, most_nodes: int, cost: GrowthCost) -> float:
        """Return the seconds of a round that grows the largest tree, and verifies one as large."""
        return self.round_seconds(num_rows + most_nodes) + cost.seconds(self.max_steps)

    def _least_probe_rounds(self, table: _AcceptanceTable, num_rows: int) -> int:
        """Return the fewest rounds from probe to probe with which probes take no more than their share of the time."""
        cost, (steps, size) = table.followed.cost, table.choice
        usual = self.round_seconds(num_rows + int(table.sizes[size]) if steps else num_rows) + cost.seconds(steps)
        probe = self._largest_seconds(num_rows, int(table.sizes[-1]), cost)
        return round((1 if steps else PROBE_LENGTH) * (probe / usual - 1.0) / _PROBE_SHARE)

    def _best(self, table: _AcceptanceTable, num_rows: int) -> tuple[int, int]:
        cost = table.followed.cost
        drafting = np.array([cost.seconds(steps) for steps in range(self.max_steps + 1)])
        verifying = np.array([self.round_seconds(num_rows + int(size)) for size in table.sizes])
        committed = num_rows + table.num_given
        rates = (committed + table.accepted) / (drafting[:, None] + verifying[None, :])
        rates[table.num_seen == 0] = 0.0
        rates[0] = committed / self.round_seconds(num_rows)
        steps, size = np.unravel_index(int(rates.argmax()), rates.shape)
        if rates[table.choice] * _HYSTERESIS >= rates[steps, size]:
            return table.choice
        return int(steps), int(size)


@dataclass(eq=False, repr=False)
class RoundGrowth:
    """Decides what grows on the device. The engine's thread alone uses it."""

    trees: RoundDrafts
    policy: GrowthPolicy
    memory: Memory
    rows_of: Callable[[int], int]
    """Returns the number of rows that a round of so many requests is padded to."""
    limits: EngineLimits
    _grown: tuple[Growth, int] | None = None

    @property
    def num_grown(self) -> int:
        """Nodes that have grown for the next round."""
        return 0 if self._grown is None else self.trees.num_grown

    def fetch(self, entries: Sequence[Entry], allowed: Allowed) -> None:
        """For entries whose nodes the host masks, take the `allowed` nodes of the trees that were grown for them.

        This waits for the device, so it is done only if the host masks all entries; in other rounds they get no trees.
        """
        decoded = [entry for entry in entries if entry.samples]
        if not self.num_grown or not all(entry.request.is_masked for entry in decoded):
            return
        takers = [entry for entry in decoded if self.trees.has_tree(entry.request)]
        room = min(_MASKED_NODES, self.room(entries)) - sum(len(entry.nodes) for entry in entries)
        share = max(room, 0) // max(len(takers), 1)
        joined = [self.trees.take_in(entry, share) for entry in takers]
        for entry, nodes in zip(takers, allowed(takers, joined), strict=True):
            if self.memory.reserve(entry.request, entry.request.cached_len + entry.num_extend + len(nodes)):
                entry.nodes = nodes
                self.trees.mark(entry)

    def rests(self, entries: Sequence[Entry]) -> bool:
        """Whether a round of these entries has no trees to take and is to have none grown behind it."""
        if self.num_grown:
            return False
        return self.trees.failed or not _are_drafted(entries) or self.policy.rests(self.rows_of(len(entries)))

    def take(self, entries: Sequence[Entry]) -> TakenTrees | None:
        """Let entries of a planned round take the trees that were grown for them, as far as there are pages.

        Entries keep the nodes that they have of a draft service; a node that is in both is taken once. Entries with
        masks got their trees in `fetch`.
        """
        grown, num_given = self._grown, sum(len(entry.nodes) for entry in entries)
        if grown is None or not self.trees.num_grown:
            return None
        num_nodes = max(min(self.trees.num_grown, self.room(entries) - num_given), 0)
        self.trees.num_grown = num_nodes
        decoded = [entry for entry in entries if entry.samples]
        share = min(num_nodes, max(_SHARE_FACTOR * num_nodes // max(len(decoded), 1), _LEAST_SHARE))
        num_taken = 0
        for entry in decoded:
            if entry.masks or not share or not self.trees.has_tree(entry.request):
                continue
            # Nodes are worth no preemption: without pages the round goes without them.
            if self.memory.reserve(entry.request, entry.request.cached_len + entry.num_tokens + share):
                entry.max_grown = share
                num_taken += share
        has_fetched = any(entry.nodes.scores for entry in decoded)
        return TakenTrees(*grown, min(num_nodes, num_taken)) if num_taken or has_fetched else None

    def room(self, entries: Sequence[Entry]) -> int:
        """Return how many nodes a round of these entries has room for."""
        num_tokens = sum(entry.num_extend for entry in entries if not self.limits.is_apart(entry))
        return min(self.limits.max_nodes, self.limits.max_round_tokens - num_tokens)

    def plan(self, entries: Sequence[Entry]) -> Growth | None:
        """Return the growth to queue behind a round of these entries; None for no growth."""
        num_roots = sum(entry.samples for entry in entries)
        num_rows = self.rows_of(num_roots) if num_roots else 0
        # From rounds of requests without speculation, the policy would learn that no drafts are accepted.
        growth = self.policy.plan(num_rows) if _are_drafted(entries) and not self.trees.failed else None
        rests = growth is None and (self.trees.failed or self.policy.rests(num_rows, WARM_ROUNDS))
        if growth is not None and not self._has_pages(entries):
            growth, rests = None, True
        self._grown = None if growth is None else (growth, num_rows)
        self.trees.rests = rests
        return growth

    def _has_pages(self, entries: Sequence[Entry]) -> bool:
        """Whether there are pages for what the drafter writes behind the round, which is worth no preemption."""
        behind = self.trees.num_behind
        return not behind or all(
            self.memory.reserve(entry.request, entry.start + entry.num_tokens + entry.max_grown + behind)
            for entry in entries
            if entry.samples
        )

    def learn(
        self, taken: TakenTrees, entries: Sequence[Entry], results: Sequence[Result], seconds: float | None
    ) -> None:
        """Learn how many nodes a finished round accepted from its grown trees, beside those of draft services.

        `seconds`: time that the growth of those trees took, if measured.
        """
        scores: list[float] = []
        depths: list[int] = []
        accepted: list[int] = []
        num_given = 0
        for entry, result in zip(entries, results, strict=True):
            nodes = entry.nodes
            if result.num_accepted:
                tokens = result.token_ids[: result.num_accepted]
                first = count_given(nodes, tokens)
                num_given += first
                path = follow(nodes.parents, nodes.token_ids, tokens) if nodes.scores else []
                accepted += [len(scores) + node for node in path[first:]]
            if nodes.scores:
                scores += [score if score <= 0 else -math.inf for score in nodes.scores]
                depths += nodes.depths
        self.policy.note(taken.growth, taken.num_rows, VerifiedNodes(scores, depths, accepted), num_given, seconds)


def _are_drafted(entries: Sequence[Entry]) -> bool:
    """Whether any of the requests whose next token a round samples may have draft tokens."""
    return any(entry.samples and not entry.request.params.disable_speculation for entry in entries)

"""Trees that grow inside the round: which of them the next round takes, and what is grown behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from verify_service.engine.memory import Memory
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Nodes, Result, TakenTrees, follow
from verify_service.speculation.growth_policy import GrowthPolicy

_LEAST_SHARE = 8
"""Least limit on the nodes of one request among many, if its tree has as many."""
_SHARE_FACTOR = 4
"""Limit on the nodes of one request among many, as a multiple of an even share."""
_LEARN = 0.05
"""Weight of the newest round in the average of draft tokens accepted from the device's tree."""
_HOPE = 0.002
"""Added to that average each time the tree is passed over, so that it is tried again: it may have become better."""


class GrownTreesOf(Protocol):
    """The trees that the executor has grown behind the last round."""

    @property
    def num_grown(self) -> int:
        """Nodes of all trees together."""

    @property
    def failed(self) -> bool:
        """Whether nothing grows any more."""

    def has_tree(self, request: Request) -> bool:
        """Whether a tree was grown for the request's root."""


class RoundGrowth:
    """Decides what grows on the device. The engine's thread alone uses it."""

    def __init__(
        self,
        trees: GrownTreesOf,
        policy: GrowthPolicy,
        memory: Memory,
        rows_of: Callable[[int], int],
        max_round_tokens: int,
    ) -> None:
        """`rows_of`: number of rows that a round of so many requests is padded to."""
        self._usual = math.inf
        """Draft tokens of a request's own tree that a round accepts, as a rule; tried before anything is known."""
        self._trees = trees
        self._policy = policy
        self._memory = memory
        self._rows_of = rows_of
        self._max_round_tokens = max_round_tokens
        self._grown: tuple[Growth, int] | None = None

    @property
    def has_trees(self) -> bool:
        """Whether trees have grown for the next round."""
        return self._grown is not None and self._trees.num_grown > 0

    def take(self, entries: Sequence[Entry], chances: Callable[[Entry], float]) -> TakenTrees | None:
        """Let entries of a planned round have the trees that were grown for them, as far as there are pages.

        An entry with nodes of a draft service keeps them, and goes without its own tree, where they are expected to
        bring more: both find the same tokens, and a tree has a token once below a node. `chances`: accepted draft
        tokens that are expected of them.
        """
        grown, num_nodes = self._grown, self._trees.num_grown
        if grown is None or not num_nodes:
            return None
        decoded = [entry for entry in entries if entry.samples]
        takers, is_better = self._takers(decoded, chances)
        share = min(num_nodes, max(_SHARE_FACTOR * num_nodes // max(len(decoded), 1), _LEAST_SHARE))
        room = self._max_round_tokens - sum(entry.num_tokens for entry in decoded)
        if num_nodes > room:
            share = min(share, room // max(len(takers), 1))
        num_taken = 0
        for entry in takers:
            # Nodes are worth no preemption: without pages the round goes without them.
            if share > 0 and self._memory.reserve(entry.request, entry.request.cached_len + entry.num_tokens + share):
                entry.max_grown = share
                num_taken += share
        # Trees that nobody takes because others are better have brought nothing: that is learned, too.
        return TakenTrees(*grown, min(num_nodes, num_taken)) if num_taken or is_better else None

    def _takers(self, entries: Sequence[Entry], chances: Callable[[Entry], float]) -> tuple[Sequence[Entry], bool]:
        """Entries that are to have their own trees, and whether others have better nodes."""
        takers, is_better = [], False
        for entry in entries:
            if not self._trees.has_tree(entry.request) or entry.request.draft_room <= 0:
                continue
            if entry.nodes.token_ids:
                if chances(entry) > self._usual:
                    self._usual += _HOPE
                    is_better = True
                    continue
                entry.nodes, entry.marks = Nodes(), None
            takers.append(entry)
        return takers, is_better

    def plan(self, entries: Sequence[Entry]) -> Growth | None:
        """The growth to queue behind a round of these entries; None for none."""
        num_roots = sum(entry.samples for entry in entries)
        num_rows = self._rows_of(num_roots) if num_roots else 0
        growth = self._policy.plan(num_rows) if num_rows and not self._trees.failed else None
        self._grown = None if growth is None else (growth, num_rows)
        return growth

    def learn(self, taken: TakenTrees, entries: Sequence[Entry], results: Sequence[Result]) -> None:
        """Learn how many nodes a finished round accepted from the trees it was given."""
        scores = np.sort(np.array([-score for entry in entries for score in entry.nodes.scores]))
        ranks = []
        for entry, result in zip(entries, results, strict=True):
            nodes = entry.nodes
            if not entry.max_grown:
                continue
            known = self._usual if self._usual < math.inf else result.num_accepted
            self._usual = known + _LEARN * (result.num_accepted - known)
            if result.num_accepted:
                path = follow(nodes.parents, nodes.token_ids, result.token_ids[: result.num_accepted])
                ranks.append(np.searchsorted(scores, [-nodes.scores[node] for node in path]).tolist())
        self._policy.note(taken.growth, taken.num_rows, ranks)

"""Trees that grow inside the round: which of them the next round takes, and what is grown behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from verify_service.engine.memory import Memory
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Result, TakenTrees, follow
from verify_service.speculation.growth_policy import GrowthPolicy

_LEAST_SHARE = 8
"""Nodes that one of many requests may take at least, as far as its tree has them."""
_SHARE_FACTOR = 4
"""Nodes that one of many requests may take, as a multiple of its even share."""


class GrownTreesOf(Protocol):
    """What the executor has grown behind the last round."""

    @property
    def num_grown(self) -> int:
        """Nodes of all trees together."""

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
        """`rows_of`: requests that a round of so many is padded to."""
        self._trees = trees
        self._policy = policy
        self._memory = memory
        self._rows_of = rows_of
        self._max_round_tokens = max_round_tokens
        self._grown: tuple[Growth, int] | None = None

    def take(self, entries: Sequence[Entry]) -> TakenTrees | None:
        """Let entries of a planned round have the trees that were grown for them, as far as there are pages."""
        grown, num_nodes = self._grown, self._trees.num_grown
        if grown is None or not num_nodes:
            return None
        decoded = [entry for entry in entries if entry.samples]
        if sum(entry.num_tokens for entry in entries if entry.samples) + num_nodes > self._max_round_tokens:
            return None
        share = min(num_nodes, max(_SHARE_FACTOR * num_nodes // max(len(decoded), 1), _LEAST_SHARE))
        taken = False
        for entry in decoded:
            request = entry.request
            if not self._trees.has_tree(request) or request.draft_room <= 0:
                continue
            # Nodes are worth no preemption: without pages the round goes without them.
            if self._memory.reserve(request, request.cached_len + entry.num_tokens + share):
                entry.max_grown = share
                taken = True
        return TakenTrees(*grown, num_nodes) if taken else None

    def plan(self, entries: Sequence[Entry]) -> Growth | None:
        """What is to be grown behind a round of these entries."""
        num_roots = sum(entry.samples for entry in entries)
        num_rows = self._rows_of(num_roots) if num_roots else 0
        growth = self._policy.plan(num_rows) if num_rows else None
        self._grown = None if growth is None else (growth, num_rows)
        return growth

    def learn(self, taken: TakenTrees, entries: Sequence[Entry], results: Sequence[Result]) -> None:
        """A round is over that was given trees."""
        scores = np.sort(np.array([-score for entry in entries for score in entry.nodes.scores]))
        ranks = []
        for entry, result in zip(entries, results, strict=True):
            nodes = entry.nodes
            if entry.max_grown and result.num_accepted:
                path = follow(nodes.parents, nodes.token_ids, result.token_ids[: result.num_accepted])
                ranks.append(np.searchsorted(scores, [-nodes.scores[node] for node in path]).tolist())
        self._policy.note(taken.growth, taken.num_rows, ranks)

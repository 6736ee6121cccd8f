"""Trees that grow inside the round: which of them the next round takes, and what is grown behind it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from verify_service.engine.memory import Memory
from verify_service.engine.round import Entry, Growth, Nodes, Result, TakenTrees, count_given, follow
from verify_service.engine.scheduler import EngineLimits
from verify_service.executors.round_drafts import RoundDrafts
from verify_service.speculation.growth_policy import GrowthPolicy, VerifiedNodes

_LEAST_SHARE = 8
"""Least limit on the nodes of one request among many, if its tree has as many."""
_SHARE_FACTOR = 4
"""Limit on the nodes of one request among many, as a multiple of an even share."""
WARM_ROUNDS = 64
"""Rounds before a trial that work for the drafter again, though nothing grows: it has the newest tokens' features."""


_MASKED_NODES = 32
"""Nodes of a round that the host masks while the device waits: some 15 us each, of a round of some 5 ms."""

Allowed = Callable[[Sequence[Entry], Sequence[Nodes]], Sequence[Nodes]]
"""Of each entry's nodes, those that it may have."""


class RoundGrowth:
    """Decides what grows on the device. The engine's thread alone uses it."""

    def __init__(
        self,
        trees: RoundDrafts,
        policy: GrowthPolicy,
        memory: Memory,
        rows_of: Callable[[int], int],
        limits: EngineLimits,
    ) -> None:
        """`rows_of`: number of rows that a round of so many requests is padded to."""
        self._trees = trees
        self._policy = policy
        self._memory = memory
        self._rows_of = rows_of
        self._limits = limits
        self._grown: tuple[Growth, int] | None = None

    @property
    def num_grown(self) -> int:
        """Nodes that have grown for the next round."""
        return 0 if self._grown is None else self._trees.num_grown

    def fetch(self, entries: Sequence[Entry], allowed: Allowed) -> None:
        """Give entries whose nodes the host masks the trees that were grown for them, and `allowed` of their nodes.

        The round waits for the device, so this is for rounds where all entries are such; in others they go without.
        """
        decoded = [entry for entry in entries if entry.samples]
        if not self.num_grown or not all(entry.request.is_masked for entry in decoded):
            return
        takers = [entry for entry in decoded if self._has_tree(entry)]
        room = min(_MASKED_NODES, self.room(entries)) - sum(len(entry.nodes) for entry in entries)
        share = max(room, 0) // max(len(takers), 1)
        joined = [self._trees.take_in(entry, share) for entry in takers]
        for entry, nodes in zip(takers, allowed(takers, joined), strict=True):
            if self._memory.reserve(entry.request, entry.request.cached_len + entry.num_extend + len(nodes)):
                entry.nodes = nodes
                self._trees.mark(entry)

    def rests(self, entries: Sequence[Entry]) -> bool:
        """Whether a round of these entries has no trees to take and is to have none grown behind it."""
        if self.num_grown:
            return False
        return self._trees.failed or not _are_drafted(entries) or self._policy.rests(self._rows_of(len(entries)))

    def take(self, entries: Sequence[Entry]) -> TakenTrees | None:
        """Let entries of a planned round have the trees that were grown for them, as far as there are pages.

        They come beside the nodes that entries have of a draft service; what both have found is there once. Entries
        with masks have theirs by now.
        """
        grown, num_given = self._grown, sum(len(entry.nodes) for entry in entries)
        num_nodes = max(min(self._trees.num_grown, self.room(entries) - num_given), 0)
        if grown is None or not self._trees.num_grown:
            return None
        self._trees.limit(num_nodes)
        decoded = [entry for entry in entries if entry.samples]
        share = min(num_nodes, max(_SHARE_FACTOR * num_nodes // max(len(decoded), 1), _LEAST_SHARE))
        num_taken = 0
        for entry in decoded:
            if entry.masks or not share or not self._has_tree(entry):
                continue
            # Nodes are worth no preemption: without pages the round goes without them.
            if self._memory.reserve(entry.request, entry.request.cached_len + entry.num_tokens + share):
                entry.max_grown = share
                num_taken += share
        has_fetched = any(entry.nodes.scores for entry in decoded)
        return TakenTrees(*grown, min(num_nodes, num_taken)) if num_taken or has_fetched else None

    def _has_tree(self, entry: Entry) -> bool:
        return self._trees.has_tree(entry.request) and entry.request.draft_room > 0

    def room(self, entries: Sequence[Entry]) -> int:
        """Nodes that a round of these entries has room for."""
        num_tokens = sum(entry.num_extend for entry in entries if not self._limits.is_apart(entry))
        return min(self._limits.max_nodes, self._limits.max_round_tokens - num_tokens)

    def plan(self, entries: Sequence[Entry]) -> Growth | None:
        """The growth to queue behind a round of these entries; None for none."""
        num_roots = sum(entry.samples for entry in entries)
        num_rows = self._rows_of(num_roots) if num_roots else 0
        # Rounds of requests that want no drafts would tell the policy that none are accepted.
        growth = self._policy.plan(num_rows) if _are_drafted(entries) and not self._trees.failed else None
        rests = growth is None and (self._trees.failed or self._policy.rests(num_rows, WARM_ROUNDS))
        if growth is not None and not self._has_pages(entries):
            growth, rests = None, True
        self._grown = None if growth is None else (growth, num_rows)
        self._trees.rest(rests)
        return growth

    def _has_pages(self, entries: Sequence[Entry]) -> bool:
        """Whether there are pages for what the drafter writes behind the round, which is worth no preemption."""
        behind = self._trees.num_behind
        return not behind or all(
            self._memory.reserve(entry.request, entry.start + entry.num_tokens + entry.max_grown + behind)
            for entry in entries
            if entry.samples
        )

    def learn(
        self, taken: TakenTrees, entries: Sequence[Entry], results: Sequence[Result], seconds: float | None
    ) -> None:
        """Learn how many nodes a finished round accepted from the trees it was given, beside what others had found.

        `seconds`: what the growth of those trees took, if it was measured.
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
        self._policy.note(taken.growth, taken.num_rows, VerifiedNodes(scores, depths, accepted), num_given, seconds)


def _are_drafted(entries: Sequence[Entry]) -> bool:
    """Whether any of the requests whose next token a round samples may have draft tokens."""
    return any(entry.samples and not entry.request.params.disable_speculation for entry in entries)

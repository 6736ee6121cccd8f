"""Trees that grew behind rounds, on the device and as the host is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.frontier_state import (
    BASE,
    NUM_FIELDS,
    PARENT,
    ROW,
    SLOT,
    TOKEN,
    GrownTrees,
    MergeLimits,
)
from kernels.round_trees import merge_trees
from kernels.sampling_state import RoundTokens

MAX_CHOSEN = 256
"""Largest number of nodes, over all requests, that a round is given."""


class RowTree(NamedTuple):
    """The part of a row's grown tree that a round takes, and whether the row's next tree is to be grown."""

    table_row: int
    max_nodes: int
    max_depth: int
    is_drafted: bool


class GrownNodes(NamedTuple):
    """Nodes for one row of a round, parents first: those that it was given if any, then the likeliest first."""

    token_ids: list[int]
    parents: list[int]
    """Index of each node's parent; -1 below the root."""
    scores: list[float]
    """Path scores of those that grew; 1 for nodes that the round was given and that did not grow, too."""


class RoundTrees:
    """A round's tokens with trees, one piece of memory for the largest round each way."""

    def __init__(self, max_tokens: int, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        pinned = device.type == "cuda"
        self._told = torch.zeros(4 * max_rows + 2, dtype=torch.int32, pin_memory=pinned)
        self._limits = torch.zeros(4 * max_rows + 2, dtype=torch.int32, device=device)
        self._host_limits: NDArray[np.int32] = self._told.numpy()
        sizes = (max_tokens,) * 3 + (max_rows + 1,)
        self._nodes = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._read = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=pinned)
        token_ids, parents, scores, first = self._nodes.split(sizes)
        self._scores = scores.view(torch.float32)
        self._host = self._read.numpy()
        self._host_scores = self._host.view(np.float32)
        self._max_tokens = max_tokens

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self._fetched = torch.zeros(1 + NUM_FIELDS, MAX_CHOSEN, dtype=torch.int32, pin_memory=pinned)
        self._fetched_at = torch.cuda.Event() if pinned else None
        positions, rows, root, table_rows = ints(max_tokens), ints(max_tokens), ints(max_rows), ints(max_rows)
        self._tokens = RoundTokens(token_ids, positions, parents, rows, first, root, table_rows, cached_len=root)
        self.tell(())

    def tell(self, rows: Sequence[RowTree], num_nodes: int = 0) -> None:
        """Set what the rows of the next round take, in their order, of the best `num_nodes` nodes of all trees.

        All other rows take nothing.
        """
        count, most = len(rows), self._max_rows
        host = self._host_limits
        row_of = host[: most + 1]
        row_of[:] = -1
        host[most + 1 :] = 0
        if not rows:
            return
        max_nodes, max_depth, drafted = host[most + 1 : -1].reshape(3, most)
        host[-1] = num_nodes
        for row, tree in enumerate(rows):
            if tree.max_nodes:
                row_of[tree.table_row] = row
        max_nodes[:count] = [tree.max_nodes for tree in rows]
        max_depth[:count] = [tree.max_depth for tree in rows]
        drafted[:count] = [tree.is_drafted for tree in rows]

    def to_device(self) -> None:
        """Queue the copy of what `tell` has set; may be captured."""
        self._limits.copy_(self._told, non_blocking=True)

    def drafted(self, num_rows: int) -> Tensor:
        """Flags on the device, int32 [num_rows], 1 where the next tree is to be grown."""
        start = 3 * self._max_rows + 1
        return self._limits[start : start + num_rows]

    def tokens(self, base: RoundTokens) -> RoundTokens:
        """The memory that `merge` writes a round of the base's size to."""
        own = self._tokens.head(base.token_ids.shape[0], base.table_rows.shape[0])
        return replace(own, cached_len=base.cached_len)

    def merge(self, base: RoundTokens, grown: GrownTrees) -> RoundTokens:
        """Hang trees below the roots of a round that the host laid out, perhaps with nodes; may be captured."""
        out, num_rows, most = self.tokens(base), base.table_rows.shape[0], self._max_rows
        limits = MergeLimits(
            row_of=self._limits[: most + 1],
            max_nodes=self._limits[most + 1 : most + 1 + num_rows],
            max_depth=self._limits[2 * most + 1 : 2 * most + 1 + num_rows],
            most=self._limits[4 * most + 1 :],
        )
        num_tokens = base.token_ids.shape[0]
        seen = GrownTrees(grown.order[:num_tokens], grown.pool)
        merge_trees(base, seen, limits, out, self._scores[:num_tokens])
        return out

    def fetch(self, grown: GrownTrees) -> None:
        """Queue the copy of all nodes that were chosen, before a round has taken them."""
        self._fetched[0].copy_(grown.order, non_blocking=True)
        self._fetched[1:].copy_(grown.pool.entries, non_blocking=True)
        if self._fetched_at is not None:
            self._fetched_at.record()

    def fetched(self, table_row: int, max_nodes: int) -> GrownNodes:
        """The best nodes that were fetched for a row of the tables; waits for them."""
        if self._fetched_at is not None:
            self._fetched_at.synchronize()
        order, entries = self._fetched[0].numpy(), self._fetched[1:].numpy()
        mine = (np.flatnonzero((order >= 0) & (entries[ROW] == table_row)))[:max_nodes]
        token_ids, slots, above = (entries[field, mine].tolist() for field in (TOKEN, SLOT, PARENT))
        places = {slot: place for place, slot in enumerate(slots) if slot >= 0}
        return GrownNodes(
            token_ids,
            [places[slot] if slot >= 0 else -1 for slot in above],
            entries[BASE, mine].view(np.float32).tolist(),
        )

    def to_host(self) -> None:
        """Queue the copy of the merged round; may be captured."""
        self._read.copy_(self._nodes, non_blocking=True)

    def read(self, row: int, num_extend: int) -> GrownNodes:
        """The nodes of a row of the last round, behind its first `num_extend` tokens, once the copy is done."""
        most = self._max_tokens
        first = 3 * most + row
        begin, end = int(self._host[first]) + num_extend, int(self._host[first + 1])
        parents = (self._host[most + begin : most + end] - begin).tolist()
        return GrownNodes(
            self._host[begin:end].tolist(),
            [max(parent, -1) for parent in parents],
            self._host_scores[2 * most + begin : 2 * most + end].tolist(),
        )

"""Device memory of drafting inside the round: committed tokens, grown trees, and the choice of their nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kernels.frontier_state import FLOOR, HEADER_WORDS, NUM_FIELDS, STEP, BurstRows, CandidatePool, StepTokens
from kernels.sampling_state import RoundTokens


@dataclass(frozen=True, slots=True)
class CommittedTokens(RoundTokens):
    """The tokens that a round committed, as a drafter's forward takes them: E slots over the round's B rows.

    Fields of RoundTokens are int32; `positions` and `cached_len` are places in the drafter's page tables, which may
    leave out pages of the sequence, each token hangs below the one before it in its row, and `root` is the slot of a
    row's last token, 0 where it has none.
    """

    rotary: Tensor
    """int32 [E], KV position of the token in the sequence: nothing is left out."""
    context_len: Tensor
    """int32 [B], places that the row has when these tokens are context; 0 where it has none."""

    sources: Tensor
    """int64 [E], target KV slot whose feature goes with the token: that of the position before it; `spare` for padding.
    """
    last: Tensor
    """int64 [B], as `root`."""
    draft_rows: Tensor
    """int32 [B], `table_rows` where the row has tokens, else -1."""
    root_positions: Tensor
    """int32 [B], position in the sequence of the row's last token; 0 where it has none."""

    _OF_ROWS: ClassVar = RoundTokens._OF_ROWS | {"context_len", "last", "draft_rows", "root_positions"}

    @classmethod
    def new(cls, num_tokens: int, num_rows: int, device: torch.device) -> CommittedTokens:
        """Memory for `num_tokens` tokens of `num_rows` rows."""
        kinds = dict.fromkeys(("sources", "last"), torch.int64)
        sizes = cls.sizes(num_tokens, num_rows).items()
        return cls(**{name: torch.zeros(n, dtype=kinds.get(name, torch.int32), device=device) for name, n in sizes})


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Nodes that were chosen of the trees grown behind a round.

    Attributes:
        order: int32 [N], pool indices, the best node first, parents before children; -1 behind them.
        pool: what the trees were grown in; ROW is a row of the tables, BASE holds path scores, SLOT the tree slot of
            nodes that were run.
    """

    order: Tensor
    pool: CandidatePool

    @classmethod
    def new(cls, most_nodes: int, device: torch.device) -> GrownTrees:
        """Memory for so many nodes, none yet."""
        order = torch.full((most_nodes,), -1, dtype=torch.int32, device=device)
        return cls(order, CandidatePool(torch.zeros(NUM_FIELDS, most_nodes, dtype=torch.int32, device=device), 0))


@dataclass(frozen=True, slots=True)
class NodePicker:
    """Memory for the choice of the best N nodes of a pool, and for the nodes that were chosen, L at most.

    Attributes:
        trees: the chosen nodes in a pool of their own.
        choice: the choice's scratch: `order` int32 [N], `keys` and `tally`.
        header: int32 [4], as the choice reads it.
        rows: under which all nodes may be chosen.
    """

    trees: GrownTrees
    choice: StepTokens
    header: Tensor
    rows: BurstRows

    @classmethod
    def new(cls, trees: GrownTrees, num_nodes: int, capacity: int, num_rows: int, floor: float) -> NodePicker:
        """Memory for the choice of `num_nodes` of pools of `capacity` entries and `num_rows` rows, which go to `trees`.

        Nodes with path scores below `floor` are not chosen.
        """
        device = trees.order.device
        ones = torch.ones(num_rows, dtype=torch.int32, device=device)
        zeros = torch.zeros_like(ones)
        empty = zeros[:, None]
        header = torch.zeros(HEADER_WORDS, dtype=torch.int32)
        header[STEP] = 1
        header[FLOOR : FLOOR + 1] = torch.tensor([floor], dtype=torch.float32).view(torch.int32)
        return cls(
            trees=trees,
            choice=StepTokens.new(num_nodes, 1, 1, device, capacity),
            header=header.to(device),
            rows=BurstRows(zeros, zeros, ones, zeros, empty, empty),
        )


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """Limits on the trees that a round takes. All int32.

    Attributes:
        row_of: [T], the round's row of each row of the tables; -1 where its tree is not wanted.
        max_nodes: [B], nodes that a row of the round takes at most, beside those that it has.
        max_depth: [B], how far below the root they may lie.
        most: [1], how many of the best nodes of all trees are looked at.
    """

    row_of: Tensor
    max_nodes: Tensor
    max_depth: Tensor
    most: Tensor

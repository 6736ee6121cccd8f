"""Drafting inside the round: from what a round committed to its drafter's tokens, and from grown trees to a round."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.frontier import choose_entries
from kernels.frontier_state import FLOOR, HEADER_WORDS, NUM_FIELDS, STEP, BurstRows, CandidatePool, StepTokens
from kernels.launch import use_triton
from kernels.reference import round_trees as reference
from kernels.sampling_state import RoundTokens

MAX_TABLES = 4096
"""Rows of the tables at most."""
_ALL_STEPS = 1 << 10


@dataclass(frozen=True, slots=True)
class CommittedTokens(RoundTokens):
    """The tokens that a round committed, as a drafter's forward takes them: E slots over the round's B rows.

    Fields of RoundTokens are int32; `positions` and `cached_len` are the drafter's KV positions, each token hangs below
    the one before it in its row, and `root` is the slot of a row's last token, 0 where it has none.
    """

    sources: Tensor
    """int64 [E], target KV slot whose feature goes with the token: that of the position before it; `spare` for padding.
    """
    last: Tensor
    """int64 [B], as `root`."""
    draft_rows: Tensor
    """int32 [B], `table_rows` where the row has tokens, else -1."""
    root_positions: Tensor
    """int32 [B], position in the sequence of the row's last token; 0 where it has none."""

    @classmethod
    def new(cls, num_tokens: int, num_rows: int, device: torch.device) -> CommittedTokens:
        """Memory for `num_tokens` tokens of `num_rows` rows."""

        def ints(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            token_ids=ints(num_tokens),
            positions=ints(num_tokens),
            parents=ints(num_tokens),
            rows=ints(num_tokens),
            first=ints(num_rows + 1),
            root=ints(num_rows),
            table_rows=ints(num_rows),
            cached_len=ints(num_rows),
            sources=ints(num_tokens, torch.int64),
            last=ints(num_rows, torch.int64),
            draft_rows=ints(num_rows),
            root_positions=ints(num_rows),
        )

    def head(self, num_tokens: int, num_rows: int) -> CommittedTokens:
        """Its first slots and rows."""
        return CommittedTokens(
            token_ids=self.token_ids[:num_tokens],
            positions=self.positions[:num_tokens],
            parents=self.parents[:num_tokens],
            rows=self.rows[:num_tokens],
            first=self.first[: num_rows + 1],
            root=self.root[:num_rows],
            table_rows=self.table_rows[:num_rows],
            cached_len=self.cached_len[:num_rows],
            sources=self.sources[:num_tokens],
            last=self.last[:num_rows],
            draft_rows=self.draft_rows[:num_rows],
            root_positions=self.root_positions[:num_rows],
        )


@dataclass(frozen=True, slots=True)
class GrownTrees:
    """Nodes that were chosen of the trees grown behind a round.

    Attributes:
        order: int32 [N], pool indices, the best node first, parents before children; -1 behind them.
        pool: what the trees were grown in; BASE holds path scores, SLOT the tree slot of nodes that were run.
        table_rows: int32 [B], of the pool's rows.
    """

    order: Tensor
    pool: CandidatePool
    table_rows: Tensor


@dataclass(frozen=True, slots=True)
class NodePicker:
    """Memory for the choice of the best N nodes of a pool, and for the nodes that were chosen, L at most.

    Attributes:
        trees: the chosen nodes in a pool of their own, where ROW is a row of the tables.
        choice: the choice's scratch: `order` int32 [N], `keys` and `tally`.
        header: int32 [4], as the choice reads it.
        rows: under which all nodes may be chosen.
    """

    trees: GrownTrees
    choice: StepTokens
    header: Tensor
    rows: BurstRows

    @classmethod
    def new(
        cls, num_nodes: int, most_nodes: int, capacity: int, num_rows: int, floor: float, device: torch.device
    ) -> NodePicker:
        """Memory for `num_nodes` of at most `most_nodes` nodes, of pools of `capacity` entries and `num_rows` rows.

        Nodes with path scores below `floor` are not chosen.
        """

        def ints(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        pool = CandidatePool(ints(NUM_FIELDS, most_nodes), 0)
        trees = GrownTrees(ints(most_nodes, value=-1), pool, torch.arange(MAX_TABLES, dtype=torch.int32, device=device))
        return cls.of(trees, num_nodes, capacity, num_rows, floor)

    @classmethod
    def of(cls, trees: GrownTrees, num_nodes: int, capacity: int, num_rows: int, floor: float) -> NodePicker:
        """The same where the chosen nodes go to `trees`."""
        device = trees.order.device
        ones = torch.ones(num_rows, dtype=torch.int32, device=device)
        zeros = torch.zeros_like(ones)
        empty = zeros[:, None]
        header = torch.zeros(HEADER_WORDS, dtype=torch.int32)
        header[STEP] = _ALL_STEPS
        header[FLOOR : FLOOR + 1] = torch.tensor([floor], dtype=torch.float32).view(torch.int32)
        return cls(
            trees=trees,
            choice=StepTokens.new(num_nodes, 1, 1, device, capacity),
            header=header.to(device),
            rows=BurstRows(zeros, zeros, ones, zeros, empty, empty),
        )


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Which trees a round takes, and how much of them. All int32.

    Attributes:
        row_of: [T], the round's row of each row of the tables; -1 where its tree is not wanted.
        max_nodes: [B], nodes that a row of the round takes at most.
        max_depth: [B], how far below the root they may lie.
    """

    row_of: Tensor
    max_nodes: Tensor
    max_depth: Tensor


def lay_out_committed(
    tokens: RoundTokens,
    num_tokens: Tensor,
    committed: Tensor,
    drafts: Tensor,
    page_tables: Tensor,
    out: CommittedTokens,
    *,
    page_size: int,
    lag: int,
    spare: int,
) -> None:
    """Lay out what a round committed for a forward of its drafter. One launch.

    Args:
        tokens: of the round, M slots and B rows.
        num_tokens: int32 [B], tokens that each row committed; may be strided.
        committed: int32 [B, D], those tokens; rows may be strided, entries not.
        drafts: int32 [B], 0 for rows whose tree is not to be grown.
        page_tables: int32 [T, P] of the target, rows contiguous.
        out: filled, E slots and B rows; E is at least the sum of `num_tokens`.
        page_size: tokens in a page.
        lag: how far a token's KV position in the drafter lies before its position: 1 with features, else 0.
        spare: the source of slots without a token.

    Raises:
        ValueError: shapes that do not fit.
    """
    num_rows = tokens.table_rows.shape[0]
    if out.table_rows.shape[0] != num_rows or drafts.shape[0] != num_rows or committed.shape[0] != num_rows:
        raise ValueError(f"{out.table_rows.shape[0]} rows for what {num_rows} rows committed")
    if committed.stride(1) != 1 or page_tables.stride(1) != 1:
        raise ValueError("committed tokens of a row, and the rows of the page tables, must be contiguous")
    arguments = (tokens, num_tokens, committed, drafts, page_tables, out, page_size, lag, spare)
    if use_triton(num_tokens):
        from kernels.jit import round_trees

        round_trees.lay_out_committed(*arguments)
    else:
        reference.lay_out_committed(*arguments)


def plant_roots(
    header: Tensor, pool: CandidatePool, rows: BurstRows, at: CommittedTokens, tokens: Tensor, scores: Tensor,
    floor: float, lag: int,
) -> None:  # fmt: skip
    """Begin a tree below each row's last committed token: its candidates become all the seeds of the pool. One launch.

    Args:
        header: int32 [4], written; see kernels.frontier.begin_burst.
        pool: its seeds, one for each candidate, are overwritten.
        rows: of the burst; all but `live` and `free` are written. A row without tokens has no free tree slot.
        at: what was committed.
        tokens: int32 [B, k], target ids of the candidates of each row's last token; -1 for none.
        scores: float32 [B, k], their edge scores, at most 0.
        floor: path score below which nothing is run.
        lag: see lay_out_committed. With a lag the feature of row b's last token is given as number b.

    Raises:
        ValueError: shapes that do not fit.
    """
    num_rows, branching = tokens.shape
    if header.shape != (HEADER_WORDS,) or scores.shape != tokens.shape or pool.max_seeds != num_rows * branching:
        raise ValueError(f"candidates of {list(tokens.shape)} do not fit {pool.max_seeds} seeds")
    if not (tokens.is_contiguous() and scores.is_contiguous() and pool.entries.is_contiguous()):
        raise ValueError("candidates and pool must be contiguous")
    arguments = (header, pool, rows, at, tokens, scores, floor, lag)
    if use_triton(header):
        from kernels.jit import round_trees

        round_trees.plant_roots(*arguments)
    else:
        reference.plant_roots(*arguments)


def pick_nodes(header: Tensor, pool: CandidatePool, tables: Tensor, step_size: int, picker: NodePicker) -> None:
    """Choose the best nodes of trees that were grown, whether they were run or not. Three launches.

    Path scores never rise from parent to child and ties go to the lower index, so the chosen nodes hang together.

    Args:
        header: of the burst.
        pool: SCORE is overwritten; no step may follow.
        tables: int32 [B], row of the tables of each row of the pool.
        step_size: entries that a step added to the pool.
        picker: `trees` is written.
    """
    if use_triton(header):
        from kernels.jit import round_trees

        round_trees.reopen_pool(header, pool, step_size)
    else:
        reference.reopen_pool(header, pool, step_size)
    choose_entries(picker.header, pool, picker.rows, picker.choice, pool.capacity)
    if use_triton(header):
        from kernels.jit import round_trees

        round_trees.export_nodes(pool, tables, picker.choice.order, picker.trees)
    else:
        reference.export_nodes(pool, tables, picker.choice.order, picker.trees)


def merge_trees(base: RoundTokens, trees: GrownTrees, limits: TreeLimits, out: RoundTokens, scores: Tensor) -> None:
    """Hang grown trees below the roots of a round that a host laid out without them. One launch.

    The nodes of a row come behind the tokens that it has, the best first. What its limits leave out are the deepest or
    the least likely nodes, so that all parents are there.

    Args:
        base: M slots, B rows; `root` -1 for rows that do not sample, whose trees are not taken.
        trees: at most M nodes.
        limits: of the rows.
        out: written, M slots and B rows; `root` and `first` are where the tokens went. Its `table_rows` are the base's.
        scores: float32 [M], written: path scores of nodes, 0 for other tokens.

    Raises:
        ValueError: shapes that do not fit.
    """
    if out.token_ids.shape != base.token_ids.shape or trees.order.shape[0] > base.token_ids.shape[0]:
        raise ValueError(f"{trees.order.shape[0]} nodes for a round of {base.token_ids.shape[0]} tokens")
    if not trees.pool.entries.is_contiguous():
        raise ValueError("the pool must be contiguous")
    if use_triton(base.token_ids):
        from kernels.jit import round_trees

        round_trees.merge_trees(base, trees, limits, out, scores)
    else:
        reference.merge_trees(base, trees, limits, out, scores)

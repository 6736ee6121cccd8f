"""Drafting inside the round: from what a round committed to its drafter's tokens, and from grown trees to a round."""

from __future__ import annotations

from torch import Tensor

from kernels.frontier import choose_entries
from kernels.frontier_state import (
    HEADER_WORDS,
    BurstRows,
    CandidatePool,
    CommittedTokens,
    GrownTrees,
    MergeLimits,
    NodePicker,
)
from kernels.launch import backend
from kernels.sampling_state import RoundTokens


def lay_out_committed(
    tokens: RoundTokens,
    num_tokens: Tensor,
    committed: Tensor,
    drafts: Tensor,
    page_tables: Tensor,
    shifts: Tensor,
    out: CommittedTokens,
    *,
    page_size: int,
    lag: int,
    spare: int,
) -> None:
    """Lay out what a round committed for a forward of its drafter. One launch.

    Args:
        tokens: the round's, M slots and B rows.
        num_tokens: int32 [B], tokens that each row committed; may be strided.
        committed: int32 [B, D], those tokens; rows may be strided, entries not.
        drafts: int32 [B], 0 for rows whose tree is not to be grown.
        page_tables: int32 [T, P] of the drafter, rows contiguous.
        shifts: int32 [T], pages of the sequence that each row of `page_tables` leaves out behind its first one.
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
    backend(num_tokens, "round_trees").lay_out_committed(
        tokens, num_tokens, committed, drafts, page_tables, shifts, out, page_size, lag, spare
    )


def plant_roots(
    header: Tensor, pool: CandidatePool, rows: BurstRows, at: CommittedTokens, tokens: Tensor, scores: Tensor,
    floor: float, lag: int,
) -> None:  # fmt: skip
    """Begin a tree below each row's last committed token: its candidates become all the seeds of the pool. One launch.

    Args:
        header: int32 [4], written; see kernels.frontier.begin_burst.
        pool: its seeds, one for each candidate, are overwritten.
        rows: the burst's; all but `live` and `free` are written. A row without tokens has no free tree slot.
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
    backend(header, "round_trees").plant_roots(header, pool, rows, at, tokens, scores, floor, lag)


def pick_nodes(header: Tensor, pool: CandidatePool, tables: Tensor, step_size: int, picker: NodePicker) -> None:
    """Choose the best nodes of trees that were grown, whether they were run or not. Three launches.

    Path scores never rise from parent to child and ties go to the lower index, so the chosen nodes hang together.

    Args:
        header: the burst's.
        pool: SCORE is overwritten; no step may follow.
        tables: int32 [B], row of the tables of each row of the pool.
        step_size: entries that a step added to the pool.
        picker: `trees` is written.
    """
    module = backend(header, "round_trees")
    module.reopen_pool(header, pool, step_size)
    choose_entries(picker.header, pool, picker.rows, picker.choice, pool.capacity)
    module.export_nodes(pool, tables, picker.choice.order, picker.trees)


def merge_trees(base: RoundTokens, trees: GrownTrees, limits: MergeLimits, out: RoundTokens, scores: Tensor) -> None:
    """Hang grown trees below the roots of a round that a host laid out without them. One launch.

    The nodes of a row come behind the tokens that it has, the best first. What its limits leave out are the deepest or
    the least likely nodes, so that all parents are there. A row may have nodes of its own below its root, no two of one
    token below one node: a grown node that it has already is not there twice, and what grew below it hangs below that.

    Args:
        base: M slots, B rows; `root` -1 for rows that do not sample, whose trees are not taken.
        trees: at most M nodes.
        limits: the rows' limits.
        out: written, M slots and B rows; `root` and `first` are where the tokens went. Its `table_rows` are the base's.
        scores: float32 [M], written: path scores of nodes that grew, those included that a row has already; 1 for other
            tokens.

    Raises:
        ValueError: shapes that do not fit.
    """
    if out.token_ids.shape != base.token_ids.shape or trees.order.shape[0] > base.token_ids.shape[0]:
        raise ValueError(f"{trees.order.shape[0]} nodes for a round of {base.token_ids.shape[0]} tokens")
    if not trees.pool.entries.is_contiguous():
        raise ValueError("the pool must be contiguous")
    backend(base.token_ids, "round_trees").merge_trees(base, trees, limits, out, scores)

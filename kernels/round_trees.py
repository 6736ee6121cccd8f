"""Drafting inside the round: lay out committed tokens for the drafter, and merge the trees it grew into a round."""

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
    """Lay out the tokens that a round committed for a forward of its drafter. One launch.

    Args:
        tokens: the round's, M slots and B rows.
        num_tokens: int32 [B], tokens that each row committed; may be strided.
        committed: int32 [B, D], those tokens; rows may be strided, entries not.
        drafts: int32 [B], 0 for rows whose tree must not be grown.
        page_tables: int32 [T, P] of the drafter, rows contiguous.
        shifts: int32 [T], pages of the sequence that each row of `page_tables` leaves out after its first page.
        out: filled, E slots and B rows; E is at least the sum of `num_tokens`.
        page_size: tokens in a page.
        lag: a token's position minus its KV position in the drafter: 1 with features, otherwise 0.
        spare: value of `sources` for slots without a token.
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
    """Start a tree below each row's last committed token, whose candidates become the pool's seeds. One launch.

    Args:
        header: int32 [4], written; see kernels.frontier.begin_burst.
        pool: its seeds, one for each candidate, are overwritten.
        rows: the burst's; all but `live` and `free` are written. A row without tokens has no free tree slot.
        at: the committed tokens.
        tokens: int32 [B, k], the target's token ids of the candidates of each row's last token; -1 for none.
        scores: float32 [B, k], their edge scores, at most 0.
        floor: nodes with a path score below this are not run.
        lag: see lay_out_committed. With a lag, the feature of row b's last token is the given feature b.
    """
    num_rows, branching = tokens.shape
    if header.shape != (HEADER_WORDS,) or scores.shape != tokens.shape or pool.max_seeds != num_rows * branching:
        raise ValueError(f"candidates of {list(tokens.shape)} do not fit {pool.max_seeds} seeds")
    if not (tokens.is_contiguous() and scores.is_contiguous() and pool.entries.is_contiguous()):
        raise ValueError("candidates and pool must be contiguous")
    backend(header, "round_trees").plant_roots(header, pool, rows, at, tokens, scores, floor, lag)


def pick_nodes(header: Tensor, pool: CandidatePool, tables: Tensor, step_size: int, picker: NodePicker) -> None:
    """Choose the best nodes of grown trees, whether they were run or not. Three launches.

    Path scores never rise from parent to child and ties go to the lower index, so parents of chosen nodes are chosen,
    too.

    Args:
        header: the burst's.
        pool: SCORE is overwritten, so no step may follow.
        tables: int32 [B], row of the tables of each row of the pool.
        step_size: entries that a step added to the pool.
        picker: `trees` is written.
    """
    module = backend(header, "round_trees")
    module.reopen_pool(header, pool, step_size)
    choose_entries(picker.header, pool, picker.rows, picker.choice, pool.capacity)
    module.export_nodes(pool, tables, picker.choice.order, picker.trees)


def merge_trees(base: RoundTokens, trees: GrownTrees, limits: MergeLimits, out: RoundTokens, scores: Tensor) -> None:
    """Add grown trees below the roots of a round that the host laid out without them. One launch.

    A row's grown nodes follow its other tokens, the best first. Limits leave out the deepest or the least likely nodes,
    so the parents of all nodes are kept. A row may already have nodes below its root, with distinct tokens below each
    node. A grown node that the row already has is not added again, and nodes that grew below it go below the existing
    one.

    Args:
        base: M slots, B rows; `root` is -1 for rows that do not sample, whose trees are ignored.
        trees: at most M nodes.
        limits: the rows' limits.
        out: written, M slots and B rows; `root` and `first` are the new places of the tokens, `table_rows` are the
            base's.
        scores: float32 [M], written: path scores of grown nodes, including those that a row already had; 1 for other
            tokens.
    """
    if out.token_ids.shape != base.token_ids.shape or trees.order.shape[0] > base.token_ids.shape[0]:
        raise ValueError(f"{trees.order.shape[0]} nodes for a round of {base.token_ids.shape[0]} tokens")
    if not trees.pool.entries.is_contiguous():
        raise ValueError("the pool must be contiguous")
    backend(base.token_ids, "round_trees").merge_trees(base, trees, limits, out, scores)

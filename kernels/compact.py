"""After a commit: the keys and values of the accepted nodes move up behind the root."""

from __future__ import annotations

from torch import Tensor

from kernels.launch import use_triton
from kernels.reference import compact as reference


def compact(
    k: Tensor,
    v: Tensor,
    first: Tensor,
    cached_len: Tensor,
    table_rows: Tensor,
    page_tables: Tensor,
    root: Tensor,
    accepted: Tensor,
    num_tokens: Tensor,
    page_size: int,
) -> None:
    """Move accepted node k = 0 .. num_tokens[b] - 2 of each row to place root[b] - first[b] + 1 + k of the row.

    All layers in one launch. Nodes lie behind their parents, so none moves down, and what is overwritten has been
    moved before.

    Args:
        k: [L, S, KVH, D], contiguous, moved in place; so is `v`.
        first: int32 [B + 1].
        cached_len: int32 [B]; token i of row b lies at logical position cached_len[b] + i - first[b].
        table_rows: int32 [B].
        page_tables: int32 [R, P], rows contiguous.
        root: int32 [B], the root's place in the round; -1 where nothing moves.
        accepted: int32 [B, D_max], places of the accepted nodes in the round, parents first; rows contiguous.
        num_tokens: int32 [B], committed tokens: accepted nodes and one; may be a column of a matrix.
        page_size: tokens in a page.

    Raises:
        ValueError: caches that are not contiguous or differ.
    """
    if k.shape != v.shape or k.dtype != v.dtype or not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError("k and v must be contiguous and alike")
    if accepted.stride(1) != 1 or page_tables.stride(1) != 1:
        raise ValueError("the rows of accepted and of the page tables must be contiguous")
    inputs = (first, cached_len, table_rows, page_tables, root, accepted, num_tokens)
    if use_triton(k):
        from kernels.jit import compact as jit

        jit.compact(k, v, *inputs, page_size)
    else:
        reference.compact(k, v, *inputs, page_size)

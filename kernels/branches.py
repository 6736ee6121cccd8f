"""Attention of nodes whose tree outlives a forward: to their context, and each to its own ancestors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention import check_caches, check_splits
from kernels.attention_tiles import TileConfig, branch_config, short_config, short_tokens, usual_tokens
from kernels.launch import supports_pdl, use_triton
from kernels.reference import branches as reference

__all__ = ["Branches", "branch_attention", "list_branches", "short_tokens"]


class Branches(NamedTuple):
    """What M tokens see behind their contexts, themselves included: the tree slots that their masks name."""

    slots: Tensor
    """int32 [M, A], KV slots, `lens` of each token from the first on; the rest means nothing."""
    lens: Tensor
    """int32 [M], 0 for padding."""


def list_branches(
    mask: Tensor, first: Tensor, table_rows: Tensor, page_tables: Tensor, *, base: int, page_size: int
) -> Branches:
    """Once for all layers, what bit masks over tree regions mean; A = W * 32. One launch, with which nothing overlaps.

    A region is a part of a row's page table whose slots hold the keys of a tree that grows over several forwards: of
    some hundred slots a node sees a dozen.

    Args:
        mask: int32 [M, W], contiguous; bit j % 32 of word j // 32 is tree slot j. Of padding tokens it does not matter.
        first: int32 [B + 1], tokens of row b are first[b] .. first[b + 1] - 1; those behind first[B] are padding.
        table_rows: int32 [B].
        page_tables: int32 [R, P], rows contiguous.
        base: logical position of tree slot 0 in every row's page table.
        page_size: tokens in a page.

    Raises:
        ValueError: shapes or numbers that do not fit.
    """
    if first.shape != (table_rows.shape[0] + 1,) or base < 0 or not mask.is_contiguous() or page_tables.stride(1) != 1:
        raise ValueError(f"{list(first.shape)} starts of {table_rows.shape[0]} rows, or a region at {base}")
    count, words = mask.shape
    slots = torch.empty(count, words * 32, dtype=torch.int32, device=mask.device)
    branches = Branches(slots, torch.empty(count, dtype=torch.int32, device=mask.device))
    where = (mask, first, table_rows, page_tables, base, page_size)
    if use_triton(mask):
        from kernels.jit import branches as jit

        jit.list_branches(*where, *branches)
    else:
        reference.list_branches(*where, *branches)
    return branches


def branch_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_tables: Tensor,
    table_rows: Tensor,
    first: Tensor,
    cached_len: Tensor,
    branches: Branches,
    *,
    page_size: int,
    max_row_tokens: int,
    num_splits: int,
    scale: float,
    out: Tensor | None = None,
    config: TileConfig | None = None,
    pdl: bool = True,
    short: bool = False,
) -> Tensor:
    """Each token attends to the context of its row and to its branch.

    Two launches: partial softmaxes of each split of the context and of each branch, then their sum. One, if `short`.
    Nothing is read on the host, so the launches can be captured. Keys and values of the tokens must have been written
    (`rope_write`). Where `pdl`, all but q and the caches is read before the launch in front of this one has ended,
    which therefore must not be that of the lists: see kernels.attention.tree_attention, whose arguments these are, too,
    but for:

    Args:
        branches: of these tokens.
        num_splits: the most programs that share the context of a tile, 1 to 32; how many do is decided on the device.
            If `short`, it is not used.
        short: contexts are expected to have at most `short_tokens(D)` tokens. Longer ones take longer this way, and
            come out the same. Where `pdl`, keys and values of contexts are read before the launch in front of this one
            has ended, too, which therefore must write none: only tokens' own.

    Returns:
        [M, H * D] in q's dtype; zeros for padding.

    Raises:
        ValueError: shapes or numbers that do not fit.
    """
    check_caches(q, k_cache, v_cache, page_tables)
    check_splits(num_splits)
    num_tokens, num_heads, head_dim = q.shape
    if branches.slots.shape[0] != num_tokens or branches.lens.shape != (num_tokens,):
        raise ValueError(f"branches of {branches.slots.shape[0]} tokens for {num_tokens}")
    out = torch.empty(num_tokens, num_heads * head_dim, dtype=q.dtype, device=q.device) if out is None else out
    where = (page_tables, table_rows, first, cached_len, *branches)
    if not use_triton(q):
        return reference.branch_attention(q, k_cache, v_cache, *where, page_size, scale, out)
    if short:
        from kernels.jit import short_branches

        config = config or short_config(num_heads // k_cache.shape[1], head_dim, q.dtype)
        told = (page_size, scale, pdl and supports_pdl(q), max_row_tokens, config)
        short_branches.branch_attention(q, k_cache, v_cache, *where, out, *told)
        return out
    from kernels.jit import branches as jit

    usual = usual_tokens(num_tokens, cached_len.shape[0], max_row_tokens)
    config = config or branch_config(usual, num_heads // k_cache.shape[1], head_dim, q.dtype)
    sizes = (page_size, num_splits, scale, pdl and supports_pdl(q))
    jit.branch_attention(q, k_cache, v_cache, *where, out, *sizes, max_row_tokens, config)
    return out

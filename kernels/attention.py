"""Attention over paged KV with lengths in device memory: trees of a round, prompts, trees that grow over forwards."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention_tiles import (
    MAX_SPLITS,
    PLAIN_SCORES,
    ScoreRules,
    TileConfig,
    branch_config,
    fit_heads,
    mean_row_tokens,
    path_config,
    prefill_config,
    short_config,
    tree_config,
)
from kernels.launch import check_head_dim, power_of_two, supports_pdl, use_triton
from kernels.reference import attention as reference


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_tables: Tensor,
    table_rows: Tensor,
    first: Tensor,
    cached_len: Tensor,
    mask: Tensor,
    *,
    page_size: int,
    max_row_tokens: int,
    num_splits: int,
    scale: float,
    path: Tensor | None = None,
    rules: ScoreRules = PLAIN_SCORES,
    positions: Tensor | None = None,
    config: TileConfig | None = None,
    pdl: bool = True,
) -> Tensor:
    """Let each token attend to the context of its row and to the row's own tokens that are set in its mask.

    One launch, or two if keys are split: a partial softmax of each split, then their sum. The host reads nothing, so
    the launches can be captured. Keys and values of the row's own tokens must have been written (`rope_write`).

    With `path` the mode is deterministic: a token's result depends, bit by bit, only on its own query, keys, values,
    absolute position, `num_splits` and `config`, not on other tokens, `cached_len` or the rest of the batch.

    With `pdl`, the tensors that describe the round (all but q and the caches) are read before the previous launch has
    ended. So there must be a launch without `pdl`, for instance `rotary_angles`, between their last write and this
    call.

    Args:
        q: [M, H, D] float32, bfloat16 or float16; D a power of two, at least 16.
        k_cache: [S, KVH, D] of the same dtype, or float8_e4m3fn, contiguous; `v_cache` likewise. H is a multiple of
            KVH.
        page_tables: int32 [R, P], rows contiguous.
        table_rows: int32 [B].
        first: int32 [B + 1], tokens of row b are first[b] .. first[b + 1] - 1; tokens from first[B] on are padding.
        cached_len: int32 [B], context of each row; the row's tokens follow it in its pages.
        mask: int32 [M, W], contiguous, a bit for each token of the same row, so W * 32 is at least `max_row_tokens`;
            every token sees itself.
        page_size: tokens in a page.
        max_row_tokens: most tokens of a row.
        num_splits: most programs that share the keys of a tile, 1 to 32. The device decides how many do, by the length
            of the row, `config.span` and its number of processors. 1 saves the second launch.
        scale: factor of the scores.
        path: int32 [M, D_path], see kernels.tree.expand_tree; D_path a power of two.
        rules: for the scores.
        positions: int32 [M], position of each token in its request, the first of a row at `cached_len`; required for a
            window.
        config: the tile; chosen by shape if None.
        pdl: start before the previous launch has ended, if the device supports it.

    Returns:
        [M, H * D] in q's dtype; zeros for padding.
    """
    out = _checked(q, k_cache, v_cache, page_tables, num_splits, rules)
    if mask.shape[1] * 32 < max_row_tokens:
        raise ValueError(f"{mask.shape[1]} mask words cannot tell {max_row_tokens} tokens of a row apart")
    if not mask.is_contiguous() or (path is not None and not path.is_contiguous()):
        raise ValueError("mask and path must be contiguous")
    if path is not None and path.shape[1] != power_of_two(path.shape[1]):
        raise ValueError(f"the depth of paths must be a power of two, got {path.shape[1]}")
    if rules.window and positions is None:
        raise ValueError("a window needs the positions of the tokens")
    num_tokens, num_heads = q.shape[:2]
    lengths = (page_tables, table_rows, first, cached_len)
    if not use_triton(q):
        return reference.tree_attention(
            q, k_cache, v_cache, *lengths, mask, page_size, scale, path, out, rules, positions
        )
    from kernels.jit import attention as jit

    group = num_heads // k_cache.shape[1]
    pdl = pdl and supports_pdl(q)
    sizes = (page_size, num_splits, scale, pdl)
    if path is None:
        num_rows = cached_len.shape[0]
        row_tokens = mean_row_tokens(num_tokens, num_rows, max_row_tokens)
        config = config or fit_heads(tree_config(row_tokens, group, q.dtype), q.shape[2], q.dtype)
        positions = positions if rules.window else None
        jit.tree_attention(q, k_cache, v_cache, *lengths, mask, positions, out, *sizes, max_row_tokens, config, rules)
    else:
        config = config or fit_heads(path_config(group, q.dtype), q.shape[2], q.dtype)
        jit.path_attention(q, k_cache, v_cache, *lengths, path, out, *sizes, max_row_tokens, config, rules)
    return out


def prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_tables: Tensor,
    table_rows: Tensor,
    first: Tensor,
    cached_len: Tensor,
    *,
    page_size: int,
    max_row_tokens: int,
    scale: float,
    rules: ScoreRules = PLAIN_SCORES,
    config: TileConfig | None = None,
) -> Tensor:
    """Compute causal attention for chunks of prompts: token i of row b sees positions 0 .. cached_len[b] + i.

    One launch. The result of a token is bitwise the same wherever its chunk begins. For arguments see `tree_attention`.

    Returns:
        [M, H * D] in q's dtype; zeros for padding.
    """
    out = _checked(q, k_cache, v_cache, page_tables, 1, rules)
    num_heads, head_dim = q.shape[1:]
    lengths = (page_tables, table_rows, first, cached_len)
    if not use_triton(q):
        return reference.prefill_attention(q, k_cache, v_cache, *lengths, page_size, scale, out, rules)
    from kernels.jit import attention as jit

    group = num_heads // k_cache.shape[1]
    config = config or fit_heads(prefill_config(group, head_dim, q.dtype), head_dim, q.dtype)
    pdl = supports_pdl(q)
    jit.prefill_attention(q, k_cache, v_cache, *lengths, out, page_size, scale, pdl, max_row_tokens, config, rules)
    return out


def _checked(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_tables: Tensor,
    num_splits: int,
    rules: ScoreRules,
    out: Tensor | None = None,
) -> Tensor:
    """Return `out` or a new tensor [M, H * D]. Raises ValueError for arguments that attention does not support."""
    if not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be 1 to {MAX_SPLITS}, got {num_splits}")
    num_heads, head_dim = q.shape[1:]
    if k_cache.shape != v_cache.shape or k_cache.shape[2] != head_dim:
        raise ValueError(f"caches of {list(k_cache.shape)} and {list(v_cache.shape)} do not fit heads of {head_dim}")
    if num_heads % k_cache.shape[1]:
        raise ValueError(f"{num_heads} query heads cannot share {k_cache.shape[1]} kv heads")
    check_head_dim(head_dim)
    sinks = rules.sinks
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype != torch.float32):
        raise ValueError(f"sinks must be float32 [{num_heads}], got {sinks.dtype} {list(sinks.shape)}")
    if k_cache.dtype != v_cache.dtype or k_cache.dtype not in (q.dtype, torch.float8_e4m3fn):
        raise ValueError(f"q is {q.dtype}, the caches are {k_cache.dtype} and {v_cache.dtype}")
    if not (q.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()) or page_tables.stride(1) != 1:
        raise ValueError("q, the caches and the rows of the page tables must be contiguous")
    return torch.empty(len(q), num_heads * head_dim, dtype=q.dtype, device=q.device) if out is None else out


class BranchSlots(NamedTuple):
    """KV slots that each of M tokens attends to besides its context: its ancestors in the tree and itself."""

    slots: Tensor
    """int32 [M, A], KV slots; the first `lens` of each token are valid."""
    lens: Tensor
    """int32 [M], 0 for padding."""


def list_branches(
    mask: Tensor, first: Tensor, table_rows: Tensor, page_tables: Tensor, *, base: int, page_size: int
) -> BranchSlots:
    """Expand bit masks over tree regions to lists of KV slots, once for all layers; A = W * 32.

    One launch, which does not overlap others. A region is a part of a row's page table whose slots hold the keys of a
    tree that grows over several forwards: of some hundred slots a node sees a dozen. For arguments not listed here see
    `tree_attention`.

    Args:
        mask: int32 [M, W], contiguous; bit j % 32 of word j // 32 is tree slot j. Ignored for padding tokens.
        base: logical position of tree slot 0 in every row's page table.
    """
    if first.shape != (table_rows.shape[0] + 1,) or base < 0 or not mask.is_contiguous() or page_tables.stride(1) != 1:
        raise ValueError(f"{list(first.shape)} starts of {table_rows.shape[0]} rows, or a region at {base}")
    count, words = mask.shape
    slots = torch.empty(count, words * 32, dtype=torch.int32, device=mask.device)
    branches = BranchSlots(slots, torch.empty(count, dtype=torch.int32, device=mask.device))
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
    branches: BranchSlots,
    *,
    page_size: int,
    max_row_tokens: int,
    num_splits: int,
    scale: float,
    rules: ScoreRules = PLAIN_SCORES,
    out: Tensor | None = None,
    config: TileConfig | None = None,
    pdl: bool = True,
    short: bool = False,
) -> Tensor:
    """Let each token attend to the context of its row and to its branch.

    Two launches: partial softmaxes of each split of the context and of each branch, then their sum; one launch if
    `short`. The host reads nothing, so the launches can be captured. Keys and values of the tokens must have been
    written (`rope_write`). With `pdl`, everything but q and the caches is read before the previous launch has ended,
    which therefore must not be that of `list_branches`. For arguments not listed here see `tree_attention`.

    Args:
        branches: the tokens' branches.
        rules: for the scores. A window hides only context; branches are always seen in full, so they should be shorter.
        out: [M, H * D] to write to, contiguous; a new tensor if None.
        num_splits: most programs that share the context of a tile, 1 to 32; the device decides how many do. Not used if
            `short`.
        short: contexts are expected to have at most `short_tokens(D)` tokens. Longer ones are slower this way, with the
            same result. With `pdl`, keys and values of contexts are also read before the previous launch has ended, so
            that launch may write only those of the tokens themselves.

    Returns:
        [M, H * D] in q's dtype; zeros for padding.
    """
    if k_cache.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype}, the caches are {k_cache.dtype}; a tree region's are of one dtype")
    out = _checked(q, k_cache, v_cache, page_tables, num_splits, rules, out)
    num_tokens, num_heads, head_dim = q.shape
    if branches.slots.shape[0] != num_tokens or branches.lens.shape != (num_tokens,):
        raise ValueError(f"branches of {branches.slots.shape[0]} tokens for {num_tokens}")
    where = (page_tables, table_rows, first, cached_len, *branches)
    if not use_triton(q):
        return reference.branch_attention(q, k_cache, v_cache, *where, page_size, scale, out, rules)
    from kernels.jit import branches as jit

    group = num_heads // k_cache.shape[1]
    if short:
        config = config or fit_heads(short_config(group, head_dim, q.dtype), head_dim, q.dtype)
        settings = (page_size, scale, pdl and supports_pdl(q), max_row_tokens, config, rules)
        jit.short_branch_attention(q, k_cache, v_cache, *where, out, *settings)
        return out
    row_tokens = mean_row_tokens(num_tokens, cached_len.shape[0], max_row_tokens)
    config = config or fit_heads(branch_config(row_tokens, group, head_dim, q.dtype), head_dim, q.dtype)
    sizes = (page_size, num_splits, scale, pdl and supports_pdl(q))
    jit.branch_attention(q, k_cache, v_cache, *where, out, *sizes, max_row_tokens, config, rules)
    return out

"""Trees and page tables in FlashInfer's form, written on the device so that the host need not know them.

A row of n tokens that see up to L keys has n * L mask bits, token after token, in whole bytes, lowest bit first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.attention.paged import PagedBatch


def mask_offsets(batch: PagedBatch) -> Tensor:
    """int32 [B + 2]: the byte where each row's bits begin. A last row without keys is for padding tokens."""
    own, keys = _lengths(batch)
    ends = torch.cumsum((own * keys + 7) // 8, 0)
    return torch.cat([ends.new_zeros(1), ends, ends[-1:]]).to(torch.int32)


def write_page_indices(batch: PagedBatch, page_indptr: Tensor, indices: Tensor) -> None:
    """indices[page_indptr[b] + j] = page j of row b, for all pages that have keys.

    `page_indptr` is int32 [at least B + 1]; the last place of `indices` int32 [N] takes what nobody needs.
    """
    _, keys = _lengths(batch)
    tables = batch.page_tables.index_select(0, batch.table_rows)
    place = torch.arange(tables.shape[1], device=tables.device)
    used = place < ((keys + batch.page_size - 1) // batch.page_size).unsqueeze(1)
    where = torch.where(used, page_indptr[: len(keys)].unsqueeze(1) + place, len(indices) - 1)
    indices.scatter_(0, where.flatten(), tables.flatten())


def write_packed_mask(batch: PagedBatch, offsets: Tensor, packed: Tensor) -> None:
    """Write the bits of every row from byte `offsets[b]` on: its context is seen by all, its own tokens by `mask`.

    Only bits of own tokens are ever 0, few whatever the context: they are taken out of bytes of ones.
    """
    if batch.mask is None:
        raise ValueError("a causal batch has no mask to pack")
    own, keys = _lengths(batch)
    token = torch.arange(batch.token_ids.shape[0], dtype=torch.int32, device=packed.device)
    # Padding tokens get the last row; nothing of theirs is written, since they lie behind its tokens.
    row = torch.searchsorted(batch.first[1:], token, right=True, out_int32=True).clamp_(max=len(keys) - 1).long()
    place = token - batch.first[row]
    other = torch.arange(batch.max_row_tokens, device=packed.device)
    sees = (batch.mask[:, other // 32] >> (other % 32)) & 1
    inside = (other < own[row].unsqueeze(1)) & (place < own[row]).unsqueeze(1)
    hidden = inside & (sees == 0)
    bit = (place * keys[row] + batch.cached_len[row]).unsqueeze(1) + other
    byte = torch.where(hidden, offsets[row].unsqueeze(1) + bit // 8, 0)
    # Bytes wrap around, so adding 256 - x takes x away; no bit is taken twice, so the order is no matter.
    taken = torch.where(hidden, 256 - (1 << bit % 8), 0).to(torch.uint8)
    packed.fill_(255)
    packed.index_add_(0, byte.flatten(), taken.flatten())


def _lengths(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """int64 [B] each: own tokens of the rows, and keys that their last tokens see."""
    own = torch.diff(batch.first).long()
    return own, torch.where(own > 0, batch.cached_len + own, 0)

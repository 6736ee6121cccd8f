"""See kernels.branches."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.attention import attend, set_bits, slots_of


def list_branches(
    mask: Tensor, first: Tensor, table_rows: Tensor, page_tables: Tensor, base: int, page_size: int,
    slots: Tensor, lens: Tensor,
) -> None:  # fmt: skip
    """As kernels.branches.list_branches, into `slots` and `lens`."""
    lens.zero_()
    starts = first.tolist()
    for row, table_row in enumerate(table_rows.tolist()):
        for token in range(starts[row], starts[row + 1]):
            named = slots_of(page_tables[table_row], base + set_bits(mask[token]), page_size)
            count = lens[token] = named.numel()
            slots[token, :count] = named


def branch_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, slots: Tensor, lens: Tensor,
    page_size: int, scale: float, out: Tensor,
) -> Tensor:  # fmt: skip
    """As kernels.branches.branch_attention."""
    out.zero_()
    starts = first.tolist()
    for row, (table_row, cached) in enumerate(zip(table_rows.tolist(), cached_len.tolist(), strict=True)):
        context = slots_of(page_tables[table_row], torch.arange(cached, device=q.device), page_size)
        for token in range(starts[row], starts[row + 1]):
            seen = torch.cat([context, slots[token, : int(lens[token])].long()])
            hidden = torch.zeros(1, seen.numel(), dtype=torch.bool, device=q.device)
            out[token] = attend(q[token : token + 1], k_cache[seen], v_cache[seen], hidden, scale)[0]
    return out

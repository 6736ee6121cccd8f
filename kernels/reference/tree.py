"""See kernels.tree."""

from __future__ import annotations

from torch import Tensor


def expand_tree(
    parents: Tensor, rows: Tensor, first: Tensor, cached_len: Tensor, table_rows: Tensor, page_tables: Tensor,
    positions: Tensor, page_size: int, slots: Tensor, mask: Tensor, path: Tensor,
) -> None:  # fmt: skip
    """As kernels.tree.expand_tree."""
    slots.fill_(-1)
    mask.zero_()
    path.fill_(-1)
    for token, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        begin, cached = int(first[row]), int(cached_len[row])
        logical = cached + token - begin
        slots[token] = page_tables[table_rows[row], logical // page_size] * page_size + logical % page_size
        ancestor = token
        for depth in range(int(positions[token]) - cached, -1, -1):
            place = ancestor - begin
            path[token, depth] = place
            mask[token, place // 32] |= 1 << place % 32 if place % 32 < 31 else -(1 << 31)
            ancestor = int(parents[ancestor])

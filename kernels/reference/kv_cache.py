"""Torch reference of kernels.kv_cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.reference.attention import slots_of
from kernels.sampling_state import RoundTokens


def update_pages(page_tables: Tensor, updates: Tensor, shifts: Tensor | None, num_sinks: int) -> None:
    """Implement kernels.kv_cache.update_pages."""
    for row, place, page in updates.tolist():
        if row < 0:
            continue
        shift = 0 if shifts is None else int(shifts[row])
        if not shift or place - shift >= num_sinks:
            page_tables[row, place - shift] = page


def compact(
    k: Tensor, v: Tensor, tokens: RoundTokens, page_tables: Tensor, accepted: Tensor, num_tokens: Tensor, page_size: int
) -> None:
    """Implement kernels.kv_cache.compact."""
    for row, count in enumerate(num_tokens.tolist()):
        if int(tokens.root[row]) < 0 or count < 2:
            continue
        begin = int(tokens.first[row])
        old = accepted[row, : count - 1].long() - begin
        new = int(tokens.root[row]) - begin + 1 + torch.arange(count - 1, device=old.device)
        table, cached = page_tables[int(tokens.table_rows[row])], int(tokens.cached_len[row])
        source, target = (slots_of(table, cached + place, page_size) for place in (old, new))
        for cache in (k, v):
            cache[:, target] = cache[:, source]


def move(k: Tensor, v: Tensor, moves: Tensor) -> None:
    """Implement kernels.kv_cache.move."""
    source, target = moves[(moves >= 0).all(1)].long().unbind(1)
    for cache in (k, v):
        cache[:, target] = cache[:, source]

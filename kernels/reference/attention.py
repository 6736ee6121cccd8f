"""Torch reference of kernels.attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.attention_tiles import PLAIN_SCORES, ScoreRules


def tree_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, mask: Tensor,
    page_size: int, scale: float, path: Tensor | None, out: Tensor, rules: ScoreRules = PLAIN_SCORES,
    positions: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Implement kernels.attention.tree_attention."""
    out.zero_()
    seen = _bits(mask) if path is None else _as_mask(path, 32 * mask.shape[1])
    for begin, end, cached, slots in _rows(page_tables, table_rows, first, cached_len, page_size):
        hidden = torch.zeros(end - begin, slots.numel(), dtype=torch.bool, device=q.device)
        hidden[:, cached:] = ~seen[begin:end, : end - begin]
        if rules.window and positions is not None:
            own = positions[begin:end]
            keys = torch.cat([torch.arange(cached, device=own.device), own])
            hidden |= keys.unsqueeze(0) <= own.unsqueeze(1) - rules.window
        out[begin:end] = attend(q[begin:end], k_cache[slots], v_cache[slots], hidden, scale, rules)
    return out


def prefill_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor,
    page_size: int, scale: float, out: Tensor, rules: ScoreRules = PLAIN_SCORES,
) -> Tensor:  # fmt: skip
    """Implement kernels.attention.prefill_attention."""
    out.zero_()
    for begin, end, cached, slots in _rows(page_tables, table_rows, first, cached_len, page_size):
        hidden = torch.ones(end - begin, slots.numel(), dtype=torch.bool, device=q.device).triu(cached + 1)
        if rules.window:
            hidden |= torch.ones_like(hidden).tril(cached - rules.window)
        out[begin:end] = attend(q[begin:end], k_cache[slots], v_cache[slots], hidden, scale, rules)
    return out


def _rows(
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, page_size: int
) -> Iterator[tuple[int, int, int, Tensor]]:
    """Yield first token, last token + 1, context length and KV slots of every row that has tokens."""
    starts = first.tolist()
    for row, (table_row, cached) in enumerate(zip(table_rows.tolist(), cached_len.tolist(), strict=True)):
        begin, end = starts[row], starts[row + 1]
        if begin < end:
            logical = torch.arange(cached + end - begin, device=first.device)
            yield begin, end, cached, slots_of(page_tables[table_row], logical, page_size)


def slots_of(table: Tensor, logical: Tensor, page_size: int) -> Tensor:
    """Return int64 KV slots of logical positions by a row's page table [P]."""
    return table.long()[logical // page_size] * page_size + logical % page_size


def _bits(words: Tensor) -> Tensor:
    """Expand int32 [M, W] to bool [M, 32 W], from the lowest bit of the first word on."""
    return (words.unsqueeze(2) >> torch.arange(32, dtype=torch.int32, device=words.device) & 1).flatten(1).bool()


def _as_mask(places: Tensor, count: int) -> Tensor:
    """Return bool [M, count] with the numbers in `places` [M, D] set; -1 means none."""
    named = torch.zeros(len(places), count + 1, dtype=torch.bool, device=places.device)
    return named.scatter_(1, torch.where(places < 0, count, places).long(), True)[:, :count]


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float, rules: ScoreRules = PLAIN_SCORES) -> Tensor:
    """Attend with q [n, H, D] to k and v [L, KVH, D], except where hidden [n, L]: [n, H * D]."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.float().repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("nhd,lhd->nhl", q.float(), k) * scale
    if rules.softcap:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores.masked_fill(hidden.unsqueeze(1), float("-inf"))
    if rules.sinks is not None:
        sinks = rules.sinks.float().view(1, -1, 1).expand(len(q), -1, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    # A query that sees no key gets zeros.
    weights = weights.masked_fill(hidden.all(1).view(-1, 1, 1), 0.0)
    return torch.einsum("nhl,lhd->nhd", weights, v).flatten(1).to(q.dtype)


def list_branches(
    mask: Tensor, first: Tensor, table_rows: Tensor, page_tables: Tensor, base: int, page_size: int,
    slots: Tensor, lens: Tensor,
) -> None:  # fmt: skip
    """Implement kernels.attention.list_branches, writing to `slots` and `lens`."""
    lens.zero_()
    starts, bits = first.tolist(), _bits(mask)
    for row, table_row in enumerate(table_rows.tolist()):
        for token in range(starts[row], starts[row + 1]):
            named = slots_of(page_tables[table_row], base + bits[token].nonzero().view(-1), page_size)
            count = lens[token] = named.numel()
            slots[token, :count] = named


def branch_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor,
    page_tables: Tensor, table_rows: Tensor, first: Tensor, cached_len: Tensor, slots: Tensor, lens: Tensor,
    page_size: int, scale: float, out: Tensor, rules: ScoreRules = PLAIN_SCORES,
) -> Tensor:  # fmt: skip
    """Implement kernels.attention.branch_attention."""
    out.zero_()
    starts = first.tolist()
    for row, (table_row, cached) in enumerate(zip(table_rows.tolist(), cached_len.tolist(), strict=True)):
        context = slots_of(page_tables[table_row], torch.arange(cached, device=q.device), page_size)
        for token in range(starts[row], starts[row + 1]):
            count = int(lens[token])
            begin = max(cached + count - rules.window, 0) if rules.window else 0
            seen = torch.cat([context[begin:], slots[token, :count].long()])
            hidden = torch.zeros(1, seen.numel(), dtype=torch.bool, device=q.device)
            out[token] = attend(q[token : token + 1], k_cache[seen], v_cache[seen], hidden, scale, rules)[0]
    return out

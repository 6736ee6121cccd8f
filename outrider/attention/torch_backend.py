"""The reference backend: plain torch, any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.attention.base import AttentionBackend, AttentionPlan, ForwardBatch, Segment, TokenBatch
from outrider.attention.folded import folded_attention
from outrider.attention.groups import Group, Member, group_segments, row_order
from outrider.attention.heads import HeadSplit
from outrider.cache.kv import KVCache
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary

# The rows of a folded product: attention is folded while these are few. Measured on 2 Zen 4 cores this halves
# the time of 1 to 4 queries (bfloat16, one query, 1000 keys: 109 against 560 us); at 16 queries nothing is left of it.
FOLD_ROWS = 32


class TorchAttention(AttentionBackend):
    """scaled_dot_product_attention over gathered keys, one call for each group of segments."""

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        if not isinstance(batch, ForwardBatch):
            raise ValueError("the torch backend needs a batch of segments")
        members: list[Member] = []
        start = 0
        for segment in batch.segments:
            _check(segment)
            members.append(Member(start, segment))
            start += segment.num_queries
        if start != batch.token_ids.numel() or start != batch.positions.numel() or start == 0:
            raise ValueError(f"segments have {start} queries, the batch {batch.token_ids.numel()} tokens")
        own = [segment.kv_slots[-segment.num_queries :] for segment in batch.segments]
        groups = group_segments(members)
        order = row_order(groups, start)
        calls = [_Call(group, kv, num_heads, in_order=len(groups) == 1 and order is None) for group in groups]
        return _TorchPlan(kv, HeadSplit(batch, kv, num_heads, rotary), torch.cat(own), calls, order)


class _TorchPlan(AttentionPlan):
    """Calls give their padded rows one after the other; `order` picks the batch's rows out of them."""

    def __init__(
        self, kv: KVCache, split: HeadSplit, own_slots: Tensor, calls: list[_Call], order: Tensor | None
    ) -> None:
        self._kv = kv
        self._split = split
        self._own_slots = own_slots
        self._calls = calls
        self._order = order

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None) -> Tensor:
        """See AttentionPlan."""
        q, k, v = self._split(heads, qk_norm)
        self._kv.write(layer, self._own_slots, k, v)
        all_k, all_v = self._kv.k_layers[layer], self._kv.v_layers[layer]
        outputs = [call(q, all_k, all_v) for call in self._calls]
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return rows if self._order is None else rows.index_select(0, self._order)


class _Call:
    """One group's attention: B segments of n queries over L keys."""

    def __init__(self, group: Group, kv: KVCache, num_heads: int, in_order: bool) -> None:
        self._size, self._num_queries, self._length = group.shape
        self._slots = group.slots
        self._rows = None if in_order else group.rows
        self._is_causal = group.is_causal
        self._num_heads = num_heads
        self._num_kv_heads, self._head_dim = kv.k.shape[2:]
        per_kv_head = num_heads // self._num_kv_heads
        self._fold = not group.is_causal and self._num_queries * per_kv_head <= FOLD_ROWS
        self._mask: Tensor | None = None
        if group.mask is not None:
            # Torch would turn a bool mask into numbers once a layer.
            mask = torch.zeros(group.mask.shape, dtype=kv.k.dtype, device=group.mask.device)
            mask.masked_fill_(~group.mask, float("-inf"))
            self._mask = mask.repeat(1, 1, per_kv_head, 1) if self._fold else mask

    def __call__(self, q: Tensor, all_k: Tensor, all_v: Tensor) -> Tensor:
        """q [M, num_heads, head_dim] -> [B * n, num_heads * head_dim]."""
        if self._rows is not None:
            q = q.index_select(0, self._rows)
        k, v = self._read(all_k), self._read(all_v)
        if self._fold:
            return folded_attention(q, k, v, self._mask)
        q = q.view(self._size, self._num_queries, self._num_heads, self._head_dim).transpose(1, 2)
        output = scaled_dot_product_attention(q, k, v, attn_mask=self._mask, is_causal=self._is_causal, enable_gqa=True)
        return output.transpose(1, 2).reshape(self._size * self._num_queries, -1)

    def _read(self, cache: Tensor) -> Tensor:
        """[num_slots, num_kv_heads, head_dim] -> [B, num_kv_heads, L, head_dim]."""
        read = cache[self._slots] if isinstance(self._slots, slice) else cache.index_select(0, self._slots)
        return read.view(self._size, self._length, self._num_kv_heads, self._head_dim).transpose(1, 2)


def _check(segment: Segment) -> None:
    n, length = segment.num_queries, segment.kv_slots.numel()
    if not 1 <= n <= length:
        raise ValueError(f"a segment of {length} slots cannot have {n} queries")
    if segment.mask is None:
        return
    rows, columns = segment.mask.shape
    if rows != n or not n <= columns <= length:
        raise ValueError(f"a mask of {rows} x {columns} does not fit {n} queries over {length} positions")

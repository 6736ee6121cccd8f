"""Attention of a draft model over a known text, and of nodes below its roots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.attention.torch_backend import HeadSplit
from outrider.cache.kv import KVCache
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider_tools.training.dense import dense_attention


class TextAttention(AttentionBackend):
    """Causal attention over the text. Keeps keys and values of all layers, each [T, kv_heads, head_dim]."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        return _TextPlan(self, HeadSplit(batch, kv, num_heads, rotary))


class _TextPlan(AttentionPlan):
    def __init__(self, backend: TextAttention, split: HeadSplit) -> None:
        self._backend = backend
        self._split = split

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None) -> Tensor:
        """See AttentionPlan."""
        q, k, v = self._split(heads, qk_norm)
        self._backend.kept[layer] = (k.contiguous(), v.contiguous())
        return dense_attention(q, k, v, 1)


@dataclass(slots=True)
class BranchBatch(TokenBatch):
    """`bases` int64 [N], how many rows of the text each node sees; `parents` as in `Branches.run`."""

    bases: Tensor
    parents: Tensor


class BranchAttention(AttentionBackend):
    """Attention of nodes to the text before their root, and to the path from there to them."""

    def __init__(self, text: TextAttention) -> None:
        self.text = text
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        """Of each layer, keys and values of the last nodes and those above them, [N, kv_heads, depth, head_dim]."""

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        if not isinstance(batch, BranchBatch):
            raise ValueError("nodes below a text's roots need a batch that says where they stand")
        return _BranchPlan(self, batch, HeadSplit(batch, kv, num_heads, rotary))


class _BranchPlan(AttentionPlan):
    def __init__(self, backend: BranchAttention, batch: BranchBatch, split: HeadSplit) -> None:
        self._backend = backend
        self._batch = batch
        self._split = split
        length = backend.text.kept[0][0].shape[0]
        self._hidden = torch.arange(length, device=batch.bases.device) >= batch.bases.unsqueeze(1)

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None) -> Tensor:
        """See AttentionPlan."""
        q, k, v = self._split(heads, qk_norm)
        text_k, text_v = self._backend.text.kept[layer]
        own_k, own_v = self._extend(layer, k, v)
        q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
        scale = q.shape[-1] ** -0.5
        text = torch.einsum("nkgd,tkd->nkgt", q, text_k).float() * scale
        text = text.masked_fill_(self._hidden[:, None, None], float("-inf"))
        own = torch.einsum("nkgd,nkjd->nkgj", q, own_k).float() * scale
        weights = torch.cat([text, own], -1).softmax(-1).to(v.dtype)
        text, own = weights.split((text.shape[-1], own.shape[-1]), -1)
        found = torch.einsum("nkgt,tkd->nkgd", text, text_v) + torch.einsum("nkgj,nkjd->nkgd", own, own_v)
        return found.flatten(1)

    def _extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The nodes' own keys and values behind those of their parents."""
        before = self._backend.own.get(layer)
        k, v = k.unsqueeze(2), v.unsqueeze(2)
        if before is not None:
            k, v = (torch.cat([old[self._batch.parents], new], 2) for old, new in zip(before, (k, v), strict=True))
        self._backend.own[layer] = (k, v)
        return k, v

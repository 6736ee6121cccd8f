"""The target over sequences that lie one after the other: features and hidden states, nothing kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.rope import rope_write, rotary_angles
from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.decoder import CausalLM
from outrider_tools.training.packed_attention import Spans, causal_attention


@dataclass(slots=True)
class SpanBatch(TokenBatch):
    """Sequences one after the other, without padding between them."""

    spans: Spans


class SpanAttention(AttentionBackend):
    """Causal attention within each sequence of a SpanBatch; of KV, only a layer's own is kept."""

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        if not isinstance(batch, SpanBatch):
            raise ValueError("attention over spans needs a batch of spans")
        return _SpanPlan(batch, kv, num_heads, rotary)


class _SpanPlan(AttentionPlan):
    def __init__(self, batch: SpanBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> None:
        self._spans = batch.spans
        self._num_heads = num_heads
        num_tokens = batch.token_ids.shape[0]
        shape = (num_tokens, *kv.k.shape[2:])
        self._k, self._v = (torch.empty(shape, dtype=kv.k.dtype, device=kv.k.device) for _ in range(2))
        self._slots = torch.arange(num_tokens, dtype=torch.int32, device=kv.k.device)
        self._angles = rotary_angles(batch.positions.to(torch.int32), rotary.half_frequencies, rotary.scale)

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None) -> Tensor:
        """See AttentionPlan."""
        weight, eps = (qk_norm.weight, qk_norm.eps) if qk_norm is not None else (None, 0.0)
        k, v = self._k, self._v
        q = rope_write(heads, *self._angles, self._slots, k, v, self._num_heads, weight, eps, pdl=False)
        return causal_attention(q, k, v, self._spans).flatten(1)


def span_states(
    model: CausalLM, token_ids: Tensor, spans: Spans, feature_layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """As `dense.target_states`, for tokens int64 [M] of sequences one after the other.

    Returns:
        features [M, layers * hidden] and hidden states [M, hidden].
    """
    batch = SpanBatch(token_ids, spans.positions, spans)
    hidden, layers = model.forward_with_features(batch, model.new_kv(1), SpanAttention(), feature_layers)
    return torch.cat(layers, 1), hidden.clone()

"""The target over whole sequences at once: features and hidden states of a padded rectangle, nothing kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.rope import rope_write, rotary_angles
from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary, rotate
from outrider.models.base import CausalLM
from outrider.training.packed_attention import Spans, causal_attention


@dataclass(slots=True)
class DenseBatch(TokenBatch):
    """`num_rows` sequences of equal padded length, one after the other; padding stands at their ends."""

    num_rows: int


class DenseAttention(AttentionBackend):
    """Causal attention within each sequence of a DenseBatch. Writes no KV."""

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        if not isinstance(batch, DenseBatch):
            raise ValueError("dense attention needs a dense batch")
        return _DensePlan(batch.num_rows, num_heads, rotary.angles(batch.positions, kv.k.dtype))


class _DensePlan(AttentionPlan):
    def __init__(self, num_rows: int, num_heads: int, angles: tuple[Tensor, Tensor]) -> None:
        self._num_rows = num_rows
        self._num_heads = num_heads
        self._angles = angles

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None) -> Tensor:
        """See AttentionPlan."""
        num_tokens, all_heads, head_dim = heads.shape
        num_kv_heads = (all_heads - self._num_heads) // 2
        qk, v = heads.split((self._num_heads + num_kv_heads, num_kv_heads), 1)
        if qk_norm is not None:
            qk = qk_norm(qk)
        q, k = rotate(qk, *self._angles).split((self._num_heads, num_kv_heads), 1)
        # Padding follows what it pads, so causality alone hides it.
        q, k, v = (
            part.reshape(self._num_rows, -1, part.shape[1], head_dim).transpose(1, 2).contiguous() for part in (q, k, v)
        )
        output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2).reshape(num_tokens, -1)


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
    """As `target_states`, for tokens int64 [M] of sequences one after the other: [M, layers * hidden], [M, hidden]."""
    batch = SpanBatch(token_ids, spans.positions, spans)
    hidden, layers = model.forward_with_features(batch, model.new_kv(1), SpanAttention(), feature_layers)
    return torch.cat(layers, 1), hidden.clone()


def target_states(model: CausalLM, token_ids: Tensor, feature_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Run the target over padded sequences, int64 [B, T].

    Returns:
        features [B, T, len(feature_layers) * hidden], in the order of `feature_layers`, and the hidden states
        [B, T, hidden] that `model.logits` takes. Both may be saved for a backward pass.
    """
    num_rows, width = token_ids.shape
    positions = torch.arange(width, device=token_ids.device).repeat(num_rows)
    batch = DenseBatch(token_ids.reshape(-1), positions, num_rows)
    # Nothing is written to the cache, which tells its dtype alone.
    hidden, layers = model.forward_with_features(batch, model.new_kv(1), DenseAttention(), feature_layers)
    # Copies: autograd refuses to keep tensors that inference mode made.
    return torch.cat(layers, 1).view(num_rows, width, -1), hidden.clone().view(num_rows, width, -1)

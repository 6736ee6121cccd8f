"""The target over whole sequences at once: features and hidden states of a padded rectangle, nothing kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.attention.torch_backend import HeadSplit
from outrider.cache.kv import KVCache
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.decoder import CausalLM


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
        return _DensePlan(batch.num_rows, HeadSplit(batch, kv, num_heads, rotary))


class _DensePlan(AttentionPlan):
    def __init__(self, num_rows: int, split: HeadSplit) -> None:
        self._num_rows = num_rows
        self._split = split

    def attend(self, layer: int, heads: Tensor, qk_norm: RMSNorm | None) -> Tensor:
        """See AttentionPlan."""
        # Padding follows what it pads, so causality alone hides it.
        return dense_attention(*self._split(heads, qk_norm), self._num_rows)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, num_rows: int) -> Tensor:
    """Causal within each of `num_rows` sequences of equal length: q [M, H, D], k and v [M, KVH, D] to [M, H * D]."""
    num_tokens = q.shape[0]
    q, k, v = (part.reshape(num_rows, -1, *part.shape[1:]).transpose(1, 2).contiguous() for part in (q, k, v))
    output = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).reshape(num_tokens, -1)


def target_states(model: CausalLM, token_ids: Tensor, feature_layers: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Run the target over padded sequences, int64 [B, T].

    Returns:
        features [B, T, len(feature_layers) * hidden], in the order of `feature_layers`, and the hidden states
        [B, T, hidden] that `model.logits` takes. Both may be saved for a backward pass.
    """
    num_rows, width = token_ids.shape
    positions = torch.arange(width, device=token_ids.device).repeat(num_rows)
    batch = DenseBatch(token_ids.reshape(-1), positions, num_rows)
    # Nothing is written to the cache, which tells its heads and dtype alone.
    hidden, layers = model.forward_with_features(batch, model.new_kv(1), DenseAttention(), feature_layers)
    # Copies: autograd refuses to keep tensors that inference mode made.
    return torch.cat(layers, 1).view(num_rows, width, -1), hidden.clone().view(num_rows, width, -1)

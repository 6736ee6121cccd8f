"""What every draft model offers to the draft service."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.sampling.edge_scale import PLAIN_SCALE


class DraftModel(ABC):
    """A model that guesses the target's tokens, with or without the target's features."""

    dtype: torch.dtype
    device: torch.device
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Longest sequence that it serves."""
    vocab_size: int
    """Columns of `logits`: ids of the draft vocabulary."""
    target_vocab_size: int
    """Ids of the target's vocabulary that it knows as input."""
    target_ids: Tensor | None
    """int32 [vocab_size], the target's id of each draft id; None where they are the same."""
    tokenizer_hash: str
    """SHA-256 of its own tokenizer.json, hexadecimal; empty for a head without one."""
    hidden_size: int
    """Width of the target's hidden state; 0 for a model without features."""
    feature_layers: tuple[int, ...]
    """Layers of the target that its features come from: number n is the residual stream as it enters layer n,
    num_layers the last layer's output, num_layers + 1 that output after the final norm. Empty without features."""
    feature_size: int
    """Width of a feature as `forward` takes it, after `project`; 0 without features."""
    edge_scale = PLAIN_SCALE
    """How its candidates are scored."""

    @abstractmethod
    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """Run M tokens; writes their k and v.

        `features` [M, feature_size]: of the position before each token, the target's own (projected) or the second
        value that this method returned for the token's parent.

        Returns:
            rows for `logits` [M, any], and features [M, feature_size] for the tokens' children (None without features).
        """

    @abstractmethod
    def logits(self, rows: Tensor) -> Tensor:
        """float32 [R, vocab_size]."""

    def project(self, features: Tensor) -> Tensor:
        """Target features [N, len(feature_layers) * hidden_size] to [N, feature_size]."""
        return features

    def projection(self) -> Tensor | None:
        """The matrix [feature_size, len(feature_layers) * hidden_size] that `project` multiplies raw features with.

        None where there is none, or where what comes before the product is not linear.
        """
        return None

    def finish_product(self, product: Tensor) -> Tensor:
        """What `project` gives, from features that were multiplied with `projection` elsewhere [N, feature_size]."""
        return product

    def new_kv(self, num_slots: int) -> KVCache:
        """A cache of the model's shape, dtype and device."""
        return KVCache(self.num_layers, num_slots, self.num_kv_heads, self.head_dim, self.dtype, self.device)

"""The interface of language models for executors and drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.models.config import ModelShape


class LanguageModel(ABC):
    """A causal language model that keeps no state between forwards: the caller has the KV and says what tokens see.

    A forward on a GPU may be captured: it reads lengths only from device memory and never waits for the device.
    """

    config: ModelShape
    dtype: torch.dtype
    device: torch.device
    has_experts = False
    """Whether tokens choose which weights are read, and padding reads none."""
    kv_dtype: torch.dtype | None = None
    """Dtype of keys and values; None is `dtype`."""
    steady_rows = 0
    """Most rows of a forward with which no bit of a row depends on the rows beside it; 0 if it always may."""

    def forward(self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend) -> Tensor:
        """Run the batch, and write its k and v to their slots.

        Returns [M, hidden_size] in the model's dtype, after the final norm.

        Raises ValueError if the segments do not fit the tokens.
        """
        return self.forward_with_features(batch, kv, attention, ())[0]

    @abstractmethod
    def forward_with_features(
        self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend, feature_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """Do `forward`, and also return the residual stream [M, hidden] as it enters each of `feature_layers`.

        Layer numbers run from 0 (the embedding) to num_layers (the last layer's output, before the final norm) and
        num_layers + 1 (the same after the final norm).
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [R, vocab_size] for rows [R, hidden_size] that `forward` returned."""

    def new_kv(self, num_slots: int) -> KVCache:
        """Return a cache of the model's shape and device."""
        config, dtype = self.config, self.kv_dtype or self.dtype
        return KVCache(config.num_layers, num_slots, config.num_kv_heads, config.head_dim, dtype, self.device)

    @property
    def kv_bytes(self) -> int:
        """Memory of one token's keys and values in a cache from `new_kv`."""
        config, dtype = self.config, self.kv_dtype or self.dtype
        return KVCache.bytes_per_slot(config.num_layers, config.num_kv_heads, config.head_dim, dtype)

"""What every causal language model offers to an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.models.config import ModelConfig


class CausalLM(ABC):
    """A decoder and its output matrix. Built empty; `load_model` fills the tensors that `checkpoint_tensors` names."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint belongs: its name to a tensor, or a view of a fused one, of its shape."""

    @abstractmethod
    def finish_loading(self) -> None:
        """Called once when all tensors are filled, to choose memory layouts."""

    @abstractmethod
    def forward_with_features(
        self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend, feature_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """`forward`, and the residual stream [M, hidden] as it enters each of `feature_layers`.

        Layer numbers run from 0 (the embedding) to num_layers (the last layer's output, before the final norm) and
        num_layers + 1 (the same behind the final norm).
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocab_size] for rows [R, hidden_size] that `forward` returned."""

    def forward(self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend) -> Tensor:
        """Run the batch: writes its k and v to their slots.

        Returns:
            [M, hidden_size] in the model's dtype, after the final norm.

        Raises:
            ValueError: the segments do not fit the tokens.
        """
        return self.forward_with_features(batch, kv, attention, ())[0]

    def new_kv(self, num_slots: int) -> KVCache:
        """A cache of the model's shape, dtype and device."""
        config = self.config
        return KVCache(config.num_layers, num_slots, config.num_kv_heads, config.head_dim, self.dtype, self.device)

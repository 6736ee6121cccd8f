"""A small language model with the target's tokenizer as a drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel


class StandaloneDraft(DraftModel):
    """Any causal language model; `target_ids` int32 are those of its output matrix's rows, None for all."""

    def __init__(self, model: CausalLM, tokenizer_hash: str, target_ids: Tensor | None = None) -> None:
        config = model.config
        self.model = model
        self.dtype = model.dtype
        self.device = model.device
        self.num_layers = config.num_layers
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.max_positions = config.max_positions
        self.vocab_size = config.vocab_size if target_ids is None else target_ids.numel()
        self.target_vocab_size = config.vocab_size
        self.target_ids = target_ids
        self.tokenizer_hash = tokenizer_hash
        self.hidden_size = 0
        self.feature_layers = ()
        self.feature_size = 0

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        return self.model.forward(batch, kv, attention), None

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """See DraftModel."""
        return self.model.logits(rows)

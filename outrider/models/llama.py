"""The Llama family: Llama 2 and 3, Qwen2, Qwen3, MiMo.

What tells them apart is stated by ModelConfig, not by subclasses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import CausalLM
from outrider.models.config import ModelConfig
from outrider.models.decoder import DecoderLayer


class LlamaFamily(CausalLM):
    """Pre-norm decoder with rotary positions, grouped-query attention and a gated MLP."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, layer, dtype, device) for layer in range(config.num_layers)]
        self.norm = RMSNorm((config.hidden_size,), config.rms_norm_eps, dtype, device)
        self.rotary = Rotary(config.rope, config.head_dim, device)
        self.head = Linear(config.hidden_size, 0 if config.tie_embeddings else config.vocab_size, False, dtype, device)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Hugging Face names."""
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_embeddings:
            found["lm_head.weight"] = self.head.weight
        for number, layer in enumerate(self.layers):
            found |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.checkpoint_tensors().items()}
        return found

    def finish_loading(self) -> None:
        """Layer by layer, so that no more than one matrix is in memory twice."""
        if self.config.tie_embeddings:
            # Rows are looked up in the plain layout; where packing helps, the head is a second copy in another one.
            self.head.weight = self.embedding
        self.head.pack()
        for layer in self.layers:
            layer.finish_loading()

    @torch.inference_mode()
    def forward_with_features(
        self, batch: TokenBatch, kv: KVCache, attention: AttentionBackend, feature_layers: Sequence[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """See CausalLM."""
        plan = attention.plan(batch, kv, self.config.num_heads, self.rotary)
        wanted = set(feature_layers)
        stream = functional.embedding(batch.token_ids, self.embedding)
        features: dict[int, Tensor] = {}
        for number, layer in enumerate(self.layers):
            if number in wanted:
                features[number] = stream
            stream = layer(stream, plan)
        features[len(self.layers)] = stream
        hidden = features[len(self.layers) + 1] = self.norm(stream)
        return hidden, [features[number] for number in feature_layers]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM."""
        return self.head.to_float32(hidden)

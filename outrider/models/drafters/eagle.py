"""EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858).

A head extrapolates the target's hidden state after its final norm: fc of embedding and feature, side by side, then
decoder layers of which the first has no norm before its attention. The result is the feature of the child, and the
target's output matrix turns it to logits as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.models.decoder import DecoderLayer
from outrider.models.drafters.config import HeadConfig
from outrider.models.drafters.head import DraftHead, required


class EagleHead(DraftHead):
    """See the module."""

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, dtype, device, target_ids)
        self.fc = self.linear(2 * config.decoder.hidden_size, config.fc_bias)
        for number in range(config.decoder.num_layers):
            self.layers.append(DecoderLayer(config.decoder, number, dtype, device, input_norm=number > 0))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See DraftHead."""
        found = super().checkpoint_tensors()
        found["fc.weight"] = self.fc.weight
        if self.fc.bias is not None:
            found["fc.bias"] = self.fc.bias
        return found

    def finish_loading(self) -> None:
        """See DraftHead."""
        super().finish_loading()
        self.fc.pack()

    def project(self, features: Tensor) -> Tensor:
        """See DraftModel."""
        return features.to(self.dtype)

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        plan = attention.plan(batch, kv, self.num_heads, self.rotary)
        stream = self.fc(torch.cat((self.embed(batch.token_ids), required(features)), 1))
        for layer in self.layers:
            stream = layer(stream, plan)
        return stream, stream

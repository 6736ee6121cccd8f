"""The multi-token prediction head of MiMo checkpoints: one decoder layer on the target's last hidden state.

It takes that state after the target's final norm, and the embedding of the token after it; both are normed and
projected side by side, the state first. Its output after a norm of its own goes to the target's output matrix and, as
feature, to the child.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.models.decoder import DecoderLayer
from outrider.models.drafters.config import HeadConfig
from outrider.models.drafters.head import DraftHead, required


class MtpHead(DraftHead):
    """See the module."""

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, dtype, device, target_ids)
        hidden = config.decoder.hidden_size
        self.token_norm = self.norm(hidden)
        self.hidden_norm = self.norm(hidden)
        self.final_norm = self.norm(hidden)
        self.input = self.linear(2 * hidden)
        self.layers.append(DecoderLayer(config.decoder, 0, dtype, device))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See DraftHead."""
        return super().checkpoint_tensors() | {
            "token_layernorm.weight": self.token_norm.weight,
            "hidden_layernorm.weight": self.hidden_norm.weight,
            "final_layernorm.weight": self.final_norm.weight,
            "input_proj.weight": self.input.weight,
        }

    def finish_loading(self) -> None:
        """See DraftHead."""
        super().finish_loading()
        self.input.pack()

    def project(self, features: Tensor) -> Tensor:
        """See DraftModel."""
        return features.to(self.dtype)

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        plan = attention.plan(batch, kv, self.num_heads, self.rotary)
        tokens = self.token_norm(self.embed(batch.token_ids))
        # The first pair of a sequence has no token, as in the engines that serve this head.
        tokens = tokens.masked_fill((batch.positions == 0).unsqueeze(1), 0.0)
        stream = self.input(torch.cat((self.hidden_norm(required(features)), tokens), 1))
        rows = self.final_norm(self.layers[0](stream, plan))
        return rows, rows

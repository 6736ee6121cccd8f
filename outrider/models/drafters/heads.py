"""Draft models: EAGLE-1/2, EAGLE-3 and MTP heads on a target's features, and a small language model."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.head_step import HeadStep, HeadWeights, Links, Ranking, Stepped, fits_head
from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.linear import Linear, RMSNorm
from outrider.models.base import LanguageModel
from outrider.models.decoder import DecoderLayer
from outrider.models.drafters.base import DraftHead, DraftModel, required
from outrider.models.drafters.config import HeadConfig


class EagleHead(DraftHead):
    """EAGLE-1 and EAGLE-2 heads (arXiv 2401.15077, 2406.16858).

    A head extrapolates the target's hidden state after its final norm: fc of embedding and feature, side by side, then
    decoder layers of which the first has no norm before its attention. The result is the feature of the child, and the
    target's output matrix turns it to logits as it is.
    """

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, dtype, device, target_ids)
        self.fc = self.linear("fc", 2 * config.decoder.hidden_size, config.fc_bias)
        for number in range(config.decoder.num_layers):
            self.layers.append(DecoderLayer(config.decoder, number, dtype, device, input_norm=number > 0))

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        stream = self.fc(torch.cat((self.embed(batch.token_ids), required(features)), 1))
        stream, _ = self.stack(stream, batch, kv, attention, given=stream)
        return stream, stream


class Eagle3Head(DraftHead):
    """EAGLE-3 heads (arXiv 2503.01840), and the norms of EAGLE 3.1.

    feature     fc of the target's residual stream at some layers, side by side
    layer 0     attention over the normed embedding and the normed feature, side by side; the residual is the feature
    to logits   norm, then an output matrix over a smaller vocabulary
    to child    the stream before that norm
    """

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, dtype, device, target_ids)
        hidden, num_features = config.decoder.hidden_size, len(config.feature_layers)
        self.fc: Linear | None = None
        if config.projects:
            self.fc = self.linear("fc", num_features * config.target_hidden_size, config.fc_bias)
        self.feature_norms: list[RMSNorm] = []
        if config.norm_each:
            size = config.target_hidden_size
            self.feature_norms = [self.norm(f"fc_norm.{number}", size) for number in range(num_features)]
        self.joint_norm: RMSNorm | None = None
        if config.norm_all:
            self.joint_norm = self.norm("input_norm", num_features * config.target_hidden_size)
        if not self.feature_norms and self.joint_norm is None:
            self._reducer = self.fc
        self._step: HeadStep | None = None
        # The first layer's own input norm is the embedding's.
        self.token_norm = self.norm("layers.0.input_layernorm", hidden)
        self.hidden_norm = self.norm("layers.0.hidden_norm", hidden)
        self.final_norm = self.norm("norm", hidden)
        self.layers.append(DecoderLayer(config.decoder, 0, dtype, device, input_size=2 * hidden, input_norm=False))
        for number in range(1, config.decoder.num_layers):
            self.layers.append(DecoderLayer(config.decoder, number, dtype, device))

    def finish_loading(self) -> None:
        """See DraftHead."""
        super().finish_loading()
        shape, output = self.stack.few_shape, self.output.on_cpu and self.output.on_cpu.of_few
        if shape is None or not output or self.output.bias is not None or self.exchange is not None:
            return
        weights = HeadWeights(
            self.embedding,
            self.token_norm.wide_weight,
            self.hidden_norm.wide_weight,
            self.final_norm.wide_weight,
            output,
            starts_normed=self.config.norm_before_residual,
            leaves_normed=self.config.norm_output,
        )
        self._step = HeadStep(shape, weights) if fits_head(shape, weights) else None

    @torch.inference_mode()
    def step(self, batch: TokenBatch, links: Links, kv: KVCache, ranking: Ranking | None) -> Stepped | None:
        """See DraftModel."""
        plan = None if self._step is None else self.stack.plan(batch, kv)
        return None if self._step is None or plan is None else self._step(plan, batch.token_ids, links, ranking)

    @torch.inference_mode()
    def project(self, features: Tensor) -> Tensor:
        """See DraftModel."""
        features = features.to(self.dtype)
        if self.feature_norms:
            parts = features.chunk(len(self.feature_norms), 1)
            features = torch.cat(
                [norm(part.contiguous()) for norm, part in zip(self.feature_norms, parts, strict=True)], 1
            )
        if self.joint_norm is not None:
            features = self.joint_norm(features)
        return features if self.fc is None else self.fc(features)

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        stream = required(features)
        hidden = self.hidden_norm(stream)
        rows = torch.cat((self.token_norm(self.embed(batch.token_ids)), hidden), 1)
        stream = hidden if self.config.norm_before_residual else stream
        stream, _ = self.stack(stream, batch, kv, attention, given=rows)
        normed = self.final_norm(stream)
        return normed, normed if self.config.norm_output else stream


class MtpHead(DraftHead):
    """The multi-token prediction head of MiMo checkpoints: one decoder layer on the target's last hidden state.

    It takes that state after the target's final norm, and the embedding of the token after it; both are normed and
    projected side by side, the state first. Its output after a norm of its own goes to the target's output matrix and,
    as feature, to the child.
    """

    def __init__(
        self, config: HeadConfig, dtype: torch.dtype, device: torch.device, target_ids: Tensor | None = None
    ) -> None:
        super().__init__(config, dtype, device, target_ids)
        hidden = config.decoder.hidden_size
        self.token_norm = self.norm("token_layernorm", hidden)
        self.hidden_norm = self.norm("hidden_layernorm", hidden)
        self.final_norm = self.norm("final_layernorm", hidden)
        self.input = self.linear("input_proj", 2 * hidden)
        self.layers.append(DecoderLayer(config.decoder, 0, dtype, device))

    @torch.inference_mode()
    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        tokens = self.token_norm(self.embed(batch.token_ids))
        # The first pair of a sequence has no token, as in the engines that serve this head.
        tokens = tokens.masked_fill((batch.positions == 0).unsqueeze(1), 0.0)
        stream = self.input(torch.cat((self.hidden_norm(required(features)), tokens), 1))
        stream, _ = self.stack(stream, batch, kv, attention)
        rows = self.final_norm(stream)
        return rows, rows


class StandaloneDraft(DraftModel):
    """Any causal language model; `target_ids` int32 are those of its output matrix's rows, None for all."""

    def __init__(self, model: LanguageModel, tokenizer_hash: str, target_ids: Tensor | None = None) -> None:
        super().__init__(model.config, model.config.vocab_size, target_ids, model.dtype, model.device)
        self.model = model
        self.tokenizer_hash = tokenizer_hash

    def forward(
        self, batch: TokenBatch, features: Tensor | None, kv: KVCache, attention: AttentionBackend
    ) -> tuple[Tensor, Tensor | None]:
        """See DraftModel."""
        return self.model.forward(batch, kv, attention), None

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """See DraftModel."""
        return self.model.logits(rows)

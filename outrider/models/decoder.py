"""Pre-norm decoders with rotary positions, grouped-query attention and gated MLPs, or mixtures of them: Llama 2 and 3,
Qwen2, Qwen3, MiMo, Mixtral.

What tells them apart is stated by ModelConfig, not by subclasses. The heads of drafters are made of the same layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.experts import ExpertMlp
from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import LanguageModel
from outrider.models.config import ModelConfig


class SelfAttention:
    """Grouped-query attention over rows [M, input_size]; `layer` is its layer of the KV cache."""

    def __init__(
        self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device, input_size: int
    ) -> None:
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        # q, k and v are one matrix: heads in that order, so that q and k are rotated (and normed) as one tensor.
        name, num_out = f"model.layers.{layer}.self_attn", self.q_size + 2 * self.kv_size
        scheme = config.scheme_of(f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        self.qkv = Linear(input_size, num_out, config.qkv_bias, dtype, device, scheme)
        scheme = config.scheme_of(f"{name}.o_proj")
        self.output = Linear(self.q_size, config.hidden_size, config.output_bias, dtype, device, scheme)
        self.qk_norm: RMSNorm | None = None
        if config.qk_norm:
            shape = (config.num_heads + config.num_kv_heads, config.head_dim)
            self.qk_norm = RMSNorm(shape, config.rms_norm_eps, dtype, device)

    def __call__(self, rows: Tensor, residual: Tensor, plan: AttentionPlan) -> Tensor:
        """`residual` [M, hidden] plus the attention's output for `rows`."""
        heads = self.qkv(rows).view(rows.shape[0], -1, self.head_dim)
        return self.output.add_to(residual, plan.attend(self.layer, heads, self.qk_norm))

    def of_stream(self, stream: Tensor, norm: RMSNorm, plan: AttentionPlan) -> Tensor:
        """The residual stream [M, hidden] plus the attention's output for it, normed."""
        attended = plan.attend_stream(self.layer, stream, norm, self.qkv, self.qk_norm)
        if attended is None:
            return self(norm(stream), stream, plan)
        return self.output.add_to(stream, attended)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """q, k and v as views of the fused matrix; Qwen3's head norms fill one row a head."""
        sizes = (self.q_size, self.kv_size, self.kv_size)
        found = self.qkv.tensors("q_proj", "k_proj", "v_proj", rows=sizes) | self.output.tensors("o_proj")
        if self.qk_norm is not None:
            found["q_norm.weight"] = self.qk_norm.weight[0]
            found["k_norm.weight"] = self.qk_norm.weight[self.num_heads]
        return found

    def finish_loading(self) -> None:
        """Called once when the weights are filled, to choose memory layouts."""
        if self.qk_norm is not None:
            self.qk_norm.weight[: self.num_heads] = self.qk_norm.weight[0].clone()
            self.qk_norm.weight[self.num_heads :] = self.qk_norm.weight[self.num_heads].clone()
        self.qkv.pack()
        self.output.pack()


class GatedMlp:
    """A gated MLP."""

    name = "mlp"
    """In checkpoints."""

    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = config.intermediate_size
        name = f"model.layers.{layer}.mlp"
        scheme = config.scheme_of(f"{name}.gate_proj", f"{name}.up_proj")
        self.gate_up = Linear(config.hidden_size, 2 * self.size, config.mlp_bias, dtype, device, scheme)
        scheme = config.scheme_of(f"{name}.down_proj")
        self.down = Linear(self.size, config.hidden_size, config.mlp_bias, dtype, device, scheme)

    def __call__(self, stream: Tensor, norm: RMSNorm, plan: AttentionPlan) -> Tensor:
        """The residual stream [M, hidden] plus the MLP's output for it, normed."""
        return self.down.add_to(stream, self.gate_up.normed_gated(stream, norm))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """gate and up as halves of one matrix."""
        gate_up = self.gate_up.tensors("gate_proj", "up_proj", rows=(self.size, self.size))
        return gate_up | self.down.tensors("down_proj")

    def finish_loading(self) -> None:
        """See SelfAttention."""
        self.gate_up.pack()
        self.down.pack()


class DecoderLayer:
    """Attention and MLP, each behind a norm and with a residual around it.

    `input_size` is the width of what attention takes, if it is not the residual stream's. `input_norm` False leaves
    out the norm before attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: torch.dtype,
        device: torch.device,
        input_size: int | None = None,
        input_norm: bool = True,
    ) -> None:
        shape = (config.hidden_size,)
        self.attention_norm = RMSNorm(shape, config.rms_norm_eps, dtype, device) if input_norm else None
        self.attention = SelfAttention(config, layer, dtype, device, input_size or config.hidden_size)
        self.mlp_norm = RMSNorm(shape, config.rms_norm_eps, dtype, device)
        experts = config.experts
        self.mlp: GatedMlp | ExpertMlp
        if experts is not None and layer in experts.layers:
            self.mlp = ExpertMlp(experts, config.hidden_size, dtype, device)
        else:
            self.mlp = GatedMlp(config, layer, dtype, device)

    def __call__(self, stream: Tensor, plan: AttentionPlan) -> Tensor:
        """The residual stream [M, hidden] after the layer."""
        if self.attention_norm is None:
            return self.run(stream, stream, plan)
        return self.mlp(self.attention.of_stream(stream, self.attention_norm, plan), self.mlp_norm, plan)

    def run(self, rows: Tensor, stream: Tensor, plan: AttentionPlan) -> Tensor:
        """The same where attention takes `rows` [M, input_size], which the caller has normed."""
        stream = self.attention(rows, stream, plan)
        return self.mlp(stream, self.mlp_norm, plan)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Hugging Face names below the layer's own."""
        found: dict[str, Tensor] = {"post_attention_layernorm.weight": self.mlp_norm.weight}
        if self.attention_norm is not None:
            found["input_layernorm.weight"] = self.attention_norm.weight
        found |= {f"self_attn.{name}": tensor for name, tensor in self.attention.checkpoint_tensors().items()}
        found |= {f"{self.mlp.name}.{name}": tensor for name, tensor in self.mlp.checkpoint_tensors().items()}
        return found

    def finish_loading(self) -> None:
        """See SelfAttention."""
        self.attention.finish_loading()
        self.mlp.finish_loading()


class CausalLM(LanguageModel):
    """Embedding, decoder layers, final norm and output matrix. Built empty; `load_model` fills it."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config: ModelConfig = config
        self.dtype = dtype
        self.device = device
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, layer, dtype, device) for layer in range(config.num_layers)]
        self.norm = RMSNorm((config.hidden_size,), config.rms_norm_eps, dtype, device)
        self.rotary = Rotary(config.rope, config.head_dim, device)
        rows = 0 if config.tie_embeddings else config.vocab_size
        scheme = None if config.tie_embeddings else config.scheme_of("lm_head")
        self.head = Linear(config.hidden_size, rows, False, dtype, device, scheme)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Where each tensor of the checkpoint belongs: its name to a tensor, or a view of a fused one, of its shape."""
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm.weight}
        if not self.config.tie_embeddings:
            found |= self.head.tensors("lm_head")
        for number, layer in enumerate(self.layers):
            found |= {f"model.layers.{number}.{name}": tensor for name, tensor in layer.checkpoint_tensors().items()}
        return found

    def finish_loading(self) -> None:
        """Called once when all tensors are filled, to choose memory layouts.

        Layer by layer, so that no more than one matrix is in memory twice.
        """
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
        """See LanguageModel."""
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
        """See LanguageModel."""
        return self.head.to_float32(hidden)

"""The Llama family: Llama 2 and 3, Qwen2, Qwen3. What tells them apart is stated by ModelConfig, not by subclasses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.cache.kv import KVCache
from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import CausalLM
from outrider.models.config import ModelConfig


class _Attention:
    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layer = layer
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_size = config.num_heads * config.head_dim
        self.kv_size = config.num_kv_heads * config.head_dim
        # q, k and v are one matrix: heads in that order, so that q and k are rotated (and normed) as one tensor.
        self.qkv = Linear(config.hidden_size, self.q_size + 2 * self.kv_size, config.qkv_bias, dtype, device)
        self.output = Linear(self.q_size, config.hidden_size, config.output_bias, dtype, device)
        self.qk_norm: RMSNorm | None = None
        if config.qk_norm:
            shape = (config.num_heads + config.num_kv_heads, config.head_dim)
            self.qk_norm = RMSNorm(shape, config.rms_norm_eps, dtype, device)

    def __call__(self, rows: Tensor, residual: Tensor, plan: AttentionPlan) -> Tensor:
        heads = self.qkv(rows).view(rows.shape[0], -1, self.head_dim)
        return self.output.add_to(residual, plan.attend(self.layer, heads, self.qk_norm))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """q, k and v as views of the fused matrix; Qwen3's head norms fill one row a head."""
        found: dict[str, Tensor] = {"o_proj.weight": self.output.weight}
        sizes = (self.q_size, self.kv_size, self.kv_size)
        for name, view in zip("qkv", self.qkv.weight.split(sizes), strict=True):
            found[f"{name}_proj.weight"] = view
        if self.qkv.bias is not None:
            for name, view in zip("qkv", self.qkv.bias.split(sizes), strict=True):
                found[f"{name}_proj.bias"] = view
        if self.output.bias is not None:
            found["o_proj.bias"] = self.output.bias
        if self.qk_norm is not None:
            found["q_norm.weight"] = self.qk_norm.weight[0]
            found["k_norm.weight"] = self.qk_norm.weight[self.num_heads]
        return found

    def finish_loading(self) -> None:
        if self.qk_norm is not None:
            self.qk_norm.weight[: self.num_heads] = self.qk_norm.weight[0].clone()
            self.qk_norm.weight[self.num_heads :] = self.qk_norm.weight[self.num_heads].clone()
        self.qkv.pack()
        self.output.pack()


class _Mlp:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.size = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, 2 * self.size, config.mlp_bias, dtype, device)
        self.down = Linear(self.size, config.hidden_size, config.mlp_bias, dtype, device)

    def __call__(self, rows: Tensor, residual: Tensor) -> Tensor:
        return self.down.add_to(residual, self.gate_up.gated(rows))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        gate, up = self.gate_up.weight.split(self.size)
        found: dict[str, Tensor] = {
            "gate_proj.weight": gate,
            "up_proj.weight": up,
            "down_proj.weight": self.down.weight,
        }
        if self.gate_up.bias is not None and self.down.bias is not None:
            found["gate_proj.bias"], found["up_proj.bias"] = self.gate_up.bias.split(self.size)
            found["down_proj.bias"] = self.down.bias
        return found

    def finish_loading(self) -> None:
        self.gate_up.pack()
        self.down.pack()


class _Layer:
    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.hidden_size,)
        self.attention_norm = RMSNorm(shape, config.rms_norm_eps, dtype, device)
        self.attention = _Attention(config, layer, dtype, device)
        self.mlp_norm = RMSNorm(shape, config.rms_norm_eps, dtype, device)
        self.mlp = _Mlp(config, dtype, device)

    def __call__(self, stream: Tensor, plan: AttentionPlan) -> Tensor:
        stream = self.attention(self.attention_norm(stream), stream, plan)
        return self.mlp(self.mlp_norm(stream), stream)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {
            "input_layernorm.weight": self.attention_norm.weight,
            "post_attention_layernorm.weight": self.mlp_norm.weight,
        }
        found |= {f"self_attn.{name}": tensor for name, tensor in self.attention.checkpoint_tensors().items()}
        found |= {f"mlp.{name}": tensor for name, tensor in self.mlp.checkpoint_tensors().items()}
        return found

    def finish_loading(self) -> None:
        self.attention.finish_loading()
        self.mlp.finish_loading()


class LlamaFamily(CausalLM):
    """Pre-norm decoder with rotary positions, grouped-query attention and a gated MLP."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [_Layer(config, layer, dtype, device) for layer in range(config.num_layers)]
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
        return self.norm(stream), [features[number] for number in feature_layers]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM."""
        return self.head.to_float32(hidden)

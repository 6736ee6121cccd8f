"""A trainable decoder layer, with its weights named as in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.layers.rotary import rotate
from outrider.models.config import ModelConfig
from outrider_tools.inflate.shapes import shape_of

# Fields that a head copies from its target's config.json.
SHARED_FIELDS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
)
INPUT_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"


def llama_layer(config: ModelConfig) -> ModelConfig:
    """Return the config with Llama's layer, which all public heads have: no biases, no head norms."""
    return replace(config, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False)


def llama_fields(
    target: ModelConfig, architecture: str, target_fields: dict[str, Any], **changes: Any
) -> dict[str, Any]:
    """Return a head's config.json with such a layer: the target's sizes, `changes`, and the target's shared fields."""
    fields = {
        "architectures": [architecture],
        "model_type": "llama",
        # A head has one MLP as wide as the target's own, even if the target has experts.
        **shape_of(replace(target, num_layers=1, experts=None)).config_fields(),
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
    }
    return fields | changes | {name: target_fields[name] for name in SHARED_FIELDS if name in target_fields}


class TrainableNorm(nn.Module):
    """RMS norm; the mean is taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        """Norm rows [..., size]."""
        return (functional.rms_norm(rows.float(), rows.shape[-1:], None, self._eps) * self.weight).to(rows.dtype)


def matrix(size_in: int, size_out: int, bias: bool = False) -> nn.Linear:
    """Return a projection whose random weights keep the size of its input."""
    made = nn.Linear(size_in, size_out, bias=bias)
    nn.init.normal_(made.weight, std=size_in**-0.5)
    if bias:
        nn.init.zeros_(made.bias)
    return made


class TrainableAttention(nn.Module):
    """Projections of grouped-query attention. The caller attends with them."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        """`width` is that of the projected rows, if it is not the residual stream's."""
        super().__init__()
        width = width or config.hidden_size
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = matrix(width, size, config.qkv_bias)
        self.k_proj = matrix(width, kv_size, config.qkv_bias)
        self.v_proj = matrix(width, kv_size, config.qkv_bias)
        self.o_proj = matrix(size, config.hidden_size, config.output_bias)
        if config.qk_norm:
            self.q_norm = TrainableNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = TrainableNorm(config.head_dim, config.rms_norm_eps)
        self._qk_norm = config.qk_norm

    def project(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project rows [M, width] to q [M, H, D], k and v [M, KVH, D], q and k rotated by their positions' angles."""
        num_heads, _, head_dim = self._heads
        q = self.q_proj(rows).unflatten(1, (num_heads, head_dim))
        return rotate(self.q_norm(q) if self._qk_norm else q, cos, sin), *self.keys(rows, cos, sin)

    def keys(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return only the k and v of `project`."""
        _, num_kv_heads, head_dim = self._heads
        k = self.k_proj(rows).unflatten(1, (num_kv_heads, head_dim))
        v = self.v_proj(rows).unflatten(1, (num_kv_heads, head_dim))
        return rotate(self.k_norm(k) if self._qk_norm else k, cos, sin), v

    def output(self, attended: Tensor) -> Tensor:
        """Project [M, H, D] to [M, hidden]."""
        projected: Tensor = self.o_proj(attended.flatten(1))
        return projected


class TrainableMlp(nn.Module):
    """A gated MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = matrix(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = matrix(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = matrix(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, rows: Tensor) -> Tensor:
        """Run the MLP on rows [..., hidden]."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class TrainableLayer(nn.Module):
    """Attention and MLP. The caller chooses the input of attention's projections, and attends with them."""

    input_layernorm: TrainableNorm
    hidden_norm: TrainableNorm
    post_attention_layernorm: TrainableNorm

    def __init__(
        self, config: ModelConfig, norms: Sequence[str] = (INPUT_NORM, MLP_NORM), width: int | None = None
    ) -> None:
        """`norms` lists the names of the norms. `width`: see TrainableAttention."""
        super().__init__()
        self.self_attn = TrainableAttention(config, width)
        self.mlp = TrainableMlp(config)
        # States on disk number the parameters, so this order must stay.
        for name in norms:
            self.add_module(name, TrainableNorm(config.hidden_size, config.rms_norm_eps))

    def project(self, stream: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of the residual stream that enters the layer: see TrainableAttention."""
        return self.self_attn.project(self.input_layernorm(stream), cos, sin)

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """Return the residual stream after the layer, from the one before it and attention's output [M, H, D]."""
        stream = stream + self.self_attn.output(attended)
        output: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return output

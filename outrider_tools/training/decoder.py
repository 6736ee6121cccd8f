"""A decoder layer that learns, under the names that its weights have in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.layers.rotary import rotate
from outrider.models.config import ModelConfig

INPUT_NORM, MLP_NORM = "input_layernorm", "post_attention_layernorm"


def llama_layer(config: ModelConfig) -> ModelConfig:
    """The config with a Llama's layer, which public heads have whatever their target's is: no biases, no head norms."""
    return replace(config, qkv_bias=False, output_bias=False, mlp_bias=False, qk_norm=False)


class Norm(nn.Module):
    """RMS norm; the mean is taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, rows: Tensor) -> Tensor:
        """[..., size]."""
        return (functional.rms_norm(rows.float(), rows.shape[-1:], None, self._eps) * self.weight).to(rows.dtype)


def matrix(size_in: int, size_out: int, bias: bool = False) -> nn.Linear:
    """A projection that keeps the size of what it projects."""
    made = nn.Linear(size_in, size_out, bias=bias)
    nn.init.normal_(made.weight, std=size_in**-0.5)
    if bias:
        nn.init.zeros_(made.bias)
    return made


class Attention(nn.Module):
    """Projections of grouped-query attention; what is done with them is the caller's."""

    def __init__(self, config: ModelConfig, width: int | None = None) -> None:
        """`width` of the rows that are projected, if it is not the residual stream's."""
        super().__init__()
        width = width or config.hidden_size
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = matrix(width, size, config.qkv_bias)
        self.k_proj = matrix(width, kv_size, config.qkv_bias)
        self.v_proj = matrix(width, kv_size, config.qkv_bias)
        self.o_proj = matrix(size, config.hidden_size, config.output_bias)
        if config.qk_norm:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps)
        self._qk_norm = config.qk_norm

    def project(self, rows: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, heads, T, head_dim] of [B, T, width], rotated; each kv head repeated for its queries."""
        num_heads, num_kv_heads, head_dim = self._heads
        q = self.q_proj(rows).view(*rows.shape[:2], num_heads, head_dim)
        k = self.k_proj(rows).view(*rows.shape[:2], num_kv_heads, head_dim)
        v = self.v_proj(rows).view(*rows.shape[:2], num_kv_heads, head_dim)
        if self._qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *angles), rotate(k, *angles)
        k, v = (part.repeat_interleave(num_heads // num_kv_heads, 2) for part in (k, v))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def output(self, attended: Tensor) -> Tensor:
        """[B, H, T, D] to [B, T, hidden]."""
        projected: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return projected


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = matrix(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = matrix(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = matrix(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., hidden]."""
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class Layer(nn.Module):
    """Attention and MLP.

    Heads whose attention takes something else than the normed stream have other norms, and no use for `forward`.
    """

    input_layernorm: Norm
    post_attention_layernorm: Norm

    def __init__(
        self, config: ModelConfig, norms: Sequence[str] = (INPUT_NORM, MLP_NORM), width: int | None = None
    ) -> None:
        """`norms`: names of its norms. `width`: see Attention."""
        super().__init__()
        self.self_attn = Attention(config, width)
        self.mlp = Mlp(config)
        # States on disk have their parameters by number, so this order stays.
        for name in norms:
            self.add_module(name, Norm(config.hidden_size, config.rms_norm_eps))

    def forward(self, stream: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream [B, T, hidden] after the layer, with causal attention."""
        q, k, v = self.self_attn.project(self.input_layernorm(stream), angles)
        return self.finish(stream, functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """The residual stream after the layer, from the one that entered it and what attention found [B, H, T, D]."""
        stream = stream + self.self_attn.output(attended)
        output: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return output

"""A decoder layer that learns, under the names that its weights have in Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.layers.rotary import rotate
from outrider.models.config import ModelConfig


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

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = matrix(config.hidden_size, size, config.qkv_bias)
        self.k_proj = matrix(config.hidden_size, kv_size, config.qkv_bias)
        self.v_proj = matrix(config.hidden_size, kv_size, config.qkv_bias)
        self.o_proj = matrix(size, config.hidden_size, config.output_bias)
        if config.qk_norm:
            self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
            self.k_norm = Norm(config.head_dim, config.rms_norm_eps)
        self._qk_norm = config.qk_norm

    def project(self, rows: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B, heads, T, head_dim] of [B, T, hidden], rotated; each kv head repeated for its queries."""
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
    """Attention and MLP. `input_norm` False leaves out the norm before attention."""

    def __init__(self, config: ModelConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)
        if input_norm:
            self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, stream: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """The residual stream [B, T, hidden] after the layer, with causal attention."""
        q, k, v = self.self_attn.project(self.input_layernorm(stream), angles)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        stream = stream + self.self_attn.output(attended)
        output: Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return output

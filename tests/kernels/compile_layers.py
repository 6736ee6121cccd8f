"""Compiles the kernels of a small model's layer. See compile_only.py."""

from __future__ import annotations

import torch

from kernels.attention_tiles import ScoreRules


def main() -> None:
    """Call every launcher; each launch is a compilation."""
    from kernels.attention_tiles import short_config
    from kernels.jit import branches, row_linear
    from kernels.linear_configs import qkv_config, row_config

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.int32)

    heads, kv_heads, dim, count, dtype = 9, 3, 64, 64, torch.bfloat16
    rules = ScoreRules(128, 50.0, torch.zeros(heads))
    size, mlp = heads * dim, 2 * heads * dim + 16

    def made(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    q, cache, stream = made(count, heads, dim), made(640, kv_heads, dim), made(count, size)
    branches.short_branch_attention(
        q, cache, cache, ints(2, 40), ints(1), ints(2), ints(1), ints(count, 256), ints(count),
        made(count, size), 16, 0.125, True, count, short_config(heads // kv_heads, dim, dtype), rules,
    )  # fmt: skip
    gated, down = row_config(count, mlp, size, True), row_config(count, size, mlp, False)
    row_linear.norm_linear(stream, made(2 * mlp, size), made(size), 1e-5, None, None, True, made(count, mlp), gated)
    row_linear.norm_linear(made(count, mlp), made(size, mlp), None, 0.0, None, stream, False, stream, down)
    angles, weight = torch.zeros(count, dim // 2), made((heads + 2 * kv_heads) * dim, size)
    row_linear.norm_qkv(
        stream, weight, angles, angles, ints(count), cache, cache, made(size), 1e-5, None, None, 0.0,
        q, qkv_config(size, dim, False),
    )  # fmt: skip

"""Compiles products with few rows for Hopper GPUs. See compile_only.py."""

from __future__ import annotations

import torch
from test_quant_gemm import made

from kernels.jit.ring_gemm import ring_linear
from kernels.ring_configs import RingConfig


def main() -> None:
    """Call every launcher; each launch is a compilation."""
    half = torch.bfloat16
    rows, residual = torch.zeros(20, 512, dtype=half), torch.zeros(20, 192, dtype=half)
    ring_linear(rows, torch.zeros(384, 512, dtype=half), None, residual, True, residual, RingConfig(128, 64))
    for kind, group, config in (
        ("fp8", 0, RingConfig(64, 256, split_k=2)),
        ("fp8", 128, RingConfig(128, 128, split_k=0, warps=8)),
        ("int4z", 128, RingConfig(64, 256)),
        ("fp8", 0, RingConfig(128, 256, split_k=2, stages=3, by_warp=True)),
        ("int4z", 128, RingConfig(64, 256, split_k=0, per_sm=4, stages=2, by_warp=True)),
    ):
        weight = made(kind, 192, 512, group, span=128 if kind == "fp8" and group else 1).for_streaming()
        ring_linear(rows, weight, torch.zeros(192), None, False, residual, config)

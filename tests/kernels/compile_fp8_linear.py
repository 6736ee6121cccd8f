"""Compiles the kernels around products in fp8. See compile_only.py."""

from __future__ import annotations

import torch


def main() -> None:
    """Call every launcher; each launch is a compilation."""
    from kernels.jit import gemm as jit

    def made(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    for rounded, count in ((False, 140), (True, 70)):
        parts = made(count, 4096, dtype=torch.float8_e4m3fn)
        jit.split(made(70, 4096), 128, parts, made(count, 1, dtype=torch.float32), rounds=rounded)
        for gated, num_out in ((False, 1024), (True, 512)):
            args = made(count, 1024), made(1024), made(70, num_out), gated, made(70, num_out)
            jit.join(*args, rounded=rounded)

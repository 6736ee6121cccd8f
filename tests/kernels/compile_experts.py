"""Compiles the kernels of experts. See compile_only.py."""

from __future__ import annotations

import torch

from kernels.quant_weight import QuantWeight, codes_per_word

TOKENS, EXPERTS, ACTIVE, SIZE, NUM_OUT = 8, 6, 2, 256, 96


def main() -> None:
    """Call every launcher; each launch is a compilation."""
    from kernels.expert_tiles import SWIGLU, Gating
    from kernels.jit import experts as jit

    def made(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    def quantized(kind: str, group: int, rows: int, zeros: bool = False) -> QuantWeight:
        codes = made(EXPERTS, rows, SIZE // codes_per_word(kind), dtype=torch.int16)
        scales = made(EXPERTS, SIZE // group, rows)
        return QuantWeight(kind, codes, scales, group, 128, zeros=scales.to(torch.uint8) if zeros else None)

    pairs = TOKENS * ACTIVE
    gates = Gating(1.702, 7.0, 1.0)
    for tile in (16, 128):
        logits, slots = made(TOKENS, EXPERTS, dtype=torch.float32), made(TOKENS, dtype=torch.int32)
        routes = jit.route(logits, ACTIVE, True, slots, tile)
        jit.gate(made(pairs, 2 * SIZE), gates, True)
        jit.combine(made(pairs, SIZE), routes, made(TOKENS, SIZE))
        rows, bias = made(TOKENS, SIZE), made(EXPERTS, NUM_OUT)
        gated_bias, height = made(EXPERTS, 2 * NUM_OUT), 2 * NUM_OUT
        jit.expert_linear(rows, made(EXPERTS, NUM_OUT, SIZE), routes, bias, None, False)
        jit.expert_linear(rows, made(EXPERTS, height, SIZE), routes, None, SWIGLU, False)
        weights = [quantized(kind, group, height) for kind, group in (("mxfp4", 32), ("fp8", 128), ("fp8", SIZE))]
        for weight in [*weights, quantized("int4", 128, height, zeros=True)][: 4 if tile == 16 else 2]:
            jit.expert_linear(rows, weight, routes, gated_bias, gates, True)

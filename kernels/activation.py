"""Activations of a gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import use_triton
from kernels.reference import activation as reference


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in float32, rounded once: [M, 2F] (gate first, contiguous) to [M, F] of the same dtype.

    Raises:
        ValueError: `gate_up` is not a matrix with an even number of columns.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul of {tuple(gate_up.shape)}")
    if not use_triton(gate_up):
        return reference.silu_mul(gate_up)
    from kernels.jit import activation

    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    activation.silu_mul(gate_up, out)
    return out

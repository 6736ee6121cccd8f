"""See kernels.activation."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """As kernels.activation.silu_mul."""
    gate, up = gate_up.float().chunk(2, 1)
    return (functional.silu(gate) * up).to(gate_up.dtype)

"""See kernels.gemm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def stream_linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    out_dtype: torch.dtype,
) -> Tensor:
    """As kernels.gemm.stream_linear."""
    product = rows.float() @ weight.float().T
    if bias is not None:
        product += bias.float()
    if gated:
        gate, up = product.chunk(2, 1)
        product = functional.silu(gate) * up
    if residual is not None:
        product += residual.float()
    return product.to(out_dtype)

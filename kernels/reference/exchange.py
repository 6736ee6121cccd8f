"""See kernels.exchange."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.reference.elementwise import rms_norm


def sum_rows(parts: Sequence[Tensor], residual: Tensor | None = None) -> Tensor:
    """What kernels.exchange.sum_rows gives every rank, of all ranks' rows [M, width]."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    if residual is not None:
        total += residual.float()
    # Zeros are +0.0.
    return total.to(parts[0].dtype) + 0.0


def sum_rows_normed(parts: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As kernels.exchange.sum_rows_normed."""
    stream = sum_rows(parts, residual)
    return stream, rms_norm(stream, weight, eps)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """As kernels.exchange.join_columns."""
    return torch.cat(list(parts), 1) + 0.0

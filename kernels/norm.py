"""Root mean square norm of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import use_triton
from kernels.reference import norm as reference


def rms_norm(rows: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """rows / sqrt(mean(rows^2) + eps) * weight for each row, in float32, rounded once.

    Args:
        rows: [M, K], contiguous, of any float dtype.
        weight: [K]. It may be read before the kernel launched last has ended: it must not be what that one writes.
        eps: added to the mean of the squares.
        out: [M, K] of the dtype of `rows`, written and returned; a new tensor if None. It may be `rows` itself.

    Raises:
        ValueError: the shapes do not fit.
    """
    if rows.dim() != 2 or weight.shape != rows.shape[1:]:
        raise ValueError(f"rms_norm of {tuple(rows.shape)} with a weight of {tuple(weight.shape)}")
    if out is None:
        out = torch.empty_like(rows)
    if use_triton(rows):
        from kernels.jit import norm

        norm.rms_norm(rows, weight, eps, out)
    else:
        out.copy_(reference.rms_norm(rows, weight, eps))
    return out

"""Root mean square norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.launch import use_triton


class RMSNorm:
    """Scale rows to unit root mean square, then by a weight."""

    def __init__(self, shape: tuple[int, ...], eps: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(shape, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., size] to the same shape; the mean is taken over the last dimension."""
        if self.weight.ndim == 1 and rows.ndim == 2 and use_triton(rows):
            from kernels.elementwise import rms_norm

            return rms_norm(rows, self.weight, self.eps)
        return functional.rms_norm(rows, rows.shape[-1:], None, self.eps).mul_(self.weight)

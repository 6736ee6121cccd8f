"""See kernels.move."""

from __future__ import annotations

from torch import Tensor


def move(k: Tensor, v: Tensor, moves: Tensor) -> None:
    """As kernels.move.move."""
    source, target = moves[(moves >= 0).all(1)].long().unbind(1)
    for cache in (k, v):
        cache[:, target] = cache[:, source]

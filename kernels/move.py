"""Copying keys and values from slot to slot, in all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import use_triton
from kernels.reference import move as reference


def move(k: Tensor, v: Tensor, moves: Tensor) -> None:
    """Copy what the first slot of each pair holds to the second one, in all layers by one launch.

    The order in which pairs are taken is open: no slot may be the target of two, nor the source of one and the target
    of another. A tree region and contexts share no slot, so moves from the one to the other keep that. Pairs are read
    on the device, so the launch can be captured; unused ones of a buffer of fixed size are (-1, -1).

    Args:
        k: [L, S, KVH, D], contiguous, written in place; so is `v`.
        moves: int32 [N, 2], contiguous: source and target slot; nothing happens where either is negative.

    Raises:
        ValueError: caches that are not contiguous or differ, or moves that are no pairs.
    """
    if k.shape != v.shape or k.dtype != v.dtype or not (k.is_contiguous() and v.is_contiguous()):
        raise ValueError("k and v must be contiguous and alike")
    if moves.dim() != 2 or moves.shape[1] != 2 or moves.dtype != torch.int32 or not moves.is_contiguous():
        raise ValueError(f"moves of {list(moves.shape)} {moves.dtype}")
    if not moves.shape[0]:
        return
    if use_triton(k):
        from kernels.jit import move as jit

        jit.move(k, v, moves)
    else:
        reference.move(k, v, moves)

"""The KV cache: keys and values of all layers, slot by slot."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kernels.kv_cache import compact, move
from kernels.sampling_state import RoundTokens


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that, on a CPU, take memory only when a slot is first written: torch.zeros writes them all at once.

    They must be zeros: what a mask hides is multiplied by 0, and 0 times a stray NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class KVCache:
    """k and v of every layer: [num_layers, num_slots, num_kv_heads, head_dim]. Who owns a slot is kept elsewhere."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        self.k, self.v = (zeros(shape, dtype, torch.device(device)) for _ in range(2))
        self.k_layers = self.k.unbind(0)
        self.v_layers = self.v.unbind(0)
        self.num_slots = num_slots

    @staticmethod
    def bytes_per_slot(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Memory of one slot over all layers, k and v together."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [M, num_kv_heads, head_dim] of one layer at int64 slots [M], which must differ."""
        self.k_layers[layer].index_copy_(0, slots, k)
        self.v_layers[layer].index_copy_(0, slots, v)

    def clear(self, slots: Tensor) -> None:
        """Zeros at int64 slots [N] of all layers."""
        for cache in (self.k, self.v):
            cache.index_fill_(1, slots, 0)

    def move(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy slots [N] to slots [N] in all layers at once, as if all were read before any is written.

        So the two may overlap in any order (compaction after a commit); destinations must differ.
        """
        if src_slots.shape != dst_slots.shape:
            raise ValueError(f"{src_slots.numel()} slots cannot move to {dst_slots.numel()}")
        for cache in (self.k, self.v):
            # index_select copies out first: that is what makes overlap safe.
            cache.index_copy_(1, dst_slots, cache.index_select(1, src_slots))

    def move_pairs(self, moves: Tensor) -> None:
        """Copy slots by int32 pairs [N, 2] of source and target on the device, in one launch; skips negative ones.

        No slot may be the target of two pairs, nor the source of one and the target of another.
        """
        move(self.k, self.v, moves)

    def compact(
        self, tokens: RoundTokens, accepted: Tensor, num_tokens: Tensor, page_tables: Tensor, page_size: int
    ) -> None:
        """Move the KV of accepted nodes behind their root, in all layers, as a round's last work on the device.

        `accepted` [B, D] names the tokens of the round that were accepted, `num_tokens` [B] is one more than how many.
        """
        compact(self.k, self.v, tokens, page_tables, accepted, num_tokens, page_size)

"""Where keys and values live."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """k and v of every layer: [num_layers, num_slots, num_kv_heads, head_dim]. Who owns which slot is kept elsewhere."""

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
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
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

    def move(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy slots [N] to slots [N] in all layers at once, as if all were read before any is written.

        So the two may overlap in any order (compaction after a commit); destinations must differ.
        """
        if src_slots.shape != dst_slots.shape:
            raise ValueError(f"{src_slots.numel()} slots cannot move to {dst_slots.numel()}")
        for cache in (self.k, self.v):
            # index_select copies out first: that is what makes overlap safe.
            cache.index_copy_(1, dst_slots, cache.index_select(1, src_slots))

"""Stores on the device with one entry per slot: keys and values of all layers, and the target's features."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.kv_cache import compact, move
from kernels.sampling_state import RoundTokens
from outrider.device import DTYPES
from outrider.layers.linear import Linear
from outrider.tree.handshake import PROJECTED, Projection


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU they take memory only when a slot is first written: torch.zeros writes all at once.

    The memory must be zero: masked values are multiplied by 0, and 0 times a stray NaN is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


class KVCache:
    """k and v of every layer: [num_layers, num_slots, num_kv_heads, head_dim]. Does not know who owns a slot."""

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
        """Return the bytes of one slot over all layers, k and v together."""
        return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [M, num_kv_heads, head_dim] of one layer at int64 slots [M], which must differ."""
        self.k_layers[layer].index_copy_(0, slots, k)
        self.v_layers[layer].index_copy_(0, slots, v)

    def clear(self, slots: Tensor) -> None:
        """Set int64 slots [N] of all layers to zero."""
        for cache in (self.k, self.v):
            cache.index_fill_(1, slots, 0)

    def move(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy slots [N] to slots [N] in all layers at once, as if all were read before any is written.

        So sources and destinations may overlap in any order (compaction after a commit); destinations must differ.
        """
        for cache in (self.k, self.v):
            # index_select copies out first, which makes overlap safe.
            cache.index_copy_(1, dst_slots, cache.index_select(1, src_slots))

    def move_pairs(self, moves: Tensor) -> None:
        """Copy slots by int32 pairs [N, 2] of source and destination, on the device in one launch; skip negative ones.

        No slot may be the destination of two pairs, nor the source of one and the destination of another.
        """
        move(self.k, self.v, moves)

    def compact(
        self, tokens: RoundTokens, accepted: Tensor, num_tokens: Tensor, page_tables: Tensor, page_size: int
    ) -> None:
        """Move the KV of accepted nodes behind their root, in all layers, as a round's last work on the device.

        `accepted` [B, D] has the accepted tokens' places in the round; `num_tokens` [B] is their number plus one.
        """
        compact(self.k, self.v, tokens, page_tables, accepted, num_tokens, page_size)


class FeatureStore:
    """Hidden states for every KV slot, [num_slots, width] in the model's dtype.

    A row has the states of `layers` one behind the other. If there is a projection, its product with the states of its
    own layers follows. Rows lie in two halves, [2, num_slots + 1, width / 2], like keys and values, so that the same
    code compacts both. The last slot takes what belongs to no token.
    """

    def __init__(
        self,
        layers: Sequence[int],
        hidden_size: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
        projection: Projection | None = None,
    ) -> None:
        """Raises torch.OutOfMemoryError if there is no room, ValueError if a row has an odd width."""
        self.layers = tuple(layers)
        self.parts = self.layers if projection is None else (*self.layers, PROJECTED)
        """Parts of a row, in order."""
        self._factors = () if projection is None else projection.layers
        self.inputs = tuple(sorted({*self.layers, *self._factors}))
        """Layers whose states `write` takes, in order."""
        self._product = None if projection is None else _load(projection, hidden_size, dtype, device)
        self._sizes = [hidden_size] * len(self.layers) + ([] if projection is None else [projection.num_columns])
        self.width = sum(self._sizes)
        self.num_slots = num_slots
        if self.width % 2:
            raise ValueError(f"a row of {self.width} values has no halves")
        self._halves = zeros((2, num_slots + 1, self.width // 2), dtype, device)
        self.dtype, self.device = dtype, self._halves.device

    def size_of(self, parts: Sequence[int]) -> int:
        """Return how many values these parts of a row have."""
        return sum(self._sizes[self.parts.index(part)] for part in parts)

    def write(self, slots: Tensor, features: Sequence[Tensor]) -> None:
        """Store rows [M, hidden_size] of each of `inputs` at slots [M]. May be captured.

        Rows of slot -1 are padding; all other slots must differ.
        """
        # Slot -1 is the last one.
        places = slots.remainder(self.num_slots + 1).long()
        self._halves.index_copy_(1, places, self._rows(features).view(-1, 2, self.width // 2).transpose(0, 1))

    def move(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy rows as `KVCache.move` does."""
        self._halves.index_copy_(1, dst_slots, self._halves.index_select(1, src_slots))

    def compact(
        self, tokens: RoundTokens, accepted: Tensor, num_tokens: Tensor, page_tables: Tensor, page_size: int
    ) -> None:
        """Move the rows of accepted nodes as `KVCache.compact` does. May be captured."""
        first, second = self._halves[:, None, :, None]
        compact(first, second, tokens, page_tables, accepted, num_tokens, page_size)

    def gather(self, slots: Tensor, parts: Sequence[int], into: Tensor) -> None:
        """Copy parts of the rows at slots [N] (int32 or int64) to `into` [N, size_of(parts)]."""
        rows = self._halves.index_select(1, slots)
        if tuple(parts) == self.parts:
            into.view(len(slots), 2, -1).copy_(rows.transpose(0, 1))
            return
        found = torch.cat([rows[0], rows[1]], 1).split(self._sizes, 1)
        start = 0
        for part in parts:
            values = found[self.parts.index(part)]
            into[:, start : start + values.shape[1]] = values
            start += values.shape[1]

    def _rows(self, features: Sequence[Tensor]) -> Tensor:
        """Return whole rows [M, width]."""
        given = dict(zip(self.inputs, features, strict=True))
        parts = [given[layer] for layer in self.layers]
        if self._product is not None:
            parts.append(self._product(torch.cat([given[layer] for layer in self._factors], 1)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _load(projection: Projection, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Linear:
    """Return the product with a projection, in the model's dtype."""
    product = Linear(len(projection.layers) * hidden_size, projection.num_columns, False, dtype, device)
    given = torch.frombuffer(bytearray(projection.data), dtype=DTYPES[projection.dtype])
    product.weight.copy_(given.view(product.weight.shape))
    product.pack()
    return product

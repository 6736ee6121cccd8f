"""Where the target's features live: beside the KV, slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.compact import compact
from outrider.cache.kv import zeros

if TYPE_CHECKING:
    from outrider.attention.paged import TreeTokens


class FeatureStore:
    """Hidden states of `layers` for every KV slot, [num_slots, len(layers) * hidden_size] in the model's dtype.

    A row lies in two halves, [2, num_slots + 1, width / 2], as keys and values do, so that what compacts those compacts
    it too. The last slot takes what belongs to no token.
    """

    def __init__(
        self, layers: Sequence[int], hidden_size: int, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises torch.OutOfMemoryError where there is no room, ValueError for a row of an odd width."""
        self.layers = tuple(layers)
        self.width = len(self.layers) * hidden_size
        self.num_slots = num_slots
        if self.width % 2:
            raise ValueError(f"a row of {self.width} values has no halves")
        self._halves = zeros((2, num_slots + 1, self.width // 2), dtype, device)

    @property
    def dtype(self) -> torch.dtype:
        """Of the features."""
        return self._halves.dtype

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self._halves.device

    def write(self, slots: Tensor, features: Sequence[Tensor]) -> None:
        """Store rows [M, hidden_size] of each layer at slots [M], which must differ where they are not negative.

        Rows of negative slots are padding. May be captured.
        """
        places = torch.where(slots < 0, self.num_slots, slots).long()
        rows = torch.cat(list(features), 1).view(-1, 2, self.width // 2)
        for half in range(2):
            self._halves[half].index_copy_(0, places, rows[:, half])

    def move(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy rows as `KVCache.move` does."""
        self._halves.index_copy_(1, dst_slots, self._halves.index_select(1, src_slots))

    def compact(
        self, tokens: TreeTokens, accepted: Tensor, num_tokens: Tensor, page_tables: Tensor, page_size: int
    ) -> None:
        """Move the rows of accepted nodes as `KVCache.compact` does. May be captured."""
        first, second = self._halves[:, None, :, None]
        compact(
            first,
            second,
            tokens.first,
            tokens.cached_len,
            tokens.table_rows,
            page_tables,
            tokens.root,
            accepted,
            num_tokens,
            page_size=page_size,
        )

    def gather(self, slots: Tensor, layers: Sequence[int], into: Tensor) -> None:
        """Copy the features of `layers` at int64 slots [N] to `into` [N, len(layers) * hidden_size]."""
        rows = self._halves.index_select(1, slots)
        if tuple(layers) == self.layers:
            into.view(len(slots), 2, -1).copy_(rows.transpose(0, 1))
            return
        whole = torch.cat([rows[0], rows[1]], 1).view(len(slots), len(self.layers), -1)
        for place, layer in enumerate(layers):
            into.view(len(slots), len(layers), -1)[:, place] = whole[:, self.layers.index(layer)]

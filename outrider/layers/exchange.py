"""What the ranks of a tensor-parallel model tell each other within a forward."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from outrider.host.rank_memory import BOX_BYTES, RankMemory


class Exchange(ABC):
    """Sums and joins over ranks. All ranks call the same in the same order, with tensors of the same shapes.

    Sums are taken in float32 in the order of ranks, so that all ranks and all runs have the same bits.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    @abstractmethod
    def add(self, stream: Tensor, part: Tensor) -> Tensor:
        """`stream` [M, hidden], the same on all ranks, plus all ranks' `part` of that shape; rounded once."""

    @abstractmethod
    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part` [M, hidden]."""

    @abstractmethod
    def join(self, part: Tensor) -> Tensor:
        """All ranks' `part` float32 [M, n] side by side in the order of ranks: [M, world * n]."""


class HostExchange(Exchange):
    """Through memory that the ranks' processes share, for CPUs."""

    def __init__(self, memory: RankMemory) -> None:
        super().__init__(memory.rank, memory.world)
        self._memory = memory

    def add(self, stream: Tensor, part: Tensor) -> Tensor:
        """See Exchange."""
        return self._sum(part).add_(stream).to(part.dtype)

    def total(self, part: Tensor) -> Tensor:
        """See Exchange."""
        return self._sum(part).to(part.dtype)

    def join(self, part: Tensor) -> Tensor:
        """See Exchange."""
        pieces = [torch.cat(tuple(parts), 1) for parts in self._swap(part)]
        return torch.cat(pieces)

    def _sum(self, part: Tensor) -> Tensor:
        found = torch.empty(part.shape, dtype=torch.float32)
        first = 0
        for parts in self._swap(part):
            rows = found[first : first + parts.shape[1]]
            rows.copy_(parts[0])
            for other in parts[1:]:
                rows += other
            first += len(rows)
        return found

    def _swap(self, part: Tensor) -> list[Tensor]:
        """`part` of all ranks, [world, rows, n] for as many rows at a time as a box holds."""
        step = max(BOX_BYTES // (part.shape[1] * part.itemsize), 1)
        found = []
        for first in range(0, part.shape[0], step):
            rows = part[first : first + step].contiguous()
            boxes = self._memory.swap(rows.view(torch.uint8).view(-1).numpy())
            found.append(torch.from_numpy(boxes.copy()).view(part.dtype).view(self.world, *rows.shape))
        return found

"""What the ranks of a tensor-parallel model tell each other within a forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.host.rank_memory import BOX_BYTES, RankMemory
from outrider.layers.linear import RMSNorm


class Exchange(ABC):
    """Sums and joins over ranks. All ranks call the same in the same order, with tensors of the same shapes.

    Sums are taken in float32 in the order of ranks, so that all ranks and all runs have the same bits.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._is_alone = False

    def add(self, stream: Tensor, part: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """`stream` [M, hidden], the same on all ranks, plus all ranks' `part` of that shape; rounded once.

        `norm`: what the sum is normed by next; it may have been when this returns (`RMSNorm.note`).
        """
        return stream + part if self._is_alone else self._add(stream, part, norm)

    def total(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part` [M, hidden]."""
        return part if self._is_alone else self._add(None, part, None)

    def join(self, part: Tensor) -> Tensor:
        """All ranks' `part` float32 [M, n] side by side in the order of ranks: [M, world * n]."""
        return part.repeat(1, self.world) if self._is_alone else self._join(part)

    def share(self, parts: Sequence[Tensor]) -> None:
        """Give int32 tensors, of numbers between -2^24 and 2^24, the values that they have on rank 0."""
        if self._is_alone:
            return
        numbers = torch.cat([part.reshape(-1) for part in parts])
        # float32 holds them exactly, and all other ranks add nothing.
        shared = self._share(numbers.float() if self.rank == 0 else torch.zeros_like(numbers, dtype=torch.float32))
        if self.rank:
            for part, values in zip(parts, shared.int().split([part.numel() for part in parts]), strict=True):
                part.copy_(values.view(part.shape))

    def silent_rank(self) -> int | None:
        """A rank that was waited for in vain, if there is one: what was computed since is worthless."""
        return None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Meanwhile nothing is exchanged, and what comes of it is worthless: kernels are compiled in any order."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    @abstractmethod
    def _add(self, stream: Tensor | None, part: Tensor, norm: RMSNorm | None) -> Tensor:
        """`add`, or without a stream `total`."""

    @abstractmethod
    def _join(self, part: Tensor) -> Tensor:
        """`join`."""

    @abstractmethod
    def _share(self, numbers: Tensor) -> Tensor:
        """The sum of all ranks' float32 [n]."""


class OrderedExchange(Exchange):
    """One whose ranks each have all parts, and sum them alike."""

    def _add(self, stream: Tensor | None, part: Tensor, norm: RMSNorm | None) -> Tensor:
        total = self._sum(part)
        return (total if stream is None else total.add_(stream)).to(part.dtype)

    def _share(self, numbers: Tensor) -> Tensor:
        return self._sum(numbers[:, None])[:, 0]

    @abstractmethod
    def _sum(self, part: Tensor) -> Tensor:
        """float32 [M, n], the sum of all ranks' `part` of that shape in the order of ranks."""


def add_up(parts: Sequence[Tensor], total: Tensor) -> Tensor:
    """`total` float32, filled with the sum of parts of its shape in their order."""
    total.copy_(parts[0])
    for part in parts[1:]:
        total += part
    return total


class HostExchange(OrderedExchange):
    """Through memory that the ranks' processes share, for CPUs."""

    def __init__(self, memory: RankMemory) -> None:
        super().__init__(memory.rank, memory.world)
        self._memory = memory

    def _join(self, part: Tensor) -> Tensor:
        pieces = [torch.cat(tuple(parts), 1) for parts in self._swap(part)]
        return torch.cat(pieces)

    def _sum(self, part: Tensor) -> Tensor:
        found = torch.empty(part.shape, dtype=torch.float32)
        first = 0
        for parts in self._swap(part):
            first += len(add_up([*parts], found[first : first + parts.shape[1]]))
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

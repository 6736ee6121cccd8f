"""Sums and joins over the ranks of a tensor-parallel model within a forward.

CPUs exchange through memory that their processes share, GPUs of one host through memory that each writes directly, or
through NCCL.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.nn import functional

from kernels.exchange import join_columns, sum_rows, sum_rows_normed
from kernels.exchange_state import TIMEOUT_SECONDS, Mailboxes, empty, mailbox_bytes
from outrider.cuda_ipc import ExportedMemory, ImportedMemory
from outrider.errors import ConfigError
from outrider.host.rank_memory import BOX_BYTES, RankMemory
from outrider.layers.linear import RMSNorm
from outrider.logs import get_logger

log = get_logger(__name__)

_MAX_ROWS = 512
"""Rows of the residual stream in one launch."""
_JOINED_ROWS = 32
"""Rows of logits in one launch."""
_MAX_PIECE, _MIN_PIECE, _PADDED_PIECE = 4096, 256, 1024
_START_SECONDS = 60.0
_SHARED_WIDTH, _SHARED_ROWS = 256, 32

Trade = Callable[[bytes], Sequence[bytes]]
"""Sends a rank's bytes to all ranks, waits for theirs, and returns those of all in the order of ranks."""


class Exchange(ABC):
    """Sums and joins over ranks. All ranks make the same calls in the same order, with tensors of the same shapes.

    Sums are computed in float32 in the order of ranks, so that all ranks and all runs get the same bits.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self._is_alone = False

    def add(self, stream: Tensor, part: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Return `stream` [M, hidden], the same on all ranks, plus all ranks' `part` of that shape; rounded once.

        `norm` is the norm that follows; it may have been applied to the sum already (`RMSNorm.note`).
        """
        return stream + part if self._is_alone else self._add(stream, part, norm)

    def total(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' `part` [M, hidden]."""
        return part if self._is_alone else self._add(None, part, None)

    def join(self, part: Tensor) -> Tensor:
        """Return all ranks' `part`, float32 [M, n], side by side in the order of ranks: [M, world * n]."""
        return part.repeat(1, self.world) if self._is_alone else self._join(part)

    def share(self, parts: Sequence[Tensor]) -> None:
        """Set int32 tensors, of numbers between -2^24 and 2^24, to the values that they have on rank 0."""
        if self._is_alone:
            return
        numbers = torch.cat([part.reshape(-1) for part in parts])
        # float32 holds them exactly, and all other ranks add zeros.
        shared = self._share(numbers.float() if self.rank == 0 else torch.zeros_like(numbers, dtype=torch.float32))
        if self.rank:
            for part, values in zip(parts, shared.int().split([part.numel() for part in parts]), strict=True):
                part.copy_(values.view(part.shape))

    def silent_rank(self) -> int | None:
        """Return a rank that was waited for in vain, if any; results computed since then are worthless."""
        return None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Exchange nothing within the block, so that kernels can be compiled in any order; results are worthless."""
        self._is_alone = True
        try:
            yield
        finally:
            self._is_alone = False

    @abstractmethod
    def _add(self, stream: Tensor | None, part: Tensor, norm: RMSNorm | None) -> Tensor:
        """Do `add`, or `total` if there is no stream."""

    @abstractmethod
    def _join(self, part: Tensor) -> Tensor:
        """Do `join`."""

    @abstractmethod
    def _share(self, numbers: Tensor) -> Tensor:
        """Return the sum of all ranks' float32 [n]."""


class OrderedExchange(Exchange):
    """An exchange whose ranks each get all parts and sum them in the same order."""

    def _add(self, stream: Tensor | None, part: Tensor, norm: RMSNorm | None) -> Tensor:
        total = self._sum(part)
        return (total if stream is None else total.add_(stream)).to(part.dtype)

    def _share(self, numbers: Tensor) -> Tensor:
        return self._sum(numbers[:, None])[:, 0]

    @abstractmethod
    def _sum(self, part: Tensor) -> Tensor:
        """Return float32 [M, n], the sum of all ranks' `part` of that shape in the order of ranks."""


def add_up(parts: Sequence[Tensor], total: Tensor) -> Tensor:
    """Fill `total`, float32, with the sum of parts of its shape, in their order, and return it."""
    total.copy_(parts[0])
    for part in parts[1:]:
        total += part
    return total


class HostExchange(OrderedExchange):
    """An exchange through memory that the ranks' processes share, for CPUs."""

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
        """Return `part` of all ranks, [world, rows, n], for as many rows at a time as a box holds."""
        step = max(BOX_BYTES // (part.shape[1] * part.itemsize), 1)
        found = []
        for first in range(0, part.shape[0], step):
            rows = part[first : first + step].contiguous()
            boxes = self._memory.swap(rows.view(torch.uint8).view(-1).numpy())
            found.append(torch.from_numpy(boxes.copy()).view(part.dtype).view(self.world, *rows.shape))
        return found


class PeerMailboxes:
    """A rank's mailboxes, and those of the other ranks, mapped for its device.

    All ranks create equal mailboxes, in the same order. Memory that a rank has shared is not freed while it lives.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        max_rows: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        trade: Trade,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Raises DriverError if devices cannot reach each other's memory."""
        num_bytes = mailbox_bytes(world, max_rows, width, dtype)
        own = ExportedMemory(num_bytes, device)
        empty(own.rows, dtype)
        # Others may write as soon as they have the handle.
        torch.cuda.synchronize(device)
        handles = trade(own.handle)
        self._peers = {
            other: ImportedMemory(handle, num_bytes, device) for other, handle in enumerate(handles) if other != rank
        }
        addresses = [own.rows.data_ptr() if other == rank else self._peers[other].address for other in range(world)]
        self.boxes = Mailboxes(
            rank,
            world,
            max_rows,
            width,
            dtype,
            table=torch.tensor(addresses, dtype=torch.int64, device=device),
            turns=torch.zeros(max_rows, dtype=torch.int32, device=device),
            failed=torch.zeros(1, dtype=torch.int32, device=device),
            report=torch.zeros(1, dtype=torch.int32).pin_memory(),
            timeout_seconds=timeout_seconds,
        )
        """For the functions of kernels.exchange."""


class PeerExchange(Exchange):
    """An exchange by our kernels (kernels.exchange); may be captured."""

    def __init__(
        self, memory: RankMemory, width: int, num_columns: int, dtype: torch.dtype, device: torch.device, seconds: float
    ) -> None:
        """`width` is the residual stream's, `num_columns` the logits of each rank. All ranks call this together.

        Raises DriverError if the devices cannot reach each other's memory.
        """
        super().__init__(memory.rank, memory.world)
        self._piece = next((n for n in range(_MAX_PIECE, _MIN_PIECE - 1, -1) if num_columns % n == 0), _PADDED_PIECE)
        # Graphs keep the timeout that they were captured with, and one rank may have to compile what another one has. A
        # rank that ends or hangs is found through its process long before.
        seconds = max(seconds, _START_SECONDS)
        joined_rows = _JOINED_ROWS * -(-num_columns // self._piece)

        def boxes(max_rows: int, size: int, kind: torch.dtype) -> PeerMailboxes:
            return PeerMailboxes(memory.rank, memory.world, max_rows, size, kind, device, memory.trade, seconds)

        self._stream = boxes(_MAX_ROWS, width, dtype)
        self._columns = boxes(joined_rows, self._piece, torch.float32)
        self._numbers = boxes(_SHARED_ROWS, _SHARED_WIDTH, torch.float32)

    def silent_rank(self) -> int | None:
        """See Exchange."""
        found = [held.boxes.silent_rank() for held in (self._stream, self._columns, self._numbers)]
        return next((rank for rank in found if rank is not None), None)

    def _add(self, stream: Tensor | None, part: Tensor, norm: RMSNorm | None) -> Tensor:
        """See Exchange. The sum and the norm are one launch."""
        boxes, part = self._stream.boxes, part.contiguous()
        if stream is None or norm is None:
            return sum_rows(boxes, part, stream)
        stream, normed = sum_rows_normed(boxes, part, stream, norm.weight, norm.eps)
        norm.note(stream, normed)
        return stream

    def _join(self, part: Tensor) -> Tensor:
        num_rows, count = part.shape
        if not (missing := -count % self._piece):
            return join_columns(self._columns.boxes, part.contiguous())
        joined = join_columns(self._columns.boxes, functional.pad(part, (0, missing)))
        return joined.view(num_rows, self.world, -1)[:, :, :count].reshape(num_rows, -1)

    def _share(self, numbers: Tensor) -> Tensor:
        padded = functional.pad(numbers, (0, -len(numbers) % _SHARED_WIDTH)).view(-1, _SHARED_WIDTH)
        return sum_rows(self._numbers.boxes, padded).view(-1)[: len(numbers)]


class NcclExchange(OrderedExchange):
    """An exchange by NCCL, which gives all parts to every rank, so that sums have a fixed order. May be captured."""

    def __init__(self, memory: RankMemory, device: torch.device) -> None:
        """All ranks call this together."""
        super().__init__(memory.rank, memory.world)
        # Ranks are processes of one host: nothing should listen on its other interfaces.
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        # Ranks read this file for as long as they run. A memory file of rank 0 vanishes with it, however it ends.
        place = f"/proc/{os.getpid()}/fd/{os.memfd_create('outrider-nccl')}" if memory.rank == 0 else ""
        store = FileStore(memory.trade(place.encode())[0].decode(), memory.world)
        distributed.init_process_group("nccl", store=store, rank=memory.rank, world_size=memory.world, device_id=device)

    def _join(self, part: Tensor) -> Tensor:
        return self._gather(part).transpose(0, 1).reshape(part.shape[0], -1)

    def _sum(self, part: Tensor) -> Tensor:
        return add_up([*self._gather(part)], torch.empty_like(part, dtype=torch.float32))

    def _gather(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        found = part.new_empty(self.world, *part.shape)
        distributed.all_gather_into_tensor(found.view(-1), part.view(-1))
        return found


def device_exchange(
    name: str,
    memory: RankMemory,
    width: int,
    num_columns: int,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> Exchange:
    """Return the exchange that --rank-exchange names, the same on all ranks. See PeerExchange. Raises ConfigError."""
    first = (device.index or 0) - memory.rank
    devices = range(first, first + memory.world)
    # Not only the pairs of this rank, because all ranks must decide alike.
    apart = [(a, b) for a in devices for b in devices if a != b and not torch.cuda.can_device_access_peer(a, b)]
    if name != "nccl" and not apart:
        return PeerExchange(memory, width, num_columns, dtype, device, seconds)
    if name == "peer":
        raise ConfigError(f"--rank-exchange: GPU {apart[0][0]} does not reach the memory of {apart[0][1]}; choose nccl")
    if name == "auto" and memory.rank == 0:
        log.warning("GPU %d does not reach the memory of %d: ranks exchange through NCCL", *apart[0])
    return NcclExchange(memory, device)

"""Mailboxes of kernels.exchange in memory that the ranks' processes map: on several GPUs of one host, or on one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.exchange_state import TIMEOUT_SECONDS, Mailboxes, empty, mailbox_bytes
from outrider.cuda_ipc import ExportedMemory, ImportedMemory

Trade = Callable[[bytes], Sequence[bytes]]
"""Gives a rank's bytes to all ranks and returns those of all, in the order of ranks; it waits for them."""


class PeerMailboxes:
    """A rank's mailboxes, and those of the other ranks as its device reaches them.

    All ranks make the same ones in the same order. What a rank has shared is never freed while it lives.
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
        """Raises DriverError where devices cannot reach each other's memory."""
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

    def close(self) -> None:
        """Unmap what others share. Nothing that uses it may be under way or launched again."""
        for memory in self._peers.values():
            memory.close()

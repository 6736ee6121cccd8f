"""Memory that a draft on the same host maps, so that features need not pass through two sockets."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from outrider.cuda_ipc import ExportedMemory
from outrider.host.machine import host_id
from outrider.logs import get_logger
from outrider.protocol.messages import MAGIC_BYTES, MAX_FEATURE_BYTES, FeatureRing

log = get_logger(__name__)

NUM_SLOTS = 64
"""Batches of features in a ring, of up to MAX_FEATURE_BYTES each; 16 MiB in all."""

_END_BYTES = 256
"""At either end of a ring, for its magic; slots are aligned to as much."""

RING_BYTES = NUM_SLOTS * MAX_FEATURE_BYTES + 2 * _END_BYTES


class SharedMemory(Protocol):
    """Memory that other processes may map."""

    handle: bytes
    """By which they do."""
    rows: Tensor
    """uint8 [num_bytes], where features are stored."""


ShareMemory = Callable[[int, torch.device], SharedMemory]
"""Makes some, of so many bytes; raises OSError or RuntimeError where it cannot."""


class Ring:
    """A ring as one draft uses it: which of its slots are free. Released messages free them, so no order is needed."""

    def __init__(self, memory: SharedMemory, told: FeatureRing) -> None:
        self.memory = memory
        self.told = told
        """What the draft is told of it."""
        self._free = [_END_BYTES + slot * MAX_FEATURE_BYTES for slot in reversed(range(NUM_SLOTS))]

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def take(self) -> int | None:
        """First byte of a slot; None if all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, offset: int) -> None:
        """The slot at `offset` holds nothing any more."""
        self._free.append(offset)

    def rows(self, offset: int, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] from `offset` on."""
        return self.memory.rows[offset : offset + num_bytes]


class RingPool:
    """All rings. One whose draft is gone waits for the next: some process may still have it mapped."""

    def __init__(self, device: torch.device, share: ShareMemory | None) -> None:
        self._device = device
        self._share = share
        self._idle: list[tuple[SharedMemory, FeatureRing]] = []

    def lend(self) -> Ring | None:
        """A ring for a draft; None where no memory can be shared."""
        if self._idle:
            return Ring(*self._idle.pop())
        host = host_id()
        if self._share is None or not host:
            return None
        try:
            memory = self._share(RING_BYTES, self._device)
            magic = secrets.token_bytes(MAGIC_BYTES)
            _write_ends(memory.rows, magic)
        except (OSError, RuntimeError) as error:
            log.info("features travel in messages: no memory can be shared with drafts: %s", error)
            self._share = None
            return None
        return Ring(memory, FeatureRing(host, str(self._device), memory.handle, RING_BYTES, magic))

    def take_back(self, ring: Ring) -> None:
        """Its draft is gone, or does not use it."""
        self._idle.append((ring.memory, ring.told))


def share_device_memory(num_bytes: int, device: torch.device) -> ExportedMemory:
    """Device memory for a ring."""
    return ExportedMemory(num_bytes, device)


def _write_ends(rows: Tensor, magic: bytes) -> None:
    """Write the magic to both ends; it is there when this returns, and no other stream is waited for."""
    ends = torch.frombuffer(bytearray(magic), dtype=torch.uint8)
    if not rows.is_cuda:
        rows[:MAGIC_BYTES] = ends
        rows[-MAGIC_BYTES:] = ends
        return
    stream = torch.cuda.Stream(rows.device)
    with torch.cuda.stream(stream):
        rows[:MAGIC_BYTES].copy_(ends)
        rows[-MAGIC_BYTES:].copy_(ends)
    stream.synchronize()

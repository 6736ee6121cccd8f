"""Which features are stored, and their way from the store: to the host, or to a ring that a draft on this host maps.

No call waits for a round.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.cache.kv import FeatureStore
from outrider.cuda_ipc import ExportedMemory
from outrider.device import put
from outrider.host.line import host_id
from outrider.logs import get_logger
from outrider.protocol.speculation import MAGIC_BYTES, MAX_FEATURE_BYTES, FeatureRing
from outrider.tree.handshake import PROJECTED, Projection

log = get_logger(__name__)

STAGE_BYTES = MAX_FEATURE_BYTES
"""Bytes of features that are copied to the host, and sent, in one go: more at once could hold up the end of a round."""

NUM_STAGES = 32
"""Most copies to the host that are under way, or wait to be sent."""


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """Layers that are stored as they are, and the projection whose product with some layers is stored, if any."""

    layers: tuple[int, ...] = ()
    """Ascending."""
    projection: Projection | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """Layers that a forward must give, ascending."""
        return tuple(sorted({*self.layers, *(self.projection.layers if self.projection is not None else ())}))

    def holds(self, parts: tuple[int, ...], projection_name: str) -> bool:
        """Whether `parts` are stored, and the product, if it is among them, is that of this projection."""
        if PROJECTED in parts and (self.projection is None or self.projection.name != projection_name):
            return False
        return set(parts) <= {*self.layers, PROJECTED}


class _Stage:
    """A piece of device memory and its image on the host."""

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.empty(STAGE_BYTES, dtype=torch.uint8, device=device)
        self.image = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()


@dataclass(eq=False, slots=True)
class StagedRows:
    """Features that are being copied: to the host, or to a ring at `offset`."""

    image: Tensor | None
    """Their place on the host; None in a ring."""
    copied: torch.cuda.Event | None
    give_back: Callable[[], None] | None
    offset: int | None = None
    """Their place in a ring; None if they go to the host."""

    def done(self) -> bool:
        """Whether the copy is done. Never blocks."""
        return self.copied is None or self.copied.query()

    def data(self) -> memoryview:
        """Return their bytes, row by row, once they are on the host."""
        return memoryview(b"") if self.image is None else self.image.numpy().data

    def free(self) -> None:
        """Give back their memory: they are not needed any more."""
        give_back, self.give_back = self.give_back, None
        if give_back is not None:
            give_back()


class FeatureStaging:
    """Reads rows of a feature store. On a GPU, a stream of its own gathers them and copies them to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.rings = RingPool(device, ExportedMemory if device.type == "cuda" else None)
        """Rings that drafts of this host read."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._gathered: torch.cuda.Event | None = None
        self._free: list[_Stage] = []
        if device.type == "cuda":
            # High priority: few rows, which somebody waits for, beside a round that takes the whole device.
            self._stream = torch.cuda.Stream(device, priority=-1)
            self._free = [_Stage(device) for _ in range(NUM_STAGES)]

    @torch.inference_mode()
    def read(
        self,
        store: FeatureStore,
        slots: NDArray[np.int32],
        parts: tuple[int, ...],
        after: torch.cuda.Event | None,
        ring: Ring | None = None,
    ) -> StagedRows | None:
        """Copy `parts` of the rows at slots [N], at most STAGE_BYTES; None while all stages, or ring slots, are taken.

        `after`: event to wait for before reading. Only work that is launched after `join` may overwrite the rows.
        """
        size = len(slots) * store.size_of(parts) * store.dtype.itemsize
        if ring is not None:
            offset = ring.take()
            if offset is None:
                return None
            gathered = self._gather(store, slots, parts, ring.rows(offset, size), after)
            return StagedRows(None, gathered, partial(ring.give_back, offset), offset)
        if self._stream is None:
            image = torch.empty(size, dtype=torch.uint8)
            self._gather(store, slots, parts, image, None)
            return StagedRows(image, None, None)
        if not self._free:
            return None
        stage = self._free.pop()
        self._gather(store, slots, parts, stage.rows[:size], after)
        with torch.cuda.stream(self._stream):
            stage.image[:size].copy_(stage.rows[:size], non_blocking=True)
            stage.copied.record()
        return StagedRows(stage.image[:size], stage.copied, partial(self._free.append, stage))

    def join(self) -> None:
        """Make work that is launched from now on wait, on the device, until all rows that were asked for were read."""
        if self._gathered is not None:
            torch.cuda.current_stream().wait_event(self._gathered)
            self._gathered = None

    def _gather(
        self,
        store: FeatureStore,
        slots: NDArray[np.int32],
        parts: tuple[int, ...],
        into: Tensor,
        after: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        """Copy rows to bytes `into`. Returns an event that says when they are there; None if they are at once."""
        rows = into.view(store.dtype).view(len(slots), -1)
        if self._stream is None:
            store.gather(torch.from_numpy(slots), parts, rows)
            return None
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            store.gather(put(slots, self._device), parts, rows)
            self._gathered = torch.cuda.Event()
            self._gathered.record()
        return self._gathered


NUM_SLOTS = 64
"""Batches of features in a ring, of up to MAX_FEATURE_BYTES each; 16 MiB in all."""

_END_BYTES = 256
"""Bytes at either end of a ring for its magic; slots are aligned to as many."""

RING_BYTES = NUM_SLOTS * MAX_FEATURE_BYTES + 2 * _END_BYTES


ShareMemory = Callable[[int, torch.device], ExportedMemory]
"""Makes memory that other processes may map; raises OSError or RuntimeError if it cannot."""


class Ring:
    """A ring that one draft uses, and its free slots. Released messages free slots, so these need no order."""

    def __init__(self, memory: ExportedMemory, description: FeatureRing) -> None:
        self.memory = memory
        self.description = description
        """Description by which the draft maps it."""
        self._free = [_END_BYTES + slot * MAX_FEATURE_BYTES for slot in reversed(range(NUM_SLOTS))]

    def take(self) -> int | None:
        """Take a slot and return the offset of its first byte; None if all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, offset: int) -> None:
        """Free the slot at `offset`."""
        self._free.append(offset)

    def rows(self, offset: int, num_bytes: int) -> Tensor:
        """Return uint8 [num_bytes] from `offset` on."""
        return self.memory.rows[offset : offset + num_bytes]


class RingPool:
    """All rings. A ring whose draft is gone is kept for the next one: some process may still have it mapped."""

    def __init__(self, device: torch.device, share: ShareMemory | None) -> None:
        self._device = device
        self._share = share
        self._idle: list[tuple[ExportedMemory, FeatureRing]] = []

    def lend(self) -> Ring | None:
        """Return a ring for a draft; None if no memory can be shared."""
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
        """Take back a ring whose draft is gone, or does not use it."""
        self._idle.append((ring.memory, ring.description))


def _write_ends(rows: Tensor, magic: bytes) -> None:
    """Write the magic to both ends, and wait until it is written, but not for other streams."""
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


@dataclass(eq=False, slots=True)
class FeatureChannel:
    """A draft's features stream, which bounds what is sent and not released."""

    row_bytes: int
    """Bytes of the features of one position."""
    dtype: str
    ring: Ring | None = None
    """The ring for the draft's features; None if the messages have them, as when the draft does not use the ring."""
    window: int = 0
    """Bytes that may be in flight."""
    accepted: bool = False
    """Whether the draft has accepted the stream."""
    open: bool = False
    """Whether the draft has accepted the stream, and what it takes is stored."""
    sequence: int = 0
    """Number of the last message."""
    under_way: deque[tuple[int, int]] = field(default_factory=deque)
    """Number and bytes of each message that was not released."""
    num_bytes: int = 0
    lent: deque[tuple[int, StagedRows]] = field(default_factory=deque)
    """Rows in the ring, each with the number of the last message about them."""

    @property
    def room(self) -> int:
        """Bytes that may be sent now; a window that is smaller than one position lets one through at a time."""
        return max(self.window - self.num_bytes, 0 if self.under_way else self.row_bytes)

    def take(self, num_bytes: int) -> int:
        """Count a new message of so many bytes, and return its number."""
        self.sequence += 1
        self.under_way.append((self.sequence, num_bytes))
        self.num_bytes += num_bytes
        return self.sequence

    def release(self, through: int) -> None:
        """Note that the draft is done with messages up to number `through`."""
        while self.under_way and self.under_way[0][0] <= through:
            self.num_bytes -= self.under_way.popleft()[1]
        while self.lent and self.lent[0][0] <= through:
            self.lent.popleft()[1].free()

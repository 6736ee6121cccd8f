"""Features on their way from the store to the host or to a ring, beside the rounds and without waiting for anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.cache.features import FeatureStore
from outrider.device import put
from verify_service.features.ports import STAGE_BYTES
from verify_service.features.ring import Ring, RingPool, share_device_memory

NUM_STAGES = 32
"""Copies to the host that may be under way, or wait to be sent."""


class _Stage:
    """A piece of device memory and its image on the host."""

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.empty(STAGE_BYTES, dtype=torch.uint8, device=device)
        self.image = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()


class StagedRows:
    """Features that are being copied: to the host, or to a ring at `offset`."""

    def __init__(
        self,
        image: Tensor | None,
        copied: torch.cuda.Event | None,
        give_back: Callable[[], None] | None,
        offset: int | None = None,
    ) -> None:
        self.offset = offset
        """See Staged."""
        self._image = image
        self._copied = copied
        self._give_back = give_back

    def done(self) -> bool:
        """See Staged."""
        return self._copied is None or self._copied.query()

    def data(self) -> memoryview:
        """See Staged."""
        return memoryview(b"") if self._image is None else self._image.numpy().data

    def free(self) -> None:
        """See Staged."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class FeatureStaging:
    """Reads rows of a feature store. On a GPU a stream of its own gathers them, and copies them to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.rings = RingPool(device, share_device_memory if device.type == "cuda" else None)
        """Where drafts of this host read."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._gathered: torch.cuda.Event | None = None
        self._free: list[_Stage] = []
        if device.type == "cuda":
            # A few rows, which somebody waits for, beside a round that takes the whole device.
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
        """Copy `parts` of the rows at slots [N], at most STAGE_BYTES; None while all stages, or the ring's, are taken.

        `after`: what must have run before. Rows may be written again by what is launched behind `join`.
        """
        size = len(slots) * store.size_of(parts) * store.dtype.itemsize
        if size > STAGE_BYTES:
            raise ValueError(f"{size} bytes of features at once, at most {STAGE_BYTES}")
        if ring is not None:
            return self._read_to_ring(store, slots, parts, after, ring, size)
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
        """Let what is launched from now on wait, on the device, until all rows that were asked for were read."""
        if self._gathered is not None:
            torch.cuda.current_stream().wait_event(self._gathered)
            self._gathered = None

    def _read_to_ring(
        self,
        store: FeatureStore,
        slots: NDArray[np.int32],
        parts: tuple[int, ...],
        after: torch.cuda.Event | None,
        ring: Ring,
        size: int,
    ) -> StagedRows | None:
        offset = ring.take()
        if offset is None:
            return None
        gathered = self._gather(store, slots, parts, ring.rows(offset, size), after)
        return StagedRows(None, gathered, partial(ring.give_back, offset), offset)

    def _gather(
        self,
        store: FeatureStore,
        slots: NDArray[np.int32],
        parts: tuple[int, ...],
        into: Tensor,
        after: torch.cuda.Event | None,
    ) -> torch.cuda.Event | None:
        """Copy rows to bytes `into`; returns what says that they are there, None where they are at once."""
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

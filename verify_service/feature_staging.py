"""Features on their way from the store to the host, beside the rounds and without waiting for anything."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.cache.features import FeatureStore
from outrider.device import put
from verify_service.features import STAGE_BYTES

NUM_STAGES = 32
"""Copies that may be under way, or wait to be sent."""


class _Stage:
    """A piece of device memory and its image on the host."""

    def __init__(self, device: torch.device) -> None:
        self.rows = torch.empty(STAGE_BYTES, dtype=torch.uint8, device=device)
        self.image = torch.empty(STAGE_BYTES, dtype=torch.uint8, pin_memory=True)
        self.copied = torch.cuda.Event()


class StagedRows:
    """Features that are being copied to the host."""

    def __init__(self, image: Tensor, stage: _Stage | None, owner: FeatureStaging | None) -> None:
        self._image = image
        self._stage = stage
        self._owner = owner

    def done(self) -> bool:
        """See Staged."""
        return self._stage is None or self._stage.copied.query()

    def data(self) -> memoryview:
        """See Staged."""
        return self._image.numpy().data

    def free(self) -> None:
        """See Staged."""
        if self._stage is not None and self._owner is not None:
            self._owner.give_back(self._stage)
            self._stage = None


class FeatureStaging:
    """Reads rows of a feature store. On a GPU a stream of its own gathers them and copies them to pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._gathered: torch.cuda.Event | None = None
        self._free: list[_Stage] = []
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._free = [_Stage(device) for _ in range(NUM_STAGES)]

    @torch.inference_mode()
    def read(
        self, store: FeatureStore, slots: NDArray[np.int32], layers: tuple[int, ...], after: torch.cuda.Event | None
    ) -> StagedRows | None:
        """Copy the features of `layers` at slots [N], at most STAGE_BYTES; None while all stages are taken.

        `after`: what must have run before. Rows may be written again by what is launched behind `join`.
        """
        width = store.width // len(store.layers) * len(layers)
        size = len(slots) * width * store.dtype.itemsize
        if size > STAGE_BYTES:
            raise ValueError(f"{size} bytes of features at once, at most {STAGE_BYTES}")
        if self._stream is None:
            rows = torch.empty(len(slots), width, dtype=store.dtype)
            store.gather(torch.from_numpy(slots.astype(np.int64)), layers, rows)
            return StagedRows(rows.view(-1).view(torch.uint8), None, None)
        if not self._free:
            return None
        stage = self._free.pop()
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            rows = stage.rows[:size].view(store.dtype).view(len(slots), width)
            store.gather(put(slots, self._device).long(), layers, rows)
            self._gathered = torch.cuda.Event()
            self._gathered.record()
            stage.image[:size].copy_(stage.rows[:size], non_blocking=True)
            stage.copied.record()
        return StagedRows(stage.image[:size], stage, self)

    def join(self) -> None:
        """Let what is launched from now on wait, on the device, until all rows that were asked for were read."""
        if self._gathered is not None:
            torch.cuda.current_stream().wait_event(self._gathered)
            self._gathered = None

    def give_back(self, stage: _Stage) -> None:
        """A stage may be used again."""
        self._free.append(stage)

"""What a burst is told and what it answers, as one copy each way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.burst.buckets import Bucket
from draft_service.burst.plan import Burst, BurstResult, BurstShape, RowState, Seeds
from outrider.attention.frontier import (
    BASE,
    FEATURE,
    FORCED_FROM,
    HEADER_WORDS,
    NUM_FIELDS,
    PARENT,
    POSITION,
    ROW,
    SCORE,
    SLOT,
    TOKEN,
    BurstRows,
)

NUM_COPIES = 2
"""Bursts that may be pending: each has host memory of its own."""

Words = NDArray[np.int32]


class _Layout:
    """Where fields lie in a run of int32 words; free slots, of which there may be many, last."""

    def __init__(self, shape: BurstShape) -> None:
        rows, words = shape.num_rows, shape.region // 32
        sizes: dict[str, tuple[int, ...]] = {
            "header": (HEADER_WORDS,),
            "seeds": (NUM_FIELDS, shape.max_seeds),
            "table_rows": (rows,),
            "context_len": (rows,),
            "region_len": (rows,),
            "num_free": (rows,),
            "next_free": (rows,),
            "live": (rows, words),
            "free": (rows, shape.region),
        }
        self.fields: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        self.size = 0
        for name, size in sizes.items():
            end = self.size + math.prod(size)
            self.fields[name] = (self.size, end, size)
            self.size = end

    def used(self, num_rows: int) -> int:
        """Words that a burst of so many rows must copy."""
        begin, _, (_, region) = self.fields["free"]
        return begin + num_rows * region


class BurstInput:
    """A burst's description, in host memory twice and on the device once."""

    def __init__(self, shape: BurstShape, device: torch.device) -> None:
        self._shape = shape
        self._layout = layout = _Layout(shape)
        pinned = device.type == "cuda"
        self._pinned = [torch.zeros(layout.size, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_COPIES)]
        self._device = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self._host: list[dict[str, Words]] = [
            {name: memory.numpy()[begin:end].reshape(size) for name, (begin, end, size) in layout.fields.items()}
            for memory in self._pinned
        ]
        views = {name: self._device[begin:end].view(size) for name, (begin, end, size) in layout.fields.items()}
        self.header: Tensor = views.pop("header")
        """On the device, as everything that follows; see kernels.frontier."""
        self.seeds: Tensor = views.pop("seeds")
        self.rows = BurstRows(**views)
        for host in self._host:
            self._fill_rows(host, ())

    def fill(self, copy: int, burst: Burst) -> None:
        """Describe a burst in one of the host's copies. Raises ValueError for one that is too large."""
        seeds, shape = burst.seeds, self._shape
        count, num_rows = len(seeds.rows), len(burst.rows)
        if count > shape.max_seeds or num_rows > shape.num_rows or not 1 <= burst.num_steps <= shape.max_steps:
            raise ValueError(
                f"a burst of {count} seeds, {num_rows} rows and {burst.num_steps} steps; the runner takes "
                f"{shape.max_seeds}, {shape.num_rows} and 1 to {shape.max_steps}"
            )
        if count and not 0 <= int(seeds.rows.min()) <= int(seeds.rows.max()) < num_rows:
            raise ValueError(f"seeds of rows outside the burst's {num_rows}")
        host = self._host[copy]
        host["header"][:] = (0, count, np.float32(burst.floor).view(np.int32), 0)
        _fill_seeds(host["seeds"], seeds)
        self._fill_rows(host, burst.rows)

    def clear(self) -> None:
        """Describe, on the device, a burst in which nothing can be run."""
        self.header.copy_(torch.tensor([0, 0, int(np.float32(np.inf).view(np.int32)), 0], dtype=torch.int32))

    def to_device(self, copy: int, num_rows: int) -> None:
        """Queue the copy of a description with so many rows."""
        size = self._layout.used(num_rows)
        self._device[:size].copy_(self._pinned[copy][:size], non_blocking=True)

    def _fill_rows(self, host: dict[str, Words], rows: Sequence[RowState]) -> None:
        count = len(rows)
        host["table_rows"][:count] = [row.row for row in rows]
        host["table_rows"][count:] = self._shape.num_rows
        for name in ("context_len", "region_len", "num_free", "next_free"):
            host[name][:] = 0
        host["context_len"][:count] = [row.context_len for row in rows]
        host["num_free"][:count] = [len(row.free) for row in rows]
        host["live"][count:] = 0
        if not rows:
            return
        live = np.stack([row.live for row in rows])
        host["live"][:count] = np.packbits(live, axis=1, bitorder="little").view("<i4")
        host["region_len"][:count] = np.where(live.any(1), live.shape[1] - live[:, ::-1].argmax(1), 0)
        for target, row in zip(host["free"], rows, strict=False):
            target[: len(row.free)] = row.free


def _fill_seeds(target: Words, seeds: Seeds) -> None:
    count = len(seeds.rows)
    for field, values in (
        (ROW, seeds.rows),
        (PARENT, seeds.parents),
        (TOKEN, seeds.tokens),
        (POSITION, seeds.positions),
        (SLOT, seeds.slots),
        (FEATURE, seeds.features),
        (SCORE, seeds.scores.view(np.int32)),
        (BASE, _bases(seeds).view(np.int32)),
    ):
        target[field, :count] = values


def _bases(seeds: Seeds) -> NDArray[np.float32]:
    """Where a seed's candidates count from: its own score; 0 below the root; nowhere below other forced ones."""
    forced = seeds.scores >= FORCED_FROM
    more = np.zeros_like(forced)
    more[:-1] = forced[1:] & (seeds.rows[1:] == seeds.rows[:-1])
    of_forced = np.where(more, np.float32(-np.inf), np.float32(0.0))
    bases: NDArray[np.float32] = np.where(forced, of_forced, seeds.scores)
    return bases


class BurstOutput:
    """Results of a burst's steps, on the device once and in host memory twice."""

    def __init__(self, shape: BurstShape, device: torch.device) -> None:
        self._shape = shape
        size = shape.max_steps * shape.max_width * (2 + 2 * shape.branching)
        pinned = device.type == "cuda"
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_COPIES)]

    def steps(self, width: int) -> Tensor:
        """On the device, [max_steps, width * (2 + 2 * k)]."""
        line = width * (2 + 2 * self._shape.branching)
        return self._device[: self._shape.max_steps * line].view(self._shape.max_steps, line)

    def to_host(self, copy: int, bucket: Bucket, num_steps: int) -> None:
        """Queue the copy of what the first steps brought."""
        size = num_steps * bucket.width * (2 + 2 * self._shape.branching)
        self._pinned[copy][:size].copy_(self._device[:size], non_blocking=True)

    def read(self, copy: int, bucket: Bucket, num_steps: int, num_seeds: int) -> BurstResult:
        """What a copy holds, in memory of its own."""
        width, branching = bucket.width, self._shape.branching
        size = num_steps * width * (2 + 2 * branching)
        steps = self._pinned[copy].numpy()[:size].reshape(num_steps, -1)
        picked = steps[:, :width]
        # On the device candidates lie behind the seeds that there could be, not behind those that there are.
        picked = np.where(picked >= self._shape.max_seeds, picked - self._shape.max_seeds + num_seeds, picked)
        shape = (num_steps, width, branching)
        return BurstResult(
            picked=picked,
            slots=steps[:, width : 2 * width].copy(),
            tokens=steps[:, 2 * width : (2 + branching) * width].copy().reshape(shape),
            scores=steps[:, (2 + branching) * width :].copy().view(np.float32).reshape(shape),
        )

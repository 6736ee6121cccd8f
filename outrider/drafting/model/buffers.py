"""What a burst is told and what it answers, as one copy each way."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.frontier_state import (
    FIRST_SEED,
    HEADER_WORDS,
    NEW_ROOT,
    NEW_ROOT_SLOT,
    NOT_HERE,
    NUM_FIELDS,
    NUM_NEW_SEEDS,
    NUM_NEW_SLOTS,
    REROOT_WORDS,
    SEED_HEADER_WORDS,
    SHIFT,
    BurstRows,
)
from outrider.drafting.model.burst import Burst, BurstResult, BurstShape, Reroots, RowStates, StepBucket

NUM_COPIES = 2
"""Bursts that may be pending: each has host memory of its own."""

Words = NDArray[np.int32]

_SAME_ROOT = np.array([-1, -1, 0, 0], np.int32)
"""A row that keeps its root: see kernels.frontier.reroot_pool."""


class _StagedWords:
    """int32 words on a device, and NUM_COPIES times in host memory from or to which they are copied."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_COPIES)]
        self.host: list[Words] = [memory.numpy() for memory in self._pinned]
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._views: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}  # kept: there are few different ones

    def to_device(self, copy: int, end: int) -> None:
        """Queue a copy of the first words, `end` of them."""
        there, here = self._find(copy, 0, end)
        there.copy_(here, non_blocking=True)

    def to_host(self, copy: int, begin: int, end: int) -> None:
        """Queue a copy of these words."""
        there, here = self._find(copy, begin, end)
        here.copy_(there, non_blocking=True)

    def _find(self, copy: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        found = self._views.get((copy, begin, end))
        if found is None:
            found = (self.device[begin:end], self._pinned[copy][begin:end])
            self._views[copy, begin, end] = found
        return found


class BurstInput:
    """A burst as the device is told of it: header, seeds and rows; free slots, of which there may be many, last."""

    def __init__(self, shape: BurstShape, device: torch.device) -> None:
        self._shape = shape
        rows, words = shape.num_rows, shape.region // 32
        sizes: dict[str, tuple[int, ...]] = {
            "header": (HEADER_WORDS,),
            "seeds": (NUM_FIELDS, shape.max_seeds),
            **dict.fromkeys(("table_rows", "context_len", "num_free", "next_free"), (rows,)),
            "live": (rows, words),
            "free": (rows, shape.region),
        }
        bounds = np.cumsum([0, *map(math.prod, sizes.values())]).tolist()
        self._begins = dict(zip(sizes, bounds, strict=False))
        self._words = _StagedWords(bounds[-1], device)

        def views(words: Any) -> dict[str, Any]:
            """Fields by name."""
            places = zip(sizes.items(), bounds, bounds[1:], strict=False)
            return {name: words[begin:end].reshape(size) for (name, size), begin, end in places}

        self._host: list[dict[str, Words]] = [views(words) for words in self._words.host]
        fields = views(self._words.device)
        self.header: Tensor = fields.pop("header")
        """On the device, as everything that follows; see kernels.frontier."""
        self.seeds: Tensor = fields.pop("seeds")
        self.rows = BurstRows(**fields)
        for host, memory in zip(self._host, self._words.host, strict=True):
            # All that has a word for each row.
            host["rows"] = memory[self._begins["table_rows"] : self._begins["live"]].reshape(4, -1)
            host["table_rows"][:] = shape.num_rows

    def fill(self, copy: int, burst: Burst) -> None:
        """Describe a burst in one of the host's copies."""
        host, count = self._host[copy], len(burst.seeds)
        header = host["header"]
        header[0], header[1], header[2], header[3] = 0, count, _bits(burst.floor), 0
        host["seeds"][:, :count] = burst.seeds.fields
        _fill_rows(host, burst.rows, self._shape.num_rows)

    def clear(self) -> None:
        """Describe, on the device, a burst in which nothing can be run."""
        self.header.copy_(torch.tensor([0, 0, _bits(np.inf), 0], dtype=torch.int32))

    def to_device(self, copy: int, num_rows: int) -> None:
        """Queue the copy of a description with so many rows."""
        self._words.to_device(copy, self._begins["free"] + num_rows * self._shape.region)


class RerootInput:
    """What a burst that goes on is told: further seeds, then its rows."""

    def __init__(self, shape: BurstShape, device: torch.device) -> None:
        self._line = REROOT_WORDS + shape.region
        self._begin = SEED_HEADER_WORDS + NUM_FIELDS * shape.max_width
        self._turn = 0
        self._words = _StagedWords(self._begin + shape.num_rows * self._line, device)
        self.rows(shape.num_rows)[:, : NEW_ROOT_SLOT + 1] = -1

    @property
    def seeds(self) -> Tensor:
        """On the device, the further seeds; see kernels.frontier.add_seeds."""
        return self._words.device[: self._begin]

    def rows(self, count: int) -> Tensor:
        """On the device, what the first rows are told; see kernels.frontier.reroot_pool."""
        return self._words.device[self._begin : self._end(count)].view(count, self._line)

    def to_device(self, reroots: Reroots, count: int) -> None:
        """Queue the copy of what the first `count` rows are told. Two of them may be pending."""
        end = self._end(count)
        words = self._words.host[self._turn]
        self._fill_seeds(words, reroots)
        lines = words[self._begin : end].reshape(count, self._line)
        lines[:, :REROOT_WORDS] = _SAME_ROOT
        rows, indices, roots = reroots.rows.tolist(), reroots.indices.tolist(), reroots.slots.tolist()
        shifts = reroots.shifts.view(np.int32).tolist()
        for row, index, root, shift, free in zip(rows, indices, roots, shifts, reroots.free, strict=True):
            line = lines[row]
            line[NEW_ROOT], line[NEW_ROOT_SLOT] = index, NOT_HERE if index < 0 and root < 0 else root
            line[SHIFT], line[NUM_NEW_SLOTS] = shift, len(free)
            line[REROOT_WORDS : REROOT_WORDS + len(free)] = free
        self._words.to_device(self._turn, end)
        self._turn = (self._turn + 1) % NUM_COPIES

    def _fill_seeds(self, words: Words, reroots: Reroots) -> None:
        count = 0 if reroots.seeds is None else len(reroots.seeds)
        words[FIRST_SEED], words[NUM_NEW_SEEDS] = reroots.first_seed, count
        if reroots.seeds is not None:
            words[SEED_HEADER_WORDS : self._begin].reshape(NUM_FIELDS, -1)[:, :count] = reroots.seeds.fields

    def _end(self, num_rows: int) -> int:
        return self._begin + num_rows * self._line


def _bits(value: float) -> int:
    """Those of a float32, as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _fill_rows(host: dict[str, Words], rows: RowStates, spare_row: int) -> None:
    count = len(rows)
    # Of padding rows the rest does not matter where nothing is live or free.
    host["rows"][:, count:] = 0
    host["table_rows"][count:] = spare_row
    host["live"][count:] = 0
    host["table_rows"][:count] = rows.rows
    host["context_len"][:count] = rows.context_lens
    host["num_free"][:count] = rows.free_ends
    host["next_free"][:count] = rows.free_starts
    host["free"][:count] = rows.free
    packed = np.packbits(rows.live, axis=1, bitorder="little")
    host["live"][:count] = packed.view("<i4")


class BurstOutput:
    """Results of a burst's steps."""

    def __init__(self, shape: BurstShape, device: torch.device) -> None:
        self._shape = shape
        size = shape.max_steps * shape.max_width * (2 + 2 * shape.most_branching)
        self._words = _StagedWords(size, device)

    def steps(self, bucket: StepBucket) -> Tensor:
        """On the device, [max_steps, width * (2 + 2 * k)]."""
        line = bucket.num_words
        return self._words.device[: self._shape.max_steps * line].view(self._shape.max_steps, line)

    def to_host(self, copy: int, bucket: StepBucket, num_steps: int, first_step: int = 0) -> None:
        """Queue the copy of what some steps brought."""
        line = bucket.num_words
        self._words.to_host(copy, first_step * line, (first_step + num_steps) * line)

    def host_steps(self, copy: int, bucket: StepBucket, num_steps: int, first_step: int = 0) -> Words:
        """In host memory, [num_steps, width * (2 + 2 * k)]."""
        line = bucket.num_words
        return self._words.host[copy][first_step * line : (first_step + num_steps) * line].reshape(num_steps, line)

    def read(self, copy: int, bucket: StepBucket, num_steps: int, first_step: int = 0) -> BurstResult:
        """What a copy holds of some steps, in memory of its own."""
        width, branching = bucket.width, bucket.branching
        steps = self.host_steps(copy, bucket, num_steps, first_step).copy()
        shape = (num_steps, width, branching)
        return BurstResult(
            first=self._shape.max_seeds + first_step * width * branching,
            picked=steps[:, :width],
            slots=steps[:, width : 2 * width],
            tokens=steps[:, 2 * width : (2 + branching) * width].reshape(shape),
            scores=steps[:, (2 + branching) * width :].view(np.float32).reshape(shape),
        )

"""Runs bursts on a GPU by replaying one captured step. The input and the output of a burst are one copy each.

Runs on a CPU too, slowly and without graphs, for tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.frontier import add_seeds, begin_burst, reroot_pool
from kernels.frontier_state import (
    FIRST_SEED,
    FLOOR,
    HEADER_WORDS,
    NEW_ROOT,
    NEW_ROOT_SLOT,
    NOT_HERE,
    NUM_FIELDS,
    NUM_NEW_SEEDS,
    NUM_NEW_SLOTS,
    NUM_SEEDS,
    REROOT_WORDS,
    SEED_HEADER_WORDS,
    SHIFT,
    STEP,
    BurstRows,
)
from outrider.attention.base import AttentionBackend
from outrider.attention.paged import PromptChunk
from outrider.cuda_ipc import ImportedMemory
from outrider.device import share_l1
from outrider.drafting.model.burst import Burst, BurstResult, BurstShape, Int32s, Reroots, StepBucket
from outrider.drafting.model.cuda_forward import BlockSteps, ContextForward, DraftSteps
from outrider.drafting.model.device_memory import join_rows
from outrider.drafting.model.features import MemoryMapper
from outrider.drafting.model.runner import BurstRunner, PendingBurst, RunnerOptions
from outrider.graphs import GraphPool
from outrider.models.drafters.base import DraftModel
from outrider.sampling.proposer import Proposer

NUM_COPIES = 2
"""Bursts that may be pending: each has host memory of its own."""

_SAME_ROOT = np.array([-1, -1, 0, 0], np.int32)
"""A row that keeps its root: see kernels.frontier.reroot_pool."""


class _StagedWords:
    """int32 words on a device, and NUM_COPIES host buffers that they are copied from or to."""

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._pinned = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_COPIES)]
        self.host: list[Int32s] = [memory.numpy() for memory in self._pinned]
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._views: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}  # a cache, as there are few different ones

    def to_device(self, copy: int, end: int) -> None:
        """Queue a copy of the first `end` words to the device."""
        there, here = self._find(copy, 0, end)
        there.copy_(here, non_blocking=True)

    def to_host(self, copy: int, begin: int, end: int) -> None:
        """Queue a copy of words `begin` to before `end` to the host."""
        there, here = self._find(copy, begin, end)
        here.copy_(there, non_blocking=True)

    def _find(self, copy: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        found = self._views.get((copy, begin, end))
        if found is None:
            found = (self.device[begin:end], self._pinned[copy][begin:end])
            self._views[copy, begin, end] = found
        return found


class BurstInput:
    """A burst in the device's format: header, seeds and rows; free slots, of which there may be many, come last."""

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
            """Return the fields by name, as views of `words`."""
            places = zip(sizes.items(), bounds, bounds[1:], strict=False)
            return {name: words[begin:end].reshape(size) for (name, size), begin, end in places}

        self._host: list[dict[str, Int32s]] = [views(words) for words in self._words.host]
        fields = views(self._words.device)
        self.header: Tensor = fields.pop("header")
        """On the device, like `seeds` and `rows`; see kernels.frontier."""
        self.seeds: Tensor = fields.pop("seeds")
        self.rows = BurstRows(**fields)
        for host, memory in zip(self._host, self._words.host, strict=True):
            # All fields that have one word for each row.
            host["rows"] = memory[self._begins["table_rows"] : self._begins["live"]].reshape(4, -1)
            host["table_rows"][:] = shape.num_rows

    def fill(self, copy: int, burst: Burst) -> None:
        """Describe a burst in one of the host's copies."""
        host, rows, count = self._host[copy], burst.rows, len(burst.rows)
        header, num_seeds = host["header"], len(burst.seeds)
        header[STEP], header[NUM_SEEDS] = 0, num_seeds
        header.view(np.float32)[FLOOR] = burst.floor
        host["seeds"][:, :num_seeds] = burst.seeds.fields
        # Nothing is live or free in padding rows, so their other fields do not matter.
        host["rows"][:, count:] = 0
        host["table_rows"][count:] = self._shape.num_rows
        host["live"][count:] = 0
        host["table_rows"][:count] = rows.rows
        host["context_len"][:count] = rows.context_lens
        host["num_free"][:count] = rows.free_ends
        host["next_free"][:count] = rows.free_starts
        host["free"][:count] = rows.free
        packed = np.packbits(rows.live, axis=1, bitorder="little")
        host["live"][:count] = packed.view("<i4")

    def to_device(self, copy: int, num_rows: int) -> None:
        """Queue the copy of a burst with `num_rows` rows to the device."""
        self._words.to_device(copy, self._begins["free"] + num_rows * self._shape.region)


class RerootInput:
    """The input of a burst that goes on: further seeds, then changes of its rows."""

    def __init__(self, shape: BurstShape, device: torch.device) -> None:
        self._line = REROOT_WORDS + shape.region
        self._begin = SEED_HEADER_WORDS + NUM_FIELDS * shape.max_width
        self._turn = 0
        self._words = _StagedWords(self._begin + shape.num_rows * self._line, device)
        self.rows(shape.num_rows)[:, : NEW_ROOT_SLOT + 1] = -1

    @property
    def seeds(self) -> Tensor:
        """The further seeds on the device; see kernels.frontier.add_seeds."""
        return self._words.device[: self._begin]

    def rows(self, count: int) -> Tensor:
        """Return the changes of the first `count` rows on the device; see kernels.frontier.reroot_pool."""
        return self._words.device[self._begin : self._end(count)].view(count, self._line)

    def to_device(self, reroots: Reroots, count: int) -> None:
        """Queue the copy of seeds and of the changes of the first `count` rows. Two copies may be pending."""
        end = self._end(count)
        words = self._words.host[self._turn]
        seeds = reroots.seeds
        words[FIRST_SEED], words[NUM_NEW_SEEDS] = reroots.first_seed, 0 if seeds is None else len(seeds)
        if seeds is not None:
            words[SEED_HEADER_WORDS : self._begin].reshape(NUM_FIELDS, -1)[:, : len(seeds)] = seeds.fields
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

    def _end(self, num_rows: int) -> int:
        return self._begin + num_rows * self._line


class BurstOutput:
    """Results of a burst's steps."""

    def __init__(self, shape: BurstShape, device: torch.device) -> None:
        self._shape = shape
        size = shape.max_steps * shape.max_width * (2 + 2 * shape.most_branching)
        self._words = _StagedWords(size, device)
        self.device = self._words.device
        """Results of steps on the device: see kernels.frontier.append_candidates."""

    def to_host(self, copy: int, bucket: StepBucket, num_steps: int, first_step: int = 0) -> None:
        """Queue the copy of the results of some steps to the host."""
        line = bucket.num_words
        self._words.to_host(copy, first_step * line, (first_step + num_steps) * line)

    def host_steps(self, copy: int, bucket: StepBucket, num_steps: int, first_step: int = 0) -> Int32s:
        """Return the results of some steps in host memory, [num_steps, width * (2 + 2 * k)]."""
        line = bucket.num_words
        return self._words.host[copy][first_step * line : (first_step + num_steps) * line].reshape(num_steps, line)

    def read(self, copy: int, bucket: StepBucket, num_steps: int, first_step: int = 0) -> BurstResult:
        """Return the results of some steps from a host buffer, in new memory."""
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


_FEATURES = (1, 3, 17, 48, 100)
"""Numbers of positions to warm up with, one for each kernel that products with features use."""


class CudaRunner(BurstRunner):
    """See BurstRunner. A step is one captured graph, which reads lengths and trees from device memory."""

    def __init__(
        self, model: DraftModel, shape: BurstShape, attention: AttentionBackend, options: RunnerOptions
    ) -> None:
        super().__init__(model, shape, attention, options)
        device = model.device
        self._on_gpu = device.type == "cuda"
        self._proposer = Proposer(
            shape.num_rows + 1,
            shape.max_width,
            model.vocab_size,
            model.target_vocab_size,
            model.target_ids,
            device,
            options.rank_by_noise,
            model.edge_scale,
        )
        self._input = BurstInput(shape, device)
        self._output = BurstOutput(shape, device)
        self._turn = 0
        make: type[DraftSteps] = BlockSteps if shape.has_blocks else DraftSteps
        self._steps = make(
            model,
            self.memory,
            attention,
            self._proposer,
            shape,
            self._input.header,
            self._input.rows,
            self._output.device,
            lambda bucket: shape.max_seeds,
        )
        self._reroot_input = RerootInput(shape, device)
        self._contexts = ContextForward(model, self.memory, shape, attention, options.chunk_size)
        self.graphs = GraphPool[StepBucket]("draft steps", self._steps.run)
        self._begins = GraphPool[StepBucket]("beginnings of bursts", self._begin)
        self._reroots = GraphPool[StepBucket]("new roots of bursts", self._reroot)

    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Warm up prompts and capture a graph for every bucket; does nothing on a CPU. Overwrites the KV cache."""
        if not self._on_gpu:
            return
        with self.at_work():
            if any(bucket.short for bucket in self.buckets.all()):
                share_l1()
            self._warm_up()
            # Steps change nothing while the pool has no entries.
            self._steps.clear()
            if self.options.use_graphs:
                self.graphs.capture(self.buckets.all(), True, progress)
                self._begins.capture(self.buckets.sizes(), False)
                # Steps of one shape leave entries in the pool whose rows do not exist in another shape.
                self._steps.clear()
                self._reroots.capture(self.buckets.sizes(), False)
                self._contexts.capture()

    def _warm_up(self) -> None:
        """Launch once, without effect, all kernels used outside of graphs: compiling one takes a third of a second."""
        if not self.options.use_graphs:
            self._contexts.warm_up()
        self._warm_up_features()
        self.memory.warm_up()
        self._steps.clear()
        for bucket in self.buckets.sizes():
            self._begin(bucket)
            self._reroot(bucket)

    def _warm_up_features(self) -> None:
        """Project several numbers of features, and join some."""
        model, store = self._model, self.memory.features
        if store is None:
            return
        width = model.hidden_size * len(model.feature_layers)
        for count in _FEATURES:
            rows = model.project(store.new_zeros(count, width))
            model.finish_product(rows)
        join_rows([rows, rows], rows.new_zeros(2 * len(rows), self.shape.feature_size))

    def _run_context(self, chunks: Sequence[PromptChunk], features: Tensor | None) -> None:
        self._contexts.run_at(chunks, features)

    @property
    def num_bytes(self) -> int:
        """Device memory of KV, features and graphs, in bytes."""
        graphs = (self.graphs, self._begins, self._reroots, self._contexts)
        return self.memory.num_bytes + sum(one.num_bytes for one in graphs)

    def memory_mapper(self) -> MemoryMapper | None:
        """See BurstRunner."""
        return partial(ImportedMemory, device=self.memory.kv.k.device) if self._on_gpu else None

    def go_on(self, pending: PendingBurst, num_steps: int, reroots: Reroots | None = None) -> PendingBurst | None:
        """See PendingBurst.go_on. Pool, rows and the count of steps are still on the device as the burst left them."""
        done = pending.first_step + pending.num_steps
        if not self._launched or self._launched[-1] is not pending or done + num_steps > self.shape.max_steps:
            return None
        more = PendingBurst(self, pending.burst, pending.bucket, num_steps, done)
        more.copy = pending.copy
        with self.at_work():
            if reroots is not None:
                self.memory.take_features(reroots.features)
                self._reroot_input.to_device(reroots, more.bucket.rows)
                self._reroots.run(more.bucket.sizes)
            self._run_steps(more, fresh=reroots is not None and bool(reroots.features))
        self._launched.append(more)
        return more

    def _read(self, pending: PendingBurst) -> BurstResult:
        return self._output.read(pending.copy, pending.bucket, pending.num_steps, pending.first_step)

    def _queue(self, pending: PendingBurst) -> None:
        pending.copy = self._turn
        self._turn = (self._turn + 1) % NUM_COPIES
        burst, bucket = pending.burst, pending.bucket
        self._input.fill(pending.copy, burst)
        self.memory.flush()
        self.memory.take_features(burst.features)
        self._input.to_device(pending.copy, len(burst.rows))
        self._begins.run(bucket.sizes)
        self._run_steps(pending, fresh=bool(burst.features))

    def _run_steps(self, part: PendingBurst, *, fresh: bool) -> None:
        """Queue the steps of a part, and an event for its end. `fresh`: the first step takes features that came."""
        for number in range(part.num_steps):
            self.graphs.run(part.bucket._replace(fresh=self.shape.has_blocks and fresh and not number))
        self._output.to_host(part.copy, part.bucket, part.num_steps, part.first_step)
        part.ran = True
        if self._on_gpu:
            part.event = torch.cuda.Event()
            part.event.record()

    def _begin(self, bucket: StepBucket) -> None:
        """Write rows and seeds of a burst into the pool; may be captured."""
        rows = self._input.rows.head(bucket.rows)
        begin_burst(self._input.header, self._input.seeds, self._steps.pool(bucket), rows, self.memory.plan)

    def _reroot(self, bucket: StepBucket) -> None:
        """Apply commits, new slots and further seeds to the pool; may be captured."""
        rows, pool = self._input.rows.head(bucket.rows), self._steps.pool(bucket)
        words = self._reroot_input.rows(bucket.rows)
        reroot_pool(self._input.header, pool, rows, self.memory.plan, words, bucket.num_candidates)
        add_seeds(pool, self._reroot_input.seeds)

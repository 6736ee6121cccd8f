"""Runs bursts on a GPU: one captured step, replayed. Runs on a CPU too, slowly and without graphs, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.frontier import add_seeds, begin_burst, reroot_pool
from outrider.attention.base import AttentionBackend
from outrider.attention.paged import PromptChunk
from outrider.cuda_ipc import ImportedMemory
from outrider.device import share_l1
from outrider.drafting.model.buffers import NUM_COPIES, BurstInput, BurstOutput, RerootInput
from outrider.drafting.model.burst import BurstResult, BurstShape, Reroots, StepBucket
from outrider.drafting.model.cuda_forward import BlockSteps, ContextForward, DraftSteps
from outrider.drafting.model.device_memory import join_rows
from outrider.drafting.model.features import MemoryMapper
from outrider.drafting.model.runner import BurstRunner, PendingBurst, RunnerOptions, on_device
from outrider.graphs import GraphPool
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.heads import BlockHead
from outrider.sampling.proposer import Proposer

_FEATURES = (1, 3, 17, 48, 100)
"""Positions whose features come together, one for each kernel that products with them have."""


class CudaRunner(BurstRunner):
    """See BurstRunner. A step is one captured graph, which reads lengths and trees from device memory."""

    _proposer: Proposer

    def __init__(
        self, model: DraftModel, shape: BurstShape, attention: AttentionBackend, options: RunnerOptions
    ) -> None:
        super().__init__(model, shape, attention, options)
        device = model.device
        self._on_gpu = device.type == "cuda"
        self._has_blocks = isinstance(model, BlockHead)
        self._input = BurstInput(shape, device)
        self._output = BurstOutput(shape, device)
        self._turn = 0
        make: type[DraftSteps] = BlockSteps if self._has_blocks else DraftSteps
        self._steps = make(
            model,
            self.memory,
            attention,
            self._proposer,
            shape,
            self._input.header,
            self._input.rows,
            self._output.steps,
            lambda bucket: shape.max_seeds,
        )
        self._reroot_input = RerootInput(shape, device)
        self._contexts = ContextForward(model, self.memory, shape, attention, options.chunk_size)
        self.graphs = GraphPool[StepBucket]("draft steps", self._steps.run)
        self._begins = GraphPool[StepBucket]("beginnings of bursts", self._begin)
        self._reroots = GraphPool[StepBucket]("new roots of bursts", self._reroot)

    @on_device
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Warm prompts up and capture a graph for every bucket; on a CPU there is nothing to do. Trashes the cache."""
        if not self._on_gpu:
            return
        if any(bucket.short for bucket in self.buckets.all()):
            share_l1()
        self._warm_up()
        # With no entries in the pool, steps change nothing.
        self._input.clear()
        if self.options.use_graphs:
            self.graphs.capture(self.buckets.all(), True, progress)
            self._begins.capture(self.buckets.sizes(), False)
            # Steps of one shape leave entries in the pool that name no row of another shape.
            self._input.clear()
            self._steps.clear()
            self._reroots.capture(self.buckets.sizes(), False)
            self._contexts.capture()

    def _warm_up(self) -> None:
        """Run what is launched outside of graphs once, without effect: compiling a kernel takes a third of a second."""
        if not self.options.use_graphs:
            self._contexts.warm_up()
        self._warm_up_features()
        self.memory.warm_up()
        self._input.clear()
        for bucket in self.buckets.sizes():
            self._begin(bucket)
            self._reroot(bucket)

    def _warm_up_features(self) -> None:
        """Project features of several counts, and join some."""
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
        """Device memory of KV, features and graphs."""
        graphs = (self.graphs, self._begins, self._reroots, self._contexts)
        return self.memory.num_bytes + sum(one.num_bytes for one in graphs)

    def memory_mapper(self) -> MemoryMapper | None:
        """See BurstRunner."""
        return partial(CudaMemory, device=self.memory.kv.k.device) if self._on_gpu else None

    def _make_proposer(self) -> Proposer:
        shape, model, options = self.shape, self._model, self.options
        return Proposer(
            shape.num_rows + 1,
            shape.max_width,
            model.vocab_size,
            model.target_vocab_size,
            model.target_ids,
            model.device,
            options.rank_by_noise,
            model.edge_scale,
        )

    @on_device
    def go_on(self, pending: PendingBurst, num_steps: int, reroots: Reroots | None = None) -> PendingBurst | None:
        """See PendingBurst.go_on. Pool, rows and the count of steps lie on the device as the burst left them."""
        done = pending.first_step + pending.num_steps
        if not self._launched or self._launched[-1] is not pending or done + num_steps > self.shape.max_steps:
            return None
        more = PendingBurst(self, pending.burst, pending.bucket, done, num_steps)
        more.ran, more.copy = True, pending.copy
        if reroots is not None:
            self.memory.take_features(reroots.features)
            self._reroot_input.to_device(reroots, more.bucket.rows)
            self._reroots.run(more.bucket.sizes)
        self._run_steps(more.bucket, num_steps, fresh=reroots is not None and bool(reroots.features))
        self._output.to_host(more.copy, more.bucket, num_steps, done)
        self._mark(more)
        self._launched.append(more)
        return more

    def _read(self, pending: PendingBurst) -> BurstResult:
        return self._output.read(pending.copy, pending.bucket, pending.num_steps, pending.first_step)

    def _mark(self, pending: PendingBurst) -> None:
        """Note where a part of a burst ends."""
        if self._on_gpu:
            pending.event = torch.cuda.Event()
            pending.event.record()

    def _queue(self, pending: PendingBurst) -> None:
        pending.ran, pending.copy = True, self._turn
        self._turn = (self._turn + 1) % NUM_COPIES
        burst, bucket = pending.burst, pending.bucket
        self._input.fill(pending.copy, burst)
        self.memory.flush()
        self.memory.take_features(burst.features)
        self._input.to_device(pending.copy, len(burst.rows))
        self._begins.run(bucket.sizes)
        self._run_steps(bucket, burst.num_steps, fresh=bool(burst.features))
        self._output.to_host(pending.copy, bucket, burst.num_steps)
        self._mark(pending)

    def _run_steps(self, bucket: StepBucket, count: int, *, fresh: bool) -> None:
        """`fresh`: features came with these steps, which the first of them takes."""
        for number in range(count):
            self.graphs.run(bucket._replace(fresh=self._has_blocks and fresh and not number))

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


class CudaMemory(ImportedMemory):
    """See MappedMemory. Bursts may be under way: `read` waits for none of them."""

    def peek(self, offset: int, num_bytes: int) -> bytes:
        """See MappedMemory."""
        return self.read(offset, num_bytes).cpu().numpy().tobytes()

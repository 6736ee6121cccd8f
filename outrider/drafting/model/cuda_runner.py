"""Runs bursts on a GPU: one captured step, replayed. Runs on a CPU too, slowly and without graphs, for tests."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from kernels.frontier import add_seeds, append_candidates, begin_burst, choose_entries, place_entries, reroot_pool
from kernels.frontier_state import NUM_FIELDS, CandidatePool, StepTokens
from outrider.attention.base import AttentionBackend
from outrider.attention.paged import PagedBatch, choose_splits
from outrider.attention.prompts import PromptChunk, PromptLayout, PromptShape
from outrider.cuda_ipc import ImportedMemory
from outrider.device import num_processors, put, share_l1
from outrider.drafting.model.buffers import RerootInput
from outrider.drafting.model.burst import BurstShape, Reroots, StepBucket
from outrider.drafting.model.device_memory import DeviceMemory, join_rows
from outrider.drafting.model.features import MemoryMapper
from outrider.drafting.model.runner import BurstRunner, ContextChunk, PendingBurst, RunnerOptions, on_device
from outrider.graphs import GraphPool
from outrider.models.drafters.base import DraftModel
from outrider.sampling.proposer import Proposer

_FEATURES = (1, 3, 17, 48, 100)
"""Positions whose features come together, one for each kernel that products with them have."""


class CudaRunner(BurstRunner):
    """See BurstRunner. A step is one captured graph, which reads lengths and trees from device memory."""

    def __init__(
        self, model: DraftModel, shape: BurstShape, attention: AttentionBackend, options: RunnerOptions
    ) -> None:
        super().__init__(model, shape, attention, options)
        device = model.device
        self._on_gpu = device.type == "cuda"
        self._num_processors = num_processors(device)
        self._entries = torch.zeros(NUM_FIELDS * shape.most_entries, dtype=torch.int32, device=device)
        size = shape.max_width * shape.most_branching
        self._tokens = torch.zeros(size, dtype=torch.int32, device=device)
        self._scores = torch.zeros(size, dtype=torch.float32, device=device)
        self._reroot_input = RerootInput(shape, device)
        self._contexts = ContextForward(model, self.memory, shape, attention, options.chunk_size)
        self._steps: dict[StepBucket, StepTokens] = {}
        self.graphs = GraphPool[StepBucket]("draft steps", self._step)
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
            self._entries.view(torch.float32).fill_(-math.inf)
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

    def _run_context(self, chunks: Sequence[ContextChunk], features: Tensor | None) -> None:
        self._contexts.run(chunks, features)

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
            self._vocab_limit,
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
        more = PendingBurst(self, pending.burst, pending.bucket, pending.copy, done, num_steps)
        more.ran = True
        if reroots is not None:
            self.memory.take_features(reroots.features)
            self._reroot_input.to_device(reroots, more.bucket.rows)
            self._reroots.run(more.bucket.sizes)
        for _ in range(num_steps):
            self.graphs.run(more.bucket)
        self._output.to_host(more.copy, more.bucket, num_steps, done)
        self._mark(more)
        self._launched.append(more)
        return more

    def _queue(self, pending: PendingBurst) -> None:
        self._run(pending)
        self._mark(pending)

    def _mark(self, pending: PendingBurst) -> None:
        """Note where a part of a burst ends."""
        if self._on_gpu:
            pending.event = torch.cuda.Event()
            pending.event.record()

    def _run(self, pending: PendingBurst) -> None:
        """Queue all work of a burst on the device."""
        pending.ran = True
        burst, bucket = pending.burst, pending.bucket
        self.memory.flush()
        self.memory.take_features(burst.features)
        self._input.to_device(pending.copy, len(burst.rows))
        self._begins.run(bucket.sizes)
        for _ in range(burst.num_steps):
            self.graphs.run(bucket)
        self._output.to_host(pending.copy, bucket, burst.num_steps)

    def _begin(self, bucket: StepBucket) -> None:
        """Write rows and seeds of a burst into the pool; may be captured."""
        rows = self._input.rows.head(bucket.rows)
        begin_burst(self._input.header, self._input.seeds, self._pool(bucket), rows, self.memory.plan)

    def _reroot(self, bucket: StepBucket) -> None:
        """Apply commits, new slots and further seeds to the pool; may be captured."""
        rows, words, pool = self._input.rows.head(bucket.rows), self._reroot_input.rows(bucket.rows), self._pool(bucket)
        reroot_pool(self._input.header, pool, rows, self.memory.plan, words, bucket.num_candidates)
        add_seeds(pool, self._reroot_input.seeds)

    def _step(self, bucket: StepBucket) -> None:
        """A step: choose nodes, run them, append their candidates to the pool; may be captured."""
        header, pool, step = self._input.header, self._pool(bucket), self._step_tokens(bucket)
        rows = self._input.rows.head(bucket.rows)
        choose_entries(header, pool, rows, step, bucket.branching)
        place_entries(pool, rows, step, self.memory.plan)
        flat, size = slice(bucket.num_candidates), (bucket.width, bucket.branching)
        tokens, scores = self._tokens[flat].view(size), self._scores[flat].view(size)
        self._propose(bucket, step, tokens, scores)
        append_candidates(header, pool, step, tokens, scores, self._output.steps(bucket))

    def _propose(self, bucket: StepBucket, step: StepTokens, tokens: Tensor, scores: Tensor) -> None:
        """Run the nodes of a step, and write their candidates."""
        batch = self._step_batch(bucket, step)
        count = batch.token_ids.shape[0]
        store = self.memory.features
        given = None if store is None else store.index_select(0, step.sources[:count])
        rows, features = self._model.forward(batch, given, self.memory.kv, self._attention)
        logits = self._model.logits(rows)
        where = (step.table_rows[:count], step.positions[:count])
        self._proposer(logits, *where, tokens[:count], scores[:count])
        if store is not None and features is not None:
            store.index_copy_(0, step.targets[:count], features)

    def _pool(self, bucket: StepBucket) -> CandidatePool:
        """The pool as bursts of this shape lay it out."""
        max_seeds = self.shape.max_seeds
        size = max_seeds + self.shape.max_steps * bucket.num_candidates
        return CandidatePool(self._entries[: NUM_FIELDS * size].view(NUM_FIELDS, size), max_seeds)

    def _step_tokens(self, bucket: StepBucket) -> StepTokens:
        bucket = bucket.sizes
        found = self._steps.get(bucket)
        if found is None:
            words, device = self.shape.region // 32, self._model.device
            capacity = self._pool(bucket).capacity
            made = StepTokens.new(bucket.width, bucket.rows, words, device, capacity)
            # Another thread may compile a step of the same sizes.
            found = self._steps.setdefault(bucket, made)
        return found

    def _step_batch(self, bucket: StepBucket, step: StepTokens) -> PagedBatch:
        rows, plan, model = self._input.rows.head(bucket.rows), self.memory.plan, self._model
        heads = (model.num_heads, model.num_kv_heads)
        return PagedBatch(
            token_ids=step.token_ids,
            positions=step.rotary,
            first=step.first,
            cached_len=rows.context_len,
            table_rows=rows.table_rows,
            page_tables=plan.page_tables,
            slots=step.kv_slots,
            page_size=plan.page_size,
            max_row_tokens=bucket.width,
            mask=step.mask,
            region_base=plan.region_base,
            num_splits=choose_splits(bucket.width, bucket.rows, bucket.width, *heads, self._num_processors),
            short=bucket.short,
        )


_CONTEXT_TOKENS = (32, 128, 512)
_CONTEXT_ROWS = (7, 127)
"""Shapes of captured forwards. Rows are one below a power of two: attention has a kernel for each power."""
_PROMPTS = (1, 3, 17, 48, 100)
"""Prompt tokens, one for each kernel that products and attention have."""


class ContextForward:
    """Forwards of context tokens of several rows, as a captured graph where they are few, which prompts mostly are.

    Kernel by kernel a forward takes the host many times what it takes the device, and no tree grows meanwhile.
    """

    def __init__(
        self, model: DraftModel, memory: DeviceMemory, shape: BurstShape, attention: AttentionBackend, chunk_size: int
    ) -> None:
        """`chunk_size`: tokens of a forward at most."""
        self._model = model
        self._memory = memory
        self._attention = attention
        self._spare = shape.num_rows
        self._page_size = shape.page_size
        self._most = min(shape.num_pages * shape.page_size, shape.max_context, chunk_size)
        self._tokens = sorted({min(size, chunk_size) for size in _CONTEXT_TOKENS})
        self._captured = False
        largest = PromptShape(self._tokens[-1], _CONTEXT_ROWS[-1])
        self._layout = PromptLayout(largest)
        self._words = torch.zeros(self._layout.size, dtype=torch.int32, device=model.device)
        self._features: Tensor | None = None
        if shape.feature_size:
            size = (largest.tokens, shape.feature_size)
            self._features = torch.zeros(size, dtype=model.dtype, device=model.device)
        self._graphs = GraphPool[PromptShape]("forwards of prompts", self._run)

    @property
    def num_bytes(self) -> int:
        """Device memory of the graphs."""
        return self._graphs.num_bytes

    def warm_up(self) -> None:
        """Run forwards of all kinds once, without effect, so that all kernels are compiled."""
        for count in sorted({min(self._most, count) for count in _PROMPTS} | {self._most}):
            self._warm_up([count])
        for rows in _CONTEXT_ROWS:
            self._warm_up([1] * min(rows, self._spare))

    def capture(self) -> None:
        """Capture forwards, and compile the kernels of those that are too large for that."""
        self._describe(())
        self._graphs.capture([PromptShape(*shape) for shape in product(self._tokens[::-1], _CONTEXT_ROWS[::-1])], False)
        self._captured = True
        if self._most > self._tokens[-1]:
            self._warm_up([self._most])

    def run(self, chunks: Sequence[ContextChunk], features: Tensor | None) -> None:
        """Queue a forward of `chunks`, each of another row; `features` [tokens, feature_size] for a model of them."""
        prompts = [
            PromptChunk(row, tokens, start, self._memory.context_slots(row, start, start + len(tokens)))
            for row, tokens, start in chunks
        ]
        num_tokens = sum(len(chunk.slots) for chunk in prompts)
        shape = self._fit(num_tokens, len(prompts))
        if shape is None:
            self._run_alone(prompts, num_tokens, features)
            return
        self._describe(prompts)
        if self._features is not None and features is not None:
            self._features[:num_tokens].copy_(features)
        self._graphs.run(shape)

    def _fit(self, num_tokens: int, num_rows: int) -> PromptShape | None:
        if not self._captured or num_tokens > self._tokens[-1] or num_rows > _CONTEXT_ROWS[-1]:
            return None
        return PromptShape(self._tokens[bisect_left(self._tokens, num_tokens)], _padded(num_rows))

    def _describe(self, chunks: Sequence[PromptChunk]) -> None:
        put(self._layout.describe(chunks, self._spare), self._model.device, into=self._words)

    def _run(self, shape: PromptShape) -> None:
        """A forward of what was described last; may be captured."""
        features = None if self._features is None else self._features[: shape.tokens]
        self._compute(self._layout, self._words, shape, features)

    def _run_alone(self, chunks: Sequence[PromptChunk], num_tokens: int, features: Tensor | None) -> None:
        shape = PromptShape(num_tokens, _padded(len(chunks)))
        layout = PromptLayout(shape)
        self._compute(layout, put(layout.describe(chunks, self._spare), self._model.device), shape, features)

    def _compute(self, layout: PromptLayout, words: Tensor, shape: PromptShape, features: Tensor | None) -> None:
        batch = layout.batch(words, shape, self._memory.plan.page_tables, self._page_size)
        self._model.forward(batch, features, self._memory.kv, self._attention)

    def _warm_up(self, counts: Sequence[int]) -> None:
        """A forward of rows with so many tokens each, which are written nowhere."""
        chunks = [PromptChunk(self._spare, [0] * count, 0, np.full(count, -1, np.int32)) for count in counts]
        total = sum(counts)
        features = None if self._features is None else self._features.new_zeros(total, self._features.shape[1])
        self._run_alone(chunks, total, features)


def _padded(num_rows: int) -> int:
    """Rows of a forward with so many, empty ones included."""
    return _CONTEXT_ROWS[bisect_left(_CONTEXT_ROWS, num_rows)] if num_rows <= _CONTEXT_ROWS[-1] else num_rows


class CudaMemory(ImportedMemory):
    """See MappedMemory. Bursts may be under way: `read` waits for none of them."""

    def peek(self, offset: int, num_bytes: int) -> bytes:
        """See MappedMemory."""
        return self.read(offset, num_bytes).cpu().numpy().tobytes()

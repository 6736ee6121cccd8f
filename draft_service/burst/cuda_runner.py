"""Runs bursts on a GPU: one captured step, replayed. Runs on a CPU too, slowly and without graphs, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draft_service.burst.buckets import Bucket
from draft_service.burst.plan import BurstShape
from draft_service.burst.runner import Pending, Runner, RunnerOptions, on_device
from outrider.attention.base import AttentionBackend
from outrider.attention.frontier import StepTokens
from outrider.attention.paged import PagedBatch, TreeRegion, choose_splits
from outrider.device import num_processors
from outrider.graphs import GraphPool
from outrider.models.drafters.base import DraftModel
from outrider.sampling.proposer import Proposer

_PROMPTS = (1, 3, 17, 48, 100)
"""Prompt tokens whose products and attention are kernels of their own."""
_ALIGNED = 4
"""int32 words between two places where fields may begin."""


class CudaRunner(Runner):
    """See BurstRunner; lengths and trees are read from device memory."""

    def __init__(
        self, model: DraftModel, shape: BurstShape, attention: AttentionBackend, options: RunnerOptions
    ) -> None:
        super().__init__(model, shape, attention, options)
        self._on_gpu = model.device.type == "cuda"
        self._num_processors = num_processors(model.device)
        self.graphs = GraphPool[Bucket]("draft steps", self._step)
        self._begins = GraphPool[Bucket]("beginnings of bursts", self._begin)

    @on_device
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Warm prompts up and capture a graph for every bucket; on a CPU there is nothing to do. Trashes the cache."""
        if not self._on_gpu:
            return
        self._warm_up()
        # With no entries in the pool, steps change nothing.
        self._input.clear()
        if self.options.use_graphs:
            self.graphs.capture(self.buckets.all(), True, progress)
            self._begins.capture(self.buckets.all(), False)

    def _warm_up(self) -> None:
        """Run once, without effect, all that is launched outside of graphs: a kernel that is compiled while requests
        wait costs a third of a second."""
        room = min(self.shape.num_pages * self.shape.page_size, self.shape.max_context, self.options.chunk_size)
        for count in sorted({min(room, count) for count in _PROMPTS} | {room}):
            batch = self._paged_prompt(self.shape.num_rows, [0] * count, 0, [-1] * count)
            features = None
            if self.memory.features is not None:
                features = self.memory.features.new_zeros(count, self.shape.feature_size)
            self._model.forward(batch, features, self.memory.kv, self._attention)
        self.memory.warm_up()
        self._input.clear()
        for bucket in self.buckets.all():
            self._begin(bucket)

    @property
    def num_bytes(self) -> int:
        """Device memory of KV, features and graphs."""
        return self.memory.num_bytes + self.graphs.num_bytes + self._begins.num_bytes

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
    def go_on(self, pending: Pending, num_steps: int) -> Pending | None:
        """See PendingBurst.go_on. Pool, rows and the count of steps lie on the device as the burst left them."""
        done = pending.first_step + pending.num_steps
        if not self._launched or self._launched[-1] is not pending or done + num_steps > self.shape.max_steps:
            return None
        more = Pending(self, pending.burst, pending.bucket, pending.copy, done, num_steps)
        more.ran = True
        for _ in range(num_steps):
            self._run_step(more.bucket)
        self._output.to_host(more.copy, more.bucket, num_steps, done)
        self._mark(more)
        self._launched.append(more)
        return more

    def _queue(self, pending: Pending) -> None:
        self._run(pending)
        self._mark(pending)

    def _mark(self, pending: Pending) -> None:
        """Note where a part of a burst ends."""
        if self._on_gpu:
            pending.event = torch.cuda.Event()
            pending.event.record()

    def _run_begin(self, bucket: Bucket) -> None:
        self._begins.run(bucket)

    def _run_step(self, bucket: Bucket) -> None:
        self.graphs.run(bucket)

    def _step_batch(self, bucket: Bucket, step: StepTokens) -> PagedBatch:
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
            region=TreeRegion(plan.region_base, rows.region_len),
            num_splits=choose_splits(bucket.width, bucket.rows, bucket.width, *heads, self._num_processors),
        )

    def _prompt_batch(self, row: int, tokens: Sequence[int], position: int) -> PagedBatch:
        slots = self.memory.context_slots(row, position, position + len(tokens)).tolist()
        return self._paged_prompt(row, tokens, position, slots)

    def _paged_prompt(self, row: int, tokens: Sequence[int], position: int, slots: Sequence[int]) -> PagedBatch:
        count = len(tokens)
        # One small copy for all that describes the chunk. Fields begin where pointers are aligned, whatever the count:
        # kernels are compiled anew for others.
        fields: list[int] = []
        starts = []
        for part in (tokens, range(position, position + count), slots, (0, count), (position,), (row,)):
            starts.append(len(fields))
            fields += part
            fields += [0] * (-len(fields) % _ALIGNED)
        told = self._put(fields)
        token_ids, positions, kv_slots, first, cached_len, table_rows = (
            told[start : start + size] for start, size in zip(starts, (count, count, count, 2, 1, 1), strict=True)
        )
        return PagedBatch(
            token_ids=token_ids,
            positions=positions,
            first=first,
            cached_len=cached_len,
            table_rows=table_rows,
            page_tables=self.memory.plan.page_tables,
            slots=kv_slots,
            page_size=self.shape.page_size,
            max_row_tokens=count,
        )

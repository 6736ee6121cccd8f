"""Runs bursts on a GPU: one captured step, replayed. Runs on a CPU too, slowly and without graphs, for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from draft_service.burst.buckets import Bucket
from draft_service.burst.plan import BurstShape
from draft_service.burst.runner import Pending, Runner, RunnerOptions, on_device
from draft_service.burst.step_graphs import StepGraphs
from outrider.attention.base import AttentionBackend
from outrider.attention.frontier import StepTokens
from outrider.attention.paged import PagedBatch, TreeRegion, choose_splits
from outrider.device import num_processors
from outrider.models.drafters.base import DraftModel
from outrider.sampling.proposer import Proposer


class CudaRunner(Runner):
    """See BurstRunner; lengths and trees are read from device memory."""

    def __init__(
        self, model: DraftModel, shape: BurstShape, attention: AttentionBackend, options: RunnerOptions
    ) -> None:
        super().__init__(model, shape, attention, options)
        self._on_gpu = model.device.type == "cuda"
        self._num_processors = num_processors(model.device)
        self.graphs = StepGraphs(self._step)

    @on_device
    def capture(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Warm prompts up and capture a graph for every bucket; on a CPU there is nothing to do. Trashes the cache."""
        if not self._on_gpu:
            return
        room = min(self.shape.num_pages * self.shape.page_size, self.shape.max_context, self.options.chunk_size)
        for count in {room, min(room, 48)}:
            batch = self._paged_prompt(self.shape.num_rows, [0] * count, 0, [-1] * count)
            features = None
            if self.memory.features is not None:
                features = self.memory.features.new_zeros(count, self.shape.feature_size)
            self._model.forward(batch, features, self.memory.kv, self._attention)
        self._input.clear()
        if self.options.use_graphs:
            self.graphs.capture(self.buckets.all(), progress)

    @property
    def num_bytes(self) -> int:
        """Device memory of KV, features and graphs."""
        return self.memory.num_bytes + self.graphs.num_bytes

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
            options.tau,
        )

    def _queue(self, pending: Pending) -> None:
        self._run(pending)
        if self._on_gpu:
            pending.event = torch.cuda.Event()
            pending.event.record()

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
        # One small copy for all that describes the chunk.
        fields = self._put([*tokens, *range(position, position + count), *slots, 0, count, position, row])
        return PagedBatch(
            token_ids=fields[:count],
            positions=fields[count : 2 * count],
            first=fields[3 * count : 3 * count + 2],
            cached_len=fields[3 * count + 2 : 3 * count + 3],
            table_rows=fields[3 * count + 3 :],
            page_tables=self.memory.plan.page_tables,
            slots=fields[2 * count : 3 * count],
            page_size=self.shape.page_size,
            max_row_tokens=count,
        )

"""Forwards of a draft model on a GPU that read lengths and trees from device memory: draft steps, and context.

They can be captured. Launched kernel by kernel, a forward would take the host many times as long as the device, and no
tree would grow meanwhile.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.blocks import find_roots, forget_injected, lay_out_blocks
from kernels.frontier import append_candidates, choose_entries, place_entries
from kernels.frontier_state import (
    FLOOR,
    NUM_FIELDS,
    BlockLayout,
    BlockRoots,
    BurstRows,
    CandidatePool,
    StepTokens,
)
from outrider.attention.base import AttentionBackend, TokenBatch
from outrider.attention.paged import PagedBatch, PromptChunk, PromptLayout, PromptShape, choose_splits
from outrider.device import num_processors, put
from outrider.drafting.model.burst import BurstShape, StepBucket
from outrider.drafting.model.device_memory import DeviceMemory
from outrider.graphs import GraphPool
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.heads import BlockHead
from outrider.sampling.proposer import Proposer


class DraftSteps:
    """Steps of best-first growth on a device: each runs the best nodes of a pool and adds their candidates to it.

    Everything that a step reads and writes is in device memory, so that it can be captured for its bucket and replayed.
    """

    def __init__(
        self,
        model: DraftModel,
        memory: DeviceMemory,
        attention: AttentionBackend,
        proposer: Proposer,
        shape: BurstShape,
        header: Tensor,
        rows: BurstRows,
        results: Tensor,
        num_seeds: Callable[[StepBucket], int],
    ) -> None:
        """`header`, `rows`: of the burst, see kernels.frontier.

        `results`: int32, where steps write their results, see kernels.frontier.append_candidates.
        `num_seeds`: returns for how many seeds the pool of a bucket has room.
        """
        device = model.device
        self._model = model
        self._memory = memory
        self._attention = attention
        self._proposer = proposer
        self._shape = shape
        self.header = header
        self.rows = rows
        self._results = results
        self._num_seeds = num_seeds
        self._num_processors = num_processors(device)
        self._entries = torch.zeros(NUM_FIELDS * shape.most_entries, dtype=torch.int32, device=device)
        size = shape.max_width * shape.most_branching
        self._tokens = torch.zeros(size, dtype=torch.int32, device=device)
        self._scores = torch.zeros(size, dtype=torch.float32, device=device)
        self._step_tokens: dict[StepBucket, StepTokens] = {}

    def run(self, bucket: StepBucket) -> None:
        """Run a whole step; may be captured."""
        header, pool, step = self.header, self.pool(bucket), self._tokens_of(bucket)
        rows = self.rows.head(bucket.rows)
        choose_entries(header, pool, rows, step, bucket.branching)
        place_entries(pool, rows, step, self._memory.plan)
        flat, size = slice(bucket.num_candidates), (bucket.width, bucket.branching)
        tokens, scores = self._tokens[flat].view(size), self._scores[flat].view(size)
        self._propose(bucket, step, tokens, scores)
        results = self._results[: self._shape.max_steps * bucket.num_words].view(-1, bucket.num_words)
        append_candidates(header, pool, step, tokens, scores, results)

    def pool(self, bucket: StepBucket) -> CandidatePool:
        """Return the pool in the layout of this bucket's bursts."""
        num_seeds = self._num_seeds(bucket)
        size = num_seeds + self._shape.max_steps * bucket.num_candidates
        return CandidatePool(self._entries[: NUM_FIELDS * size].view(NUM_FIELDS, size), num_seeds)

    def clear(self) -> None:
        """Make sure that no step of any bucket runs an entry until the header is written again.

        Steps of different buckets lay out the pool differently: a token of one may be a score to another.
        """
        self._entries.view(torch.float32).fill_(-math.inf)
        self.header.zero_()
        self.header[FLOOR : FLOOR + 1].view(torch.float32).fill_(math.inf)

    def _propose(self, bucket: StepBucket, step: StepTokens, tokens: Tensor, scores: Tensor) -> None:
        """Run the nodes of a step, and write their candidates to `tokens` and `scores`."""
        batch = self._batch(bucket, step)
        count = batch.token_ids.shape[0]
        store = self._memory.features
        # `index_select` takes several times as long for up to 16 rows.
        given = None if store is None else store[step.sources[:count]]
        rows, features = self._model.forward(batch, given, self._memory.kv, self._attention)
        logits = self._model.logits(rows)
        where = (step.table_rows[:count], step.positions[:count])
        self._proposer(logits, *where, tokens[:count], scores[:count])
        if store is not None and features is not None:
            store.index_copy_(0, step.targets[:count], features)

    def _tokens_of(self, bucket: StepBucket) -> StepTokens:
        bucket = bucket.sizes
        found = self._step_tokens.get(bucket)
        if found is None:
            words, device = self._shape.region // 32, self._model.device
            capacity = self.pool(bucket).capacity
            made = StepTokens.new(bucket.width, bucket.rows, words, device, capacity)
            # Another thread may compile a step of the same sizes.
            found = self._step_tokens.setdefault(bucket, made)
        return found

    def _batch(self, bucket: StepBucket, step: StepTokens) -> PagedBatch:
        rows, plan, model = self.rows.head(bucket.rows), self._memory.plan, self._model
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


class BlockSteps(DraftSteps):
    """Steps of a block head.

    A fresh step takes features that have come: it writes keys and values of their positions, and runs the block of each
    root among its nodes, at most one for a request. Any other step only reads the requests' last blocks.

    Beside products, norms and attention, a fresh step launches kernels that find roots, gather features, compute
    angles, write keys, lay out and keep blocks, and read them. Another step launches the first and the last of these.
    """

    def __init__(self, head: BlockHead, *rest: Any) -> None:
        super().__init__(head, *rest)
        self._head, self._blocks = head, self._memory.room_for_blocks
        # 1 for tree slots whose keys and values are of the target's features.
        size = (self._shape.num_rows + 1, self._shape.region)
        self._injected = torch.zeros(size, dtype=torch.int8, device=head.device)

    def _propose(self, bucket: StepBucket, step: StepTokens, tokens: Tensor, scores: Tensor) -> None:
        head, memory = self._head, self._memory
        store, size, taken = memory.features, head.state_size, self._shape.feature_size
        if store is None:
            raise ValueError("a block head needs features")
        given = store[:, : max(size, taken if bucket.fresh else 0)].index_select(0, step.sources)
        if bucket.fresh:
            rows = self.rows.head(bucket.rows)
            slots, roots = find_roots(step, rows, memory.first_given, self._injected)
            batch = TokenBatch(step.token_ids, step.rotary)
            head.extend(batch, given[:, :taken], slots, memory.kv, self._attention)
            self.run_blocks(roots, step.mask)
        else:
            forget_injected(step, self._injected)
        logits, left = self.read(step.table_rows, step.token_ids, step.positions, given[:, :size])
        self._proposer(logits, step.table_rows, step.positions, tokens, scores)
        if size:
            store[:, :size].index_copy_(0, step.targets, left)

    def read(self, rows: Tensor, tokens: Tensor, positions: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """Read the blocks for nodes of the table's `rows`; see BlockHead.read_blocks."""
        return self._head.read_blocks(self._blocks, rows, tokens, positions, given)

    def run_blocks(self, roots: BlockRoots, seen: Tensor | None = None) -> BlockLayout:
        """Run the blocks of R requests, for `read`; may be captured.

        `seen`: int32 [M, region / 32], bits of the tree slots that each of M tokens sees; the roots are among these
        tokens. Beside the context, blocks see those slots that have keys of features. None: they see only the context.
        """
        head, plan, region = self._head, self._memory.plan, self._shape.region
        num_rows, size = roots.positions.shape[0], head.block.size
        both = None if seen is None else (seen, self._injected)
        layout = lay_out_blocks(roots, plan, region, size, head.block.mask_token, both)
        heads = (head.num_heads, head.num_kv_heads)
        batch = PagedBatch(
            token_ids=layout.token_ids,
            positions=layout.positions,
            first=layout.first,
            cached_len=roots.context_len,
            table_rows=roots.table_rows,
            page_tables=plan.page_tables,
            slots=layout.slots,
            page_size=plan.page_size,
            max_row_tokens=size,
            mask=layout.mask,
            region_base=plan.region_base + (region if seen is None else 0),
            num_splits=choose_splits(num_rows * size, num_rows, size, *heads, self._num_processors),
        )
        rows = head.forward_blocks(batch, self._memory.kv, self._attention)
        head.keep_blocks(self._blocks, layout.rows, roots.positions, rows)
        return layout


_CONTEXT_TOKENS = (32, 128, 512)
_CONTEXT_ROWS = (7, 127)
"""Shapes of captured forwards. Rows are one below a power of two: attention has a kernel for each power."""
_PROMPTS = (1, 3, 17, 48, 100)
"""Numbers of prompt tokens to warm up with, one for each kernel that products and attention use."""


class ContextForward:
    """Forwards of context tokens of several rows, as a captured graph if the tokens are few, as they mostly are."""

    def __init__(
        self, model: DraftModel, memory: DeviceMemory, shape: BurstShape, attention: AttentionBackend, chunk_size: int
    ) -> None:
        """`chunk_size`: most tokens of a forward."""
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
        """Device memory of the graphs, in bytes."""
        return self._graphs.num_bytes

    def warm_up(self) -> None:
        """Run forwards of all kinds once, without effect, so that all kernels are compiled."""
        for count in sorted({min(self._most, count) for count in _PROMPTS} | {self._most}):
            self._warm_up([count])
        for rows in _CONTEXT_ROWS:
            self._warm_up([1] * min(rows, self._spare))

    def capture(self) -> None:
        """Capture forwards, and compile the kernels of forwards that are too large to be captured."""
        self._describe(())
        self._graphs.capture([PromptShape(*shape) for shape in product(self._tokens[::-1], _CONTEXT_ROWS[::-1])], False)
        self._captured = True
        if self._most > self._tokens[-1]:
            self._warm_up([self._most])

    def run_at(self, chunks: Sequence[PromptChunk], features: Tensor | None) -> None:
        """Queue a forward of `chunks`, each of a different row. A chunk's start is a KV position.

        `features` [tokens, feature_size] for a model that takes them.
        """
        num_tokens = sum(len(chunk.slots) for chunk in chunks)
        shape = self._fit(num_tokens, len(chunks))
        if shape is None:
            self._run_alone(chunks, num_tokens, features)
            return
        self._describe(chunks)
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
        """Run a forward of the chunks described last; may be captured."""
        features = None if self._features is None else self._features[: shape.tokens]
        self._compute(self._layout, self._words, shape, features)

    def _run_alone(self, chunks: Sequence[PromptChunk], num_tokens: int, features: Tensor | None) -> None:
        shape = PromptShape(num_tokens, _padded(len(chunks)))
        layout = PromptLayout(shape)
        self._compute(layout, put(layout.describe(chunks, self._spare), self._model.device), shape, features)

    def _compute(self, layout: PromptLayout, words: Tensor, shape: PromptShape, features: Tensor | None) -> None:
        batch = layout.batch(words, shape, self._memory.plan.page_tables, self._page_size)
        self._model.extend(batch, features, batch.slots, self._memory.kv, self._attention)

    def _warm_up(self, counts: Sequence[int]) -> None:
        """Run a forward of rows with `counts` tokens whose KV is written nowhere."""
        chunks = [PromptChunk(self._spare, [0] * count, 0, np.full(count, -1, np.int32)) for count in counts]
        total = sum(counts)
        features = None if self._features is None else self._features.new_zeros(total, self._features.shape[1])
        self._run_alone(chunks, total, features)


def _padded(num_rows: int) -> int:
    """Return the rows of a forward for `num_rows` rows, empty ones included."""
    return _CONTEXT_ROWS[bisect_left(_CONTEXT_ROWS, num_rows)] if num_rows <= _CONTEXT_ROWS[-1] else num_rows

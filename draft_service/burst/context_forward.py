"""Forwards of context tokens on a GPU: as one captured graph where they are few, which prompts mostly are.

Kernel by kernel a forward takes the host many times what it takes the device, and no tree grows meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.burst.device_memory import DeviceMemory
from draft_service.burst.plan import BurstShape
from draft_service.burst.runner import Chunk
from outrider.attention.base import AttentionBackend
from outrider.attention.paged import PagedBatch
from outrider.device import put
from outrider.graphs import GraphPool
from outrider.models.drafters.base import DraftModel

_TOKENS = (32, 128, 512)
_ROWS = (7, 127)
"""One below a power of two: attention is a kernel of its own for each of those."""
_PROMPTS = (1, 3, 17, 48, 100)
"""Prompt tokens whose products and attention are kernels of their own."""
_ALIGNED = 4
"""int32 words between two places where fields may begin: kernels are compiled anew for pointers aligned otherwise."""


class Forward(NamedTuple):
    """Shape of a forward."""

    tokens: int
    rows: int

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """Where token ids, positions, slots, first, cached_len and table_rows lie in one run of int32 words."""
        sizes = (self.tokens, self.tokens, self.tokens, self.rows + 1, self.rows, self.rows)
        starts = accumulate((size + -size % _ALIGNED for size in sizes), initial=0)
        return [(start, start + size) for start, size in zip(starts, sizes, strict=False)]


class ContextForward:
    """Runs context tokens of several rows, padded to a shape that was captured if there is one."""

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
        self._tokens = sorted({min(size, chunk_size) for size in _TOKENS})
        self._captured = False
        largest = Forward(self._tokens[-1], _ROWS[-1])
        self._told = torch.zeros(largest.bounds[-1][1], dtype=torch.int32, device=model.device)
        self._features: Tensor | None = None
        if shape.feature_size:
            size = (largest.tokens, shape.feature_size)
            self._features = torch.zeros(size, dtype=model.dtype, device=model.device)
        self._given: tuple[Sequence[Chunk], Sequence[int]] = ((), ())
        self._graphs = GraphPool[Forward]("forwards of prompts", self._run, self._tell)

    @property
    def num_bytes(self) -> int:
        """Device memory of the graphs."""
        return self._graphs.num_bytes

    def warm_up(self) -> None:
        """Run forwards of all kinds once, without effect: a kernel that is compiled while requests wait costs a third
        of a second."""
        for count in sorted({min(self._most, count) for count in _PROMPTS} | {self._most}):
            self._warm_up([count])
        for rows in _ROWS:
            self._warm_up([1] * min(rows, self._spare))

    def capture(self) -> None:
        """Capture forwards, and leave nothing to be compiled for those that are too large."""
        shapes = [Forward(size, rows) for size in reversed(self._tokens) for rows in reversed(_ROWS)]
        self._given = ((), ())
        self._graphs.capture(shapes, False)
        self._captured = True
        if self._most > self._tokens[-1]:
            self._warm_up([self._most])

    def run(self, chunks: Sequence[Chunk], features: Tensor | None) -> None:
        """Queue a forward of `chunks`, each of another row; `features` [tokens, feature_size] for a model of them."""
        slots: list[int] = []
        for row, tokens, position in chunks:
            slots += self._memory.context_slots(row, position, position + len(tokens)).tolist()
        shape = self._fit(len(slots), len(chunks))
        if shape is None:
            self._run_alone(chunks, slots, features)
            return
        self._given = (chunks, slots)
        if self._features is not None and features is not None:
            self._features[: len(slots)].copy_(features)
        self._graphs.run(shape)

    def _fit(self, num_tokens: int, num_rows: int) -> Forward | None:
        if not self._captured or num_tokens > self._tokens[-1] or num_rows > _ROWS[-1]:
            return None
        return Forward(self._tokens[bisect_left(self._tokens, num_tokens)], _ROWS[bisect_left(_ROWS, num_rows)])

    def _run(self, shape: Forward) -> None:
        """A forward of what was told last; may be captured."""
        features = None if self._features is None else self._features[: shape.tokens]
        batch = self._batch(shape, self._told, shape.tokens)
        self._model.forward(batch, features, self._memory.kv, self._attention)

    def _run_alone(self, chunks: Sequence[Chunk], slots: Sequence[int], features: Tensor | None) -> None:
        rows = _ROWS[bisect_left(_ROWS, len(chunks))] if len(chunks) <= _ROWS[-1] else len(chunks)
        shape = Forward(len(slots), rows)
        told = put(self._words(shape, chunks, slots), self._model.device)
        batch = self._batch(shape, told, max(len(tokens) for _, tokens, _ in chunks))
        self._model.forward(batch, features, self._memory.kv, self._attention)

    def _warm_up(self, counts: Sequence[int]) -> None:
        """A forward of rows with so many tokens each, which are written nowhere."""
        chunks, total = [Chunk(self._spare, [0] * count, 0) for count in counts], sum(counts)
        features = None if self._features is None else self._features.new_zeros(total, self._features.shape[1])
        self._run_alone(chunks, [-1] * total, features)

    def _tell(self, shape: Forward) -> None:
        words = self._words(shape, *self._given)
        put(words, self._model.device, into=self._told[: len(words)])

    def _words(self, shape: Forward, chunks: Sequence[Chunk], slots: Sequence[int]) -> NDArray[np.int32]:
        """What describes the chunks, in one piece. Missing rows are empty, missing tokens written nowhere."""
        words = np.zeros(shape.bounds[-1][1], np.int32)
        ids, positions, where, first, cached, tables = (words[start:end] for start, end in shape.bounds)
        ends = [0, *accumulate(len(tokens) for _, tokens, _ in chunks)]
        for (_, tokens, start), (begin, end) in zip(chunks, pairwise(ends), strict=True):
            ids[begin:end] = tokens
            positions[begin:end] = np.arange(start, start + end - begin)
        where[: len(slots)] = slots
        where[len(slots) :] = -1
        first[: len(ends)] = ends
        first[len(ends) :] = ends[-1]
        cached[: len(chunks)] = [start for _, _, start in chunks]
        tables[: len(chunks)] = [row for row, _, _ in chunks]
        tables[len(chunks) :] = self._spare
        return words

    def _batch(self, shape: Forward, told: Tensor, max_row_tokens: int) -> PagedBatch:
        token_ids, positions, slots, first, cached, tables = (told[start:end] for start, end in shape.bounds)
        return PagedBatch(
            token_ids=token_ids,
            positions=positions,
            first=first,
            cached_len=cached,
            table_rows=tables,
            page_tables=self._memory.plan.page_tables,
            slots=slots,
            page_size=self._page_size,
            max_row_tokens=max_row_tokens,
        )

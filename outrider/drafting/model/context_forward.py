"""Forwards of context tokens on a GPU: as one captured graph where they are few, which prompts mostly are.

Kernel by kernel a forward takes the host many times what it takes the device, and no tree grows meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import product

import numpy as np
import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend
from outrider.attention.prompts import PromptChunk, PromptLayout, PromptShape
from outrider.device import put
from outrider.drafting.model.device_memory import DeviceMemory
from outrider.drafting.model.plan import BurstShape
from outrider.drafting.model.runner import Chunk
from outrider.graphs import GraphPool
from outrider.models.drafters.base import DraftModel

_TOKENS = (32, 128, 512)
_ROWS = (7, 127)
"""One below a power of two: attention is a kernel of its own for each of those."""
_PROMPTS = (1, 3, 17, 48, 100)
"""Prompt tokens whose products and attention are kernels of their own."""


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
        largest = PromptShape(self._tokens[-1], _ROWS[-1])
        self._layout = PromptLayout(largest)
        self._told = torch.zeros(self._layout.size, dtype=torch.int32, device=model.device)
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
        """Run forwards of all kinds once, without effect: a kernel that is compiled while requests wait costs a third
        of a second."""
        for count in sorted({min(self._most, count) for count in _PROMPTS} | {self._most}):
            self._warm_up([count])
        for rows in _ROWS:
            self._warm_up([1] * min(rows, self._spare))

    def capture(self) -> None:
        """Capture forwards, and leave nothing to be compiled for those that are too large."""
        self._tell(())
        self._graphs.capture([PromptShape(*shape) for shape in product(self._tokens[::-1], _ROWS[::-1])], False)
        self._captured = True
        if self._most > self._tokens[-1]:
            self._warm_up([self._most])

    def run(self, chunks: Sequence[Chunk], features: Tensor | None) -> None:
        """Queue a forward of `chunks`, each of another row; `features` [tokens, feature_size] for a model of them."""
        told = [
            PromptChunk(row, tokens, start, self._memory.context_slots(row, start, start + len(tokens)))
            for row, tokens, start in chunks
        ]
        num_tokens = sum(len(chunk.slots) for chunk in told)
        shape = self._fit(num_tokens, len(told))
        if shape is None:
            self._run_alone(told, num_tokens, features)
            return
        self._tell(told)
        if self._features is not None and features is not None:
            self._features[:num_tokens].copy_(features)
        self._graphs.run(shape)

    def _fit(self, num_tokens: int, num_rows: int) -> PromptShape | None:
        if not self._captured or num_tokens > self._tokens[-1] or num_rows > _ROWS[-1]:
            return None
        return PromptShape(self._tokens[bisect_left(self._tokens, num_tokens)], _padded(num_rows))

    def _tell(self, chunks: Sequence[PromptChunk]) -> None:
        put(self._layout.describe(chunks, self._spare), self._model.device, into=self._told)

    def _run(self, shape: PromptShape) -> None:
        """A forward of what was told last; may be captured."""
        features = None if self._features is None else self._features[: shape.tokens]
        self._compute(self._layout, self._told, shape, features)

    def _run_alone(self, chunks: Sequence[PromptChunk], num_tokens: int, features: Tensor | None) -> None:
        shape = PromptShape(num_tokens, _padded(len(chunks)))
        layout = PromptLayout(shape)
        self._compute(layout, put(layout.describe(chunks, self._spare), self._model.device), shape, features)

    def _compute(self, layout: PromptLayout, told: Tensor, shape: PromptShape, features: Tensor | None) -> None:
        batch = layout.batch(told, shape, self._memory.plan.page_tables, self._page_size)
        self._model.forward(batch, features, self._memory.kv, self._attention)

    def _warm_up(self, counts: Sequence[int]) -> None:
        """A forward of rows with so many tokens each, which are written nowhere."""
        chunks = [PromptChunk(self._spare, [0] * count, 0, np.full(count, -1, np.int32)) for count in counts]
        total = sum(counts)
        features = None if self._features is None else self._features.new_zeros(total, self._features.shape[1])
        self._run_alone(chunks, total, features)


def _padded(num_rows: int) -> int:
    """Rows that a forward of so many has with the missing ones, which are empty."""
    return _ROWS[bisect_left(_ROWS, num_rows)] if num_rows <= _ROWS[-1] else num_rows

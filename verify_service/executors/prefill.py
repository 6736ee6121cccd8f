"""Prefill on the GPU: chunks of prompts, small ones as a graph, large ones kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.paged import PagedBatch, PromptChunk, PromptLayout, PromptShape
from outrider.cache.pages import page_slots
from outrider.device import put
from outrider.graphs import GraphPool
from outrider.models.base import LanguageModel
from outrider.models.capacity import width_buckets
from verify_service.engine.round import Entry
from verify_service.executors.base import PromptScores
from verify_service.executors.ranks import CAPTURE_SMALL, LOGITS, PROMPTS, ExecutorLink
from verify_service.executors.round_buffers import RequestRows


class Prefill:
    """Computes the KV of prompt tokens; nothing is sampled, since roots are left to decoding.

    The description of a forward is one copy to the device. Small forwards are padded to one of a few shapes and read it
    from a fixed address, so that they can be captured: launching one kernel by kernel takes the host longer than the
    device takes to run it, and the next round cannot be launched meanwhile.
    """

    def __init__(
        self,
        model: LanguageModel,
        compute: Callable[[PagedBatch], Tensor],
        rows: RequestRows,
        page_size: int,
        shapes: PrefillShapes,
        link: ExecutorLink,
    ) -> None:
        """`compute`: returns the hidden states of a forward, [M, hidden_size]; may be captured. `link`: to the other
        ranks of the model, which compute their part of every forward."""
        self._link = link
        self._model = model
        self._compute = compute
        self._rows = rows
        self._page_size = page_size
        self._shapes = shapes
        largest = shapes.small[-1] if shapes.small else PromptShape(0, 0)
        self._layout = PromptLayout(largest)
        device = model.device
        self._description = torch.zeros(self._layout.size, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(largest.tokens, model.config.hidden_size, dtype=model.dtype, device=device)
        """Hidden states of the last small forward."""
        self._last = self._hidden
        """Hidden states of the last forward."""
        self.graphs = GraphPool[PromptShape]("forwards of prompts", self._body, compiling=link.compiling)

    def run(self, entries: Sequence[Entry]) -> dict[Entry, PromptScores]:
        """Queue the chunks of a round. Returns log-probabilities that requests ask for, on their way to the host."""
        scores: dict[Entry, PromptScores] = {}
        for group in [[entry] for entry in entries] if self._shapes.fixed else [entries]:
            hidden = self._forward([self._chunk(entry) for entry in group])
            self._score(group, hidden, scores)
        return scores

    def capture(self, use_graphs: bool, room: int) -> None:
        """Capture small forwards, and run all others once without effect, so that the first prompts need not wait for
        kernels to be compiled. `room`: number of positions that page tables and the cache have."""
        self._link.broadcast(CAPTURE_SMALL, (use_graphs,))
        self.capture_small(use_graphs)
        for counts in self._shapes.others(room):
            self._forward([self._empty_chunk(count) for count in counts])

    def capture_small(self, use_graphs: bool) -> None:
        """Capture small forwards, or without `use_graphs` run them once."""
        small = self._shapes.small
        self._clear()
        if use_graphs and small:
            self.graphs.capture(small[::-1], together=True)
        else:
            for shape in small:
                self.graphs.run(shape)

    def capture_next(self, shape: PromptShape) -> bool:
        """See GraphPool."""
        # This is queued behind forwards that may still read their description.
        self._clear()
        nothing = self._layout.describe((), self._rows.spare)
        return self.graphs.capture_next(shape, partial(self._link.broadcast, PROMPTS, shape, nothing))

    def _chunk(self, entry: Entry) -> PromptChunk:
        request, start = entry.request, entry.request.cached_len
        end = start + entry.num_extend
        row = self._rows.row(request)
        self._rows.copy_pages(request)
        slots = page_slots(request.pages, self._page_size, start, end)
        return PromptChunk(row, request.tokens[start:end], start, slots)

    def _empty_chunk(self, num_tokens: int) -> PromptChunk:
        """Return a chunk of tokens that belong to no request and are written nowhere."""
        return PromptChunk(self._rows.spare, np.zeros(num_tokens, np.int32), 0, np.full(num_tokens, -1, np.int32))

    def _clear(self) -> None:
        """Describe a small forward without tokens, whatever its shape."""
        put(self._layout.describe((), self._rows.spare), self._model.device, into=self._description)

    def _forward(self, chunks: Sequence[PromptChunk]) -> Tensor:
        """Queue a forward. Returns [M, hidden_size], padding included; the next small forward overwrites it."""
        shape = self._shapes.fit(sum(len(chunk.slots) for chunk in chunks), len(chunks))
        layout = self._layout if shape in self._shapes.small else PromptLayout(shape)
        words = layout.describe(chunks, self._rows.spare)
        self._link.broadcast(PROMPTS, shape, words)
        return self.forward(shape, words)

    def forward(self, shape: PromptShape, words: NDArray[np.int32]) -> Tensor:
        """Queue a forward of this shape that PromptLayout has described in `words`; returns the same as `_forward`."""
        device = self._model.device
        if shape in self._shapes.small:
            put(words, device, into=self._description)
            self.graphs.run(shape)
            self._last = self._hidden
            return self._hidden[: shape.tokens]
        layout = PromptLayout(shape)
        tables = self._rows.page_tables
        batch = layout.batch(put(words, device), shape, tables, self._page_size, layout.lengths(words))
        self._last = self._compute(batch)
        return self._last

    def logits(self, first: int, count: int) -> Tensor:
        """Return the logits of `count` rows of the last forward, from row `first` on."""
        return self._model.logits(self._last[first : first + count])

    def _logits(self, rows: Tensor) -> Tensor:
        """Return the logits of `rows` of the last forward, of which each rank computes a part.

        Raises RankError if memory runs out: the others wait for this rank's part, or are a step ahead of it.
        """
        first = (rows.data_ptr() - self._last.data_ptr()) // (rows.shape[1] * rows.itemsize)
        self._link.broadcast(LOGITS, (first, len(rows)))
        with self._link.in_step("log-probabilities of a prompt"):
            return self._model.logits(rows)

    def _body(self, shape: PromptShape) -> None:
        """Run the small forward that was described last; may be captured."""
        batch = self._layout.batch(self._description, shape, self._rows.page_tables, self._page_size)
        self._hidden[: shape.tokens].copy_(self._compute(batch))

    def _score(self, group: Sequence[Entry], hidden: Tensor, scores: dict[Entry, PromptScores]) -> None:
        first = 0
        for entry in group:
            if positions := entry.scored:
                start = first + positions.start - entry.request.cached_len
                # With chunks of fixed size, padding is included so that the products keep their shape, too.
                end = None if self._shapes.fixed else start + len(positions)
                scores[entry] = PromptScores(entry, positions)
                scores[entry].compute(self._logits, hidden[start:end])
            first += entry.num_extend


_GRAPH_TOKENS = (64, 128, 192, 256, 384, 512)
"""Token counts of small forwards. Padding to the next one costs a forward of an 8B shape at most about 2 ms, while the
host takes 10 ms to launch it kernel by kernel. Larger forwards take the device longer than the host."""
_SMALL_TOKENS = 128
_GRAPH_ROWS = (7, 15)
"""Rows of forwards up to _SMALL_TOKENS, and of other small ones. One below a power of two, since attention has a kernel
for each of those. An empty row may cost an empty tile, and more of these than processors would delay each other."""


class PrefillShapes:
    """Chooses the shape that a forward is padded to."""

    def __init__(self, chunk_size: int, max_rows: int, fixed: bool = False, padded: bool = True) -> None:
        """Forwards have `chunk_size` tokens at most, as a rule, and `max_rows` rows.

        `fixed`: every forward has `chunk_size` token slots and one row, so that results do not depend on shapes. Not
        `padded`: forwards keep the shape that they have.
        """
        self.fixed = fixed
        self._chunk_size = chunk_size
        self._padded = padded
        self._rows = sorted({min(rows, max_rows) for rows in (*_GRAPH_ROWS, max_rows)})
        self.small: list[PromptShape] = []
        """Shapes that are worth a graph, smallest first; the last one has the most rows, too."""
        if fixed:
            self.small = [PromptShape(chunk_size, 1)] if chunk_size <= _GRAPH_TOKENS[-1] else []
        elif padded:
            for tokens in width_buckets(_GRAPH_TOKENS, min(chunk_size, _GRAPH_TOKENS[-1])):
                rows = _GRAPH_ROWS[0] if tokens <= _SMALL_TOKENS else _GRAPH_ROWS[1]
                self.small.append(PromptShape(tokens, min(rows, max_rows)))

    def fit(self, num_tokens: int, num_rows: int) -> PromptShape:
        """Return the shape for a forward of so many tokens and rows: the first small one that holds both, if any."""
        if self.fixed:
            return PromptShape(self._chunk_size, 1)
        for shape in self.small:
            if num_tokens <= shape.tokens and num_rows <= shape.rows:
                return shape
        if self._padded:
            # Padding with tokens would take time; an empty row takes next to none.
            num_rows = next((rows for rows in self._rows if rows >= num_rows), num_rows)
        return PromptShape(num_tokens, num_rows)

    def others(self, room: int) -> list[list[int]]:
        """Return forwards, each as the tokens of its rows, that together run all kernels of those that are not small.

        `room`: number of positions that a page table, and the cache, have.
        """
        largest = min(self._chunk_size, room)
        if self.fixed:
            return [] if self.small else [[largest]]
        if not self._padded:
            return [[largest], [min(48, room)]]
        found = [[largest]] if self._chunk_size > self.small[-1].tokens else []
        if self._rows[-1] > self.small[-1].rows:
            found.append([1] * self._rows[-1])
        return found

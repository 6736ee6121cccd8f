"""Prefill on the GPU: chunks of prompts, small ones as a graph, large ones kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend
from outrider.attention.paged import PagedBatch
from outrider.attention.prompts import PromptChunk, PromptLayout, PromptShape
from outrider.cache.features import FeatureStore
from outrider.cache.kv import KVCache
from outrider.device import put
from outrider.graphs import GraphPool
from outrider.models.decoder import CausalLM
from verify_service.engine.round import Entry
from verify_service.executors.prefill_graphs import PrefillShapes, chunk_slots
from verify_service.executors.prompt_logprobs import PromptScores
from verify_service.executors.request_rows import RequestRows


class Prefill:
    """Computes the KV of prompt tokens; nothing is sampled, since roots are left to decoding.

    What a forward is told is one copy to the device. Small forwards are padded to one of few shapes and read it from
    memory that stays where it is, so that they can be captured: launching one kernel by kernel takes the host longer
    than the device takes to run it, and the next round cannot be launched meanwhile.
    """

    def __init__(
        self,
        model: CausalLM,
        kv: KVCache,
        attention: AttentionBackend,
        rows: RequestRows,
        page_size: int,
        shapes: PrefillShapes,
    ) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        self._rows = rows
        self._page_size = page_size
        self._shapes = shapes
        largest = shapes.small[-1] if shapes.small else PromptShape(0, 0)
        self._layout = PromptLayout(largest)
        device = model.device
        self._told = torch.zeros(self._layout.size, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(largest.tokens, model.config.hidden_size, dtype=model.dtype, device=device)
        """What the last small forward brought."""
        self.graphs = GraphPool[PromptShape]("forwards of prompts", self._body)
        self.features: FeatureStore | None = None
        """Where features of prompts are stored, if anywhere; what was captured stores them where it did then."""

    def run(self, entries: Sequence[Entry]) -> dict[Entry, PromptScores]:
        """Queue the chunks of a round. Returns what is on its way to the host of prompts that are to be described."""
        scores: dict[Entry, PromptScores] = {}
        for group in self._groups(entries):
            hidden = self._forward([self._chunk(entry) for entry in group])
            self._score(group, hidden, scores)
        return scores

    def capture(self, use_graphs: bool, room: int) -> None:
        """Capture small forwards, and run all others once without effect, so that the first prompts need not wait for
        kernels to be compiled. `room`: positions that page tables and the cache have.
        """
        small = self._shapes.small
        self._clear()
        if use_graphs and small:
            self.graphs.capture(small[::-1], together=True)
        else:
            for shape in small:
                self.graphs.run(shape)
        for counts in self._shapes.others(room):
            self._forward([self._empty_chunk(count) for count in counts])

    def capture_next(self, shape: PromptShape, store: FeatureStore) -> None:
        """Capture a forward that stores features there; see GraphPool.capture_next."""
        # Queued behind forwards that may still read what they were told.
        self._clear()
        used, self.features = self.features, store
        try:
            self.graphs.capture_next(shape)
        finally:
            self.features = used

    def adopt(self, store: FeatureStore) -> None:
        """From now on features are stored there, by what `capture_next` captured."""
        self.graphs.adopt()
        self.features = store

    def _groups(self, entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
        if self._shapes.fixed:
            yield from ([entry] for entry in entries)
        else:
            yield entries

    def _chunk(self, entry: Entry) -> PromptChunk:
        request, start = entry.request, entry.request.cached_len
        end = start + entry.num_extend
        row = self._rows.row(request)
        self._rows.copy_pages(request)
        slots = chunk_slots(request.pages, self._page_size, start, end)
        return PromptChunk(row, request.tokens[start:end], start, slots)

    def _empty_chunk(self, num_tokens: int) -> PromptChunk:
        """Tokens of nobody, which are written nowhere."""
        return PromptChunk(self._rows.spare, np.zeros(num_tokens, np.int32), 0, np.full(num_tokens, -1, np.int32))

    def _clear(self) -> None:
        """Describe a small forward without tokens, whatever its shape."""
        put(self._layout.describe((), self._rows.spare), self._model.device, into=self._told)

    def _forward(self, chunks: Sequence[PromptChunk]) -> Tensor:
        """Queue a forward. Returns [M, hidden_size], padding included, which the next small forward overwrites."""
        shape = self._shapes.fit(sum(len(chunk.slots) for chunk in chunks), len(chunks))
        device, tables, spare = self._model.device, self._rows.page_tables, self._rows.spare
        if shape in self._shapes.small:
            put(self._layout.describe(chunks, spare), device, into=self._told)
            self.graphs.run(shape)
            return self._hidden[: shape.tokens]
        layout = PromptLayout(shape)
        words = layout.describe(chunks, spare)
        return self._compute(layout.batch(put(words, device), shape, tables, self._page_size, layout.lengths(words)))

    def _body(self, shape: PromptShape) -> None:
        """A small forward of what was told last; may be captured."""
        batch = self._layout.batch(self._told, shape, self._rows.page_tables, self._page_size)
        self._hidden[: shape.tokens].copy_(self._compute(batch))

    def _compute(self, batch: PagedBatch) -> Tensor:
        store = self.features
        layers = store.inputs if store is not None else ()
        hidden, features = self._model.forward_with_features(batch, self._kv, self._attention, layers)
        if store is not None:
            store.write(batch.slots, features)
        return hidden

    def _score(self, group: Sequence[Entry], hidden: Tensor, scores: dict[Entry, PromptScores]) -> None:
        first = 0
        for entry in group:
            if positions := entry.scored:
                start = first + positions.start - entry.request.cached_len
                # Padding behind a chunk of fixed size keeps the products in their shape, too.
                end = None if self._shapes.fixed else start + len(positions)
                scores[entry] = PromptScores(entry, positions)
                scores[entry].compute(self._model, hidden[start:end])
            first += entry.num_extend

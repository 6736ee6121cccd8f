"""Prefill on the GPU: chunks of prompts, kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend
from outrider.attention.lengths import HostLengths
from outrider.attention.paged import PagedBatch
from outrider.cache.features import FeatureStore
from outrider.cache.kv import KVCache
from outrider.device import put
from outrider.models.base import CausalLM
from verify_service.prompt_logprobs import PromptScores
from verify_service.request_rows import RequestRows
from verify_service.round import Entry


class Prefill:
    """Computes the KV of prompt tokens; nothing is sampled, since roots are left to decoding."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVCache,
        attention: AttentionBackend,
        rows: RequestRows,
        page_size: int,
        fixed_size: int | None,
    ) -> None:
        """`fixed_size`: every forward has this many token slots and one request, so that shapes do not matter."""
        self._model = model
        self._kv = kv
        self._attention = attention
        self._rows = rows
        self._page_size = page_size
        self._fixed_size = fixed_size
        self.features: FeatureStore | None = None
        """Where features of prompts are stored, if anywhere."""

    def run(self, entries: Sequence[Entry]) -> dict[Entry, PromptScores]:
        """Queue the chunks of a round. Returns what is on its way to the host of prompts that are to be described."""
        scores: dict[Entry, PromptScores] = {}
        for group in self._groups(entries):
            batch = self._batch(group)
            layers = self.features.inputs if self.features is not None else ()
            hidden, features = self._model.forward_with_features(batch, self._kv, self._attention, layers)
            if self.features is not None:
                self.features.write(batch.slots, features)
            self._score(group, hidden, scores)
        return scores

    def _score(self, group: Sequence[Entry], hidden: Tensor, scores: dict[Entry, PromptScores]) -> None:
        first = 0
        for entry in group:
            if positions := entry.scored:
                start = first + positions.start - entry.request.cached_len
                # Padding behind a chunk of fixed size keeps the products in their shape, too.
                end = None if self._fixed_size is not None else start + len(positions)
                scores[entry] = PromptScores(entry, positions)
                scores[entry].compute(self._model, hidden[start:end])
            first += entry.num_extend

    def warm_up(self, num_tokens: int, num_rows: int = 1) -> None:
        """Run chunks of several requests that write nothing, so that the first prompts need not wait for kernels to be
        compiled.
        """
        if self._fixed_size is not None and num_rows > 1:
            return
        size = self._fixed_size or num_tokens * num_rows
        slots = put([-1] * size, self._model.device)
        # No more than page tables have room for, however large chunks are.
        counts = [min(num_tokens, size)] * num_rows
        zeros, spare = [0] * num_rows, [self._rows.spare] * num_rows
        batch = self._paged([0] * size, put(range(size), slots.device), counts, zeros, spare, slots)
        self._model.forward(batch, self._kv, self._attention)

    def _groups(self, entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
        if self._fixed_size is None:
            yield entries
        else:
            yield from ([entry] for entry in entries)

    def _batch(self, entries: Sequence[Entry]) -> PagedBatch:
        device = self._model.device
        counts = [entry.num_extend for entry in entries]
        total = sum(counts)
        size = self._fixed_size or total
        token_ids: list[int] = []
        positions: list[int] = []
        for entry in entries:
            cached = entry.request.cached_len
            token_ids += entry.request.tokens[cached : cached + entry.num_extend]
            positions += range(cached, cached + entry.num_extend)
        padding = [0] * (size - total)
        rows = [self._rows.row(entry.request) for entry in entries]
        for entry in entries:
            self._rows.copy_pages(entry.request)

        place = put(positions + padding, device)
        owner = torch.repeat_interleave(put(rows, device), put(counts, device), output_size=total).long()
        slots = torch.full((size,), -1, dtype=torch.int32, device=device)
        pages = self._rows.page_tables[owner, (place[:total] // self._page_size).long()]
        slots[:total] = pages * self._page_size + place[:total] % self._page_size
        cached_len = [entry.request.cached_len for entry in entries]
        return self._paged(token_ids + padding, place, counts, cached_len, rows, slots)

    def _paged(
        self,
        token_ids: list[int],
        positions: Tensor,
        counts: list[int],
        cached_len: list[int],
        table_rows: list[int],
        slots: Tensor,
    ) -> PagedBatch:
        """Rows of `counts` tokens, one after the other, and padding behind them."""
        device = self._model.device
        first = [0, *accumulate(counts)]
        return PagedBatch(
            token_ids=put(token_ids, device),
            positions=positions,
            first=put(first, device),
            cached_len=put(cached_len, device),
            table_rows=put(table_rows, device),
            page_tables=self._rows.page_tables,
            slots=slots,
            page_size=self._page_size,
            max_row_tokens=max(counts) if self._fixed_size is None else self._fixed_size,
            lengths=HostLengths(np.array(first, np.int32), np.array(cached_len, np.int32)),
        )

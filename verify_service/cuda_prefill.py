"""Prefill on the GPU: chunks of prompts, kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from outrider.attention.base import AttentionBackend
from outrider.attention.lengths import HostLengths
from outrider.attention.paged import PagedBatch
from outrider.cache.kv import KVCache
from outrider.device import put
from outrider.models.base import CausalLM
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

    def run(self, entries: Sequence[Entry]) -> None:
        """Queue the chunks of a round."""
        for group in self._groups(entries):
            self._model.forward(self._batch(group), self._kv, self._attention)

    def warm_up(self, num_tokens: int) -> None:
        """Run a chunk that writes nothing, so that the first prompt need not wait for kernels to be compiled."""
        device = self._model.device
        size = self._fixed_size or num_tokens

        batch = PagedBatch(
            token_ids=put([0] * size, device),
            positions=put(range(size), device),
            first=put([0, size], device),
            cached_len=put([0], device),
            table_rows=put([self._rows.spare], device),
            page_tables=self._rows.page_tables,
            slots=put([-1] * size, device),
            page_size=self._page_size,
            max_row_tokens=size,
            lengths=HostLengths(np.array([0, size], np.int32), np.array([0], np.int32)),
        )
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
        table_rows = [self._rows.row(entry.request) for entry in entries]
        for entry in entries:
            self._rows.copy_pages(entry.request)

        rows = put(table_rows, device)
        place = put(positions + padding, device)
        owner = torch.repeat_interleave(rows, put(counts, device), output_size=total).long()
        slots = torch.full((size,), -1, dtype=torch.int32, device=device)
        pages = self._rows.page_tables[owner, (place[:total] // self._page_size).long()]
        slots[:total] = pages * self._page_size + place[:total] % self._page_size
        first = [0]
        for count in counts:
            first.append(first[-1] + count)
        cached_len = [entry.request.cached_len for entry in entries]
        return PagedBatch(
            token_ids=put(token_ids + padding, device),
            positions=place,
            first=put(first, device),
            cached_len=put(cached_len, device),
            table_rows=rows,
            page_tables=self._rows.page_tables,
            slots=slots,
            page_size=self._page_size,
            max_row_tokens=max(counts) if self._fixed_size is None else size,
            lengths=HostLengths(np.array(first, np.int32), np.array(cached_len, np.int32)),
        )

"""A request on pages in device memory, forward by forward, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, HostLengths
from outrider.attention.paged import PagedBatch, RoundTokens, TreeBuffers
from outrider.models.decoder import CausalLM

PAGE_SIZE = 16


def ints(values: Sequence[int]) -> Tensor:
    """int32 on the GPU."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class PagedRequest:
    """Computes logits of a prompt's chunks, and of trees below what was computed."""

    def __init__(self, model: CausalLM, attention: AttentionBackend, max_len: int = 256) -> None:
        num_pages = -(-max_len // PAGE_SIZE)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(num_pages, generator=generator)
        self.length = 0
        self._model = model
        self._attention = attention
        self._kv = model.new_kv(num_pages * PAGE_SIZE)
        self._tables = order.to(torch.int32).cuda()[None]
        self._slots = (order[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten().to(torch.int32).cuda()
        self._buffers = TreeBuffers(64, 64, model.device)

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [M, vocab] of a chunk, which is kept."""
        count = len(token_ids)
        positions = range(self.length, self.length + count)
        batch = PagedBatch(
            token_ids=ints(token_ids),
            positions=ints(positions),
            first=ints([0, count]),
            cached_len=ints([self.length]),
            table_rows=ints([0]),
            page_tables=self._tables,
            slots=self._slots[self.length : self.length + count],
            page_size=PAGE_SIZE,
            max_row_tokens=count,
            lengths=self._lengths(count),
        )
        self.length += count
        return self._model.logits(self._model.forward(batch, self._kv, self._attention))

    @torch.inference_mode()
    def tree(self, token_ids: Sequence[int], parents: Sequence[int], by_path: bool = False, splits: int = 2) -> Tensor:
        """float32 [M, vocab] of a tree whose first token is the next one; nothing is kept."""
        count = len(token_ids)
        positions: list[int] = []
        for parent in parents:
            positions.append(positions[parent] + 1 if parent >= 0 else self.length)
        tokens = RoundTokens(
            token_ids=ints(token_ids),
            positions=ints(positions),
            parents=ints(parents),
            rows=ints([0] * count),
            first=ints([0, count]),
            cached_len=ints([self.length]),
            root=ints([0]),
            table_rows=ints([0]),
        )
        self._attention.prepare(count, self._lengths(count), self._tables)
        batch = self._buffers.batch(tokens, self._tables, PAGE_SIZE, count, splits, by_path)
        return self._model.logits(self._model.forward(batch, self._kv, self._attention))

    def _lengths(self, count: int) -> HostLengths:
        return HostLengths(np.array([0, count], np.int32), np.array([self.length], np.int32))

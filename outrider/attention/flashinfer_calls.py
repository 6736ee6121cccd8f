"""FlashInfer's kernels, planned and called for paged batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.lengths import HostLengths
from outrider.attention.packed_mask import mask_offsets, write_packed_mask, write_page_indices
from outrider.attention.paged import PagedBatch

_PREFILL_BYTES = 128 << 20
_TREE_BYTES = 384 << 20
_PLAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class CallShape:
    """What FlashInfer's kernels are compiled and planned for. `num_heads` is a multiple of `num_kv_heads`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype


class PrefillCall:
    """Causal attention of prompts, planned once a forward."""

    def __init__(self, shape: CallShape, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._shape = shape
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(_bytes(_PREFILL_BYTES, device), "NHD")
        self._planned = torch.cuda.Event() if device.type == "cuda" else None
        self._num_tokens = 0
        # Finds or compiles the kernels now rather than when the first request waits for them.
        one = HostLengths(np.array([0, 1], np.int32), np.zeros(1, np.int32))
        self._plan(one, torch.zeros(1, dtype=torch.int32, device=device))

    def plan(self, batch: PagedBatch) -> None:
        """Lay out the next forward. Raises ValueError for a batch without lengths on the host."""
        if batch.lengths is None:
            raise ValueError("the flashinfer backend needs the batch's lengths on the host")
        tables = batch.page_tables.index_select(0, batch.table_rows)
        used = -(-batch.lengths.num_keys // self._shape.page_size)
        pages = [table[:count] for table, count in zip(tables.unbind(0), used.tolist(), strict=True)]
        self._plan(batch.lengths, torch.cat(pages))

    def _plan(self, lengths: HostLengths, pages: Tensor) -> None:
        if self._planned is not None:
            # The plan before this one lies in pinned memory that a queued copy may not have read yet.
            self._planned.synchronize()
        _plan(self._wrapper, self._shape, lengths.first, lengths.num_keys, pages, causal=True)
        if self._planned is not None:
            self._planned.record()
        self._num_tokens = lengths.num_tokens

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [M, H, D] over the pages of a layer -> [M, H * D]; zeros for padding."""
        out = torch.empty_like(q) if q.shape[0] == self._num_tokens else torch.zeros_like(q)
        count, page_size = self._num_tokens, self._shape.page_size
        self._wrapper.run(q[:count], (_paged(k, page_size), _paged(v, page_size)), out=out[:count])
        return out.flatten(1)


class TreeMemory:
    """What rounds of all shapes share, one round being under way at a time. Indices and masks grow when they must.

    A captured round keeps the memory that it was captured with.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.partial_results = _bytes(_TREE_BYTES, device)
        self.plan = _bytes(_PLAN_BYTES, device)
        self._indices = torch.zeros(0, dtype=torch.int32, device=device)
        self._mask = _bytes(0, device)

    def indices(self, size: int) -> Tensor:
        """int32 [at least size]."""
        if len(self._indices) < size:
            self._indices = torch.zeros(size, dtype=torch.int32, device=self.device)
        return self._indices

    def mask(self, size: int) -> Tensor:
        """uint8 [at least size]."""
        if len(self._mask) < size:
            self._mask = _bytes(size, self.device)
        return self._mask


class TreeCall:
    """Attention of trees for M token slots in B rows. Padding tokens form a row of their own, without keys.

    `plan` on the host before every forward; `write` and the calls may be captured.
    """

    def __init__(self, shape: CallShape, memory: TreeMemory, num_tokens: int, num_rows: int, max_pages: int) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=memory.device)

        self._shape = shape
        self._num_tokens = num_tokens
        self._kv_indptr, self._mask_offsets = ints(num_rows + 2), ints(num_rows + 2)
        # One place more, for what lies behind a row's last page.
        self._indices = memory.indices(num_rows * max_pages + 1)
        self._mask = memory.mask(-(-num_tokens * max_pages * shape.page_size // 8) + num_rows)
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            memory.partial_results,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=ints(num_rows + 2),
            paged_kv_indptr_buf=self._kv_indptr,
            paged_kv_indices_buf=self._indices,
            paged_kv_last_page_len_buf=ints(num_rows + 1),
            custom_mask_buf=self._mask,
            mask_indptr_buf=self._mask_offsets,
            backend="fa2",
        )
        self._wrapper.reset_workspace_buffer(memory.partial_results, memory.plan)

    @cached_property
    def _no_pages(self) -> Tensor:
        return torch.empty(0, dtype=torch.int32)

    def plan(self, lengths: HostLengths) -> None:
        """Split the round's work. Page indices and mask are left to `write`, which knows them on the device."""
        first = np.append(lengths.first, self._num_tokens)
        keys = np.append(lengths.num_keys, 0)
        _plan(self._wrapper, self._shape, first, keys, self._no_pages, causal=False)

    def write(self, batch: PagedBatch) -> None:
        """Page indices and mask of the round, from lengths in device memory."""
        write_page_indices(batch, self._kv_indptr, self._indices)
        self._mask_offsets.copy_(mask_offsets(batch))
        write_packed_mask(batch, self._mask_offsets, self._mask)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [M, H, D] over the pages of a layer -> [M, H * D]."""
        out, page_size = torch.empty_like(q), self._shape.page_size
        self._wrapper.run(q, (_paged(k, page_size), _paged(v, page_size)), out=out)
        return out.flatten(1)


def _plan(
    wrapper: Any, shape: CallShape, first: NDArray[np.int32], keys: NDArray[np.int32], pages: Tensor, causal: bool
) -> None:
    """Plan for rows whose tokens begin at `first` and that see `keys` keys."""
    used = -(-keys // shape.page_size)
    indptr = np.zeros(len(keys) + 1, np.int32)
    np.cumsum(used, out=indptr[1:])
    last = np.where(used > 0, keys - (used - 1) * shape.page_size, 0).astype(np.int32)
    wrapper.plan(
        torch.from_numpy(first.astype(np.int32)),
        torch.from_numpy(indptr),
        pages,
        torch.from_numpy(last),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        causal=causal,
        q_data_type=shape.dtype,
        kv_data_type=shape.dtype,
        seq_lens=torch.from_numpy(keys),
        max_token_per_sequence=int(np.diff(first).max()),
    )


def _paged(cache: Tensor, page_size: int) -> Tensor:
    """[num_slots, KVH, D] as [num_pages, page_size, KVH, D]."""
    return cache.view(-1, page_size, *cache.shape[1:])


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)

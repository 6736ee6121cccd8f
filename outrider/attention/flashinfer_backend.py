"""Attention over paged KV by FlashInfer: prompts, and trees as custom masks. Planned on the host."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.attention.base import AttentionBackend, AttentionPlan, HostLengths, LayerRules, TokenBatch
from outrider.attention.paged import PagedBatch
from outrider.attention.triton_backend import TritonAttention, TritonPlan
from outrider.cache.kv import KVCache
from outrider.errors import ConfigError
from outrider.layers.rotary import Rotary

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
_PREFILL_BYTES = 128 << 20
_TREE_BYTES = 384 << 20
_PLAN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FlashInferShape:
    """The shape that FlashInfer's kernels are compiled and planned for. `num_heads` is a multiple of `num_kv_heads`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype


def check_installed() -> None:
    """Raise ConfigError if FlashInfer is not installed."""
    if find_spec("flashinfer") is None:
        raise ConfigError(
            '--attention-backend: flashinfer is not installed; "pip install flashinfer-python", or choose triton'
        )


class FlashInferAttention(AttentionBackend):
    """Prompts by FlashInfer; trees by FlashInfer too, or by the Triton kernels of this repository.

    How work is split depends on lengths, so `prepare` must be called before every forward of trees, including replays
    of a captured one. A Triton kernel rotates q and k and writes k and v. Results depend on the batch around a token:
    there is no deterministic mode.
    """

    def __init__(self, shape: FlashInferShape, device: torch.device, trees: bool = True) -> None:
        """Allocates 128 MiB of device memory for prompts, and 384 MiB more for `trees`.

        Raises ConfigError if FlashInfer is not installed or does not support this shape.
        """
        check_installed()
        if shape.dtype not in DTYPES or shape.head_dim not in HEAD_DIMS:
            raise ConfigError(
                f"--attention-backend: flashinfer runs bfloat16 and float16 with head_dim {HEAD_DIMS}, not "
                f"{str(shape.dtype).removeprefix('torch.')} with {shape.head_dim}; choose triton"
            )
        self._shape = shape
        self._triton = TritonAttention()
        self._prefill = PrefillCall(shape, device)
        self.plans_on_host = trees
        self._memory = TreeMemory(device) if trees else None
        self._trees: dict[tuple[int, int], TreeCall] = {}

    def prepare(self, num_tokens: int, lengths: HostLengths, page_tables: Tensor) -> None:
        """Plan a forward of trees; see AttentionBackend."""
        if self._memory is None:
            return
        num_rows = len(lengths.cached_len)
        call = self._trees.get((num_tokens, num_rows))
        if call is None:
            max_pages = page_tables.shape[1]
            call = TreeCall(self._shape, self._memory, num_tokens, num_rows, max_pages)
            self._trees[num_tokens, num_rows] = call
        call.plan(lengths)

    def plan(self, batch: TokenBatch, kv: KVCache, num_heads: int, rotary: Rotary) -> AttentionPlan:
        """See AttentionBackend."""
        if not isinstance(batch, PagedBatch):
            raise ValueError("the flashinfer backend needs a paged batch")
        if batch.path is not None or batch.region_base is not None:
            raise ValueError("the flashinfer backend has no deterministic mode and no tree regions")
        if batch.mask is None:
            self._prefill.plan(batch)
            return _FlashInferPlan(batch, kv, num_heads, rotary, self._prefill)
        if self._memory is None:
            return self._triton.plan(batch, kv, num_heads, rotary)
        shape = (batch.token_ids.shape[0], batch.cached_len.shape[0])
        if shape not in self._trees:
            raise ValueError(f"a forward of {shape[0]} tokens in {shape[1]} rows was not prepared")
        self._trees[shape].write(batch)
        return _FlashInferPlan(batch, kv, num_heads, rotary, self._trees[shape])


class _FlashInferPlan(TritonPlan):
    """Rotates and writes as TritonPlan does, then calls FlashInfer."""

    def __init__(
        self, batch: PagedBatch, kv: KVCache, num_heads: int, rotary: Rotary, call: PrefillCall | TreeCall
    ) -> None:
        super().__init__(batch, kv, num_heads, rotary)
        self._call = call

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, rules: LayerRules) -> Tensor:
        if not rules.is_plain:
            raise ValueError("the flashinfer backend has no windows, caps, sinks and scales of layers")
        return self._call(q, k, v)


class PrefillCall:
    """Causal attention of prompts, planned once per forward."""

    def __init__(self, shape: FlashInferShape, device: torch.device) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._shape = shape
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(_bytes(_PREFILL_BYTES, device), "NHD")
        self._planned = torch.cuda.Event() if device.type == "cuda" else None
        self._num_tokens = 0
        # Finds or compiles the kernels now rather than when the first request waits for them.
        one = HostLengths(np.array([0, 1], np.int32), np.zeros(1, np.int32))
        self._plan(one, torch.zeros(1, dtype=torch.int32, device=device))

    def plan(self, batch: PagedBatch) -> None:
        """Plan the next forward. Raises ValueError for a batch without lengths on the host."""
        if batch.lengths is None:
            raise ValueError("the flashinfer backend needs the batch's lengths on the host")
        tables = batch.page_tables.index_select(0, batch.table_rows)
        used = -(-batch.lengths.num_keys // self._shape.page_size)
        pages = [table[:count] for table, count in zip(tables.unbind(0), used.tolist(), strict=True)]
        self._plan(batch.lengths, torch.cat(pages))

    def _plan(self, lengths: HostLengths, pages: Tensor) -> None:
        if self._planned is not None:
            # The previous plan lies in pinned memory that a queued copy may not have read yet.
            self._planned.synchronize()
        _plan(self._wrapper, self._shape, lengths.first, lengths.num_keys, pages, causal=True)
        if self._planned is not None:
            self._planned.record()
        self._num_tokens = int(lengths.first[-1])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q [M, H, D] over the pages of a layer; return [M, H * D], zeros for padding."""
        out = torch.empty_like(q) if q.shape[0] == self._num_tokens else torch.zeros_like(q)
        count, page_size = self._num_tokens, self._shape.page_size
        self._wrapper.run(q[:count], (_paged(k, page_size), _paged(v, page_size)), out=out[:count])
        return out.flatten(1)


class TreeMemory:
    """Memory that rounds of all shapes share, since only one round runs at a time. Indices and masks grow when needed.

    A captured round keeps the memory that it was captured with.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.partial_results = _bytes(_TREE_BYTES, device)
        self.plan = _bytes(_PLAN_BYTES, device)
        self._indices = torch.zeros(0, dtype=torch.int32, device=device)
        self._mask = _bytes(0, device)

    def indices(self, size: int) -> Tensor:
        """Return memory for indices, int32 [at least size]."""
        if len(self._indices) < size:
            self._indices = torch.zeros(size, dtype=torch.int32, device=self.device)
        return self._indices

    def mask(self, size: int) -> Tensor:
        """Return memory for a mask, uint8 [at least size]."""
        if len(self._mask) < size:
            self._mask = _bytes(size, self.device)
        return self._mask


class TreeCall:
    """Attention of trees for M token slots in B rows. Padding tokens form a row of their own, without keys.

    Call `plan` on the host before every forward; `write` and the calls themselves may be captured.
    """

    def __init__(
        self, shape: FlashInferShape, memory: TreeMemory, num_tokens: int, num_rows: int, max_pages: int
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=memory.device)

        self._shape = shape
        self._num_tokens = num_tokens
        self._kv_indptr, self._mask_offsets = ints(num_rows + 2), ints(num_rows + 2)
        # One place more, for the table entries behind a row's last page.
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

    def plan(self, lengths: HostLengths) -> None:
        """Split the round's work. Page indices and mask are left to `write`, which computes them on the device."""
        first = np.append(lengths.first, self._num_tokens)
        keys = np.append(lengths.num_keys, 0)
        _plan(self._wrapper, self._shape, first, keys, torch.empty(0, dtype=torch.int32), causal=False)

    def write(self, batch: PagedBatch) -> None:
        """Write page indices and mask of the round, from lengths in device memory."""
        write_page_indices(batch, self._kv_indptr, self._indices)
        self._mask_offsets.copy_(mask_offsets(batch))
        write_packed_mask(batch, self._mask_offsets, self._mask)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend with q [M, H, D] over the pages of a layer; return [M, H * D]."""
        out, page_size = torch.empty_like(q), self._shape.page_size
        self._wrapper.run(q, (_paged(k, page_size), _paged(v, page_size)), out=out)
        return out.flatten(1)


def _plan(
    wrapper: Any, shape: FlashInferShape, first: NDArray[np.int32], keys: NDArray[np.int32], pages: Tensor, causal: bool
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
    """View [num_slots, KVH, D] as [num_pages, page_size, KVH, D]."""
    return cache.view(-1, page_size, *cache.shape[1:])


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


# Masks in FlashInfer's format, written on the device so that the host need not know the trees. A row of n tokens that
# see up to L keys has n * L bits, token after token, lowest bit first, filled up to whole bytes.


def mask_offsets(batch: PagedBatch) -> Tensor:
    """Return int32 [B + 2], the byte where each row's bits begin. A last row without keys is for padding tokens."""
    own, keys = _lengths(batch)
    ends = torch.cumsum((own * keys + 7) // 8, 0)
    return torch.cat([ends.new_zeros(1), ends, ends[-1:]]).to(torch.int32)


def write_page_indices(batch: PagedBatch, page_indptr: Tensor, indices: Tensor) -> None:
    """Set indices[page_indptr[b] + j] to page j of row b, for all pages that have keys.

    `page_indptr` is int32 [at least B + 1]. All other table entries go to the last place of `indices`, int32 [N].
    """
    _, keys = _lengths(batch)
    tables = batch.page_tables.index_select(0, batch.table_rows)
    place = torch.arange(tables.shape[1], device=tables.device)
    used = place < ((keys + batch.page_size - 1) // batch.page_size).unsqueeze(1)
    where = torch.where(used, page_indptr[: len(keys)].unsqueeze(1) + place, len(indices) - 1)
    indices.scatter_(0, where.flatten(), tables.flatten())


def write_packed_mask(batch: PagedBatch, offsets: Tensor, packed: Tensor) -> None:
    """Write the bits of every row from byte `offsets[b]` on: all its tokens see the context, and each other by `mask`.

    Only bits of own tokens can be 0, and these are few whatever the context: they are subtracted from bytes of ones.
    """
    if batch.mask is None:
        raise ValueError("a causal batch has no mask to pack")
    own, keys = _lengths(batch)
    token = torch.arange(batch.token_ids.shape[0], dtype=torch.int32, device=packed.device)
    # Padding tokens get the last row. Nothing is written for them, since they lie behind its tokens.
    row = torch.searchsorted(batch.first[1:], token, right=True, out_int32=True).clamp_(max=len(keys) - 1).long()
    place = token - batch.first[row]
    other = torch.arange(batch.max_row_tokens, device=packed.device)
    sees = (batch.mask[:, other // 32] >> (other % 32)) & 1
    inside = (other < own[row].unsqueeze(1)) & (place < own[row]).unsqueeze(1)
    hidden = inside & (sees == 0)
    bit = (place * keys[row] + batch.cached_len[row]).unsqueeze(1) + other
    byte = torch.where(hidden, offsets[row].unsqueeze(1) + bit // 8, 0)
    # Bytes wrap around, so adding 256 - x subtracts x. No bit is subtracted twice, so the order does not matter.
    taken = torch.where(hidden, 256 - (1 << bit % 8), 0).to(torch.uint8)
    packed.fill_(255)
    packed.index_add_(0, byte.flatten(), taken.flatten())


def _lengths(batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """Return the number of each row's own tokens, and of keys that its last token sees, int64 [B] each."""
    own = torch.diff(batch.first).long()
    return own, torch.where(own > 0, batch.cached_len + own, 0)

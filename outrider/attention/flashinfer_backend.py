"""Attention by FlashInfer over the same pages: prompts, and trees as custom masks. Needs the host to plan."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, AttentionPlan, TokenBatch
from outrider.attention.flashinfer_calls import CallShape, PrefillCall, TreeCall, TreeMemory
from outrider.attention.lengths import HostLengths
from outrider.attention.paged import PagedBatch
from outrider.attention.triton_backend import TritonAttention, TritonPlan
from outrider.cache.kv import KVCache
from outrider.errors import ConfigError
from outrider.layers.rotary import Rotary

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)


class FlashInferAttention(AttentionBackend):
    """Prompts by FlashInfer; trees too, or by our own kernels.

    Its split of the work depends on lengths, so `prepare` must be told them before every forward of trees, replays
    of a captured one included. Rotation and the writing of k and v are our own kernel's. Results depend on the batch
    around a token: there is no deterministic mode.
    """

    def __init__(self, shape: CallShape, device: torch.device, trees: bool = True) -> None:
        """Takes 128 MiB of device memory for prompts, and for `trees` 384 MiB more.

        Raises:
            ConfigError: FlashInfer is not installed or does not run this shape.
        """
        if find_spec("flashinfer") is None:
            raise ConfigError(
                '--attention-backend: flashinfer is not installed; "pip install flashinfer-python", or choose triton'
            )
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


class _Call(Protocol):
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [M, H, D] over the pages of a layer -> [M, H * D]."""


class _FlashInferPlan(TritonPlan):
    """Our rotation and writing, their attention."""

    def __init__(self, batch: PagedBatch, kv: KVCache, num_heads: int, rotary: Rotary, call: _Call) -> None:
        super().__init__(batch, kv, num_heads, rotary)
        self._call = call

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._call(q, k, v)

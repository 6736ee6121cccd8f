"""What FlashInfer is told, checked without it: a stand-in attends as told, in plain torch."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.attention.base import AttentionBackend, HostLengths
from outrider.attention.flashinfer_backend import FlashInferAttention, FlashInferShape
from outrider.attention.paged import PagedBatch, RoundTokens, TreeBuffers
from outrider.attention.triton_backend import TritonAttention
from outrider.cache.kv import KVCache
from outrider.errors import ConfigError
from outrider.layers.rotary import Rotary
from outrider.models.parts import RopeConfig

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 64, 4
SHAPE = FlashInferShape(HEADS, KV_HEADS, DIM, PAGE, torch.bfloat16)
CPU = torch.device("cpu")


class StandIn:
    """The part of FlashInfer's wrapper that is used: reads masks and pages from the buffers when it runs."""

    def __init__(self, workspace: Tensor, kv_layout: str, use_cuda_graph: bool = False, **buffers: Any) -> None:
        assert kv_layout == "NHD"
        self._buffers = buffers if use_cuda_graph else None
        self._host: tuple[Tensor, ...] = ()

    def reset_workspace_buffer(self, floats: Tensor, ints: Tensor) -> None:
        pass

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, pages: Tensor, last: Tensor, *sizes: int, causal: bool, **more: Any
    ) -> None:
        assert sizes == (HEADS, KV_HEADS, DIM, PAGE)
        assert causal == (self._buffers is None)
        self._host = (qo_indptr, kv_indptr, pages, last)
        if self._buffers is not None:
            for name, value in {
                "qo_indptr": qo_indptr,
                "paged_kv_indptr": kv_indptr,
                "paged_kv_last_page_len": last,
            }.items():
                buffer = self._buffers[f"{name}_buf"]
                assert buffer.shape == value.shape
                buffer.copy_(value)

    def run(self, q: Tensor, caches: tuple[Tensor, Tensor], out: Tensor) -> None:
        qo_indptr, kv_indptr, pages, last = self._host
        assert q.shape[0] == qo_indptr[-1]
        if self._buffers is not None:
            pages = self._buffers["paged_kv_indices_buf"]
        for row in range(len(qo_indptr) - 1):
            begin, end = qo_indptr[row : row + 2].tolist()
            first, stop = kv_indptr[row : row + 2].tolist()
            keys = (stop - first - 1) * PAGE + int(last[row]) if stop > first else 0
            if begin == end or not keys:
                continue
            k, v = (cache[pages[first:stop].long()].flatten(0, 1)[:keys] for cache in caches)
            sees = torch.ones(end - begin, keys, dtype=torch.bool).tril(keys - (end - begin))
            if self._buffers is not None:
                offset = int(self._buffers["mask_indptr_buf"][row])
                packed = self._buffers["custom_mask_buf"][offset:].numpy()
                bits = np.unpackbits(packed, bitorder="little")[: sees.numel()]
                sees = torch.from_numpy(bits).view(sees.shape).bool()
            k, v = (part.float().repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v))
            scores = torch.einsum("nhd,lhd->nhl", q[begin:end].float(), k) * DIM**-0.5
            weights = scores.masked_fill(~sees.unsqueeze(1), float("-inf")).softmax(-1)
            out[begin:end] = torch.einsum("nhl,lhd->nhd", weights, v).to(out.dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchPrefillWithPagedKVCacheWrapper = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def ints(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def page_tables(num_rows: int, pages: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randperm(num_rows * pages, generator=generator).view(num_rows, pages).to(torch.int32)


def tree_batch(own: list[int], cached: list[int], num_tokens: int, num_rows: int) -> tuple[PagedBatch, HostLengths]:
    """Random trees of `own` tokens over `cached` ones, padded to the shape."""
    generator = torch.Generator().manual_seed(sum(own))
    first = np.zeros(num_rows + 1, np.int32)
    parents, rows, positions = [-1] * num_tokens, [-1] * num_tokens, [0] * num_tokens
    for row, count in enumerate(own):
        begin = first[row]
        first[row + 1 :] = begin + count
        for i in range(count):
            parent = int(torch.randint(0, i, (), generator=generator)) + begin if i else -1
            parents[begin + i], rows[begin + i] = parent, row
            positions[begin + i] = positions[parent] + 1 if i else cached[row]
    lengths = HostLengths(first, np.array(cached + [0] * (num_rows - len(cached)), np.int32))
    table_rows = [num_rows - 1 - row for row in range(num_rows)]
    tokens = RoundTokens(
        token_ids=ints([0] * num_tokens),
        positions=ints(positions),
        parents=ints(parents),
        rows=ints(rows),
        first=torch.from_numpy(first),
        cached_len=torch.from_numpy(lengths.cached_len),
        root=ints([-1] * num_rows),
        table_rows=ints(table_rows),
    )
    buffers = TreeBuffers(num_tokens, 64, CPU)
    batch = buffers.batch(tokens, page_tables(num_rows, 16), PAGE, num_tokens, num_splits=1, by_path=False)
    return batch, lengths


def attend(backend: AttentionBackend, batch: PagedBatch, heads: Tensor, kv: KVCache) -> Tensor:
    rotary = Rotary(RopeConfig("default", 10000.0), DIM, CPU)
    return backend.plan(batch, kv, HEADS, rotary).attend(0, heads, None)


def compare(flashinfer: FlashInferAttention, batch: PagedBatch, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    num_slots = batch.page_tables.numel() * PAGE
    caches = [KVCache(1, num_slots, KV_HEADS, DIM, torch.bfloat16) for _ in range(2)]
    context = torch.randn(2, num_slots, KV_HEADS, DIM, generator=generator).to(torch.bfloat16)
    for kv in caches:
        kv.k[0], kv.v[0] = context
    shape = (batch.token_ids.shape[0], HEADS + 2 * KV_HEADS, DIM)
    heads = torch.randn(shape, generator=generator).to(torch.bfloat16)
    expected = attend(TritonAttention(), batch, heads, caches[0])
    actual = attend(flashinfer, batch, heads, caches[1])
    assert torch.equal(caches[0].k, caches[1].k)
    torch.testing.assert_close(actual[:num_tokens], expected[:num_tokens])


@pytest.mark.parametrize(
    ("own", "cached", "shape"),
    [
        ([1], [0], (1, 1)),
        ([5], [0], (8, 1)),
        ([7, 1, 12], [3, 17, 50], (24, 4)),
        ([33, 40], [1, 20], (96, 2)),
        ([1, 1, 1, 1], [5, 6, 7, 8], (4, 4)),
        ([], [], (4, 2)),
    ],
)
def test_trees_are_masks_over_pages(stand_in: None, own: list[int], cached: list[int], shape: tuple[int, int]) -> None:
    flashinfer = FlashInferAttention(SHAPE, CPU)
    batch, lengths = tree_batch(own, cached, *shape)
    flashinfer.prepare(shape[0], lengths, batch.page_tables)
    compare(flashinfer, batch, sum(own))


def test_a_shape_is_planned_anew_for_every_round(stand_in: None) -> None:
    flashinfer = FlashInferAttention(SHAPE, CPU)
    for own, cached in ([9, 3], [0, 30]), ([1, 15], [59, 2]), ([16], [7]):
        batch, lengths = tree_batch(own, cached, 16, 2)
        flashinfer.prepare(16, lengths, batch.page_tables)
        compare(flashinfer, batch, sum(own))


def test_a_shape_that_was_not_prepared_is_refused(stand_in: None) -> None:
    batch, _ = tree_batch([5], [9], 8, 1)
    with pytest.raises(ValueError, match="8 tokens in 1 rows was not prepared"):
        compare(FlashInferAttention(SHAPE, CPU), batch, 5)


@pytest.mark.parametrize("trees", [True, False])
@pytest.mark.parametrize("size", [26, 32])
def test_prompts_are_causal(stand_in: None, trees: bool, size: int) -> None:
    own, cached = [3, 22, 1], [0, 9, 31]
    first = np.cumsum([0, *own]).astype(np.int32)
    tables = page_tables(3, 16)
    owner = [row for row, count in enumerate(own) for _ in range(count)]
    positions = [cached[row] + i for row, count in enumerate(own) for i in range(count)]
    slots = [int(tables[row, p // PAGE]) * PAGE + p % PAGE for row, p in zip(owner, positions, strict=True)]
    padding = size - sum(own)
    batch = PagedBatch(
        token_ids=ints([0] * size),
        positions=ints(positions + [0] * padding),
        first=torch.from_numpy(first),
        cached_len=ints(cached),
        table_rows=ints([0, 1, 2]),
        page_tables=tables,
        slots=ints(slots + [-1] * padding),
        page_size=PAGE,
        max_row_tokens=max(own),
        lengths=HostLengths(first, np.array(cached, np.int32)),
    )
    compare(FlashInferAttention(SHAPE, CPU, trees), batch, size)


def test_trees_can_be_left_to_our_own_kernels(stand_in: None) -> None:
    batch, lengths = tree_batch([5], [9], 8, 1)
    mixed = FlashInferAttention(SHAPE, CPU, trees=False)
    mixed.prepare(8, lengths, batch.page_tables)
    compare(mixed, batch, 5)


def test_a_batch_that_must_not_depend_on_its_shape_is_refused(stand_in: None) -> None:
    batch, _ = tree_batch([5], [9], 8, 1)
    batch.path = torch.zeros(8, 64, dtype=torch.int32)
    with pytest.raises(ValueError, match="no deterministic mode"):
        compare(FlashInferAttention(SHAPE, CPU), batch, 5)


def test_a_tree_region_is_refused(stand_in: None) -> None:
    batch, _ = tree_batch([5], [9], 8, 1)
    batch.region_base = 16
    with pytest.raises(ValueError, match="no tree regions"):
        compare(FlashInferAttention(SHAPE, CPU), batch, 5)


def test_without_flashinfer_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.attention.flashinfer_backend.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--attention-backend.*pip install flashinfer-python"):
        FlashInferAttention(SHAPE, CPU)


@pytest.mark.parametrize(
    "shape", [FlashInferShape(4, 2, 64, 4, torch.float32), FlashInferShape(4, 2, 32, 4, torch.bfloat16)]
)
def test_what_flashinfer_does_not_run_is_named(stand_in: None, shape: FlashInferShape) -> None:
    with pytest.raises(ConfigError, match=r"bfloat16 and float16 with head_dim .*choose triton"):
        FlashInferAttention(shape, CPU)

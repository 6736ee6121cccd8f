"""Chunks of prompts padded to few shapes give what they give in their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from cuda_harness import make_paged_engine
from prefill_pair import PrefillPair, run_story

from outrider.attention.paged import PromptChunk, PromptLayout, PromptShape
from outrider.cache.kv import FeatureStore
from outrider.cache.pages import page_slots
from outrider.models.decoder import CausalLM
from verify_service.executors.cuda import CudaExecutor
from verify_service.executors.prefill import PrefillShapes
from verify_service.executors.round_buffers import Bucket
from verify_service.features.staging import FeaturePlan

LAYERS = (0, 1, 3)
EXACT = 1e-4


def test_a_forward_takes_the_first_shape_that_holds_it() -> None:
    shapes = PrefillShapes(2048, 64)
    assert shapes.fit(1, 1) == shapes.fit(64, 7) == PromptShape(64, 7)
    assert shapes.fit(65, 1) == shapes.fit(100, 4) == PromptShape(128, 7)
    # More rows than short forwards have.
    assert shapes.fit(40, 8) == shapes.fit(192, 15) == PromptShape(192, 15)
    assert shapes.fit(385, 1) == PromptShape(512, 15)
    assert shapes.small == sorted(shapes.small)


def test_what_is_too_large_is_not_padded_but_for_empty_rows() -> None:
    shapes = PrefillShapes(2048, 64)
    assert shapes.fit(513, 1) == PromptShape(513, 7)
    assert shapes.fit(2048, 15) == PromptShape(2048, 15)
    assert shapes.fit(100, 16) == PromptShape(100, 64)
    assert not {shapes.fit(513, 1), shapes.fit(100, 16)} & set(shapes.small)
    # As a round without an engine may be.
    assert shapes.fit(5000, 100) == PromptShape(5000, 100)


@pytest.mark.parametrize(
    ("chunk_size", "max_rows", "small"),
    [
        (16, 8, [(16, 7)]),
        (200, 8, [(64, 7), (128, 7), (192, 8), (200, 8)]),
        (2048, 4, [(64, 4), (128, 4), (192, 4), (256, 4), (384, 4), (512, 4)]),
    ],
)
def test_no_shape_is_larger_than_forwards(chunk_size: int, max_rows: int, small: list[tuple[int, int]]) -> None:
    assert PrefillShapes(chunk_size, max_rows).small == small


def test_a_fixed_shape_is_the_only_one() -> None:
    for size, small in ((512, [PromptShape(512, 1)]), (2048, [])):
        shapes = PrefillShapes(size, 64, fixed=True)
        assert shapes.fit(1, 1) == shapes.fit(size, 1) == PromptShape(size, 1)
        assert shapes.small == small


def test_without_padding_every_forward_has_its_own_shape() -> None:
    shapes = PrefillShapes(2048, 64, padded=False)
    assert shapes.fit(5, 3) == PromptShape(5, 3) and not shapes.small


def kinds(shapes: PrefillShapes, room: int = 1 << 20) -> list[PromptShape]:
    """Of what is run before the first request, beside small forwards."""
    return [shapes.fit(sum(counts), len(counts)) for counts in shapes.others(room)]


def test_what_is_not_captured_is_warmed_up() -> None:
    assert kinds(PrefillShapes(2048, 64)) == [(2048, 7), (64, 64)]
    assert kinds(PrefillShapes(2048, 15)) == [(2048, 7)]
    assert kinds(PrefillShapes(256, 64)) == [(64, 64)]
    assert kinds(PrefillShapes(512, 64, fixed=True)) == []
    assert kinds(PrefillShapes(2048, 64, fixed=True)) == [(2048, 1)]
    assert kinds(PrefillShapes(2048, 64, padded=False)) == [(2048, 1), (48, 1)]
    assert PrefillShapes(2048, 8).others(1000) == [[1000]]


def test_fields_begin_where_pointers_are_aligned() -> None:
    tables = torch.zeros(10, 4, dtype=torch.int32)
    for shape in (PromptShape(1, 7), PromptShape(33, 7), PromptShape(512, 127)):
        layout = PromptLayout(shape)
        batch = layout.batch(torch.arange(layout.size, dtype=torch.int32), shape, tables, 4)
        fields = (batch.token_ids, batch.positions, batch.slots, batch.first, batch.cached_len, batch.table_rows)
        assert [len(field) for field in fields] == [shape.tokens] * 3 + [shape.rows + 1, shape.rows, shape.rows]
        assert all(field[0] % 4 == 0 for field in fields)
        assert all(before[-1] < after[0] for before, after in pairwise(fields))


def test_a_description_is_padded_whatever_shape_is_cut_out() -> None:
    layout = PromptLayout(PromptShape(20, 5))
    chunks = [
        PromptChunk(3, [7, 8, 9], 4, np.array([40, 41, 50], np.int32)),
        PromptChunk(1, [6], 0, np.array([12], np.int32)),
    ]
    described = torch.from_numpy(layout.describe(chunks, spare_row=9))
    for shape in (PromptShape(8, 3), PromptShape(20, 5)):
        batch = layout.batch(described, shape, torch.zeros(10, 4, dtype=torch.int32), 4)
        tokens, rows = shape.tokens - 4, shape.rows - 2
        assert batch.token_ids.tolist() == [7, 8, 9, 6] + [0] * tokens
        assert batch.positions.tolist() == [4, 5, 6, 0] + [0] * tokens
        assert batch.slots.tolist() == [40, 41, 50, 12] + [-1] * tokens
        assert batch.first.tolist() == [0, 3, 4] + [4] * rows
        assert batch.cached_len.tolist() == [4, 0] + [0] * rows
        assert batch.table_rows.tolist() == [3, 1] + [9] * rows
        assert all(getattr(batch, name).data_ptr() % 16 == described.data_ptr() % 16 for name in ("positions", "slots"))


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 4), (3, 5), (4, 12), (5, 11), (11, 12)])
def test_slots_follow_the_pages(start: int, end: int) -> None:
    pages = [9, 2, 5]
    every = [page * 4 + place for page in pages for place in range(4)]
    assert page_slots(pages, 4, start, end).tolist() == every[start:end]


@pytest.mark.parametrize("stores", [(), (LAYERS,), (LAYERS, (3,))])
@pytest.mark.parametrize(("chunk_size", "deterministic"), [(600, False), (200, True)])
def test_padded_chunks_store_what_others_store(
    model: CausalLM, stores: tuple[tuple[int, ...], ...], chunk_size: int, deterministic: bool
) -> None:
    pair = PrefillPair(model, chunk_size=chunk_size, deterministic=deterministic)
    assert run_story(pair, *stores) == pair.check(EXACT)


class NotedChunks:
    """A pool that notes for which features forwards are captured; to run one is to run its work."""

    def __init__(self, executor: CudaExecutor, shapes: Sequence[PromptShape]) -> None:
        self._executor = executor
        self._graphs: dict[PromptShape, FeatureStore | None] = dict.fromkeys(shapes)
        self._next: dict[PromptShape, FeatureStore | None] = {}
        self.order: list[PromptShape] = []
        self.num_discarded = 0
        self.full: PromptShape | None = None
        """A shape for whose next graph there is no memory."""

    def captured(self) -> list[PromptShape]:
        return sorted(self._graphs, reverse=True)

    def capture_next(self, shape: PromptShape, broadcast: Callable[[], None]) -> bool:
        self.order.append(shape)
        broadcast()
        self._executor.prefill._body(shape)
        if shape == self.full:
            return False
        self._next[shape] = self._executor._features
        return True

    def adopt(self) -> None:
        self._graphs, self._next = self._next, {}

    def discard_next(self) -> None:
        self.num_discarded += bool(self._next)
        self._next = {}

    def run(self, shape: PromptShape) -> None:
        assert self._graphs.get(shape, self._executor._features) is self._executor._features
        self._executor.prefill._body(shape)


class NoRounds:
    """A pool with one graph, of which nothing is run."""

    def __init__(self, order: list[object]) -> None:
        self._order = order

    def captured(self) -> list[Bucket]:
        return [Bucket(1, 1)]

    def capture_next(self, shape: Bucket, broadcast: Callable[[], None]) -> bool:
        self._order.append(shape)
        return True

    def adopt(self) -> None:
        """See GraphPool."""

    def discard_next(self) -> None:
        """See GraphPool."""


def test_graphs_of_chunks_are_captured_anew_for_features_behind_those_of_rounds(model: CausalLM) -> None:
    pair = PrefillPair(model, chunk_size=200)
    executor, small = pair.executor, pair.prefill._shapes.small
    graphs = NotedChunks(executor, small)
    graphs.full = small[1]
    pair.prefill.graphs = graphs  # type: ignore[assignment]
    executor.graphs = NoRounds(graphs.order)  # type: ignore[assignment,arg-type]
    request = pair.request()
    executor.begin_features(FeaturePlan((1,)))
    assert executor.refresh_features() == len(small)
    assert executor.refresh_features() == len(small) - 1
    # Chunks go on as before meanwhile.
    pair.run((request, 10))
    assert executor._features is None
    graphs.order.clear()
    pair.store_features(LAYERS)
    assert graphs.order == [Bucket(1, 1), *small[::-1]] and graphs.num_discarded == 1
    assert executor._features is not None
    assert set(graphs._graphs) == set(small) - {graphs.full} and set(graphs._graphs.values()) == {executor._features}
    # The one without memory runs without graph.
    for count in (10, 100, 90):
        request = pair.request()
        pair.run((request, count))
    # What came before has no features, in neither store.
    pair.check(EXACT)


def test_other_backends_get_forwards_as_they_are(model: CausalLM) -> None:
    from outrider.attention.torch_backend import TorchAttention

    _, executor = make_paged_engine(model, attention=TorchAttention())
    assert not executor.prefill._shapes.small

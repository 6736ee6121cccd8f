"""Chunks of prompts replayed from graphs, against the same kernels without graphs and against their own shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from prefill_pair import PrefillPair, run_story

from outrider.models.decoder import CausalLM
from verify_service.features.staging import FeaturePlan

pytestmark = pytest.mark.gpu

LAYERS = (0, 1, 3)
SIZES: dict[str, Any] = {"max_running": 8, "max_round_tokens": 8, "max_nodes": 0}

Models = Callable[..., CausalLM]
Stores = tuple[tuple[int, ...], ...]


def is_captured(pair: PrefillPair) -> bool:
    """Whether every small shape has a graph."""
    return pair.prefill.graphs.captured() == pair.prefill._shapes.small[::-1] != []


@pytest.mark.parametrize("stores", [(), (LAYERS,), (LAYERS, (3,))])
@pytest.mark.parametrize(("chunk_size", "deterministic"), [(600, False), (200, True)])
def test_they_store_what_chunks_of_other_shapes_store(
    small_models: Models, stores: Stores, chunk_size: int, deterministic: bool
) -> None:
    model = small_models(dtype=torch.float32)
    pair = PrefillPair(model, chunk_size=chunk_size, deterministic=deterministic, **SIZES)
    before = dict(pair.prefill.graphs._graphs)
    assert is_captured(pair)
    num_tokens = run_story(pair, *stores)
    assert pair.check(5e-3) == num_tokens
    assert is_captured(pair)
    assert not stores or all(pair.prefill.graphs._graphs[shape] is not graph for shape, graph in before.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("chunk_size", "deterministic"), [(600, False), (200, True)])
def test_they_store_bit_by_bit_what_their_kernels_store(
    small_models: Models, dtype: torch.dtype, chunk_size: int, deterministic: bool
) -> None:
    pairs = []
    for use_graphs in (True, False):
        options = {"chunk_size": chunk_size, "deterministic": deterministic, "use_graphs": use_graphs}
        pair = PrefillPair(small_models(dtype=dtype), **options, **SIZES)
        assert is_captured(pair) == use_graphs
        run_story(pair, LAYERS)
        pairs.append(pair)
    for name in ("k", "v"):
        graphs, kernels = (getattr(pair.executor._kv, name) for pair in pairs)
        assert torch.equal(graphs, kernels), name
    features = [pair.executor._features for pair in pairs]
    assert torch.equal(*(store._halves[:, :-1] for store in features if store is not None))


def test_what_is_queued_at_once_is_not_mixed_up(small_models: Models) -> None:
    """Chunks follow each other faster than the device runs them: each must find its own inputs."""
    pair = PrefillPair(small_models(dtype=torch.float32), chunk_size=600, **SIZES)
    requests = [pair.request() for _ in range(4)]
    torch.cuda.synchronize()
    # Some milliseconds that the device does not get to the chunks.
    torch.cuda._sleep(20_000_000)
    for number in range(24):
        pair.run((requests[number % 4], 1 + number * 7 % 31), wait=False)
    assert pair.check(5e-3) == sum(request.cached_len for request in requests)


def test_a_forward_without_memory_for_its_graph_runs_without(
    small_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = PrefillPair(small_models(dtype=torch.float32), chunk_size=600, **SIZES)
    small, record = pair.prefill._shapes.small, pair.prefill.graphs._record

    def fail_once(shape: Any) -> torch.cuda.CUDAGraph:
        if shape == small[1]:
            raise torch.OutOfMemoryError("no room")
        return record(shape)

    monkeypatch.setattr(pair.prefill.graphs, "_record", fail_once)
    num_tokens = run_story(pair, LAYERS)
    assert pair.check(5e-3) == num_tokens
    assert set(pair.prefill.graphs.captured()) == set(small) - {small[1]}


def test_graphs_take_no_memory_when_they_run(small_models: Models) -> None:
    pair = PrefillPair(small_models(), chunk_size=600, **SIZES)
    pair.executor.begin_features(FeaturePlan(LAYERS))
    with torch.inference_mode():
        while pair.executor.refresh_features():
            pass
    requests = [pair.request() for _ in range(4)]
    pair.run(*((request, 20) for request in requests))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for request in requests:
        pair.launch((request, 60))
    torch.cuda.synchronize()
    # The inputs of a chunk are read where graphs read it.
    assert torch.cuda.max_memory_allocated() <= before + (1 << 16)

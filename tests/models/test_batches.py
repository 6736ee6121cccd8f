"""However a request's tokens are cut, mixed, scattered or branched, their logits are the same."""

from __future__ import annotations

import pytest
import torch
from tiny_models import relative_error, run_one, save_tiny, token_ids
from torch import Tensor

from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.torch_backend import TorchAttention
from outrider.models.decoder import CausalLM
from outrider.models.loader import load_model

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder)
    return load_model(folder)


def one_shot(model: CausalLM, ids: Tensor) -> Tensor:
    return run_one(model, model.new_kv(ids.numel()), ids, torch.arange(ids.numel()))


@pytest.mark.parametrize("cuts", [(7, 20, 1, 1, 11), (1,) * 12, (39, 1), (16, 16)])
def test_chunked_prefill_equals_one_shot(model: CausalLM, cuts: tuple[int, ...]) -> None:
    ids = token_ids(sum(cuts))
    kv, slots = model.new_kv(ids.numel()), torch.arange(ids.numel())
    parts, start = [], 0
    for length in cuts:
        end = start + length
        parts.append(run_one(model, kv, ids[start:end], slots[:end]))
        start = end
    assert relative_error(torch.cat(parts), one_shot(model, ids)) <= TOLERANCE


def test_scattered_slots_equal_contiguous_ones(model: CausalLM) -> None:
    ids = token_ids(30)
    kv = model.new_kv(100)
    slots = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:30]
    parts = [run_one(model, kv, ids[:20], slots[:20]), run_one(model, kv, ids[20:], slots)]
    assert relative_error(torch.cat(parts), one_shot(model, ids)) <= TOLERANCE


def test_written_keys_lie_in_their_slots_alone(model: CausalLM) -> None:
    kv = model.new_kv(64)
    slots = torch.tensor([5, 9, 60])
    run_one(model, kv, token_ids(3), slots)
    untouched = torch.ones(64, dtype=torch.bool)
    untouched[slots] = False
    assert not kv.k[:, untouched].any() and not kv.v[:, untouched].any()
    assert kv.k[:, slots].abs().sum((2, 3)).all()


# Parent of each node below the root, the root being node 0.
TREES = {
    "chain": [0, 1, 2, 3],
    "wide": [0, 0, 0, 1, 1, 2, 4, 7],
    "star": [0, 0, 0, 0, 0],
    "large": [0, 0, 1, 1, 2, 3, 5, 5, 6, 6, 7, 9, 10, 11, 11, 12, 13, 14, 15, 15, 16, 18, 20, 22],
}


def tree_shape(parents: list[int]) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Depths [n], ancestor mask [n, n], and each node's path from the root, all with the root first."""
    paths = [[0]]
    for node, parent in enumerate(parents, start=1):
        paths.append([*paths[parent], node])
    mask = torch.zeros(len(paths), len(paths), dtype=torch.bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    return torch.tensor([len(path) - 1 for path in paths]), mask, paths


@pytest.mark.parametrize("name", TREES)
def test_tree_equals_each_path_alone(model: CausalLM, name: str) -> None:
    depths, mask, paths = tree_shape(TREES[name])
    context, nodes = token_ids(17), token_ids(len(paths), seed=3)
    kv = model.new_kv(64)
    run_one(model, kv, context, torch.arange(17))
    logits = run_one(model, kv, nodes, torch.arange(17 + len(paths)), mask, 17 + depths)
    for node, path in enumerate(paths):
        expected = one_shot(model, torch.cat([context, nodes[path]]))[-1]
        assert relative_error(logits[node], expected) <= TOLERANCE


def test_compacted_path_continues_as_if_never_branched(model: CausalLM) -> None:
    depths, mask, paths = tree_shape(TREES["wide"])
    context, nodes, tail = token_ids(17), token_ids(9, seed=3), token_ids(2, seed=4)
    kv = model.new_kv(64)
    run_one(model, kv, context, torch.arange(17))
    run_one(model, kv, nodes, torch.arange(26), mask, 17 + depths)
    path = paths[-1]
    kv.move(17 + torch.tensor(path), torch.arange(17, 17 + len(path)))
    end = 17 + len(path) + 2
    logits = run_one(model, kv, tail, torch.arange(end))
    expected = one_shot(model, torch.cat([context, nodes[path], tail]))[-2:]
    assert relative_error(logits, expected) <= TOLERANCE


@pytest.mark.parametrize(
    "shapes",
    [
        [(0, 5), (9, 1), (40, 1), (3, 8)],  # (context, queries) of each request
        [(10, 1), (200, 1), (31, 1)],
        [(12, 1), (12, 1)],
        [(0, 100), (150, 1), (150, 16), (20, 2)],
        [(50, 40), (0, 1), (220, 30)],
    ],
)
def test_requests_in_one_batch_equal_requests_alone(model: CausalLM, shapes: list[tuple[int, int]]) -> None:
    kv = model.new_kv(1024)
    free = torch.randperm(1024, generator=torch.Generator().manual_seed(2))
    expected, ids, positions, segments = [], [], [], []
    for number, (context, queries) in enumerate(shapes):
        slots, free = free[: context + queries], free[context + queries :]
        tokens = token_ids(context + queries, seed=number)
        if context:
            run_one(model, kv, tokens[:context], slots[:context])
        expected.append(one_shot(model, tokens)[context:])
        ids.append(tokens[context:])
        positions.append(torch.arange(context, context + queries))
        mask = torch.ones(queries, queries, dtype=torch.bool).tril() if number % 2 else None
        segments.append(Segment(queries, slots, mask))
    batch = ForwardBatch(torch.cat(ids), torch.cat(positions), segments)
    logits = model.logits(model.forward(batch, kv, TorchAttention()))
    assert relative_error(logits, torch.cat(expected)) <= TOLERANCE


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [Segment(3, torch.arange(3))],
        [Segment(0, torch.arange(4)), Segment(4, torch.arange(4))],
        [Segment(4, torch.arange(3))],
        [Segment(4, torch.arange(4), torch.ones(3, 3, dtype=torch.bool))],
    ],
)
def test_segments_that_do_not_fit_are_refused(model: CausalLM, segments: list[Segment]) -> None:
    batch = ForwardBatch(token_ids(4), torch.arange(4), segments)
    with pytest.raises(ValueError, match=r"segment|mask"):
        model.forward(batch, model.new_kv(8), TorchAttention())


def test_logits_of_a_row_do_not_depend_on_how_many_there_are(model: CausalLM) -> None:
    hidden = torch.randn(8, 32, generator=torch.Generator().manual_seed(5))
    alone = torch.cat([model.logits(row[None]) for row in hidden])
    assert relative_error(alone, model.logits(hidden)) <= TOLERANCE

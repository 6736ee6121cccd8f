from __future__ import annotations

import interpreter  # noqa: F401
import pytest
import torch
from torch import Tensor

from kernels.move import move
from kernels.reference import move as reference


def make(shape: tuple[int, int, int], slots: int, dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layers, kv_heads, dim = shape
    return [torch.randn(layers, slots, kv_heads, dim, generator=generator).to(dtype).to(device) for _ in range(2)]


def check(shape: tuple[int, int, int], slots: int, count: int, dtype: torch.dtype, device: str) -> None:
    """Slots of the upper half to the lower half, some pairs unused."""
    caches = make(shape, slots, dtype, device, seed=count)
    before = [cache.clone() for cache in caches]
    generator = torch.Generator().manual_seed(count)
    sources = torch.randperm(slots // 2, generator=generator)[:count] + slots // 2
    targets = torch.randperm(slots // 2, generator=generator)[:count]
    unused = torch.arange(count) % 3 == 1
    moves = torch.stack([sources, targets], 1).int()
    moves[unused] = -1
    move(*caches, moves.to(device))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[:, targets[~unused]], old[:, sources[~unused]])
        kept = torch.ones(slots, dtype=torch.bool)
        kept[targets[~unused]] = False
        assert torch.equal(cache[:, kept], old[:, kept])
    again = [cache.clone() for cache in before]
    reference.move(*again, moves.to(device))
    assert all(torch.equal(cache, other) for cache, other in zip(caches, again, strict=True))


@pytest.mark.parametrize("count", [1, 6, 11])
@pytest.mark.parametrize(("shape", "dtype"), [((2, 2, 16), torch.float32), ((3, 3, 16), torch.bfloat16)])
def test_named_slots_move_and_others_stay(
    shape: tuple[int, int, int], dtype: torch.dtype, count: int, device: str
) -> None:
    check(shape, 40, count, dtype, device)


def test_slots_wider_than_a_part(device: str) -> None:
    check((1, 9, 128), 10, 4, torch.float32, device)


def test_half_a_pair_moves_nothing(device: str) -> None:
    k, v = make((1, 1, 16), 6, torch.float32, device, seed=0)
    before = k.clone(), v.clone()
    move(k, v, torch.tensor([[-1, 2], [3, -1]], dtype=torch.int32, device=device))
    move(k, v, torch.empty(0, 2, dtype=torch.int32, device=device))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


def test_layouts_that_do_not_fit_are_refused(device: str) -> None:
    k, v = make((1, 2, 16), 4, torch.float32, device, seed=0)
    moves = torch.zeros(1, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        move(k, v[:, :2], moves)
    with pytest.raises(ValueError, match="moves"):
        move(k, v, moves[0])
    with pytest.raises(ValueError, match="int64"):
        move(k, v, moves.long())


@pytest.mark.gpu
def test_many_layers_in_a_graph(device: str) -> None:
    k, v = make((32, 8, 128), 600, torch.bfloat16, device, seed=1)
    moves = torch.full((64, 2), -1, dtype=torch.int32, device=device)
    move(k, v, moves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        move(k, v, moves)
    before = [cache.clone() for cache in (k, v)]
    moves[:50] = torch.tensor([[599 - i, i] for i in range(50)], dtype=torch.int32)
    graph.replay()
    reference.move(*before, moves)
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])

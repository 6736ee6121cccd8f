"""KV slots that move, in all layers."""

from __future__ import annotations

import pytest
import torch
from rounds import make_round, random_tree
from torch import Tensor

from kernels.kv_cache import compact, move
from kernels.reference import kv_cache as reference
from kernels.reference.kv_cache import compact as expected_compact


def make(shape: tuple[int, int, int], slots: int, dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layers, kv_heads, dim = shape
    return [torch.randn(layers, slots, kv_heads, dim, generator=generator).to(dtype).to(device) for _ in range(2)]


def check_move(shape: tuple[int, int, int], slots: int, count: int, dtype: torch.dtype, device: str) -> None:
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
    check_move(shape, 40, count, dtype, device)


def test_slots_wider_than_a_part(device: str) -> None:
    check_move((1, 9, 128), 10, 4, torch.float32, device)


def test_half_a_pair_moves_nothing(device: str) -> None:
    k, v = make((1, 1, 16), 6, torch.float32, device, seed=0)
    before = k.clone(), v.clone()
    move(k, v, torch.tensor([[-1, 2], [3, -1]], dtype=torch.int32, device=device))
    move(k, v, torch.empty(0, 2, dtype=torch.int32, device=device))
    assert torch.equal(k, before[0]) and torch.equal(v, before[1])


def test_moves_that_do_not_fit_are_refused(device: str) -> None:
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


def check_compact(device: str, shape: tuple[int, int, int], dtype: torch.dtype, num_rows: int, seed: int) -> None:
    """Random trees, of each a random path from the root accepted."""
    layers, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(seed)
    trees = [random_tree(20, seed + i, extend=1 + i % 3) for i in range(num_rows)]
    made = make_round(trees, [3 + 5 * i for i in range(num_rows)], device=device, empty_rows=1, seed=seed)
    roots, paths = [], []
    for i, tree in enumerate(trees):
        root, begin = i % 3, int(made.first[i])
        path = [int(torch.randint(root, len(tree), (1,), generator=generator))]
        while path[-1] != root:
            path.append(tree[path[-1]])
        roots.append(begin + root if i != 1 else -1)
        paths.append([begin + place for place in reversed(path[:-1])])
    accepted = torch.full((num_rows + 1, 24), -1, dtype=torch.int32)
    for i, path in enumerate(paths):
        accepted[i, : len(path)] = torch.tensor(path, dtype=torch.int32)
    counts = torch.tensor([len(path) + 1 for path in paths] + [0], dtype=torch.int32)
    counts[1] = 0
    # As in a round's output, where every count stands before its row's tokens.
    counts = torch.stack([counts, torch.full_like(counts, 9)], 1)[:, 0]
    slots = made.page_tables.numel() * made.page_size
    caches = [torch.randn(layers, slots, kv_heads, dim, generator=generator).to(dtype).to(device) for _ in range(2)]
    expected = [cache.clone() for cache in caches]
    root = torch.tensor([*roots, -1], dtype=torch.int32, device=device)
    where = (made.tokens(root), made.page_tables, accepted.to(device))
    compact(*caches, *where, counts.to(device), made.page_size)
    expected_compact(*expected, *where, counts.to(device), made.page_size)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("shape", "dtype"), [((2, 2, 16), torch.float32), ((3, 3, 16), torch.bfloat16)])
def test_paths_move_up(seed: int, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    check_compact(device, shape, dtype, 3, seed)


def test_a_long_path_moves_over_itself(device: str) -> None:
    """Every node moves by one place: each target is the source of the node before."""
    tree = [-1, 0, 0, *range(2, 30)]
    made = make_round([tree], [2], device=device)
    accepted = torch.arange(2, 31, dtype=torch.int32, device=device).unsqueeze(0)
    k = torch.arange(made.page_tables.numel() * 4, device=device).float().view(1, -1, 1, 1).repeat(1, 1, 2, 16)
    v, before = -k, k.clone()
    root, count = (torch.tensor([value], dtype=torch.int32, device=device) for value in (0, 30))
    compact(k, v, made.tokens(root), made.page_tables, accepted, count, 4)
    slots = made.expand().slots.long()
    assert torch.equal(k[:, slots[1:30]], before[:, slots[2:31]])
    assert torch.equal(k, -v)


def test_compaction_that_does_not_fit_is_refused(device: str) -> None:
    k = torch.zeros(1, 4, 2, 16, device=device)
    made = make_round([[-1]], [0], device=device)
    empty = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        compact(k, k[:, :2], made.tokens(), empty, empty, empty, 4)


@pytest.mark.gpu
def test_many_layers(device: str) -> None:
    check_compact(device, (32, 8, 128), torch.bfloat16, 30, 7)

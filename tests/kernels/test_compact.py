from __future__ import annotations

import pytest
import torch
from rounds import make_round, random_tree

from kernels.compact import compact
from kernels.reference.compact import compact as expected_compact


def check(device: str, shape: tuple[int, int, int], dtype: torch.dtype, num_rows: int, seed: int) -> None:
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
    where = (made.first, made.cached_len, made.table_rows, made.page_tables, root, accepted.to(device))
    compact(*caches, *where, counts.to(device), made.page_size)
    expected_compact(*expected, *where, counts.to(device), made.page_size)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("shape", "dtype"), [((2, 2, 16), torch.float32), ((3, 3, 16), torch.bfloat16)])
def test_paths_move_up(seed: int, shape: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    check(device, shape, dtype, 3, seed)


def test_a_long_path_moves_over_itself(device: str) -> None:
    """Every node moves by one place: each target is the source of the node before."""
    tree = [-1, 0, 0, *range(2, 30)]
    made = make_round([tree], [2], device=device)
    accepted = torch.arange(2, 31, dtype=torch.int32, device=device).unsqueeze(0)
    k = torch.arange(made.page_tables.numel() * 4, device=device).float().view(1, -1, 1, 1).repeat(1, 1, 2, 16)
    v, before = -k, k.clone()
    root, count = (torch.tensor([value], dtype=torch.int32, device=device) for value in (0, 30))
    compact(k, v, made.first, made.cached_len, made.table_rows, made.page_tables, root, accepted, count, 4)
    slots = made.expand().slots.long()
    assert torch.equal(k[:, slots[1:30]], before[:, slots[2:31]])
    assert torch.equal(k, -v)


def test_layouts_that_do_not_fit_are_refused(device: str) -> None:
    k = torch.zeros(1, 4, 2, 16, device=device)
    empty = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        compact(k, k[:, :2], empty, empty, empty, empty, empty, empty, empty, 4)


@pytest.mark.gpu
def test_many_layers(device: str) -> None:
    check(device, (32, 8, 128), torch.bfloat16, 30, 7)

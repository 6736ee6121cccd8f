"""Rounds for the tests of kernels: ragged rows of trees over shuffled pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sampling_state import RoundTokens
from kernels.tree import MAX_PATH, expand_tree


@dataclass
class Round:
    """What describes a round, int32 on one device, and the caches it reads."""

    parents: Tensor
    rows: Tensor
    positions: Tensor
    first: Tensor
    cached_len: Tensor
    table_rows: Tensor
    page_tables: Tensor
    page_size: int
    max_row_tokens: int

    def __post_init__(self) -> None:
        count, device = self.parents.shape[0], self.parents.device
        words = -(-self.max_row_tokens // 32)
        self.slots = torch.full((count,), 77, dtype=torch.int32, device=device)
        self.mask = torch.full((count, words), 77, dtype=torch.int32, device=device)
        self.path = torch.full((count, MAX_PATH), 77, dtype=torch.int32, device=device)

    def tokens(self, root: Tensor | None = None) -> RoundTokens:
        """The round; `root` is each row's first token if None."""
        root = self.first[:-1] if root is None else root
        places = (self.positions, self.parents, self.rows, self.first, root, self.table_rows, self.cached_len)
        return RoundTokens(torch.zeros_like(self.parents), *places)

    def expand(self) -> Round:
        """Fill slots, mask and path."""
        expand_tree(
            self.tokens(), self.page_tables, self.page_size, self.max_row_tokens, self.slots, self.mask, self.path
        )
        return self

    def lengths(self) -> tuple[Tensor, ...]:
        """What attention reads of it."""
        return (self.page_tables, self.table_rows, self.first, self.cached_len)


def make_round(
    trees: list[list[int]],
    cached: list[int],
    *,
    device: str,
    page_size: int = 4,
    padding: int = 0,
    empty_rows: int = 0,
    max_row_tokens: int | None = None,
    seed: int = 0,
    state_rows: list[int] | None = None,
    num_states: int | None = None,
) -> Round:
    """A round of rows given by the parents' places within the row (-1 first) and by their contexts."""
    generator = torch.Generator().manual_seed(seed)
    parents: list[int] = []
    rows: list[int] = []
    positions: list[int] = []
    first = [0]
    for row, (tree, base) in enumerate(zip(trees, cached, strict=True)):
        begin = len(parents)
        for parent in tree:
            parents.append(parent if parent < 0 else begin + parent)
            positions.append(base if parent < 0 else positions[begin + parent] + 1)
            rows.append(row)
        first.append(len(parents))
    first += [first[-1]] * empty_rows
    lengths = [base + len(tree) for base, tree in zip(cached, trees, strict=True)]
    num_states = num_states or len(trees) + 2
    pages_each = max(-(-length // page_size) for length in lengths)
    tables = torch.randperm(num_states * pages_each, generator=generator).view(num_states, pages_each)
    states = state_rows or torch.randperm(num_states, generator=generator)[: len(trees)].tolist()

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return Round(
        parents=ints(parents + [-1] * padding),
        rows=ints(rows + [-1] * padding),
        positions=ints(positions + [0] * padding),
        first=ints(first),
        cached_len=ints(cached + [0] * empty_rows),
        table_rows=ints(states + [0] * empty_rows),
        page_tables=tables.to(torch.int32).to(device),
        page_size=page_size,
        max_row_tokens=max_row_tokens or max(len(tree) for tree in trees),
    )


def chain(length: int) -> list[int]:
    """Each token the parent of the next."""
    return list(range(-1, length - 1))


def random_tree(length: int, seed: int, extend: int = 1) -> list[int]:
    """`extend` tokens in a chain, then nodes below the last of them or below each other."""
    generator = torch.Generator().manual_seed(seed)
    tree = chain(extend)
    while len(tree) < length:
        tree.append(int(torch.randint(extend - 1, len(tree), (1,), generator=generator)))
    return tree

from __future__ import annotations

import random
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.frontier_state import (
    BASE,
    NUM_FIELDS,
    PARENT,
    POSITION,
    ROW,
    SCORE,
    SLOT,
    TOKEN,
    BurstRows,
    CandidatePool,
    CommittedTokens,
    GrownTrees,
    MergeLimits,
    NodePicker,
)
from kernels.reference import round_trees as reference
from kernels.round_trees import lay_out_committed, merge_trees, pick_nodes, plant_roots
from kernels.sampling_state import RoundTokens

PAGE = 4
TABLES = 9
NUM_TOKENS = 6
"""Different tokens of nodes: few, so that trees of different origin have some in common."""


def ints(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def same(ours: Any, theirs: Any, *names: str) -> None:
    for name in names or [field.name for field in fields(ours)]:
        actual, expected = getattr(ours, name), getattr(theirs, name)
        assert torch.equal(actual.cpu(), expected.cpu()), f"{name}: {actual.tolist()} instead of {expected.tolist()}"


def to(thing: Any, device: str) -> Any:
    return type(thing)(**{field.name: getattr(thing, field.name).clone().to(device) for field in fields(thing)})


def make_round(source: random.Random, num_slots: int, num_rows: int, num_nodes: int = 0) -> RoundTokens:
    """Rows with one to three committed tokens, some of which do not sample, and padding.

    `num_nodes`: nodes below a root at most, no two of one token below one node.
    """
    tokens, positions, parents, rows, first, root = [], [], [], [], [0], []
    real = source.randint(1, num_rows)
    for row in range(real):
        cached, extend = source.randint(0, 20), source.choice([1, 1, 1, 3])
        if len(tokens) + extend > num_slots:
            extend = 0
        for index in range(extend):
            parents.append(len(tokens) - 1 if index else -1)
            tokens.append(source.randint(0, 99))
            positions.append(cached + index)
            rows.append(row)
        root.append(len(tokens) - 1 if extend and source.random() < 0.8 else -1)
        for _ in range(source.randint(0, num_nodes) if root[-1] >= 0 else 0):
            above, token = source.choice([root[-1], len(tokens) - 1]), source.randrange(NUM_TOKENS)
            if (above, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                positions.append(positions[above] + 1)
                parents.append(above)
                rows.append(row)
        first.append(len(tokens))
    rest = num_slots - len(tokens)
    tables = source.sample(range(TABLES - 1), real) + [TABLES - 1] * (num_rows - real)
    return RoundTokens(
        token_ids=ints(tokens + [0] * rest, "cpu"),
        positions=ints(positions + [0] * rest, "cpu"),
        parents=ints(parents + [-1] * rest, "cpu"),
        rows=ints(rows + [-1] * rest, "cpu"),
        first=ints(first + [first[-1]] * (num_rows - real), "cpu"),
        root=ints(root + [-1] * (num_rows - real), "cpu"),
        table_rows=ints(tables, "cpu"),
        cached_len=ints([0] * num_rows, "cpu"),
    )


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("seed", range(6))
def test_what_a_round_committed_is_laid_out_as_by_the_reference(device: str, seed: int, lag: int) -> None:
    source = random.Random(seed)
    num_rows, num_slots = source.choice([1, 2, 5, 8]), 24
    tokens = make_round(source, num_slots, num_rows)
    counts = [source.randint(0, 3) if root >= 0 else 0 for root in tokens.root.tolist()]
    # As a round's output lies: counts and tokens are columns of one piece of memory.
    output = torch.randint(0, 99, (num_rows, 8), dtype=torch.int32)
    output[:, 0] = torch.tensor(counts)
    drafts = ints([source.randint(0, 3) and 1 for _ in range(num_rows)], "cpu")
    pages = torch.randperm(TABLES * 8).int().view(TABLES, 8)
    theirs = CommittedTokens.new(num_slots, num_rows, torch.device("cpu"))
    # Rows that leave out pages begin behind them.
    shifts = ints([source.choice([0, 1, 3]) for _ in range(TABLES)], "cpu")
    tokens.positions.add_(shifts[tokens.table_rows[tokens.rows.clamp(min=0).long()].long()] * PAGE + PAGE)
    reference.lay_out_committed(tokens, output[:, 0], output[:, 2:6], drafts, pages, shifts, theirs, PAGE, lag, 999)
    ours = to(CommittedTokens.new(num_slots, num_rows, torch.device("cpu")), device)
    there = output.to(device)
    lay_out_committed(
        to(tokens, device), there[:, 0], there[:, 2:6], drafts.to(device), pages.to(device),
        shifts.to(device), ours,
        page_size=PAGE, lag=lag, spare=999,
    )  # fmt: skip
    same(ours, theirs)
    drafted = [c * d for c, d in zip(counts, drafts.tolist(), strict=True)]
    assert int(theirs.first[-1]) == sum(drafted)


def make_pool(source: random.Random, num_trees: int, size: int) -> tuple[CandidatePool, list[int]]:
    """Trees whose nodes have lower scores than their parents; returns the pool and its best entries, best first."""
    entries = torch.zeros(NUM_FIELDS, size, dtype=torch.int32)
    paths: list[float] = []
    for index in range(size):
        tree = source.randrange(num_trees)
        above = [e for e in range(index) if entries[ROW, e] == tree and entries[SLOT, e] >= 0]
        parent = source.choice([*above[-3:], -1])
        slot = int(entries[SLOT, parent]) if parent >= 0 else -1
        beside = {
            int(entries[TOKEN, e]) for e in range(index) if entries[ROW, e] == tree and entries[PARENT, e] == slot
        }
        free = sorted(set(range(NUM_TOKENS)) - beside) or [NUM_TOKENS + index]
        entries[ROW, index], entries[TOKEN, index] = tree, source.choice(free)
        entries[PARENT, index] = slot
        entries[POSITION, index] = entries[POSITION, parent] + 1 if parent >= 0 else 30 + tree
        entries[SLOT, index] = index if source.random() < 0.7 else -1
        paths.append((paths[parent] if parent >= 0 else 0.0) - source.random())
    entries[BASE] = torch.tensor(paths, dtype=torch.float32).view(torch.int32)
    return CandidatePool(entries, 1), sorted(range(size), key=lambda entry: (-paths[entry], entry))


@pytest.mark.parametrize("seed", range(16))
def test_trees_are_hung_below_their_roots_as_by_the_reference(device: str, seed: int) -> None:
    source = random.Random(seed)
    num_rows, num_slots, num_trees = source.choice([1, 2, 5, 8]), 80, 4
    base = make_round(source, num_slots, num_rows, num_nodes=seed % 2 * 6)
    num_nodes = min(24, num_slots - int(base.first[-1]))
    pool, best = make_pool(source, num_trees, 40)
    order = best[: source.randint(0, num_nodes)]
    tree_tables = source.sample(range(TABLES - 1), num_trees)
    row_of = [-1] * TABLES
    for row, table in enumerate(base.table_rows.tolist()):
        if table in tree_tables and source.random() < 0.9:
            row_of[table] = row
            if (root := int(base.root[row])) >= 0:
                moved = 29 + tree_tables.index(table) - int(base.positions[root])
                base.positions[int(base.first[row]) : int(base.first[row + 1])] += moved
    pool.entries[ROW] = ints(tree_tables, "cpu")[pool.entries[ROW].long()]
    trees = GrownTrees(ints(order + [-1] * (num_nodes - len(order)), "cpu"), pool)
    limits = MergeLimits(
        row_of=ints(row_of, "cpu"),
        max_nodes=ints([source.choice([0, 2, 30, 30]) for _ in range(num_rows)], "cpu"),
        max_depth=ints([source.choice([1, 2, 9]) for _ in range(num_rows)], "cpu"),
        most=ints([source.choice([5, num_nodes, 99])], "cpu"),
    )
    theirs, their_scores = to(base, "cpu"), torch.zeros(num_slots)
    reference.merge_trees(base, trees, limits, theirs, their_scores)
    ours, our_scores = to(base, device), torch.zeros(num_slots, device=device)
    there = GrownTrees(trees.order.to(device), CandidatePool(pool.entries.to(device), 1))
    merge_trees(to(base, device), there, to(limits, device), ours, our_scores)
    same(ours, theirs)
    assert torch.equal(our_scores.cpu(), their_scores)
    check_round(base, theirs)
    check_union(base, trees, limits, theirs, their_scores)


def check_round(base: RoundTokens, out: RoundTokens) -> None:
    """Parents come before their children, one position behind them, in the same row; no token is lost."""
    for place, (row, parent) in enumerate(zip(out.rows.tolist(), out.parents.tolist(), strict=True)):
        if row < 0:
            continue
        assert int(out.first[row]) <= place < int(out.first[row + 1])
        if parent >= 0:
            assert parent < place and out.rows[parent] == row
            assert out.positions[parent] + 1 == out.positions[place]
    for row in range(base.table_rows.shape[0]):
        begin, end = int(base.first[row]), int(base.first[row + 1])
        moved = int(out.first[row])
        assert out.token_ids[moved : moved + end - begin].tolist() == base.token_ids[begin:end].tolist()


def paths_below(root: int, parents: list[int], tokens: list[int], end: int) -> list[tuple[int, ...]]:
    """Of each place behind the root, tokens from there on."""
    paths: dict[int, tuple[int, ...]] = {root: ()}
    for place in range(root + 1, end):
        paths[place] = (*paths[parents[place]], tokens[place])
    return list(paths.values())[1:]


def check_union(base: RoundTokens, trees: GrownTrees, limits: MergeLimits, out: RoundTokens, scores: Tensor) -> None:
    """A row's paths are its own and those of its tree, each once; the limits leave out the least likely ones."""
    entries, grown = trees.pool.entries, {}
    paths: dict[tuple[int, int], tuple[int, ...]] = {}
    for index in trees.order[: int(limits.most)].tolist():
        if index < 0:
            break
        tree, parent, slot = (int(entries[field, index]) for field in (ROW, PARENT, SLOT))
        path = (*(paths[tree, parent] if parent >= 0 else ()), int(entries[TOKEN, index]))
        if slot >= 0:
            paths[tree, slot] = path
        row = int(limits.row_of[tree])
        if row >= 0 and len(path) <= int(limits.max_depth[row]):
            grown.setdefault(row, {})[path] = float(entries[BASE].view(torch.float32)[index])
    for row in range(base.table_rows.shape[0]):
        if (root := int(base.root[row])) < 0:
            continue
        own = paths_below(root, base.parents.tolist(), base.token_ids.tolist(), int(base.first[row + 1]))
        there, end = int(out.root[row]), int(out.first[row + 1])
        found = paths_below(there, out.parents.tolist(), out.token_ids.tolist(), end)
        tree = grown.get(row, {})
        wanted = [*own, *[path for path in tree if path not in own][: int(limits.max_nodes[row])]]
        assert found == wanted
        assert scores[there + 1 : end].tolist() == [tree.get(path, 1.0) for path in found]


@pytest.mark.parametrize("lag", [0, 1])
def test_roots_are_planted_as_by_the_reference(device: str, lag: int) -> None:
    num_rows, branching, region = 5, 3, 32
    at = CommittedTokens.new(16, num_rows, torch.device("cpu"))
    at.draft_rows.copy_(ints([4, -1, 2, 0, -1], "cpu"))
    at.table_rows.copy_(ints([4, 7, 2, 0, 8], "cpu"))
    at.root_positions.copy_(ints([9, 0, 17, 3, 0], "cpu"))
    at.context_len.copy_(ints([10 - lag, 0, 2, 4 - lag, 0], "cpu"))
    tokens = torch.randint(-1, 50, (num_rows, branching), dtype=torch.int32)
    scores = -torch.rand(num_rows, branching)
    found = []
    for where in ("cpu", device):
        seeds = num_rows * branching
        pool = CandidatePool(torch.full((NUM_FIELDS, seeds + 20), 7, dtype=torch.int32, device=where), seeds)
        empty = [torch.full((num_rows,), 5, dtype=torch.int32, device=where) for _ in range(4)]
        live = torch.zeros(num_rows, region // 32, dtype=torch.int32, device=where)
        free = torch.zeros(num_rows, region, dtype=torch.int32, device=where)
        rows, header = BurstRows(*empty, live, free), torch.zeros(4, dtype=torch.int32, device=where)
        plant = reference.plant_roots if len(found) == 0 else plant_roots
        plant(header, pool, rows, to(at, where), tokens.to(where), scores.to(where), -4.5, lag)
        found.append((header, pool.entries, rows))
    (their_header, their_entries, their_rows), (header, entries, rows) = found
    assert torch.equal(header.cpu(), their_header)
    assert torch.equal(entries.cpu(), their_entries)
    same(rows, their_rows)


def test_the_best_nodes_of_all_trees_are_picked_whether_they_were_run_or_not(device: str) -> None:
    source = random.Random(3)
    seeds, width, branching, num_steps = 4, 4, 5, 2
    pool, best = make_pool(source, 3, seeds + 3 * width * branching)
    entries = pool.entries.to(device)
    # A third step was not run: what lies there is of an earlier round.
    used = seeds + num_steps * width * branching
    best = [entry for entry in best if entry < used]
    entries[SCORE] = torch.full((entries.shape[1],), float("-inf")).view(torch.int32)
    header = ints([num_steps, seeds, int(torch.tensor(-2.0).view(torch.int32)), 0], device)
    picker = NodePicker.new(GrownTrees.new(8, torch.device(device)), 6, entries.shape[1], 3, -2.0)
    tree_tables = ints([5, 7, 2], device)
    pick_nodes(header, CandidatePool(entries, seeds), tree_tables, width * branching, picker)
    paths = entries[BASE].view(torch.float32)
    wanted = [entry for entry in best if paths[entry] >= -2.0][:6]
    order = picker.trees.order.tolist()
    assert order == [*range(len(wanted)), *[-1] * (8 - len(wanted))]
    found = picker.trees.pool.entries[:, : len(wanted)].cpu()
    for name in (TOKEN, POSITION, PARENT, SLOT, BASE):
        assert torch.equal(found[name], entries[name, wanted].cpu())
    assert found[ROW].tolist() == [[5, 7, 2][tree] for tree in entries[ROW, wanted].tolist()]

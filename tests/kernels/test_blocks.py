"""Blocks of a block head: roots, layout, what is kept and read, all by the torch references."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from examples import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import blocks
from kernels.frontier_state import BlockRoots, BlockStore, BurstRows, RegionPlan, StepTokens
from kernels.reference import blocks as reference

PAGE = 4
vary = settings(max_examples=examples(6), suppress_health_check=[HealthCheck.function_scoped_fixture])


class Shapes(NamedTuple):
    """Of a step: rows of the burst, table rows (and one for padding), nodes, words of a region, places of a block."""

    rows: int
    tables: int
    nodes: int
    words: int
    size: int


shapes = st.builds(
    lambda rows, more, nodes, words, size: Shapes(rows, rows + more, max(nodes, rows), words, size),
    st.integers(1, 8),
    st.integers(0, 2),
    st.integers(1, 33),
    st.integers(1, 3),
    st.integers(2, 40),
)


def some_ints(generator: torch.Generator, low: int, high: int, *size: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.randint(low, high, size, generator=generator, dtype=dtype)


def make_step(shape: Shapes, seed: int, device: str) -> tuple[StepTokens, BurstRows, RegionPlan, int]:
    """Nodes of some rows, padding behind; of each row the last one may be a root."""
    generator = torch.Generator().manual_seed(seed)
    count = int(some_ints(generator, 0, shape.nodes + 1, 1))
    region = shape.words * 32
    rows = some_ints(generator, 0, shape.rows, count).sort().values
    step = StepTokens.new(shape.nodes, shape.rows, shape.words, torch.device("cpu"))
    tables = torch.randperm(shape.tables, generator=generator)[: shape.rows].int()
    first_given = (shape.tables + 1) * region + 1
    step.rows[:count], step.table_rows[:count] = rows, tables[rows.long()]
    for row in range(shape.rows):
        own = (rows == row).nonzero()[:, 0]
        step.slots[own] = torch.randperm(region, generator=generator)[: len(own)].int()
        step.bases[own[-1:]] = 0.0
    step.token_ids[:count] = some_ints(generator, 0, 90, count)
    step.positions[:count] = some_ints(generator, 1, 90, count)
    step.kv_slots[:count] = some_ints(generator, 0, 90, count)
    step.mask.copy_(some_ints(generator, -(1 << 31), 1 << 31, shape.nodes, shape.words, dtype=torch.int64).int())
    step.sources[:count] = first_given - 1 + some_ints(generator, 0, 3, count, dtype=torch.int64)
    context = some_ints(generator, 0, 90, shape.rows)
    burst = BurstRows(tables, context, context, context, step.mask[: shape.rows], context[:, None])
    pages = some_ints(generator, 0, 90, shape.tables + 1, -(-(8 + region + shape.size) // PAGE))
    plan = RegionPlan(pages.to(device), torch.empty(0), PAGE, 8, 1)

    def on_device(one: Any) -> Any:
        return type(one)(*(getattr(one, name).to(device) for name in one.__slots__))

    return on_device(step), on_device(burst), plan, first_given


@given(shape=shapes, seed=st.integers(0, 1 << 20))
@vary
def test_roots_are_found_and_laid_out_as_by_torch(shape: Shapes, seed: int, device: str) -> None:
    step, rows, plan, first_given = make_step(shape, seed, device)
    region = shape.words * 32
    injected = torch.randint(0, 2, (shape.tables + 1, region), dtype=torch.int8, device=device)
    expected = injected.clone()
    wanted = [torch.empty(size, dtype=torch.int32, device=device) for size in (shape.nodes, shape.rows, shape.rows)]
    reference.find_roots(step, first_given, expected, *wanted)
    slots, roots = blocks.find_roots(step, rows, first_given, injected)
    for mine, other in zip((injected, slots, roots.places, roots.positions), (expected, *wanted), strict=True):
        assert torch.equal(mine, other)
    for seen in (None, (step.mask, injected)):
        layout = blocks.lay_out_blocks(roots, plan, region, shape.size, 77, seen)
        other_layout = type(layout)(*(torch.full_like(one, 55) for one in layout))
        reference.lay_out_blocks(roots, plan, region, 77, seen, other_layout)
        for name, mine, other in zip(layout._fields, layout, other_layout, strict=True):
            assert torch.equal(mine, other), name
    blocks.forget_injected(step, injected)
    reference.forget_injected(step, expected)
    assert torch.equal(injected, expected)


def test_a_lone_root_by_hand(device: str) -> None:
    """Row 1 of 2 has a root, which sees, of the slots that its mask has, those with keys of features."""
    plan = RegionPlan(torch.tensor([[0, 9], [5, 6]], dtype=torch.int32, device=device), torch.empty(0), 40, 0, 1)
    step = StepTokens.new(3, 2, 1, torch.device(device))
    ints = [([1, 1], step.rows), ([1, 1], step.table_rows), ([3, 4], step.slots), ([60, 61], step.token_ids)]
    for values, into in [*ints, ([7, 8], step.positions), ([20, 21], step.kv_slots), ([5, 9], step.sources)]:
        into[:2] = torch.tensor(values)
    step.mask[1] = 0b11010
    step.bases[1] = 0.0
    rows = BurstRows(*(torch.arange(2, dtype=torch.int32, device=device) for _ in range(4)), step.mask, step.mask)
    injected = torch.zeros(2, 32, dtype=torch.int8, device=device)
    injected[1, [1, 2, 3]] = 1
    slots, roots = blocks.find_roots(step, rows, 6, injected)
    assert slots.tolist() == [-1, 21, -1]
    assert roots.places.tolist() == [-1, 1] and roots.positions.tolist() == [0, 8]
    assert injected[1].nonzero()[:, 0].tolist() == [1, 2, 4] and not injected[0].any()
    layout = blocks.lay_out_blocks(roots, plan, 32, 3, 90, (step.mask, injected))
    assert layout.tokens.tolist() == [0, 61] and layout.rows.tolist() == [-1, 1]
    assert layout.token_ids.tolist() == [0, 90, 90, 61, 90, 90]
    assert layout.positions.tolist() == [0, 1, 2, 8, 9, 10] and layout.first.tolist() == [0, 3, 6]
    assert layout.slots.tolist() == [-1] * 3 + [5 * 40 + 32, 5 * 40 + 33, 5 * 40 + 34]
    assert layout.mask.tolist() == [[0, 0b111]] * 3 + [[0b10010, 0b111]] * 3


def make_store(num_requests: int, guesses: int, hidden: int, vocab: int, dtype: torch.dtype, device: str) -> BlockStore:
    return BlockStore(
        torch.full((num_requests,), -(1 << 30), dtype=torch.int32, device=device),
        torch.randn(num_requests * guesses, hidden, device=device).to(dtype),
        torch.randn(num_requests * guesses, vocab, device=device),
    )


@given(
    num_roots=st.integers(1, 8),
    guesses=st.integers(1, 7),
    hidden=st.sampled_from([16, 100, 2100]),
    vocab=st.sampled_from([30, 2049]),
    state_size=st.sampled_from([0, 6, 130]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1 << 20),
)
@vary
def test_what_is_kept_is_read_as_by_torch(
    num_roots: int, guesses: int, hidden: int, vocab: int, state_size: int, dtype: torch.dtype, seed: int, device: str
) -> None:
    torch.manual_seed(seed)
    found = make_store(num_roots + 1, guesses, hidden, vocab, dtype, device)
    expected = BlockStore(*(one.clone() for one in found))
    # One request of padding, which several roots must not write at once: who is last is open.
    where = torch.randperm(num_roots + 1)[:num_roots].to(torch.int32)
    where = torch.where(where == num_roots, -1, where).to(device)
    begins = torch.randint(0, 50, (num_roots,), dtype=torch.int32, device=device)
    rows = torch.randn(num_roots * guesses, hidden, device=device).to(dtype)
    logits = torch.randn(num_roots * guesses, vocab, device=device)
    blocks.keep_blocks(found, where, begins, rows, logits)
    reference.keep_blocks(expected, where, begins, rows, logits)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)
    nodes = torch.randint(-1, num_roots + 1, (9,), dtype=torch.int32, device=device)
    positions = found.begins[nodes.long()] + torch.randint(-1, guesses + 2, (9,), dtype=torch.int32, device=device)
    for added in (None, torch.randn(9, vocab, device=device)):
        read = blocks.read_logits(found, nodes, positions, added)
        other_read = torch.empty_like(read)
        reference.read_logits(found, nodes, positions, added, other_read)
        assert torch.equal(read, other_read)
    memory = torch.randn(9, state_size + 3, device=device).to(dtype)[:, :state_size]
    tokens, embedding = nodes + 1, torch.randn(num_roots + 2, 6, device=device).to(dtype)
    inputs = blocks.read_inputs(found, nodes, positions, memory, tokens, embedding)
    wanted = torch.empty_like(inputs)
    reference.read_inputs(found, nodes, positions, memory, tokens, embedding, wanted)
    assert torch.equal(inputs, wanted)


def test_nothing_is_guessed_outside_of_a_block(device: str) -> None:
    store = make_store(2, 3, 4, 5, torch.float32, device)
    rows, logits = torch.randn(3, 4, device=device), torch.randn(3, 5, device=device)
    where, begin = torch.tensor([0], device=device), torch.tensor([20], device=device)
    blocks.keep_blocks(store, where, begin, rows, logits)
    positions = torch.tensor([19, 20, 22, 23, 20], device=device)
    nodes = torch.tensor([0, 0, 0, 0, 1], device=device)
    found = blocks.read_logits(store, nodes, positions)
    nothing = torch.full((5,), -torch.inf, device=device)
    assert torch.equal(found, torch.stack([nothing, logits[0], logits[2], nothing, nothing]))
    memory, embedding = torch.full((5, 1), 7.0, device=device), torch.tensor([[2.0], [3.0]], device=device)
    inputs = blocks.read_inputs(store, nodes, positions, memory, nodes, embedding)
    assert inputs[:, :2].tolist() == [[7, 2], [0, 2], [7, 2], [7, 2], [7, 3]]
    assert torch.equal(inputs[:4, 2:], rows[[0, 0, 2, 2]])
    with pytest.raises(ValueError, match="float16"):
        blocks.read_inputs(store, nodes, positions, memory.half(), nodes, embedding)


def test_what_does_not_fit_is_refused(device: str) -> None:
    store = make_store(2, 3, 4, 5, torch.float32, device)
    where = torch.zeros(1, dtype=torch.int32, device=device)
    rows, logits = torch.zeros(3, 4, device=device), torch.zeros(3, 5, device=device)
    with pytest.raises(ValueError, match="guesses"):
        blocks.keep_blocks(store, where, where, rows[:2], logits)
    with pytest.raises(ValueError, match="added"):
        blocks.read_logits(store, where, where, logits)
    step, rows_of, plan, first_given = make_step(Shapes(2, 2, 4, 1, 3), 0, device)
    with pytest.raises(ValueError, match="int8"):
        blocks.find_roots(step, rows_of, first_given, torch.zeros(3, 32, device=device))
    _, roots = blocks.find_roots(step, rows_of, first_given, torch.zeros(3, 32, dtype=torch.int8, device=device))
    assert isinstance(roots, BlockRoots)
    with pytest.raises(ValueError, match="regions of 64"):
        blocks.lay_out_blocks(roots, plan, 64, 3, 90, (step.mask, torch.zeros(3, 32, dtype=torch.int8, device=device)))

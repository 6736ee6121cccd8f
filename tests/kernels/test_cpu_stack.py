"""Decoder layers in one function against the same in float64, and rows by themselves against rows beside others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_products import made
from torch import Tensor

from kernels.cpu.layout import GROUP, StackShape
from kernels.cpu.products import MAX_ROWS
from kernels.cpu.stack import DecoderStack, LayerWeights, Queries, StackPlan, pieces

pytestmark = pytest.mark.usefixtures("isa")
EPS, NUM_LAYERS = 1e-5, 2
WIDE = StackShape(96, 4, 2, 32, 160, EPS, 32**-0.5)
SHAPES = [
    WIDE,
    StackShape(64, 2, 2, 64, 96, EPS, 0.2, kind="half"),
    StackShape(64, 2, 1, 64, 96, EPS, 0.2, kind="eight"),
    StackShape(128, 9, 1, 64, 96, EPS, 0.125, has_bias=True, has_qk_norm=True),
    StackShape(64, 8, 2, 128, 32, EPS, 0.1, kind="half", has_bias=True),
]


class Made(NamedTuple):
    """Layers, the same in float64, and a cache's keys and values."""

    shape: StackShape
    layers: list[LayerWeights]
    wide: list[dict[str, Tensor | None]]
    keys: list[Tensor]
    values: list[Tensor]


def layers_of(shape: StackShape, num_slots: int = 80) -> Made:
    """Layers of random weights."""
    generator = torch.Generator().manual_seed(shape.hidden)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    layers, wide = [], []
    heads, width = shape.num_qkv_heads * shape.head_dim, shape.num_heads * shape.head_dim
    sizes = {
        "qkv": (heads, shape.hidden),
        "output": (shape.hidden, width),
        "gate_up": (2 * shape.inner, shape.hidden),
        "down": (shape.hidden, shape.inner),
    }
    for number in range(NUM_LAYERS):
        matrices = {name: made(shape.kind, *size, seed=number) for name, size in sizes.items()}
        others = {
            "attention_norm": 1 + normal(shape.hidden) / 10,
            "mlp_norm": 1 + normal(shape.hidden) / 10,
            "qkv_bias": normal(heads) if shape.has_bias else None,
            "qk_norm": 1 + normal(shape.num_qkv_heads - shape.num_kv_heads, shape.head_dim) / 10
            if shape.has_qk_norm
            else None,
        }
        layers.append(LayerWeights(**{name: packed for name, (packed, _) in matrices.items()}, **others))
        wide.append({name: exact for name, (_, exact) in matrices.items()} | others)
    cache = (num_slots, shape.num_kv_heads, shape.head_dim)
    keys, values = ([normal(*cache).bfloat16() for _ in layers] for _ in range(2))
    return Made(shape, layers, wide, keys, values)


def normed(rows: Tensor, weight: Any) -> Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPS) * weight


def exact(of: Made, stream: Tensor, queries: list[Queries], own: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """The layers in float64."""
    shape, stream = of.shape, stream.double()
    cos, sin = (part.double().unsqueeze(1) for part in angles)
    turned = shape.num_heads + shape.num_kv_heads
    for layer, keys, values in zip(of.wide, of.keys, of.values, strict=True):
        made_heads = normed(stream, layer["attention_norm"]) @ layer["qkv"].T
        if layer["qkv_bias"] is not None:
            made_heads = made_heads + layer["qkv_bias"]
        heads = made_heads.view(len(stream), -1, shape.head_dim)
        qk = heads[:, :turned] if layer["qk_norm"] is None else normed(heads[:, :turned], layer["qk_norm"])
        qk = qk * cos + qk.roll(shape.head_dim // 2, -1) * sin
        all_keys, all_values = keys.double(), values.double()
        all_keys[own], all_values[own] = qk[:, shape.num_heads :], heads[:, turned:]
        attended, first = [], 0
        for part in queries:
            k, v = (cache[part.slots].repeat_interleave(shape.group, 1) for cache in (all_keys, all_values))
            scores = torch.einsum("qhd,khd->hqk", qk[first : first + part.rows, : shape.num_heads], k) * shape.scale
            if part.mask is not None:
                scores[:, :, -part.mask.shape[1] :].masked_fill_(~part.mask, -torch.inf)
            attended.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
            first += part.rows
        stream = stream + torch.cat(attended) @ layer["output"].T
        gate, up = (normed(stream, layer["mlp_norm"]) @ layer["gate_up"].T).chunk(2, 1)
        stream = stream + torch.nn.functional.silu(gate) * up @ layer["down"].T
    return stream


def run(
    of: Made, stream: Tensor, queries: list[Queries], own: Tensor, angles: tuple[Tensor, Tensor], threads: int = 2
) -> tuple[Tensor, list[Tensor]]:
    """The stream behind the layers, and what the caches hold then."""
    # Each row has a position of its own, at which the table has its angles.
    positions = torch.arange(len(own)).flip(0)
    tables = angles[0][positions].bfloat16().unsqueeze(1), angles[1][positions].bfloat16().unsqueeze(1)
    kept = torch.empty_like(stream)
    caches = [tensor.clone() for tensor in of.keys], [tensor.clone() for tensor in of.values]
    found, before = stream.clone(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = 0
        for piece in pieces(queries, own, positions):
            plan = DecoderStack(of.shape, of.layers).plan(*piece, tables, caches)
            rows = slice(first, first + plan.rows)
            plan.run(found[rows], {1: kept[rows]})
            first += plan.rows
    finally:
        torch.set_num_threads(before)
    return found, [*caches[0], *caches[1]]


def angles_of(count: int, size: int) -> tuple[Tensor, Tensor]:
    turned = torch.randn(count, size // 2, generator=torch.Generator().manual_seed(count))
    cos, sin = turned.cos().bfloat16().float(), turned.sin().bfloat16().float()
    return torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)


def tree_mask(rows: int, generator: torch.Generator) -> Tensor:
    """Who is whose ancestor in some forest of as many nodes."""
    mask = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        parent = int(torch.randint(-1, row, (), generator=generator))
        if parent >= 0:
            mask[row] |= mask[parent]
    return mask


@settings(max_examples=40)
@given(
    # Each shape in as many threads, and its rows alone, for each of which it would be compiled anew.
    case=st.sampled_from([*zip(SHAPES, ((3, 2), (1, 2), (3, 2), (3, 3), (1, 1)), strict=True)]),
    parts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_layers_are_those_of_the_wide_weights_and_rows_do_not_depend_on_others(
    case: tuple[StackShape, tuple[int, int]], parts: list[tuple[int, int]], seed: int
) -> None:
    shape, (threads, threads_alone) = case
    while sum(rows for rows, _ in parts) > MAX_ROWS:
        parts = parts[1:]
    of, generator = layers_of(shape), torch.Generator().manual_seed(seed)
    slots = torch.randperm(80, generator=generator).split([rows + seen for rows, seen in parts] + [
        80 - sum(rows + seen for rows, seen in parts)
    ])  # fmt: skip
    queries = []
    for (rows, _), places in zip(parts, slots[:-1], strict=True):
        queries.append(Queries(rows, places, tree_mask(rows, generator) if rows > 1 else None))
    own = torch.cat([part.slots[-part.rows :] for part in queries])
    stream, angles = (
        torch.randn(len(own), shape.hidden, generator=generator).bfloat16(),
        angles_of(len(own), shape.head_dim),
    )
    found, caches = run(of, stream, queries, own, angles, threads)
    wanted = exact(of, stream, queries, own, angles)
    assert (found - wanted).norm() < 0.012 * wanted.norm()

    # The first node of each forest, and the last one with its ancestors.
    first = 0
    for part in queries:
        for row in {0, part.rows - 1}:
            seen = [row] if part.mask is None else part.mask[row].nonzero().flatten().tolist()
            before = part.slots[: len(part.slots) - part.rows]
            alone = Queries(len(seen), torch.cat((before, part.slots[len(before) :][seen])), None)
            if len(seen) > 1 and part.mask is not None:
                alone = alone._replace(mask=part.mask[seen][:, seen])
            rows = [first + place for place in seen]
            turned = angles[0][rows], angles[1][rows]
            by_itself, _ = run(of, stream[rows], [alone], own[rows], turned, threads_alone)
            assert torch.equal(by_itself[-1], found[first + row])
        first += part.rows
    untouched = torch.ones(80, dtype=torch.bool)
    untouched[own] = False
    for cache, given_before in zip(caches, [*of.keys, *of.values], strict=True):
        assert torch.equal(cache[untouched], given_before[untouched])


@settings(max_examples=20)
@given(counts=st.lists(st.integers(1, MAX_ROWS), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_more_rows_run_in_pieces_and_have_the_same_bits(counts: list[int], seed: int) -> None:
    of, generator = layers_of(WIDE, 5 * MAX_ROWS + 20), torch.Generator().manual_seed(seed)
    slots = torch.randperm(5 * MAX_ROWS + 20, generator=generator)
    context, places = slots[:20], slots[20 : 20 + sum(counts)].split(counts)
    masks = [
        tree_mask(count, generator) if number % 2 else torch.ones(count, count, dtype=torch.bool).tril()
        for number, count in enumerate(counts)
    ]
    explicit = [Queries(len(own), torch.cat((context, own)), mask) for own, mask in zip(places, masks, strict=True)]
    queries = [part if number % 2 else part._replace(mask=None) for number, part in enumerate(explicit)]
    stream = torch.randn(sum(counts), WIDE.hidden, generator=generator).bfloat16()
    angles = angles_of(len(stream), WIDE.head_dim)
    found, caches = run(of, stream, queries, torch.cat(places), angles)
    first = 0
    for part, own in zip(explicit, places, strict=True):
        rows = slice(first, first + part.rows)
        by_itself, kept = run(of, stream[rows], [part], own, (angles[0][rows], angles[1][rows]))
        assert torch.equal(by_itself, found[rows])
        for cache, wanted in zip(caches, kept, strict=True):
            assert torch.equal(cache[own], wanted[own])
        first += part.rows


def test_the_stream_is_kept_as_it_enters_a_layer() -> None:
    of = layers_of(WIDE)
    stream = torch.randn(5, WIDE.hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
    own, tables = torch.arange(5), tuple(part.bfloat16().unsqueeze(1) for part in angles_of(5, WIDE.head_dim))
    queries = [Queries(5, own, torch.eye(5, dtype=torch.bool))]

    def plan(layers: list[LayerWeights]) -> StackPlan:
        caches = of.keys[: len(layers)], of.values[: len(layers)]
        return DecoderStack(WIDE, layers).plan(queries, own, own, tables, caches)

    kept, behind = [torch.empty_like(stream) for _ in of.layers], [stream.clone(), stream.clone()]
    plan(of.layers).run(behind[0], dict(enumerate(kept)))
    plan(of.layers[:1]).run(behind[1])
    assert torch.equal(kept[0], stream) and torch.equal(kept[1], behind[1])


def test_keys_of_a_long_text_and_scores_far_apart() -> None:
    of = layers_of(WIDE, 3000)
    for cache in of.keys:
        cache *= 40
    slots = torch.randperm(3000, generator=torch.Generator().manual_seed(0))
    own, angles = slots[-3:], angles_of(3, WIDE.head_dim)
    stream = torch.randn(3, WIDE.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    queries = [Queries(3, slots, torch.ones(3, 3, dtype=torch.bool).tril())]
    found, _ = run(of, stream, queries, own, angles)
    wanted = exact(of, stream, queries, own, angles)
    assert (found - wanted).norm() < 0.03 * wanted.norm()


def test_threads_may_call_at_once() -> None:
    of, angles = layers_of(WIDE), angles_of(4, WIDE.head_dim)
    stream = torch.randn(4, WIDE.hidden).bfloat16()
    queries, own = [Queries(4, torch.arange(20), torch.ones(4, 4, dtype=torch.bool).tril())], torch.arange(16, 20)
    expected, _ = run(of, stream, queries, own, angles)
    with ThreadPoolExecutor(4) as pool:
        for found, _ in pool.map(lambda _: run(of, stream, queries, own, angles), range(40)):
            assert torch.equal(found, expected)


def test_what_it_does_not_take_is_refused() -> None:
    of = layers_of(WIDE)
    with pytest.raises(ValueError, match="has no function"):
        DecoderStack(StackShape(100, 4, 2, 32, 160, EPS, 1.0), of.layers)
    stack, caches = DecoderStack(WIDE, of.layers), (of.keys, of.values)
    where = torch.zeros(1, dtype=torch.int64), tuple(part.bfloat16().unsqueeze(1) for part in angles_of(1, 32))
    with pytest.raises(ValueError, match="2 slots for 1 rows"):
        stack.plan([Queries(1, torch.arange(4), None)], torch.arange(2), *where, caches)
    with pytest.raises(ValueError, match=f"{MAX_ROWS} can be taken"):
        many = MAX_ROWS + 1
        stack.plan([Queries(many, torch.arange(many), None)], torch.arange(many), *where, caches)
    with pytest.raises(ValueError, match="slots and positions are int64, side by side"):
        stack.plan([Queries(1, torch.arange(4).int(), None)], torch.arange(1), *where, caches)
    with pytest.raises(ValueError, match="a mask is bool"):
        stack.plan([Queries(1, torch.arange(4), torch.zeros(1, 1))], torch.arange(1), *where, caches)
    plan = stack.plan([Queries(1, torch.arange(4), None)], torch.arange(1), *where, caches)
    for stream in (torch.zeros(1, 96), torch.zeros(2, 96).bfloat16()):
        with pytest.raises(ValueError, match="is no stream of 1 rows in bfloat16"):
            plan.run(stream)
    query, one = [Queries(1, torch.arange(4), None)], torch.arange(1)
    for positions, angles, message in (
        (torch.arange(2), where[1], "1 rows need as many positions from 0 up to 1"),
        (one + 1, where[1], "from 0 up to 1"),
        (one - 1, where[1], "from 0 up to 1"),
        (one, angles_of(1, 32), r"angles are bfloat16 \[positions, 1, 32\]"),
    ):
        with pytest.raises(ValueError, match=message):
            stack.plan(query, one, positions, angles, caches)
    with pytest.raises(ValueError, match=r"streams of layers \[2\]; there are 2"):
        plan.run(torch.zeros(1, 96).bfloat16(), {2: torch.zeros(1, 96).bfloat16()})
    with pytest.raises(ValueError, match="is no stream of 1 rows in bfloat16"):
        plan.run(torch.zeros(1, 96).bfloat16(), {1: torch.zeros(2, 96).bfloat16()})
    assert not StackShape(96, 34, 2, 32, 160, EPS, 1.0).fits, "more queries than lanes"
    assert GROUP == 32

"""A step of a draft head in one function against the same in several."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cpu_products import made
from test_cpu_stack import EPS, angles_of, layers_of, tree_mask
from torch import Tensor

from kernels.cpu.head_step import HeadStep, HeadWeights, Links, Ranking, Stepped
from kernels.cpu.layout import StackShape
from kernels.cpu.products import tile_product
from kernels.cpu.rows import rms_norm, write_top_k
from kernels.cpu.stack import DecoderStack, LayerWeights, Queries, StackPlan

pytestmark = pytest.mark.usefixtures("isa")
HIDDEN, VOCAB, NUM_OUT, SLOTS = 64, 50, 96, 80
SHAPE = StackShape(HIDDEN, 2, 1, 64, 96, EPS, 0.2, kind="eight", qkv_input_size=2 * HIDDEN)


def head(kind: str, starts_normed: bool = False, leaves_normed: bool = False) -> SimpleNamespace:
    """Weights of a head of two layers, and caches."""
    plain = layers_of(SHAPE, SLOTS)
    heads = SHAPE.num_qkv_heads * SHAPE.head_dim
    qkv, _ = made("eight", heads, 2 * HIDDEN)
    layers = [LayerWeights(*layer)._replace(attention_norm=None, qkv=qkv) for layer in plain.layers]
    generator = torch.Generator().manual_seed(3)
    norms = [1 + torch.randn(HIDDEN, generator=generator) / 10 for _ in range(3)]
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    weights = HeadWeights(embedding, *norms, made(kind, NUM_OUT, HIDDEN)[0], starts_normed, leaves_normed)
    return SimpleNamespace(weights=weights, stack=DecoderStack(SHAPE, layers), keys=plain.keys, values=plain.values)


def by_parts(of: SimpleNamespace, plan: StackPlan, tokens: Tensor, links: Links, ranking: Ranking | None) -> Stepped:
    weights: HeadWeights = of.weights
    found = links.features[links.taken]
    hidden = rms_norm(found, weights.hidden_norm, EPS)
    rows = torch.cat((rms_norm(weights.embedding[tokens], weights.token_norm, EPS), hidden), 1)
    stream = hidden.clone() if weights.starts_normed else found.clone()
    plan.run(stream, qkv_input=rows)
    normed = rms_norm(stream, weights.final_norm, EPS)
    links.features[links.left] = normed if weights.leaves_normed else stream
    logits = tile_product(normed, weights.output, torch.float32)
    if ranking is None:
        return Stepped(logits)
    logits /= ranking.divisors[:, None]
    best = torch.empty(len(tokens), ranking.best, dtype=torch.int32), torch.empty(len(tokens), ranking.best)
    write_top_k(logits, ranking.ids, *best)
    return Stepped(logits, *best)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(("eight", "half")),
    flags=st.tuples(st.booleans(), st.booleans()),
    rows=st.integers(1, 20),
    before=st.integers(0, 40),
    best=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_it_has_the_bits_of_its_parts(
    kind: str, flags: tuple[bool, bool], rows: int, before: int, best: int, seed: int
) -> None:
    generator, earlier = torch.Generator().manual_seed(seed), torch.get_num_threads()
    slots = torch.randperm(SLOTS, generator=generator)[: before + rows]
    features = torch.randn(60, HIDDEN, generator=generator).bfloat16()
    places = torch.randperm(60, generator=generator)
    tokens = torch.randint(0, VOCAB, (rows,), generator=generator)
    ids = torch.randperm(NUM_OUT, generator=generator).int()
    ranking = Ranking(0.5 + torch.rand(rows, generator=generator), ids, best) if best else None
    tables = tuple(part.bfloat16().unsqueeze(1) for part in angles_of(rows, SHAPE.head_dim))
    queries = [Queries(rows, slots, tree_mask(rows, generator))]
    torch.set_num_threads(3)
    try:
        found, left = [], []
        for way in (lambda of, *arguments: HeadStep(SHAPE, of.weights)(*arguments), by_parts):
            of = head(kind, *flags)
            plan = of.stack.plan(queries, slots[-rows:], torch.arange(rows), tables, (of.keys, of.values))
            links = Links(features.clone(), places[:rows].contiguous(), places[rows : 2 * rows].contiguous())
            found.append(way(of, plan, tokens, links, ranking))
            left.append((links.features, *of.keys, *of.values))
    finally:
        torch.set_num_threads(earlier)
    for ours, theirs in zip((*found[0], *left[0]), (*found[1], *left[1]), strict=True):
        assert (ours is theirs is None) or torch.equal(ours, theirs)


def test_what_it_does_not_take_is_refused() -> None:
    of = head("half")
    with pytest.raises(ValueError, match="weights of four has no function"):
        HeadStep(SHAPE, of.weights._replace(output=made("four", NUM_OUT, HIDDEN)[0]))
    tables = tuple(part.bfloat16().unsqueeze(1) for part in angles_of(1, SHAPE.head_dim))
    one = torch.zeros(1, dtype=torch.int64)
    plan = of.stack.plan([Queries(1, torch.arange(4), None)], one, one, tables, (of.keys, of.values))
    step, features = HeadStep(SHAPE, of.weights), torch.zeros(5, HIDDEN).bfloat16()
    ids = torch.arange(NUM_OUT).int()
    for tokens, links, ranking, message in (
        (one.int(), Links(features, one, one), None, "int64, one for each of 1 rows"),
        (one + VOCAB, Links(features, one, one), None, f"a token of {VOCAB}; there are {VOCAB}"),
        (one, Links(features, one - 1, one), None, "a row taken of -1; there are 5"),
        (one, Links(features, one, one + 5), None, "a row left of 5; there are 5"),
        (one, Links(features.float(), one, one), None, "features torch.float32"),
        (one, Links(features, one, one), Ranking(torch.ones(2), ids, 1), "divisors are torch.float32"),
        (one, Links(features, one, one), Ranking(torch.ones(1), ids.long(), 1), "ids are torch.int32"),
        (one, Links(features, one, one), Ranking(torch.ones(1), ids, 65), f"the best 65 of {NUM_OUT}"),
    ):
        with pytest.raises(ValueError, match=message):
            step(plan, tokens, links, ranking)

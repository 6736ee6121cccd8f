"""Attention of nodes over a context and their own ancestors in a tree region."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from rounds import chain, make_round
from torch import Tensor

from kernels.attention import BranchSlots, branch_attention, list_branches, tree_attention
from kernels.attention_tiles import PLAIN_SCORES, SHORT_SPLITS, ScoreRules, TileConfig, short_tokens
from kernels.jit.branches import BRANCH_KEYS
from kernels.reference import attention as reference

SMALL = TileConfig(rows=16, keys=16, num_warps=4, num_stages=2)
HEADS = (4, 2, 16)
FULL_WORD = 1 << 32


def near(dtype: torch.dtype) -> dict[str, float]:
    """Sums of values of size one, in another order, and the weights rounded to the dtype before the second product.

    Over long contexts results are small: a step off must not hide a split that is missing.
    """
    step = torch.finfo(dtype).eps
    return {"rtol": 0.0, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2 * step, "atol": step}


@dataclass
class Step:
    """Some nodes of some trees, int32 on one device, and the caches."""

    first: Tensor
    cached_len: Tensor
    table_rows: Tensor
    page_tables: Tensor
    mask: Tensor
    base: int
    page_size: int
    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def lengths(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As attention takes them."""
        return self.page_tables, self.table_rows, self.first, self.cached_len

    def branches(self) -> BranchSlots:
        """By the kernel."""
        where = (self.mask, self.first, self.table_rows, self.page_tables)
        return list_branches(*where, base=self.base, page_size=self.page_size)

    def run(self, **options: object) -> Tensor:
        """By the kernels."""
        settings: dict[str, object] = {"num_splits": 1, "config": SMALL, **options}
        branches = self.branches()
        # Attention reads the lists before the launch in front of it has ended, which this one is.
        q = self.q.clone()
        return branch_attention(
            q, self.k, self.v, *self.lengths, branches, page_size=self.page_size,
            max_row_tokens=self.q.shape[0], scale=self.q.shape[2] ** -0.5, **settings,
        )  # type: ignore[arg-type]  # fmt: skip

    def listed(self) -> BranchSlots:
        """By the reference."""
        count, words = self.mask.shape
        found = BranchSlots(*(torch.zeros(*size, dtype=torch.int32) for size in ((count, words * 32), (count,))))
        where = (tensor.cpu() for tensor in (self.mask, self.first, self.table_rows, self.page_tables))
        reference.list_branches(*where, self.base, self.page_size, *found)
        return found

    def expected(self, rules: ScoreRules = PLAIN_SCORES) -> Tensor:
        """By the references."""
        out = torch.empty(self.q.shape[0], self.q.shape[1] * self.q.shape[2], dtype=self.q.dtype, device=self.q.device)
        listed = (part.to(self.q.device) for part in self.listed())
        scale = self.q.shape[2] ** -0.5
        where = (*self.lengths, *listed, self.page_size, scale, out, rules)
        return reference.branch_attention(self.q, self.k, self.v, *where)


def make_step(
    queries: list[int],
    contexts: list[int],
    lens: list[int],
    *,
    device: str,
    heads: tuple[int, int, int] = HEADS,
    dtype: torch.dtype = torch.float32,
    region: int = 64,
    page_size: int = 4,
    padding: int = 0,
    seed: int = 0,
) -> Step:
    """Rows of so many tokens each, over contexts and used slots; every token sees random slots, one at least."""
    generator = torch.Generator().manual_seed(seed)
    num_rows, num_tokens = len(queries), sum(queries) + padding
    base = -(-max(contexts) // page_size) * page_size + page_size
    pages_each = -(-(base + region) // page_size)
    tables = torch.randperm((num_rows + 1) * pages_each, generator=generator).view(num_rows + 1, pages_each)
    mask = torch.full((num_tokens, region // 32), -1, dtype=torch.int64)
    rows = [row for row, count in enumerate(queries) for _ in range(count)]
    for token, row in enumerate(rows):
        seen = torch.rand(region, generator=generator) < 0.4
        seen[lens[row] :] = False
        seen[int(torch.randint(lens[row], (1,), generator=generator))] = True
        mask[token] = (seen.view(-1, 32).long() << torch.arange(32)).sum(1)
    mask = torch.where(mask >= FULL_WORD // 2, mask - FULL_WORD, mask)
    first = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()])
    table_rows = torch.randperm(num_rows + 1, generator=generator)[:num_rows]
    slots = tables.numel() * page_size
    q = torch.randn(num_tokens, heads[0], heads[2], generator=generator).to(dtype)
    k, v = (torch.randn(slots, heads[1], heads[2], generator=generator).to(dtype) for _ in range(2))

    def ints(values: Tensor) -> Tensor:
        return values.to(torch.int32).to(device)

    return Step(
        first=ints(first), cached_len=ints(torch.tensor(contexts)), table_rows=ints(table_rows),
        page_tables=ints(tables), mask=ints(mask), base=base,
        page_size=page_size, q=q.to(device), k=k.to(device), v=v.to(device),
    )  # fmt: skip


QUERIES = [5, 1, 0, 9, 2]
CONTEXTS = [37, 0, 12, 16, 3]


@pytest.mark.parametrize("short", [False, True])
def test_rules_of_scores_equal_reference(short: bool, device: str) -> None:
    step = make_step(QUERIES, CONTEXTS, [20, 3, 1, 33, 64], device=device, padding=2)
    sinks = torch.randn(HEADS[0], generator=torch.Generator().manual_seed(3)).to(device)
    all_rules = ScoreRules(window=30), ScoreRules(softcap=1.5), ScoreRules(sinks=sinks), ScoreRules(24, 2.0, sinks)
    for rules, num_splits in zip(all_rules, (1, 3, 1, 3), strict=True):
        expected = step.expected(rules)
        assert (expected - step.expected()).abs().max() > 1e-2, "the rules make a difference"
        result = step.run(num_splits=num_splits, short=short, rules=rules)
        torch.testing.assert_close(result, expected, **near(torch.float32))


@pytest.mark.parametrize(("region", "lens"), [(32, [9, 1, 5, 32, 7]), (96, [96, 40, 9, 33, 1])])
def test_lists_equal_the_reference(region: int, lens: list[int], device: str) -> None:
    made = make_step(QUERIES, CONTEXTS, lens, device=device, region=region, padding=3)
    found, expected = made.branches(), made.listed()
    assert found.lens.tolist() == expected.lens.tolist() and found.lens[-3:].tolist() == [0, 0, 0]
    for slots, wanted, count in zip(found.slots.tolist(), expected.slots.tolist(), found.lens.tolist(), strict=True):
        assert slots[:count] == wanted[:count]


@pytest.mark.parametrize(
    ("num_splits", "dtype", "region", "lens"),
    [
        *((1, torch.float32, 32, [9, 1, 5, 32, 7]), (3, torch.float16, 32, [9, 1, 5, 32, 7])),
        *((1, torch.float16, 64, [64, 40, 9, 33, 1]), (3, torch.float32, 64, [64, 40, 9, 33, 1])),
    ],
)
def test_attention_equals_the_reference(
    region: int, lens: list[int], dtype: torch.dtype, num_splits: int, device: str
) -> None:
    made = make_step(QUERIES, CONTEXTS, lens, device=device, dtype=dtype, region=region, padding=3)
    result = made.run(num_splits=num_splits)
    torch.testing.assert_close(result, made.expected(), **near(dtype))
    assert not result[-3:].any(), "padding gets zeros"


@pytest.mark.parametrize("keys", [16, 32, 64])
@pytest.mark.parametrize("heads", [(9, 3, 16), (8, 2, 16)])
def test_branches_of_several_steps(heads: tuple[int, int, int], keys: int, device: str) -> None:
    """More ancestors than are looked at in one step, behind contexts that end anywhere in a tile."""
    made = make_step([7, 2, 3, 1], [45, 0, 63, 64], [256, 256, 130, 70], device=device, heads=heads, region=256)
    assert int(made.branches().lens.max()) > 2 * BRANCH_KEYS
    config = replace(SMALL, keys=keys)
    result = made.run(num_splits=1 if (heads[0] == 9) == (keys == 32) else 4, config=config)
    torch.testing.assert_close(result, made.expected(), **near(torch.float32))


@pytest.mark.parametrize(
    ("span", "rows", "num_splits"),
    [(1, 16, 4), (1, 32, 32), (1, 64, 32), (2, 16, 32), (2, 32, 4), (2, 64, 4), (100, 16, 4), (100, 64, 32)],
)
def test_splits_of_several_steps(span: int, rows: int, num_splits: int, device: str) -> None:
    """Of large tiles short contexts use some of the splits and long ones all of them."""
    made = make_step([3, 1, 2], [139, 0, 20], [60, 17, 64], device=device)
    result = made.run(num_splits=num_splits, config=replace(SMALL, span=span, rows=rows))
    torch.testing.assert_close(result, made.expected(), **near(torch.float32))


def test_what_no_mask_names_does_not_matter(device: str) -> None:
    """Between the context and the region, in unused slots and in slots of hidden nodes."""
    made = make_step([4, 2], [10, 3], [20, 64], device=device)
    before = made.run(num_splits=2)
    seen = torch.zeros(made.k.shape[0], dtype=torch.bool)
    for row in range(2):
        tokens = range(int(made.first[row]), int(made.first[row + 1]))
        named = [j for j in range(64) if any(int(made.mask[t, j // 32]) >> (j % 32) & 1 for t in tokens)]
        logical = torch.tensor([*range(int(made.cached_len[row])), *(made.base + j for j in named)])
        table = made.page_tables[int(made.table_rows[row])].cpu().long()
        seen[table[logical // 4] * 4 + logical % 4] = True
    made.k[~seen], made.v[~seen] = 1e4, -1e4
    assert torch.equal(made.run(num_splits=2), before)


@pytest.mark.parametrize(
    ("heads", "keys", "dtype"),
    [
        ((9, 3, 16), 16, torch.float32),
        ((9, 3, 16), 64, torch.float16),
        ((8, 2, 16), 64, torch.float32),
        ((2, 2, 16), 16, torch.float16),
    ],
)
def test_short_contexts(heads: tuple[int, int, int], keys: int, dtype: torch.dtype, device: str) -> None:
    """In one launch, whose programs have nothing, a part or all of their keys ahead; some contexts are not short."""
    ahead = SHORT_SPLITS * 2 * keys
    contexts = [2 * keys - 1, 0, 7 * keys, ahead + 3 * keys + 1, 8 * keys]
    made = make_step([7, 2, 0, 3, 1], contexts, [64, 9, 33, 64, 1], device=device, heads=heads, dtype=dtype, padding=9)
    result = made.run(short=True, config=replace(SMALL, keys=keys))
    torch.testing.assert_close(result, made.expected(), **near(dtype))
    assert not result[-9:].any(), "padding gets zeros"


@pytest.mark.parametrize("context", [0, 200])
def test_branches_of_several_turns_behind_short_contexts(context: int, device: str) -> None:
    """More ancestors than all programs of a tile look at together."""
    made = make_step([6], [context], [256], device=device, heads=(9, 3, 16), region=256)
    assert int(made.branches().lens.max()) > 90
    result = made.run(short=True, config=replace(SMALL, keys=16))
    torch.testing.assert_close(result, made.expected(), **near(torch.float32))


def test_padding_may_be_more_than_rows_can_have(device: str) -> None:
    made = make_step([3], [20], [9], device=device, heads=(9, 3, 16), padding=24)
    out = torch.ones(27, 9 * 16, device=device)
    tables, rows, first, cached = made.lengths
    shape = {"page_size": made.page_size, "max_row_tokens": 3, "num_splits": 1, "scale": 0.25, "short": True}
    where = (tables, rows, first, cached, made.branches())
    branch_attention(made.q.clone(), made.k, made.v, *where, out=out, **shape)  # type: ignore[arg-type]
    torch.testing.assert_close(out, made.expected(), **near(torch.float32))


def test_short_contexts_leave_counters_as_they_were(device: str) -> None:
    made = make_step([5, 3], [90, 7], [40, 60], device=device)
    first, second = (made.run(short=True, config=SMALL) for _ in range(2))
    torch.testing.assert_close(first, made.expected(), **near(torch.float32))
    assert torch.equal(first, second)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_token_without_keys_gets_zeros(num_splits: int, short: bool, device: str) -> None:
    made = make_step([2, 1], [0, 5], [3, 4], device=device)
    made.mask[:2] = 0
    result = made.run(num_splits=num_splits, short=short)
    assert not result[:2].any()
    torch.testing.assert_close(result, made.expected(), **near(torch.float32))


def test_branches_in_a_round_s_own_slots_are_its_tree(device: str) -> None:
    """Where the region begins at cached_len and every slot is a token, masks mean what they mean to a round."""
    made = make_round([chain(6)], [8], device=device).expand()
    q, k, v = (torch.randn(n, 2, 16, device=device) for n in (6, *[made.page_tables.numel() * 4] * 2))
    shape = {"page_size": 4, "max_row_tokens": 6, "scale": 0.25, "num_splits": 2, "config": SMALL}
    tables, rows, first, cached = made.lengths()
    branches = list_branches(made.mask, first, rows, tables, base=8, page_size=4)
    found = branch_attention(q, k, v, tables, rows, first, cached, branches, **shape)  # type: ignore[arg-type]
    expected = tree_attention(q, k, v, *made.lengths(), made.mask, **shape)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, **near(torch.float32))


def test_what_does_not_fit_is_refused(device: str) -> None:
    made = make_step([2, 1], [0, 5], [3, 4], device=device)
    with pytest.raises(ValueError, match="branches of 2 tokens for 3"):
        branches = BranchSlots(made.branches().slots[:2], made.branches().lens[:2])
        branch_attention(
            made.q, made.k, made.v, *made.lengths, branches, page_size=4, max_row_tokens=3, num_splits=1, scale=1.0
        )
    with pytest.raises(ValueError, match="num_splits"):
        made.run(num_splits=0)
    with pytest.raises(ValueError, match="a region at -1"):
        list_branches(made.mask, made.first, made.table_rows, made.page_tables, base=-1, page_size=4)


@pytest.mark.parametrize("short", [False, True])
def test_the_widest_heads_with_what_is_chosen_for_them(short: bool, device: str) -> None:
    made = make_step(QUERIES, CONTEXTS, [9, 1, 5, 32, 7], device=device, heads=(4, 1, 512))
    torch.testing.assert_close(made.run(short=short, config=None, num_splits=3), made.expected(), **near(torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (8, 1, 512)])
@pytest.mark.parametrize("num_splits", [1, 8, 24])
def test_large_regions(num_splits: int, heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    queries, contexts = [32, 1, 0, 8, 17], [1000, 0, 64, 4100, 129]
    for region, lens in ((768, [768, 1, 40, 200, 97]), (64, [64, 1, 40, 20, 33])):
        made = make_step(
            queries, contexts, lens, device=device, heads=heads, dtype=dtype, region=region, page_size=16, padding=6
        )
        torch.cuda.synchronize()
        for pdl in (False, True):
            result = made.run(num_splits=num_splits, config=None, pdl=pdl)
            torch.testing.assert_close(result, made.expected(), **near(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [(9, 3, 64), (14, 2, 64), (32, 8, 128), (8, 1, 512)])
@pytest.mark.parametrize("context", [0, 100, 500, 1100])
def test_short_contexts_of_real_heads(
    context: int, heads: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    assert short_tokens(64) == 1024 == 2 * short_tokens(128)
    for count in (8, 31, 64):
        made = make_step(
            [count, 2], [context, 40], [256, 33], device=device, heads=heads, dtype=dtype, region=256, page_size=16,
            padding=5,
        )  # fmt: skip
        torch.cuda.synchronize()
        for pdl in (False, True):
            result = made.run(config=None, short=True, pdl=pdl)
            torch.testing.assert_close(result, made.expected(), **near(dtype))


@pytest.mark.gpu
def test_many_rows_of_one_token(device: str) -> None:
    made = make_step(
        [1] * 64, [17 * row for row in range(64)], [1 + 4 * row for row in range(64)], device=device,
        heads=(9, 3, 64), dtype=torch.bfloat16, region=256, page_size=16,
    )  # fmt: skip
    result = made.run(num_splits=4, config=None)
    torch.testing.assert_close(result, made.expected(), **near(torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("short", [False, True])
def test_replays_of_a_graph_read_new_lengths(short: bool, device: str) -> None:
    made = make_step([8, 3], [700, 90], [256, 31], device=device, heads=(9, 3, 64), dtype=torch.bfloat16, region=256)
    made.run(num_splits=8, config=None, short=short)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = made.run(num_splits=8, config=None, short=short)
    for contexts, shift in (([700, 90], 0), ([3, 701], 1), ([64, 0], 2)):
        made.cached_len.copy_(torch.tensor(contexts))
        made.mask.copy_(made.mask.roll(shift, 0))
        graph.replay()
        torch.testing.assert_close(result, made.expected(), **near(torch.bfloat16))

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rounds import Round, chain, make_round, random_tree
from torch import Tensor

from kernels.attention import prefill_attention, tree_attention
from kernels.attention_tiles import (
    CHOSEN_SPLITS,
    MAX_SHARED_SPLITS,
    ScoreRules,
    TileConfig,
    choose_splits,
    exclusive_splits,
    max_tiles,
    mean_row_tokens,
    tree_config,
)
from kernels.jit import attention_parts
from kernels.reference import attention as reference

SMALL = TileConfig(rows=16, keys=16, num_warps=4, num_stages=2)
HEADS = (4, 2, 16)  # query heads, kv heads, size of a head
TREES = [random_tree(9, 1), chain(1), random_tree(6, 3, extend=2), random_tree(5, 4)]
CONTEXTS = [37, 0, 16, 3]
# The interpreter multiplies the bit patterns of bfloat16.
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def near(dtype: torch.dtype) -> dict[str, float]:
    """Sums of values of size one, in another order, and the weights rounded to the dtype before the second product."""
    return {"rtol": 0.0, "atol": 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps}


def caches(made: Round, heads: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; every slot that the round does not name holds what would show."""
    torch.manual_seed(1)
    device = made.parents.device
    slots = made.page_tables.numel() * made.page_size
    q = torch.randn(made.parents.shape[0], heads[0], heads[2], device=device).to(dtype)
    k, v = (torch.randn(slots, heads[1], heads[2], device=device).to(dtype) for _ in range(2))
    return q, k, v


def run_tree(made: Round, q: Tensor, k: Tensor, v: Tensor, path: bool = False, **options: object) -> Tensor:
    settings = {"num_splits": 1, "scale": q.shape[2] ** -0.5, "config": SMALL, **options}
    shape = {"page_size": made.page_size, "max_row_tokens": made.max_row_tokens}
    return tree_attention(q, k, v, *made.lengths(), made.mask, path=made.path if path else None, **shape, **settings)  # type: ignore[arg-type]


def rules_of(name: str, num_heads: int, device: str) -> ScoreRules:
    """A window that begins in a context, at its end or among a tree's own tokens; a cap; sinks; all at once."""
    sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(3)).to(device)
    return {
        "window": ScoreRules(window=3),
        "long window": ScoreRules(window=22),
        "softcap": ScoreRules(softcap=1.5),
        "sinks": ScoreRules(sinks=sinks),
        "all": ScoreRules(19, 2.0, sinks),
    }[name]


RULES = ["window", "long window", "softcap", "sinks", "all"]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("num_splits", "path"), [(1, True), (3, False)])
def test_tree_under_rules_equals_reference(name: str, num_splits: int, path: bool, device: str) -> None:
    made = make_round(TREES, CONTEXTS, device=device, padding=3, empty_rows=1).expand()
    q, k, v = caches(made, HEADS, torch.float32)
    rules = rules_of(name, HEADS[0], device)
    seen = {"rules": rules, "positions": made.positions}
    plain = expected_tree(made, q, k, v)
    out = torch.empty_like(plain)
    where = (made.mask, made.page_size, HEADS[2] ** -0.5, None, out, rules, made.positions)
    expected = reference.tree_attention(q, k, v, *made.lengths(), *where)
    assert (expected - plain).abs().max() > 1e-2, "the rules make a difference"
    result = run_tree(made, q, k, v, path, num_splits=num_splits, **seen)
    torch.testing.assert_close(result, expected, **near(torch.float32))
    assert not result[-3:].any(), "padding gets zeros"


@pytest.mark.parametrize("name", RULES)
def test_prefill_under_rules_equals_reference(name: str, device: str) -> None:
    made = make_round([chain(21), chain(1), chain(17)], [0, 33, 30], device=device, padding=2, empty_rows=1)
    q, k, v = caches(made, HEADS, torch.float32)
    rules = rules_of(name, HEADS[0], device)
    out = torch.empty(q.shape[0], HEADS[0] * HEADS[2], device=device)
    scale = HEADS[2] ** -0.5
    expected = reference.prefill_attention(q, k, v, *made.lengths(), made.page_size, scale, out, rules)
    torch.testing.assert_close(run_prefill(made, q, k, v, rules=rules), expected, **near(torch.float32))


def expected_tree(made: Round, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    scale = q.shape[2] ** -0.5
    return reference.tree_attention(q, k, v, *made.lengths(), made.mask, made.page_size, scale, None, out)


@pytest.mark.parametrize("path", [False, True])
def test_caches_of_eight_bits_are_what_they_stand_for(path: bool, device: str) -> None:
    made = make_round(TREES, CONTEXTS, device=device, padding=3, empty_rows=1).expand()
    q, k, v = caches(made, HEADS, HALF)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    result = run_tree(made, q, k, v, path, num_splits=3)
    torch.testing.assert_close(result, expected_tree(made, q, k.to(HALF), v.to(HALF)), **near(HALF))
    made = make_round([chain(21), chain(1), chain(17)], [0, 33, 30], device=device, padding=2, empty_rows=1)
    q, k, v = caches(made, HEADS, HALF)
    k, v = k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    expected = run_prefill(made, q, k.to(HALF), v.to(HALF))
    torch.testing.assert_close(run_prefill(made, q, k, v), expected, **near(HALF))


@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tree_equals_reference(num_splits: int, dtype: torch.dtype, path: bool, device: str) -> None:
    made = make_round(TREES, CONTEXTS, device=device, padding=3, empty_rows=1).expand()
    q, k, v = caches(made, HEADS, dtype)
    result = run_tree(made, q, k, v, path, num_splits=num_splits)
    torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(dtype))
    assert not result[-3:].any(), "padding gets zeros"


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("heads", [(4, 1, 512), (8, 4, 512)])
def test_the_widest_heads_with_what_is_chosen_for_them(
    heads: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    made = make_round(TREES, CONTEXTS, device=device, padding=3, empty_rows=1).expand()
    q, k, v = caches(made, heads, dtype)
    for path, num_splits in ((False, 3), (False, 1), (True, 3)):
        result = run_tree(made, q, k, v, path, num_splits=num_splits, config=None)
        torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(dtype))
    made = make_round([chain(21), chain(1), chain(17)], [0, 33, 30], device=device, padding=2, empty_rows=1)
    q, k, v = caches(made, heads, dtype)
    result = run_prefill(made, q, k, v, config=None)
    torch.testing.assert_close(result, expected_prefill(made, q, k, v), **near(dtype))


@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("span", [2, 3, 100])
def test_splits_of_several_steps(span: int, path: bool, device: str) -> None:
    """Rows of one step, of fewer than a split takes at least, and of more than all splits' least."""
    trees = [random_tree(9, 1), chain(1), chain(3), chain(2)]
    made = make_round(trees, [37, 0, 90, 139], device=device, padding=2, empty_rows=1).expand()
    q, k, v = caches(made, HEADS, torch.float32)
    result = run_tree(made, q, k, v, path, num_splits=4, config=replace(SMALL, span=span))
    torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(torch.float32))


@pytest.mark.parametrize("path", [False, True])
def test_sums_that_take_a_few_splits_at_a_time(path: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that use 1 split, a part of what is read at once, all of it, and more than once as much."""
    monkeypatch.setattr(attention_parts, "LARGE_SUM", 0)
    monkeypatch.setattr(attention_parts, "WARP_FLOATS", 4 * HEADS[2])
    trees = [random_tree(5, 1), chain(1), chain(3), chain(2)]
    made = make_round(trees, [37, 0, 61, 139], device=device, padding=2, empty_rows=1).expand()
    q, k, v = caches(made, HEADS, torch.float32)
    result = run_tree(made, q, k, v, path, num_splits=13)
    torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(torch.float32))
    assert not result[-2:].any(), "padding gets zeros"


def test_more_splits_take_part_in_long_contexts(device: str) -> None:
    """Large tiles: rows of few steps, and one whose steps are too many for one program a processor."""
    config = TileConfig(rows=32, keys=16, num_warps=4, num_stages=2)
    made = make_round([chain(3), random_tree(9, 1), chain(1)], [100, 16 * 16 * 4 + 70, 0], device=device).expand()
    q, k, v = caches(made, HEADS, torch.float32)
    result = run_tree(made, q, k, v, num_splits=7, config=config)
    torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(torch.float32))


@pytest.mark.parametrize(
    ("heads", "page_size"),
    [((6, 2, 32), 1), ((3, 3, 16), 5), ((8, 1, 16), 16), ((6, 2, 32), 32), ((3, 3, 16), 16), ((8, 1, 16), 5)],
)
def test_groups_and_page_sizes(heads: tuple[int, int, int], page_size: int, device: str) -> None:
    made = make_round(TREES[:2], [19, 40], device=device, page_size=page_size).expand()
    q, k, v = caches(made, heads, torch.float32)
    for num_splits in (1, 4):
        result = run_tree(made, q, k, v, num_splits=num_splits)
        torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(torch.float32))


def test_rows_of_more_tokens_than_a_mask_word(device: str) -> None:
    made = make_round([random_tree(41, 5, extend=35), chain(2)], [6, 50], device=device, empty_rows=1).expand()
    q, k, v = caches(made, HEADS, torch.float32)
    config = TileConfig(rows=32, keys=16, num_warps=4, num_stages=2)
    result = run_tree(made, q, k, v, num_splits=2, config=config)
    torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(torch.float32))


def test_all_padding(device: str) -> None:
    made = make_round([chain(1)], [4], device=device, padding=20).expand()
    made.first.zero_()
    q, k, v = caches(made, HEADS, torch.float32)
    for options in ({"num_splits": 1}, {"num_splits": 2}, {"path": True}, {"num_splits": 2, "path": True}):
        assert not run_tree(made, q, k, v, **options).any()  # type: ignore[arg-type]
    assert not run_prefill(made, q, k, v).any()


def run_prefill(
    made: Round, q: Tensor, k: Tensor, v: Tensor, config: TileConfig | None = SMALL, rules: ScoreRules | None = None
) -> Tensor:
    shape = {"page_size": made.page_size, "max_row_tokens": made.max_row_tokens, "scale": q.shape[2] ** -0.5}
    return prefill_attention(q, k, v, *made.lengths(), config=config, rules=rules or ScoreRules(), **shape)  # type: ignore[arg-type]


def expected_prefill(made: Round, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    return reference.prefill_attention(q, k, v, *made.lengths(), made.page_size, q.shape[2] ** -0.5, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("heads", [HEADS, (3, 1, 32)])
def test_prefill_equals_reference(dtype: torch.dtype, heads: tuple[int, int, int], device: str) -> None:
    made = make_round([chain(21), chain(1), chain(17)], [0, 33, 30], device=device, padding=2, empty_rows=1)
    q, k, v = caches(made, heads, dtype)
    torch.testing.assert_close(run_prefill(made, q, k, v), expected_prefill(made, q, k, v), **near(dtype))


def check_chunks(
    cuts: list[int],
    length: int,
    heads: tuple[int, int, int],
    config: TileConfig | None,
    device: str,
    rules: ScoreRules | None = None,
) -> None:
    """A prompt in one chunk and in several, alone and beside another row: the same bits."""
    whole = make_round([chain(length)], [0], device=device, page_size=16, seed=3)
    q, k, v = caches(whole, heads, HALF)
    shape = {"page_size": 16, "scale": heads[2] ** -0.5, "config": config, "rules": rules or ScoreRules()}
    expected = prefill_attention(q, k, v, *whole.lengths(), max_row_tokens=length, **shape)  # type: ignore[arg-type]
    for begin, end in zip([0, *cuts], [*cuts, length], strict=True):
        state = int(whole.table_rows[0])
        other = (state + 1) % 3
        made = make_round(
            [chain(5), chain(end - begin)], [2, begin], device=device, page_size=16, state_rows=[other, state],
            num_states=3,
        )  # fmt: skip
        made.page_tables = whole.page_tables
        rows = torch.cat([q[:5], q[begin:end]])
        result = prefill_attention(rows, k, v, *made.lengths(), max_row_tokens=max(5, end - begin), **shape)  # type: ignore[arg-type]
        assert torch.equal(result[5:], expected[begin:end])


def test_prefill_is_the_same_wherever_chunks_begin(device: str) -> None:
    check_chunks([7, 8, 24], 45, HEADS, SMALL, device)
    check_chunks([9, 30], 45, HEADS, SMALL, device, rules_of("all", HEADS[0], device))


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (8, 1, 512)])
def test_large_prefill_is_the_same_wherever_chunks_begin(heads: tuple[int, int, int], device: str) -> None:
    check_chunks([1, 130, 512, 1111], 1900, heads, None, device)


def check_paths(
    tree: list[int], context: int, heads: tuple[int, int, int], options: dict[str, object], device: str
) -> None:
    """Nodes of a tree, and the same tokens one after the other as plain decoding has them: the same bits.

    A path from the root to a node is laid out once more as a chain, of which a part counts as context already.
    """
    made = make_round([chain(3), tree], [11, context], device=device, page_size=16, padding=2).expand()
    q, k, v = caches(made, heads, HALF)
    result = run_tree(made, q, k, v, path=True, **{**options, "positions": made.positions})
    for node in range(0, len(tree), max(2, len(tree) // 6)):
        places = [place for place in made.path[3 + node].tolist() if place >= 0]
        for committed in {0, len(places) // 2, len(places) - 1}:
            alone = make_round(
                [chain(len(places) - committed)], [context + committed], device=device, page_size=16, seed=9,
                max_row_tokens=len(places),
            ).expand()  # fmt: skip
            k2, v2 = (torch.randn(alone.page_tables.numel() * 16, *k.shape[1:], device=device).to(k) for _ in range(2))
            old = slots_of(made, 1)[[*range(context), *(context + place for place in places)]]
            new = slots_of(alone, 0)[: context + len(places)]
            k2[new], v2[new] = k[old], v[old]
            rows = q[[3 + place for place in places[committed:]]].contiguous()
            again = run_tree(alone, rows, k2, v2, path=True, **{**options, "positions": alone.positions})
            assert torch.equal(again[-1], result[3 + node])


def slots_of(made: Round, row: int) -> Tensor:
    """int64, every logical position of a row's page table."""
    pages = made.page_tables[int(made.table_rows[row])].long()
    within = torch.arange(made.page_size, device=pages.device)
    return (pages.unsqueeze(1) * made.page_size + within).view(-1)


@pytest.mark.parametrize(("num_splits", "span"), [(1, 1), (3, 1), (3, 2)])
def test_paths_give_the_bits_of_plain_decoding(num_splits: int, span: int, device: str) -> None:
    options: dict[str, object] = {"num_splits": num_splits, "config": replace(SMALL, span=span)}
    check_paths(random_tree(8, 2, extend=2), 30, HEADS, options, device)
    options["rules"] = rules_of("all", HEADS[0], device)
    check_paths(random_tree(4, 2, extend=2), 30, HEADS, options, device)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 8, 128), (9, 3, 64), (8, 1, 512)])
@pytest.mark.parametrize("num_splits", [1, 16])
@pytest.mark.parametrize("context", [0, 100, 5000])
def test_large_paths_give_the_bits_of_plain_decoding(
    context: int, num_splits: int, heads: tuple[int, int, int], device: str
) -> None:
    options: dict[str, object] = {"num_splits": num_splits, "config": None}
    check_paths(random_tree(60, 2, extend=2), context, heads, options, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [(32, 8, 128), (40, 8, 128), (9, 3, 64), (16, 16, 128), (64, 8, 128), (16, 2, 512)])
@pytest.mark.parametrize("num_splits", [1, 5, 16])
def test_large_trees(num_splits: int, heads: tuple[int, int, int], dtype: torch.dtype, device: str) -> None:
    trees = [random_tree(1 + i * 5, i) for i in range(8)]
    contexts = [0, 5, 64, 1000, 2047, 4100, 130, 17]
    made = make_round(trees, contexts, device=device, page_size=16, padding=5, empty_rows=3).expand()
    q, k, v = caches(made, heads, dtype)
    torch.cuda.synchronize()
    for pdl in (False, True):
        for path in (False, True):
            result = run_tree(made, q, k, v, path, num_splits=num_splits, config=None, pdl=pdl)
            torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 32, 64])
def test_rows_alone_with_what_is_chosen_for_them(num_tokens: int, device: str) -> None:
    num_splits = choose_splits(num_tokens, 1, num_tokens, 32, 8, 132)
    for context in (0, 17, 1023, 1024, 9001):
        made = make_round([random_tree(num_tokens, 1)], [context], device=device, page_size=16).expand()
        q, k, v = caches(made, (32, 8, 128), torch.bfloat16)
        result = run_tree(made, q, k, v, num_splits=num_splits, config=None)
        torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(torch.bfloat16))


@pytest.mark.gpu
def test_replays_of_a_graph_read_new_lengths(device: str) -> None:
    made = make_round([random_tree(16, 1)], [700], device=device, page_size=16).expand()
    q, k, v = caches(made, (32, 8, 128), torch.bfloat16)
    run_tree(made, q, k, v, num_splits=8, config=None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run_tree(made, q, k, v, num_splits=8, config=None)
    for context in (700, 3, 64):
        made.cached_len.fill_(context)
        graph.replay()
        torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(torch.bfloat16))


def test_tiles_are_enough_for_any_row_lengths() -> None:
    for lengths in ([1] * 16, [64], [17, 17, 30], [16, 16, 32], [1, 63], [0, 0, 5]):
        for tile in (1, 5, 16):
            tokens = sum(lengths)
            needed = sum(-(-length // tile) for length in lengths)
            assert needed <= max_tiles(tokens, len(lengths), max(lengths), tile)
            needed += -(-9 // tile)
            assert needed <= max_tiles(tokens + 9, len(lengths), max(lengths), tile, padding=True)


def test_splits_fill_the_device() -> None:
    assert choose_splits(1, 1, 1, 32, 8, 132) > choose_splits(64, 16, 32, 32, 8, 132) >= 1
    assert choose_splits(1, 1, 1, 1, 1, 1000) == CHOSEN_SPLITS
    # One tile a kv head: a program a processor. Two: as many splits, for which two programs share a processor.
    assert choose_splits(8, 1, 8, 32, 8, 132) == choose_splits(32, 1, 32, 32, 8, 132) == MAX_SHARED_SPLITS
    assert choose_splits(64, 1, 64, 32, 8, 132) == MAX_SHARED_SPLITS // 2


def test_programs_of_large_tiles_begin_alone_on_their_processors() -> None:
    assert exclusive_splits(16, 64, 16, 132) == 8
    assert exclusive_splits(8, 64, 16, 132) == 16
    assert exclusive_splits(200, 64, 2, 132) == 1
    assert exclusive_splits(128, 16, 3, 132) == 3


@pytest.mark.parametrize(("num_rows", "row_tokens"), [(1, 1), (1, 32), (1, 64), (16, 4), (5, 11)])
def test_all_programs_run_at_the_same_time(num_rows: int, row_tokens: int) -> None:
    chosen = choose_splits(num_rows * row_tokens, num_rows, row_tokens, 32, 8, 132)
    rows = tree_config(row_tokens, 4, torch.bfloat16).rows
    programs = max_tiles(num_rows * row_tokens, num_rows, row_tokens, rows // 4) * 8 * chosen
    assert programs <= 132 * (3 if rows == 16 else 2)


def test_wrong_arguments_are_refused(device: str) -> None:
    made = make_round([chain(2)], [3], device=device).expand()
    q, k, v = caches(made, HEADS, torch.float32)
    with pytest.raises(ValueError, match="num_splits"):
        run_tree(made, q, k, v, num_splits=0)
    with pytest.raises(ValueError, match="float32"):
        run_tree(made, q.half(), k, v)
    with pytest.raises(ValueError, match="positions"):
        run_tree(made, q, k, v, rules=ScoreRules(window=4))
    with pytest.raises(ValueError, match="sinks must be"):
        run_tree(made, q, k, v, rules=ScoreRules(sinks=torch.zeros(3, device=device)))
    with pytest.raises(ValueError, match="share"):
        run_tree(made, q[:, :3].contiguous(), k, v)
    with pytest.raises(ValueError, match="tile of 16"):
        run_tree(made, torch.zeros(2, 32, 16, device=device), k[:, :1].contiguous(), v[:, :1].contiguous())
    made.max_row_tokens = 40
    with pytest.raises(ValueError, match="40 tokens"):
        run_tree(made, q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_row_may_have_nearly_all_tokens_of_a_round(dtype: torch.dtype, device: str) -> None:
    """Tiles are cut for rows of equal length; a long one takes several."""
    made = make_round([chain(1), random_tree(27, 3), chain(2), chain(1)], [5, 30, 9, 2], device=device).expand()
    q, k, v = caches(made, HEADS, dtype)
    assert tree_config(mean_row_tokens(31, 4, made.max_row_tokens), 2, dtype).rows < 2 * made.max_row_tokens
    result = run_tree(made, q, k, v, num_splits=2, config=None)
    torch.testing.assert_close(result, expected_tree(made, q, k, v), **near(dtype))

from __future__ import annotations

import pytest
import torch
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds import Round, chain, make_round, random_tree

from kernels.launch import triton_on_cpu
from kernels.reference.tree import expand_tree as expected_tree
from kernels.tree import MAX_PATH, expand_tree


def check(made: Round) -> None:
    made.expand()
    slots, mask, path = made.slots.clone(), made.mask.clone(), made.path.clone()
    expected_tree(made.tokens(), made.page_tables, made.page_size, made.slots, made.mask, made.path)
    assert torch.equal(slots, made.slots)
    assert torch.equal(mask, made.mask)
    assert torch.equal(path, made.path)


def test_small_tree_by_hand(device: str) -> None:
    made = make_round([[-1, 0, 0, 1]], [5], device=device, page_size=4, padding=1).expand()
    assert made.mask.view(-1).tolist() == [0b0001, 0b0011, 0b0101, 0b1011, 0]
    assert made.path[:, :4].tolist() == [
        [0, -1, -1, -1],
        [0, 1, -1, -1],
        [0, 2, -1, -1],
        [0, 1, 3, -1],
        [-1, -1, -1, -1],
    ]
    pages = made.page_tables[made.table_rows[0]].tolist()
    assert made.slots.tolist() == [pages[1] * 4 + 1, pages[1] * 4 + 2, pages[1] * 4 + 3, pages[2] * 4, -1]


def test_longest_path_and_word_borders(device: str) -> None:
    check(make_round([chain(MAX_PATH), random_tree(70, 1, extend=33)], [0, 9], device=device, padding=3, empty_rows=2))


@settings(max_examples=examples(10))
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(0, 30)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    page_size=st.sampled_from([1, 3, 16]),
    padding=st.integers(0, 3),
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="for the interpreter; the other tests run on the GPU")
def test_random_trees(sizes: list[tuple[int, int, int]], seed: int, page_size: int, padding: int) -> None:
    trees = [random_tree(size, seed + i, extend=min(extend, size)) for i, (size, extend, _) in enumerate(sizes)]
    contexts = [context for _, _, context in sizes]
    with triton_on_cpu():
        check(make_round(trees, contexts, device="cpu", page_size=page_size, padding=padding, seed=seed))


def test_too_few_words_are_refused(device: str) -> None:
    made = make_round([chain(3)], [0], device=device)
    made.max_row_tokens = 33
    with pytest.raises(ValueError, match="33 tokens"):
        made.expand()


def test_missing_token_ids_are_the_last_ones_of_their_requests(device: str) -> None:
    made = make_round([[-1], [-1, 0], [-1]], [5, 2, 9], device=device, padding=2, state_rows=[4, 0, 2], num_states=5)
    tokens = made.tokens()
    tokens.token_ids.copy_(torch.tensor([-1, 7, 8, -1, 0, 0]))
    int_params = torch.arange(40, dtype=torch.int32, device=device).view(5, 8)
    tables = (made.page_tables, made.page_size, made.max_row_tokens, made.slots, made.mask, made.path)
    expand_tree(tokens, *tables, int_params)
    assert tokens.token_ids.tolist() == [39, 7, 8, 23, 0, 0]
    tokens.token_ids.fill_(-1)
    expected_tree(tokens, made.page_tables, made.page_size, *tables[3:], int_params)
    assert tokens.token_ids.tolist() == [39, 7, 7, 23, -1, -1]


@pytest.mark.gpu
def test_large_round(device: str) -> None:
    trees = [random_tree(1 + 7 * i % 64, i, extend=1 + i % 5 if 7 * i % 64 > 5 else 1) for i in range(64)]
    check(make_round(trees, [(i * 37) % 500 for i in range(64)], device=device, page_size=16, padding=9, empty_rows=3))

"""The number of nodes follows from measured times and scores alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verify_service.budget import WIDTHS, Budget, CostModel


def flat_then_steep() -> CostModel:
    return CostModel([0.02 if width <= 8 else 0.02 * width / 8 for width in WIDTHS])


def test_a_sure_tree_fills_the_cheap_width_and_not_more() -> None:
    budget = Budget(flat_then_steep(), 63)
    assert len(budget.choose(1, 1, np.log(np.full(40, 0.6))).taken) == 7


def test_hopeless_nodes_are_not_taken_where_a_token_costs() -> None:
    cost = CostModel([0.02 * width for width in WIDTHS])
    assert len(Budget(cost, 63).choose(1, 1, np.log(np.full(40, 0.3))).taken) == 0


def test_a_batch_shares_the_budget_by_probability() -> None:
    budget = Budget(flat_then_steep(), 63)
    good, poor = np.log(np.full(10, 0.9)), np.log(np.full(10, 0.05))
    taken = budget.choose(2, 2, np.concatenate([poor, good])).taken
    assert len(taken) == 6 and (taken >= 10).all()


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[int], np.ndarray]:
    """Parents (-1 for the root) and path scores that never rise from parent to child."""
    parents, scores = [], []
    for index in range(draw(st.integers(0, 20))):
        parent = draw(st.integers(-1, index - 1))
        edge = draw(st.sampled_from([0.0, -0.1, -0.7, -3.0]))
        parents.append(parent)
        scores.append(edge + (scores[parent] if parent >= 0 else 0.0))
    return parents, np.array(scores, np.float64)


@given(
    st.lists(trees(), min_size=1, max_size=4),
    st.integers(0, 30),
    st.integers(0, 30),
    st.lists(st.floats(1e-3, 1.0), min_size=10, max_size=10),
)
def test_what_is_taken_is_within_bounds_and_connected(
    forest: list[tuple[list[int], np.ndarray]], max_nodes: int, most: int, seconds: list[float]
) -> None:
    budget = Budget(CostModel(seconds), max_nodes)
    scores = np.concatenate([scores for _, scores in forest])
    taken = budget.choose(len(forest), len(forest), scores, most).taken.tolist()
    assert len(taken) <= min(max_nodes, most) and taken == sorted(set(taken))
    start = 0
    for parents, _ in forest:
        kept = {index - start for index in taken if start <= index < start + len(parents)}
        assert all(parents[index] < 0 or parents[index] in kept for index in kept)
        start += len(parents)


def padded(tokens: int) -> int:
    return next((width for width in (16, 32, 64) if width >= tokens), tokens)


def test_a_round_is_filled_to_the_width_that_it_is_padded_to() -> None:
    cost = CostModel([0.1, 0.12, 0.2], (16, 32, 64), padded)
    assert len(Budget(cost, 63).choose(3, 3, np.log(np.full(40, 0.001))).taken) == 13
    assert len(Budget(cost, 63).choose(3, 3, np.log(np.full(40, 0.9))).taken) == 29


def test_a_width_is_kept_for_a_gain_inside_the_noise_and_no_longer() -> None:
    cost = CostModel([0.01, 0.0102, 0.02], (16, 32, 64), padded)
    budget = Budget(cost, 63)
    tree = np.log(np.concatenate([np.full(12, 0.5), np.full(2, 0.1)]))
    assert len(Budget(cost, 63).choose(4, 1, tree).taken) == 14
    budget.took(choice := budget.choose(1, 1, tree[:12]))
    assert len(choice.taken) == 12
    assert len(budget.choose(4, 1, tree).taken) == 12, "two nodes more are worth a wider round, but not by much"
    assert len(budget.choose(4, 1, np.log(np.full(40, 0.5))).taken) == 28


def test_prefill_beside_makes_nodes_cheap() -> None:
    cost = CostModel([0.001 * width for width in WIDTHS])
    tree = np.log(np.full(10, 0.3))
    assert len(Budget(cost, 63).choose(1, 1, tree).taken) == 0
    assert len(Budget(cost, 63).choose(1, 1, tree, beside=1.0).taken) == 10


def test_a_node_that_may_not_be_taken_never_is() -> None:
    budget = Budget(flat_then_steep(), 63)
    assert len(budget.choose(1, 1, np.log(np.full(7, 0.9))).taken) == 7
    tree = np.array([-0.1, -np.inf, -0.1, -np.inf, -np.inf, -np.inf, -np.inf])
    assert budget.choose(1, 1, tree).taken.tolist() == [0, 2]


def test_cost_follows_a_machine_that_slows_down() -> None:
    cost = flat_then_steep()
    for _ in range(300):
        cost.observe(4, 0.06)
    assert 0.05 < cost.seconds(4) < 0.07
    assert cost.seconds(64) > cost.seconds(4)


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(1e-4, 5.0)), max_size=50))
def test_more_tokens_never_cost_less(rounds: list[tuple[int, float]]) -> None:
    cost = flat_then_steep()
    for tokens, seconds in rounds:
        cost.observe(tokens, seconds)
    assert (np.diff(cost.curve(1, 130)) >= 0).all()

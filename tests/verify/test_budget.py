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
    (taken,) = budget.choose(1, 1, [np.log(np.full(40, 0.6))])
    assert len(taken) == 7


def test_hopeless_nodes_are_not_taken_where_a_token_costs() -> None:
    cost = CostModel([0.02 * width for width in WIDTHS])
    (taken,) = Budget(cost, 63).choose(1, 1, [np.log(np.full(40, 0.3))])
    assert len(taken) == 0


def test_a_batch_shares_the_budget_by_probability() -> None:
    budget = Budget(flat_then_steep(), 63)
    good, poor = np.log(np.full(10, 0.9)), np.log(np.full(10, 0.05))
    taken = budget.choose(2, 2, [poor, good])
    assert len(taken[1]) == 6 and len(taken[0]) == 0


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
    st.lists(st.floats(1e-3, 1.0), min_size=10, max_size=10),
)
def test_what_is_taken_is_within_bounds_and_connected(
    forest: list[tuple[list[int], np.ndarray]], max_nodes: int, seconds: list[float]
) -> None:
    budget = Budget(CostModel(seconds), max_nodes)
    taken = budget.choose(len(forest), len(forest), [scores for _, scores in forest])
    assert sum(map(len, taken)) <= max_nodes
    for (parents, _), rows in zip(forest, taken, strict=True):
        kept = set(rows.tolist())
        assert list(rows) == sorted(kept)
        assert all(parents[row] < 0 or parents[row] in kept for row in kept)


def test_cost_follows_a_machine_that_slows_down() -> None:
    cost = flat_then_steep()
    for _ in range(300):
        cost.observe(4, 0.06)
    assert 0.05 < float(cost.seconds(4)) < 0.07
    assert float(cost.seconds(64)) > float(cost.seconds(4))


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(1e-4, 5.0)), max_size=50))
def test_more_tokens_never_cost_less(rounds: list[tuple[int, float]]) -> None:
    cost = flat_then_steep()
    for tokens, seconds in rounds:
        cost.observe(tokens, seconds)
    assert (np.diff(cost.seconds(np.arange(1, 130))) >= 0).all()

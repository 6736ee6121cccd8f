"""The number of nodes follows from measured times and scores alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verify_service.speculation import budget as budget_module
from verify_service.speculation.budget import WIDTHS, Budget, ContextCost, CostModel


def flat_then_steep() -> CostModel:
    return CostModel([0.02 if width <= 8 else 0.02 * width / 8 for width in WIDTHS])


def test_a_sure_tree_fills_the_cheap_width_and_not_more() -> None:
    budget = Budget(flat_then_steep(), 63)
    assert budget.choose(1, 1, [0.6] * 40).num_nodes == 7


def test_hopeless_nodes_are_not_taken_where_a_token_costs() -> None:
    cost = CostModel([0.02 * width for width in WIDTHS])
    assert Budget(cost, 63).choose(1, 1, [0.3] * 40).num_nodes == 0


@pytest.mark.parametrize("num_spoiled", [0, 1, 4])
def test_times_are_measured_until_others_have_let_go_of_the_cores(num_spoiled: int) -> None:
    calls: list[int] = []

    def measure(width: int) -> float:
        calls.append(width)
        sweep = calls.count(width) - 1
        # While others start, a forward of several tokens waits for a core again and again.
        return 0.02 + 1e-4 * width + (0.3 / (sweep + 1) if width > 1 and sweep < num_spoiled else 0.0)

    cost = CostModel.measured(measure)
    assert cost.table() == pytest.approx({width: 0.02 + 1e-4 * width for width in WIDTHS})
    assert calls.count(1) == 2 and len(calls) == 2 + (len(WIDTHS) - 1) * (num_spoiled + 2)


def test_a_start_that_takes_long_is_not_made_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, 0

    def measure(width: int) -> float:
        nonlocal now, calls
        now, calls = now + 1.0, calls + 1
        return 1.0 / calls

    monkeypatch.setattr(budget_module, "monotonic", lambda: now)
    CostModel.measured(measure)
    assert calls == 2 * len(WIDTHS)


def test_behind_long_contexts_more_nodes_pay() -> None:
    """What cached tokens cost comes once a round, whatever its width."""

    def measure(tokens: int, context: int = 1000) -> float:
        return 5e-3 + 5e-5 * tokens + 4e-8 * context

    cost = CostModel.measured(measure, context_cost=ContextCost.measured(measure, 1000, 16_000))
    budget, chances = Budget(cost, 63), [0.9**level for level in range(60)]
    near = budget.choose(1, 1, iter(chances)).num_nodes
    for context in (270_000, 271_000, 500, 1000):
        cost.follow_contexts(context)
        for tokens in (1, 17, 64):
            assert cost.seconds(tokens) == pytest.approx(measure(tokens, max(context, 1000)), rel=0.02)
            assert cost.seconds_from(tokens, 1)[0] == pytest.approx([cost.seconds(tokens)])
        far = budget.choose(1, 1, iter(chances)).num_nodes
        assert far > near + 3 if context > 200_000 else far == near


def test_a_prompt_s_long_chunk_makes_later_rounds_no_dearer() -> None:
    """On a CPU chunks of up to 65,536 tokens may be computed beside roots and nodes."""
    asked: list[int] = []

    def width_of(tokens: int) -> int:
        asked.append(tokens)
        return tokens

    cost = CostModel([5e-3 + 5e-5 * width for width in WIDTHS], width_of=width_of)
    cost.prepare(130)
    budget, chances = Budget(cost, 63), [0.9**level for level in range(60)]
    usual = budget.choose(1, 1, chances)
    budget.took(usual)
    asked.clear()
    beside = budget.choose(8193, 2, chances)
    assert beside.num_nodes > usual.num_nodes, "a node adds less to a long round"
    assert beside.seconds == pytest.approx(cost.seconds(8193 + beside.num_nodes))
    assert len(asked) < 200, "only the counts that the round may have are looked at"
    assert budget.choose(1, 1, chances) == usual


def test_rounds_that_take_twice_as_long_do_so_at_any_context() -> None:
    cost = CostModel([5e-3 + 5e-5 * width for width in WIDTHS], context_cost=ContextCost(4e-8, 0))
    for _ in range(400):
        cost.follow_contexts(200_000)
        for width in (1, 64):
            cost.observe(width, 2 * (5e-3 + 5e-5 * width + 8e-3))
    for context in (0, 100_000, 200_000):
        cost.follow_contexts(context)
        for width in (1, 64):
            assert cost.seconds(width) == pytest.approx(2 * (5e-3 + 5e-5 * width + 4e-8 * context), rel=0.1)


def test_contexts_that_are_hardly_longer_tell_nothing() -> None:
    assert ContextCost.measured(lambda tokens, context: context * 1.0, 1024, 2000).seconds == 0


chances = st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.2, 0.05, 1e-3, 0.0]), max_size=40).map(
    lambda drawn: sorted(drawn, reverse=True)
)


@given(
    chances,
    st.integers(1, 5),
    st.integers(0, 30),
    st.integers(0, 30),
    st.lists(st.floats(1e-3, 1.0), min_size=len(WIDTHS), max_size=len(WIDTHS)),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
)
def test_as_many_are_taken_as_have_the_best_rate(
    chances: list[float], roots: int, max_nodes: int, most: int, seconds: list[float], beside: float, is_padded: bool
) -> None:
    cost = CostModel(seconds, width_of=padded) if is_padded else CostModel(seconds)
    choice = Budget(cost, max_nodes).choose(roots, roots, iter(chances), most, beside)
    possible = [chance for chance in chances[: min(max_nodes, most)] if chance]
    rates = [
        (roots + sum(possible[:count])) / (cost.seconds(roots + count) + beside) for count in range(len(possible) + 1)
    ]
    assert rates[choice.num_nodes] == pytest.approx(max(rates))
    assert choice.expected / choice.seconds == pytest.approx(max(rates))


def test_no_more_nodes_are_looked_for_than_could_pay() -> None:
    asked = iter([0.9] * 8 + [0.001] * 1000)
    assert Budget(flat_then_steep(), 63).choose(1, 1, asked).num_nodes == 7
    assert len(list(asked)) > 990


def padded(tokens: int) -> int:
    return next((width for width in (16, 32, 64) if width >= tokens), tokens)


def test_a_round_is_filled_to_the_width_that_it_is_padded_to() -> None:
    cost = CostModel([0.1, 0.12, 0.2], (16, 32, 64), padded)
    assert Budget(cost, 63).choose(3, 3, [0.001] * 40).num_nodes == 13
    assert Budget(cost, 63).choose(3, 3, [0.9] * 40).num_nodes == 29


def test_a_width_is_kept_for_a_gain_inside_the_noise_and_no_longer() -> None:
    cost = CostModel([0.01, 0.0102, 0.02], (16, 32, 64), padded)
    budget = Budget(cost, 63)
    tree = [0.5] * 12 + [0.1] * 2
    assert Budget(cost, 63).choose(4, 1, tree).num_nodes == 14
    budget.took(choice := budget.choose(1, 1, tree[:12]))
    assert choice.num_nodes == 12
    assert budget.choose(4, 1, tree).num_nodes == 12, "two nodes more are worth a wider round, but not by much"
    assert budget.choose(4, 1, [0.5] * 40).num_nodes == 28


def test_prefill_beside_makes_nodes_cheap() -> None:
    cost = CostModel([0.001 * width for width in WIDTHS])
    tree = [0.3] * 10
    assert Budget(cost, 63).choose(1, 1, tree).num_nodes == 0
    assert Budget(cost, 63).choose(1, 1, tree, beside=1.0).num_nodes == 10


def test_a_node_without_a_chance_is_never_taken() -> None:
    budget = Budget(flat_then_steep(), 63)
    assert budget.choose(1, 1, [0.9] * 7).num_nodes == 7
    assert budget.choose(1, 1, [0.9, 0.9, 0.0, 0.0, 0.0, 0.0, 0.0]).num_nodes == 2


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
    assert (np.diff(cost.seconds_from(1, 130)[0]) >= 0).all()

"""How much grows inside rounds follows from what rounds accepted and from measured times alone."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafting.model.round_drafter import MAX_CHOSEN
from verify_service.engine.build import node_counts
from verify_service.engine.round import Growth
from verify_service.engine.round_growth import (
    LEAST_TRIAL_ROUNDS,
    MAX_PROBE_ROUNDS,
    PROBE_LENGTH,
    TRIAL_ROUNDS,
    GrowthCost,
    GrowthPolicy,
    VerifiedNodes,
)
from verify_service.executors.round_buffers import Buckets

SIZES = (3, 7, 15, 31, 63)


def seconds(tokens: int) -> float:
    return 4.3e-3 + 12e-6 * tokens


def make(step: float = 0.27e-3, fixed: Growth | None = None, max_steps: int = 8) -> GrowthPolicy:
    return GrowthPolicy(seconds, lambda _: GrowthCost(0.35e-3, step), lambda _: SIZES, max_steps, fixed)


def verified(growth: Growth, spread: int, depth: int) -> VerifiedNodes:
    """The nodes of such a growth, `spread` of each level, of which the best of the first `depth` are accepted."""
    count = min(growth.num_nodes, growth.num_steps * spread)
    return VerifiedNodes(
        [-0.1 * (node + 1) for node in range(count)],
        [node // spread + 1 for node in range(count)],
        [level * spread for level in range(depth)],
    )


def play(
    policy: GrowthPolicy, chance: float, num_rounds: int, spread: int = 2, cost: GrowthCost | None = None
) -> list[Growth | None]:
    """Rounds in which the best child of a node is committed with this chance; each level has `spread` better nodes.

    `cost`: what growth is found to take, where it is measured.
    """
    source, grown, pending = random.Random(1), [], None
    for _ in range(num_rounds):
        if pending is not None:
            depth = 0
            while depth < pending.num_steps and depth * spread < pending.num_nodes and source.random() < chance:
                depth += 1
            found = None if cost is None else cost.seconds(pending.num_steps) * source.uniform(0.95, 1.1)
            policy.note(pending, 1, verified(pending, spread, depth), seconds=found)
        pending = policy.plan(1)
        grown.append(pending)
    return grown


def rate(chance: float, spread: int, growth: Growth, cost: GrowthCost) -> float:
    """Tokens a second of rounds as `play` has them that all grow so much."""
    depth = min(growth.num_steps, -(-growth.num_nodes // spread))
    tokens = 1 + sum(chance**level for level in range(1, depth + 1))
    return tokens / (seconds(1 + growth.num_nodes) + cost.seconds(growth.num_steps))


def usual(grown: list[Growth | None]) -> Growth | None:
    late = grown[len(grown) // 2 :]
    return max(set(late), key=late.count)


def test_a_useless_drafter_is_left_alone_and_tried_seldom() -> None:
    grown = play(make(), 0.0, 6000)
    assert usual(grown) is None
    tried = [index for index, growth in enumerate(grown) if growth is not None]
    late = [index for index in tried if index > 3000]
    assert late and len(late) <= PROBE_LENGTH * (3000 / MAX_PROBE_ROUNDS + 1)


def test_probes_take_little_of_the_time_where_many_tokens_cost_much() -> None:
    """As with experts: a round of 64 tokens takes six times as long as one of one."""

    def dear(tokens: int) -> float:
        return 3.6e-3 + 18e-3 * (1.0 - 0.94 ** (tokens - 1))

    cost = GrowthCost(0.35e-3, 0.27e-3)
    grown = play(GrowthPolicy(dear, lambda _: cost, lambda _: SIZES, 8), 0.1, 6000)[300:]
    times = [
        dear(1) if growth is None else dear(1 + growth.num_nodes) + cost.seconds(growth.num_steps) for growth in grown
    ]
    assert dear(1) * len(times) < sum(times) < 1.02 * dear(1) * len(times)


def test_a_useless_drafter_is_tried_for_a_few_rounds_and_others_for_more() -> None:
    useless, poor = (play(make(), chance, TRIAL_ROUNDS) for chance in (0.0, 0.3))
    assert all(poor) and sum(growth is not None for growth in useless) < TRIAL_ROUNDS // 2


def test_a_trial_that_no_request_took_part_in_begins_anew() -> None:
    policy = make()
    for _ in range(40 * TRIAL_ROUNDS):
        policy.plan(1)
    assert all(play(policy, 0.7, 120)[TRIAL_ROUNDS:])


def test_trials_are_few_where_the_largest_tree_costs_much() -> None:
    dear = GrowthPolicy(lambda tokens: 3e-3 * tokens**0.5, lambda _: GrowthCost(0.35e-3, 0.27e-3), lambda _: SIZES, 8)
    largest = Growth(8, SIZES[-1])
    assert play(make(), 0.9, TRIAL_ROUNDS) == [largest] * TRIAL_ROUNDS
    grown = play(dear, 0.5, TRIAL_ROUNDS)
    assert LEAST_TRIAL_ROUNDS <= grown.count(largest) < TRIAL_ROUNDS / 2


def test_the_better_a_drafter_the_deeper_its_trees() -> None:
    depths = [growth.num_steps for chance in (0.5, 0.7, 0.9) if (growth := usual(play(make(), chance, 1500)))]
    assert len(depths) == 3 and depths == sorted(depths) and depths[0] < depths[-1]


def test_dear_steps_make_shallow_trees() -> None:
    cheap, dear = (usual(play(make(step), 0.8, 1500)) for step in (0.1e-3, 1.5e-3))
    assert cheap is not None and dear is not None and cheap.num_steps > dear.num_steps


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_times_that_were_measured_wrong_at_the_start_are_put_right(factor: float) -> None:
    """As where other services start on the device at that time."""
    cost = GrowthCost(0.35e-3, 0.2e-3)
    wrong = GrowthCost(cost.fixed * factor, cost.step * factor)
    policies = [GrowthPolicy(seconds, lambda _: wrong, lambda _: SIZES, 8) for _ in range(2)]
    mended = usual(play(policies[0], 0.75, 3000, cost=cost))
    unmended = usual(play(policies[1], 0.75, 3000))
    best = max(rate(0.75, 2, Growth(steps, nodes), cost) for steps in range(1, 9) for nodes in SIZES)
    assert mended is not None and rate(0.75, 2, mended, cost) > 0.96 * best
    assert unmended is None or rate(0.75, 2, unmended, cost) < rate(0.75, 2, mended, cost)


@given(data=st.data(), num_steps=st.integers(1, 4))
def test_a_deep_tree_tells_what_shallower_and_smaller_ones_would_have_brought(
    data: st.DataObject, num_steps: int
) -> None:
    parents = data.draw(
        st.lists(st.integers(-1, 11), max_size=12).map(lambda p: [min(q, i - 1) for i, q in enumerate(p)])
    )
    costs = data.draw(st.lists(st.floats(0.01, 3), min_size=len(parents), max_size=len(parents), unique=True))
    scores: list[float] = []
    depths: list[int] = []
    for node, (parent, cost) in enumerate(zip(parents, costs, strict=True)):
        scores.append((scores[parent] if parent >= 0 else 0.0) - cost - 1e-6 * node)
        depths.append((depths[parent] if parent >= 0 else 0) + 1)
    path, node = [], data.draw(st.integers(-1, len(parents) - 1))
    while node >= 0:
        path.append(node)
        node = parents[node]
    sizes = np.array([1, 3, 12])
    found = VerifiedNodes(scores, depths, path[::-1]).accepted_within(num_steps, sizes)
    for steps in range(num_steps + 1):
        fitting = sorted(
            (node for node in range(len(parents)) if depths[node] <= steps), key=lambda node: -scores[node]
        )
        assert found[steps].tolist() == [sum(node in fitting[:size] for node in path) for size in sizes]


def test_a_prompt_that_the_drafter_catches_up_with_does_not_make_growth_dear() -> None:
    policy, cost = make(0.2e-3), GrowthCost(0.35e-3, 0.2e-3)
    play(policy, 0.8, 200, cost=cost)
    before = usual(play(policy, 0.8, 100, cost=cost))
    policy.note(Growth(4, 31), 1, verified(Growth(4, 31), 2, 2), seconds=0.5)
    assert usual(play(policy, 0.8, 40, cost=cost)) == before


def test_what_is_chosen_is_about_the_best_there_is() -> None:
    chance, spread = 0.75, 2
    growth = usual(play(make(), chance, 4000, spread))
    cost = GrowthCost(0.35e-3, 0.27e-3)
    best = max(rate(chance, spread, Growth(steps, nodes), cost) for steps in range(1, 9) for nodes in SIZES)
    assert growth is not None and rate(chance, spread, growth, cost) > 0.96 * best


def test_a_drafter_that_gets_better_is_used_again() -> None:
    policy = make()
    assert usual(play(policy, 0.0, 800)) is None
    assert usual(play(policy, 0.85, 6000)) is not None


def test_what_is_fixed_is_grown_always_within_the_sizes() -> None:
    assert set(play(make(fixed=Growth(3, 100)), 0.0, 50)) == {Growth(3, 63)}


def test_nothing_is_planned_while_it_rests() -> None:
    policy, num_rests, pending = make(), 0, None
    for _ in range(4000):
        if pending is not None:
            policy.note(pending, 1, verified(pending, 2, 0))
        rests, long = policy.rests(1), policy.rests(1, 64)
        assert rests or not long
        pending = policy.plan(1)
        assert pending is None or not rests
        num_rests += long
    assert num_rests > 3400


def test_a_drafter_that_is_useless_to_one_request_is_not_tried_at_first_with_more() -> None:
    policy = make()
    play(policy, 0.0, 100)
    assert policy.plan(8) is None
    grown = [policy.plan(8) for _ in range(MAX_PROBE_ROUNDS)]
    assert 0 < sum(growth is not None for growth in grown) <= PROBE_LENGTH
    # One that is of use to one request is tried with more.
    good = make()
    play(good, 0.8, 100)
    assert good.plan(8) is not None


@pytest.mark.parametrize(
    ("num_rows", "max_nodes", "sizes"), [(1, 12, (1,)), (8, 12, (8,)), (16, 12, (12,)), (512, 512, (MAX_CHOSEN,))]
)
def test_a_chain_takes_a_node_of_each_request_as_far_as_they_go(
    num_rows: int, max_nodes: int, sizes: tuple[int, ...]
) -> None:
    executor: Any = SimpleNamespace(buckets=Buckets(28, 16), limits=SimpleNamespace(max_nodes=max_nodes))
    assert tuple(node_counts(executor, num_rows, is_chain=True)) == sizes
    executor.limits.max_nodes = 0
    assert not node_counts(executor, num_rows, is_chain=True)


@pytest.mark.parametrize("max_steps", [1, 4])
def test_nothing_is_grown_that_the_options_exclude(max_steps: int) -> None:
    assert all(growth is None or growth.num_steps <= max_steps for growth in play(make(max_steps=max_steps), 0.9, 300))
    empty = GrowthPolicy(seconds, lambda _: GrowthCost(0.0, 0.0), lambda _: (), max_steps)
    assert empty.plan(1) is None

"""Lossy acceptance against exact enumeration: every interval of coins, on a tiny vocabulary."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.sampling.noise import gumbel
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import (
    EXACT,
    AcceptRule,
    Candidates,
    LogitsProcessor,
    accepted_child,
    choose,
    coin,
    walk_tree,
)

CHANCES = [0.4, 0.25, 0.2, 0.1, 0.05]
RULES = [EXACT, AcceptRule(acc=0.5), AcceptRule(single=0.2), AcceptRule(single=0.22, acc=0.75), AcceptRule(acc=0.01)]


def by_enumeration(children: Sequence[int], rule: AcceptRule) -> list[float]:
    """Distribution of the token below a node with `children`: `accepted_child` over every interval of coins.

    Where no child passes, the noise chooses among the rest in proportion to their chances.
    """
    chances = [CHANCES[child] for child in children]
    # The answer changes nowhere else.
    steps = {min(total / rule.acc, 1.0) for total in itertools.accumulate(chances)}
    borders = sorted({0.0, 1.0, *steps})
    result = [0.0] * len(CHANCES)
    rest = 1.0 - sum(chances)
    for low, high in itertools.pairwise(borders):
        index = accepted_child(chances, (low + high) / 2, rule)
        if index is not None:
            result[children[index]] += high - low
            continue
        for token in set(range(len(CHANCES))) - set(children):
            result[token] += (high - low) * CHANCES[token] / rest
    return result


def by_formula(children: Sequence[int], rule: AcceptRule) -> list[float]:
    """The same distribution from the definition, child by child: what reaches a child, and what passes there."""
    result = [0.0] * len(CHANCES)
    reached, accumulated = 1.0, 0.0
    for child in children:
        accumulated += CHANCES[child]
        below = max(0.0, 1.0 - accumulated / rule.acc)
        left = 0.0 if CHANCES[child] >= rule.single else min(reached, below)
        result[child] = reached - left
        reached = left
    rest = 1.0 - accumulated
    for token in set(range(len(CHANCES))) - set(children):
        result[token] = reached * CHANCES[token] / rest
    return result


CHILDREN = [list(order) for count in range(5) for order in itertools.permutations(range(5), count)]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_order_of_children_gives_the_distribution_of_the_definition(rule: AcceptRule) -> None:
    for children in CHILDREN:
        assert by_enumeration(children, rule) == pytest.approx(by_formula(children, rule), abs=1e-12)


def test_thresholds_of_one_give_the_targets_own_distribution() -> None:
    for children in CHILDREN:
        assert by_enumeration(children, EXACT) == pytest.approx(CHANCES, abs=1e-12)


def test_two_levels_multiply() -> None:
    """Coins of two positions are independent, so a path's chance is the product of its levels'."""
    rule = AcceptRule(acc=0.5)
    candidates = Candidates(None, np.log(np.array(CHANCES, np.float32)))
    first, second = by_formula([1, 2], rule), by_formula([3], rule)
    trials, counts = 1500, np.zeros((5, 5))
    for seed in range(trials):
        params = SamplingParams(seed=seed)

        def sample(node: int, path: Sequence[int], children: Sequence[int], params: SamplingParams = params) -> int:
            return choose(candidates, children, params, 7 + len(path), rule)

        tokens, accepted = walk_tree([-1, -1, 0], [1, 2, 3], sample)
        if accepted[:1] == [0]:
            counts[tokens[0], tokens[1]] += 1
    for token in range(5):
        expected = first[1] * second[token]
        deviation = np.sqrt(expected * (1 - expected) / trials)
        assert abs(counts[1, token] / trials - expected) < 5 * deviation + 1e-9


@pytest.mark.parametrize("rule", [AcceptRule(acc=0.5), AcceptRule(single=0.22)], ids=str)
@pytest.mark.parametrize("children", [[0], [3, 1], [4, 2, 1]])
def test_tokens_of_many_seeds_are_distributed_so(children: list[int], rule: AcceptRule) -> None:
    candidates = Candidates(None, np.log(np.array(CHANCES, np.float32)))
    trials = 2000
    tokens = [choose(candidates, children, SamplingParams(seed=seed), 3, rule) for seed in range(trials)]
    expected = np.array(by_formula(children, rule))
    deviations = np.abs(np.bincount(tokens, minlength=5) / trials - expected)
    assert (deviations < 5 * np.sqrt(expected * (1 - expected) / trials) + 1e-9).all()


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**20))
def test_without_children_sampling_is_exact(seed: int, position: int) -> None:
    logits = np.log(np.array(CHANCES, np.float32))
    params = SamplingParams(seed=seed)
    token = choose(Candidates(None, logits), [], params, position, AcceptRule(acc=0.5))
    assert token == int(np.argmax(logits + gumbel(seed, 0, position, vocab_size=5)))


@given(seed=st.integers(0, 1000))
def test_where_no_child_passes_the_noise_chooses_among_the_rest(seed: int) -> None:
    logits = np.log(np.array(CHANCES, np.float32))
    params, children = SamplingParams(seed=seed), [3, 4]
    token = choose(Candidates(None, logits), children, params, 9, AcceptRule(acc=0.9))
    if coin(seed, 0, 9) >= 0.15 / 0.9 + 1e-6:
        assert token == int(np.argmax((logits + gumbel(seed, 0, 9, vocab_size=5))[:3]))
    else:
        assert token in children


def test_ruled_out_tokens_never_pass() -> None:
    """Filtered or masked children have no chance, whatever the thresholds."""
    row = np.log(np.array(CHANCES, np.float32))
    rule = AcceptRule(single=1e-9, acc=1e-9)
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5)):
        candidates = LogitsProcessor(params).process(row, None, [])
        assert choose(candidates, [4, 2], params, 3, rule) in (0, 1)
    masked = LogitsProcessor(SamplingParams()).process(row, None, [], np.array([True, True, True, True, False]))
    assert choose(masked, [4, 2], SamplingParams(), 3, rule) == 2


def test_chances_are_those_after_the_filters() -> None:
    """Of top-k 2 the likeliest has the chance 0.4 / 0.65."""
    params = SamplingParams(top_k=2)
    candidates = LogitsProcessor(params).process(np.log(np.array(CHANCES, np.float32)), None, [])
    assert choose(candidates, [0], params, 3, AcceptRule(single=0.615)) == 0
    seed = next(seed for seed in range(99) if coin(seed, 0, 3) > 0.7)
    unlucky = SamplingParams(top_k=2, seed=seed)
    assert choose(candidates, [0], unlucky, 3, AcceptRule(single=0.616)) == 1


def test_children_that_hold_all_mass_pass() -> None:
    candidates = Candidates(None, np.array([0.0, -np.inf, -np.inf], np.float32))
    for seed in range(50):
        assert choose(candidates, [2, 0], SamplingParams(seed=seed), 3, AcceptRule(single=0.5)) == 0


def test_coins_are_even_and_apart_from_the_noise() -> None:
    coins = np.array([coin(5, 1, position) for position in range(2000)])
    assert abs(coins.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 2000)
    noise = np.array([gumbel(5, 1, position, vocab_size=1)[0] for position in range(2000)])
    assert abs(np.corrcoef(coins, noise)[0, 1]) < 0.1


def test_greedy_requests_are_exempt() -> None:
    assert not AcceptRule(acc=0.5).applies_to(SamplingParams(temperature=0.0))
    assert AcceptRule(acc=0.5).applies_to(SamplingParams(temperature=0.5))
    assert AcceptRule(single=0.5).applies_to(SamplingParams())
    assert not EXACT.applies_to(SamplingParams())

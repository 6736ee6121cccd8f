"""The ideal draft: its texts are followed as far as its trees hold them, and more steps or longer holds are no loss."""

from __future__ import annotations

import random

import pytest

from benchmarks.simulate import ideal
from benchmarks.simulate.ideal import ROUND_MS, IdealTree, Pace, Text, ahead, lockstep
from benchmarks.simulate.language import Language

LANGUAGE = Language()


TOKENS = 96
"""Of a text; what is published is of longer ones."""


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> Text:
    monkeypatch.setattr(ideal, "TOKENS", TOKENS)
    return Text(LANGUAGE, random.Random(0))


def test_a_step_deepens_the_likeliest_path_and_rounds_see_what_is_there_in_time(text: Text) -> None:
    tree = IdealTree(LANGUAGE, text.states[0])
    tree.step(4, ready_at=1.0)
    assert tree.is_bare(0, 0.5) and not tree.is_bare(0, 1.0)
    assert tree.best(0, 5, 0.5) == set()
    (first,) = tree.best(0, 1, 1.0)
    tree.step(1, ready_at=2.0)
    assert tree.is_bare(first, 1.0) and not tree.is_bare(first, 2.0)
    assert len(tree.best(0, 20, 2.0)) == 20


def test_a_tree_runs_on_below_its_new_root_alone(text: Text) -> None:
    tree = IdealTree(LANGUAGE, text.states[0])
    tree.step(1)
    first, second = sorted(tree.best(0, 2, 0.0))
    tree.reroot(second)
    tree.step(32)
    assert tree.is_bare(first, 0.0) and not tree.is_bare(second, 0.0)


def test_a_path_is_followed_as_far_as_the_round_took_it(text: Text) -> None:
    tree = IdealTree(LANGUAGE, text.states[0])
    for _ in range(4):
        tree.step(64)
    node, accepted = text.follow(tree, 0, 0, tree.best(0, 400, 0.0))
    assert accepted >= 1
    path = 0
    for place in range(1, accepted + 1):
        below = tree.child(path, text.tokens[place])
        assert below is not None
        path = below
    assert path == node
    assert text.follow(tree, 0, 0, set()) == (0, 0)


def test_a_fast_draft_is_accepted_longer_and_a_draft_that_is_late_hardly_at_all(text: Text) -> None:
    tokens, rounds, ms = ahead(LANGUAGE, text, Pace(0.5))
    slow_tokens, slow_rounds, _ = ahead(LANGUAGE, text, Pace(3.0))
    assert tokens >= TOKENS - 1 and rounds * ROUND_MS <= ms
    assert tokens / rounds > 1.2 * slow_tokens / slow_rounds
    _, late_rounds, _ = ahead(LANGUAGE, text, Pace(1.0, nodes=3 * ROUND_MS))
    assert late_rounds > 1.5 * rounds


def test_lockstep_takes_the_whole_answer(text: Text) -> None:
    tokens, rounds = lockstep(LANGUAGE, text)
    assert tokens >= TOKENS - 1 and 3 < tokens / rounds < 9

"""Commits that arrive while a burst is under way, and what is sent before it ends."""

from __future__ import annotations

import math
import random

import pytest
from growth_rig import GOES_ON, Rig, Verify, continuation, scripted
from integrity import check_slots

from outrider.config.draft import DraftOptions


def grown(credit: int = 60) -> tuple[Rig, Verify]:
    """A tree with a burst under way that is not over."""
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.001), **GOES_ON)
    request = rig.open(1, [1, 2, 3], credit=credit)
    for _ in range(4):
        rig.turn()
    rig.runner.auto_ready = False
    rig.turn()
    assert rig.growth._active is not None and not rig.growth._active.pending.done()
    return rig, request


def test_a_commit_is_answered_while_the_burst_runs() -> None:
    """Its path is in the tree: nothing that the burst brings is needed to follow it."""
    rig, request = grown()
    rig.commit(1, continuation(request.tokens, 2), credit=60)
    bursts = len(rig.runner.bursts)
    rig.turn()
    assert len(rig.runner.bursts) == bursts, "the burst is still under way"
    assert request.mirror.acked_len == len(request.tokens)
    assert request.held()
    request.check()


def test_what_a_burst_brings_below_dead_nodes_is_dropped_and_its_slots_are_free() -> None:
    rig, request = grown()
    rig.commit(1, continuation(request.tokens, 2), credit=60)
    rig.turn()
    rig.runner.auto_ready = True
    rig.settle()
    check_slots(rig.growth._forest.slots)
    request.check()
    assert len(set(rig.runner.ran)) == len(rig.runner.ran), "what the burst ran of the new tree is not run again"
    rig.close(1)
    rig.settle()
    rig.check_nothing_left()


def test_a_commit_off_the_tree_waits_for_what_the_burst_brings() -> None:
    rig, request = grown()
    known = {guess for guess, _ in scripted(tuple(request.tokens))}
    token = next(one for one in range(40) if one not in known)
    rig.commit(1, [token], credit=60)
    rig.turn()
    assert request.mirror.acked_len < len(request.tokens) or not request.held()
    rig.runner.auto_ready = True
    rig.settle()
    request.check()
    assert request.held()


@pytest.mark.parametrize("seed", range(8))
def test_commits_at_any_moment_leave_a_sound_forest(seed: int) -> None:
    draw = random.Random(seed)
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.001), **GOES_ON)
    requests = [rig.open(number, [number, 2, 3], credit=40) for number in (1, 2)]
    for _ in range(60):
        rig.runner.auto_ready = draw.random() < 0.5
        if draw.random() < 0.4 and rig.runner.pending is not None:
            rig.runner.pending.ready = True
        rig.turn(wait=draw.random() < 0.7)
        if draw.random() < 0.4:
            one = draw.choice(requests)
            if len(one.tokens) < 200:
                rig.commit(one.number, continuation(one.tokens, draw.randint(1, 3), draw), credit=40)
        for one in requests:
            one.check()
    rig.runner.auto_ready = True
    if rig.runner.pending is not None:
        rig.runner.pending.ready = True
    rig.settle()
    check_slots(rig.growth._forest.slots)
    rig.close(1)
    rig.close(2)
    rig.settle()
    rig.check_nothing_left()


def test_with_much_credit_likely_nodes_are_told_though_better_ones_may_come() -> None:
    num_held = []
    for credit in (255, 256):
        rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0001), **GOES_ON)
        request = rig.open(1, [1, 2, 3], credit=credit)
        for _ in range(7):
            rig.turn()
        num_held.append(len(request.held()))
        assert min(request.held().values()) > -math.inf
    assert num_held[1] > num_held[0]

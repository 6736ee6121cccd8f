"""Bursts that go on past commits: the device is given new roots, and lands for nothing that it has already."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from growth_rig import GOES_ON, Rig, Verify, continuation

from outrider.config.draft import DraftOptions
from outrider.drafting.model.burst import FORCED
from outrider.drafting.model.entries import DEAD

LONG = GOES_ON | {"max_steps": 32, "max_seeds": 512, "num_pages": 512}
ANY = DraftOptions(max_positions=300, min_path_probability=0.001)


def grown(numbers: Sequence[int] = (1,), turns: int = 3, credit: int = 60, **changes: int) -> tuple[Rig, list[Verify]]:
    """Trees of some depth, with a burst under way."""
    rig = Rig(ANY, **(LONG | changes))
    requests = [rig.open(number, [number, 2, 3], credit) for number in numbers]
    for _ in range(turns):
        rig.turn()
    assert rig.growth._active is not None
    return rig, requests


def commit(rig: Rig, number: int, tokens: Sequence[int]) -> None:
    """A commit arrives while the part that was queued last runs, and is followed; the next turn goes on behind it."""
    assert rig.runner.pending is not None
    rig.runner.pending.ready = False
    rig.commit(number, tokens, credit=60)
    rig.turn()
    rig.runner.pending.ready = True


def ranked(rig: Rig, request: Verify, row: int) -> list[tuple[tuple[int, ...], float]]:
    """Paths and scores of what a burst that is launched now would find to run, best first."""
    entries, found = rig.growth._forest.entries, []
    for entry in rig.growth._forest.choose(10**6, beyond=True).tolist():
        if entries.rows[entry] == row and entries.scores[entry] >= rig.growth._forest.floor:
            path, above = [], entry
            while above != rig.growth._forest.roots[row]:
                path.append(int(entries.tokens[above]))
                above = int(entries.parents[above])
            found.append(((*request.tokens, *reversed(path)), float(entries.scores[entry])))
    return found


def check_survivors(rig: Rig, request: Verify, since: int) -> bool:
    """The device may run, from when it was given new roots on, what the host would choose from, in the same order.

    False if the host does not know what that is yet, or not any more. `since`: of the times that it was given
    anything, those that may be of this request's commit.
    """
    context = next(
        context for context in rig.growth._batch_manager.rows.values() if context.tree.author.request == request.number
    )
    paths = [one[context.row] for one in rig.runner.survivors[since:] if context.row in one]
    if not paths:  # what it was given before has to be run first
        assert context.root_in_burst
        return False
    active = rig.growth._active
    if active is None or active.plan.landed_steps != rig.runner.reroot_steps[-1]:
        return False
    survivors, wanted = paths[-1], ranked(rig, request, context.row)
    if not context.root_run:
        # The root, as it was in the pool, or forced behind committed tokens that were not run; or what hangs below it
        # if the part that is under way has run it.
        root = tuple(request.tokens)
        assert all(score >= FORCED for path, score in survivors if len(path) < len(root))
        assert all(path[: len(root)] == root[: len(path)] for path, _ in survivors)
        return True
    assert sorted(path for path, _ in survivors) == sorted(path for path, _ in wanted)
    assert [score for _, score in survivors] == pytest.approx([score for _, score in wanted], abs=1e-4)
    of = dict(wanted)
    assert [of[path] for path, _ in survivors] == pytest.approx([score for _, score in wanted], abs=1e-4)
    return True


def test_a_burst_goes_on_past_a_commit_that_it_is_told_of() -> None:
    rig, (request,) = grown()
    bursts, parts = len(rig.runner.bursts), len(rig.runner.parts)
    for _ in range(3):
        commit(rig, 1, continuation(request.tokens, 2))
        for _ in range(3):
            rig.turn()
    assert len(rig.runner.bursts) == bursts and len(rig.runner.parts) > parts + 3
    assert len(rig.runner.survivors) == 3
    request.check()
    assert len(set(rig.runner.ran)) == len(rig.runner.ran), "nothing is run twice"
    rig.settle()
    rig.close(1)
    rig.settle()
    rig.check_nothing_left()


@pytest.mark.parametrize("seed", range(3))
def test_survivors_are_what_a_landing_and_a_fresh_plan_would_rank(seed: int) -> None:
    draw = random.Random(seed)
    rig, requests = grown((1, 2))
    checked = 0
    for _ in range(40):
        one = draw.choice(requests)
        before = len(rig.runner.survivors)
        if len(one.tokens) < 200:
            commit(rig, one.number, continuation(one.tokens, draw.randint(1, 3), draw))
        rig.turn()  # goes on, and takes in the part that ran before
        if len(rig.runner.survivors) > before:
            checked += check_survivors(rig, one, before)
        for _ in range(draw.randrange(4)):
            rig.turn()
        for request in requests:
            request.check()
    assert checked >= 10


@pytest.mark.parametrize("count", [1, 3])
def test_a_root_that_was_not_run_is_run_by_the_burst_under_way(count: int) -> None:
    """It is in the pool, and all that is left of its tree."""
    rig, (request,) = grown(turns=2 + count)
    entries, forest = rig.growth._forest.entries, rig.growth._forest
    unrun = forest.choose(1)[0]
    path = []
    while unrun != forest.roots[0]:
        path.append(int(entries.tokens[unrun]))
        unrun = entries.parents[unrun]
    bursts = len(rig.runner.bursts)
    commit(rig, 1, path[::-1])
    context = rig.growth._batch_manager.rows[0]
    assert context.root_in_burst or context.root_run
    for _ in range(3):
        rig.turn()
    assert context.root_run and not context.root_in_burst
    assert len(rig.runner.bursts) == bursts and request.held()
    request.check()


def test_slots_of_nodes_that_died_are_filled_again_by_the_same_burst() -> None:
    rig, (request,) = grown(credit=60, region=128 + 128)
    bursts = len(rig.runner.bursts)
    leased = rig.runner.bursts[-1].rows.free_ends - rig.runner.bursts[-1].rows.free_starts
    ran = len(rig.runner.ran)
    while len(rig.runner.bursts) == bursts and len(request.tokens) < 40:
        commit(rig, 1, continuation(request.tokens, 1))
        for _ in range(3):
            rig.turn()
    assert len(rig.runner.ran) - ran > int(leased.sum())
    assert rig.growth._forest.num_run[0] <= rig.growth._forest.quotas[0]
    rig.settle()
    request.check()


@pytest.mark.parametrize("what", ["pause", "open"])
def test_what_the_device_cannot_be_told_of_lands_the_burst(what: str) -> None:
    rig, (request, _) = grown((1, 2))
    bursts, reroots = len(rig.runner.bursts), len(rig.runner.survivors)
    if what == "open":
        rig.open(3, [6, 7], credit=60)
    else:
        rig.pause(2)
    for _ in range(3):
        rig.turn()
    assert len(rig.runner.bursts) > bursts and len(rig.runner.survivors) == reroots
    request.check()


def test_a_tree_that_has_all_it_may_have_is_followed_by_the_burst_of_others() -> None:
    """It is not worth a step when the burst begins, but is once there is a commit."""
    rig, (request, other) = grown((1, 2), credit=20)
    for _ in range(12):
        rig.turn()
        if rig.growth._forest.num_run[0] >= rig.growth._forest.quotas[0]:
            break
    commit(rig, 2, continuation(other.tokens, 2))
    rig.settle()
    rig.commit(2, continuation(other.tokens, 1), credit=60)
    rig.turn()
    burst, bursts = rig.runner.bursts[-1], len(rig.runner.bursts)
    assert burst.rows.rows.tolist() == [0, 1]
    commit(rig, 1, continuation(request.tokens, 2))
    for _ in range(3):
        rig.turn()
    assert len(rig.runner.bursts) == bursts
    request.check()
    other.check()


def test_a_burst_lands_when_much_waits_to_be_moved_to_the_context() -> None:
    rig, (request,) = grown()
    rig.growth._kv_manager._min_move = 10
    bursts, context = len(rig.runner.bursts), rig.growth._batch_manager.rows[0]
    longest = 0
    while len(rig.runner.bursts) == bursts:
        commit(rig, 1, continuation(request.tokens, 2))
        longest = max(longest, len(context.uncached))
        for _ in range(3):
            rig.turn()
        assert len(request.tokens) < 200
    assert longest == 10 and not context.uncached
    rig.settle()
    request.check()


def test_what_others_have_to_be_moved_goes_along() -> None:
    """Or their own turn would end a burst a little later."""
    rig, (busy, other) = grown((1, 2))
    rig.growth._kv_manager._min_move = 16
    bursts = len(rig.runner.bursts)
    while len(rig.runner.bursts) == bursts:
        for request, count in ((busy, 4), (other, 3)):
            commit(rig, request.number, continuation(request.tokens, count))
            for _ in range(2):
                rig.turn()
        assert len(busy.tokens) < 100
    assert len(other.tokens) > 10
    assert all(len(context.uncached) < 4 for context in rig.growth._batch_manager.rows.values())
    rig.settle()
    busy.check()
    other.check()


def test_a_drafter_of_features_goes_on_past_few_commits() -> None:
    """Then committed tokens are run once more with their true features."""
    rig = Rig(ANY, **(LONG | {"feature_size": 1}))
    request = rig.open(1, [1, 2, 3, 4], credit=60)
    rig.features(1, 0, 3)
    for _ in range(6):
        rig.turn()
    for _ in range(8):
        length = len(request.tokens)
        commit(rig, 1, continuation(request.tokens, 2))
        rig.features(1, length - 1, 2)
        for _ in range(3):
            rig.turn()
        unsettled = sum(not one.is_final for one in rig.growth._batch_manager.rows[0].uncached)
        assert unsettled <= 6
        request.check()
    assert rig.runner.survivors and len(rig.runner.bursts) == 1, "the same burst was given them"
    assert len(set(rig.runner.ran)) < len(rig.runner.ran)
    rig.settle()
    request.check()


def test_a_burst_is_told_of_seeds_that_may_be_worth_it_later() -> None:
    """What is hopeless from this root is in the pool all the same, behind everything else."""
    rig, (request,) = grown(turns=1)
    rig.settle()
    rig.commit(1, continuation(request.tokens, 1), credit=60)
    rig.turn()
    burst, forest = rig.runner.bursts[-1], rig.growth._forest
    scores = burst.seeds.scores[burst.seeds.scores <= 0]
    assert (np.diff(scores) <= 0).all() and scores[-1] < forest.floor < scores[0]
    alive = forest.entries.ranks[: forest.entries.count] > DEAD
    assert alive.any()


def test_a_tree_whose_slots_went_to_dead_nodes_gets_others_without_a_commit_of_its_own() -> None:
    rig, (busy, idle) = grown((1, 2), turns=2)
    forest, bursts = rig.growth._forest, len(rig.runner.bursts)
    commit(rig, 2, continuation(idle.tokens, 1))
    while forest.num_run[1] < forest.quotas[1] and len(rig.runner.bursts) == bursts:
        commit(rig, 1, continuation(busy.tokens, 1))
        rig.turn()
    assert len(rig.runner.bursts) == bursts, "the tree waits for the next burst"
    idle.check()
    busy.check()

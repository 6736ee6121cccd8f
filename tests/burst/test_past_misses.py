"""Bursts that go on past what nobody guessed, and without requests that were closed."""

from __future__ import annotations

import logging
import random

import pytest
from growth_rig import Rig, continuation, scripted
from test_past_commits import ANY, LONG, commit, grown


@pytest.mark.parametrize("above", [0, 1, 2, 6])
def test_a_burst_goes_on_past_a_miss(above: int) -> None:
    """It is given the root that nobody guessed, and the committed tokens above that it has not run."""
    rig, (request, other) = grown((1, 2))
    bursts, deep = len(rig.runner.bursts), continuation(request.tokens, above)
    known = {guess for guess, _ in scripted((*request.tokens, *deep))}
    commit(rig, 1, [*deep, next(one for one in range(40) if one not in known)])
    context = next(one for one in rig.growth._batch_manager.rows.values() if one.tree.author.request == 1)
    assert context.root_in_burst and not context.root_run
    for _ in range(3):
        rig.turn()
    assert len(rig.runner.bursts) == bursts and context.root_run and not context.root_in_burst
    assert request.held() and other.held()
    request.check()
    for _ in range(3):
        commit(rig, 1, continuation(request.tokens, 2))
        rig.turn()
    assert len(rig.runner.bursts) == bursts
    rig.settle()
    request.check()
    for number in (1, 2):
        rig.close(number)
    rig.settle()
    rig.check_nothing_left()


def test_a_request_that_misses_again_before_its_root_was_run_waits_for_that() -> None:
    """Others are followed meanwhile, and the burst goes on."""
    rig, (request, other) = grown((1, 2))
    bursts, reroots = len(rig.runner.bursts), len(rig.runner.survivors)
    commit(rig, 1, [39])
    rig.runner.auto_ready = False
    rig.turn()
    assert len(rig.runner.survivors) == reroots + 1 and rig.growth._active.plan.forced  # type: ignore[union-attr]
    rig.commit(1, [38], credit=60)
    rig.commit(2, continuation(other.tokens, 1), credit=60)
    rig.turn()
    assert request.mirror.acked_len < len(request.tokens) and other.mirror.acked_len == len(other.tokens)
    rig.runner.auto_ready = rig.runner.pending.ready = True  # type: ignore[union-attr]
    for _ in range(6):
        rig.turn()
    assert len(rig.runner.bursts) == bursts and request.mirror.acked_len == len(request.tokens)
    assert request.held() and other.held()
    request.check()
    other.check()


def test_requests_whose_committed_tokens_do_not_fit_at_once_are_given_them_by_later_parts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, requests = grown((1, 2, 3, 4), max_width=8)
    bursts = len(rig.runner.bursts)
    rig.runner.pending.ready = False  # type: ignore[union-attr]
    for request in requests:
        rig.commit(request.number, [39, 38, 37, 36, 35], credit=60)
    with caplog.at_level(logging.ERROR, "draft_service"):
        rig.turn()
        rig.runner.pending.ready = True  # type: ignore[union-attr]
        for _ in range(8):
            rig.turn()
        assert len(rig.runner.bursts) == bursts
        rig.settle()
    assert not caplog.records
    for request in requests:
        assert request.held()
        request.check()


def test_a_burst_lands_when_it_has_no_place_for_more_committed_tokens() -> None:
    rig, (request,) = grown(max_seeds=12)
    bursts = len(rig.runner.bursts)
    for _ in range(12):
        commit(rig, 1, [39, 38, 37])
        for _ in range(3):
            rig.turn()
        assert request.held()
        request.check()
    assert len(rig.runner.bursts) > bursts
    rig.settle()
    request.check()


def test_a_burst_goes_on_without_a_request_that_is_closed() -> None:
    rig, (request, _) = grown((1, 2))
    bursts = len(rig.runner.bursts)
    rig.close(2)
    rig.turn()
    ran = len(rig.runner.ran)
    for _ in range(3):
        commit(rig, 1, continuation(request.tokens, 1))
        rig.turn()
    assert len(rig.runner.bursts) == bursts and rig.runner.survivors[0][1] == []
    assert all(path[0] == 1 for path in rig.runner.ran[ran:]), "nothing more is run for it"
    rig.settle()
    request.check()
    assert list(rig.runner.rows) == [0], "its row is free when the burst has ended"
    rig.close(1)
    rig.settle()
    rig.check_nothing_left()


def test_pages_of_a_request_that_was_closed_are_there_for_others_when_the_burst_has_ended() -> None:
    """They were kept while it ran, which is longer than anybody must be declined for."""
    rig = Rig(ANY, **(LONG | {"num_pages": 11}))
    request, other = rig.open(1, [1, 2, 3], 60), rig.open(2, [2, *range(3, 40)], 60)
    rig.growth._kv_manager._min_move = 10
    for _ in range(3):
        rig.turn()
    bursts = len(rig.runner.bursts)
    assert rig.growth._kv_manager.pool.num_free == 0 and len(other.held())
    rig.close(2)
    while len(rig.runner.bursts) == bursts:
        commit(rig, 1, continuation(request.tokens, 2))
        for _ in range(2):
            rig.turn()
    while len(request.tokens) < 30:
        commit(rig, 1, continuation(request.tokens, 2))
        for _ in range(3):
            rig.turn()
    assert request.declined is None
    rig.settle()
    request.check()


@pytest.mark.parametrize("seed", range(4))
def test_a_root_that_the_part_under_way_may_have_run_is_not_run_beside_it(seed: int) -> None:
    """A drafter of features: the host does not know that the device has it, and would give it another tree slot."""
    draw = random.Random(seed)
    rig = Rig(ANY, **(LONG | {"feature_size": 1}))
    requests = [rig.open(number, [1, number, 3, 4], credit=60) for number in (1, 2)]
    for request in requests:
        rig.features(request.number, 0, 3)
    for _ in range(5):
        rig.turn()
    for _ in range(30):
        one = draw.choice(requests)
        row = next(
            row for row, context in rig.growth._batch_manager.rows.items() if context.tree.author.request == one.number
        )
        entries, forest = rig.growth._forest.entries, rig.growth._forest
        unrun = [entry for entry in forest.choose(40).tolist() if entries.rows[entry] == row]
        if not unrun or len(one.tokens) > 150:
            break
        path, above = [], unrun[0]
        while above != forest.roots[row]:
            path.append(int(entries.tokens[above]))
            above = int(entries.parents[above])
        length = len(one.tokens)
        rig.commit(one.number, path[::-1], credit=60)
        for _ in range(draw.randrange(3)):
            rig.turn()
        rig.features(one.number, length - 1, len(path))
        for _ in range(3):
            rig.turn()
            one.check()
    rig.settle()
    for request in requests:
        request.check()
        rig.close(request.number)
    rig.settle()
    rig.check_nothing_left()

"""Growth with a model: what verify gets is what the model says, and nothing is lost on the way."""

from __future__ import annotations

import math

import pytest
from growth_rig import GOES_ON, Rig, continuation, scripted
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config.draft import DraftOptions
from outrider.tree.messages import DeclineReason, Grow


def best_paths(tokens: list[int], count: int, floor: float) -> list[float]:
    """Path scores of the best nodes that the model knows below a root, the best first."""
    found: list[tuple[float, tuple[int, ...]]] = []
    pool = [(0.0, ())]
    while pool and len(found) <= count:
        pool.sort()
        negated, path = pool.pop(0)
        found.append((-negated, path))
        for token, score in scripted((*tokens, *path)):
            if -negated + score >= floor:
                pool.append((negated - score, (*path, token)))
    return [score for score, _ in found[1 : count + 1]]


def path_scores(held: dict[tuple[int, ...], float]) -> list[float]:
    return sorted((sum(held[path[: end + 1]] for end in range(len(path))) for path in held), reverse=True)


def test_after_an_open_verify_gets_the_best_of_the_model() -> None:
    rig = Rig(DraftOptions(min_path_probability=0.02))
    request = rig.open(1, [1, 2, 3], credit=20)
    rig.settle()
    request.check()
    scores = path_scores(request.held())
    assert len(scores) == 20
    # Some are sent before the tree is complete, so the last of them may be a little worse.
    assert scores[:8] == pytest.approx(best_paths(request.tokens, 8, math.log(0.02)), rel=1e-5)


def test_an_open_is_answered_by_one_burst_of_four_steps() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3])
    rig.turn()
    assert [burst.num_steps for burst in rig.runner.bursts] == [4]
    rig.turn()
    assert len(request.held()) > 8
    assert [burst.num_steps for burst in rig.runner.bursts[1:]] == [2]


def test_the_next_burst_is_under_way_before_nodes_are_announced() -> None:
    rig = Rig()
    rig.open(1, [1, 2, 3], credit=60)
    rig.turn()
    launched: list[int] = []
    rig.runner.wait_fault = lambda burst: launched.append(rig.requests.growth.num_live)  # type: ignore[func-returns-value]
    rig.turn()
    assert launched == [0]
    assert rig.requests.growth.num_live > 8


def test_a_burst_goes_on_from_its_own_pool_while_nothing_waits_for_its_end() -> None:
    """The device has its next steps before the host has looked at those before."""
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0), **GOES_ON)
    request = rig.open(1, [1, 2, 3], credit=60)
    rig.turn()
    assert rig.runner.parts == []
    held = []
    for _ in range(4):
        rig.turn()
        held.append(len(request.held()))
    assert len(rig.runner.bursts) == 1 and rig.runner.parts == [1, 1, 1, 1]
    assert 0 < held[0] < held[-1], "each part is announced when it has landed"
    request.check()
    rig.turn()
    assert len(rig.runner.bursts) == 2, "a burst has eight steps at most"
    rig.growth._forest.check_integrity()


def test_parts_run_what_bursts_would_run() -> None:
    """Best first over all that is known, whether the host looks or not."""
    grown = []
    for shape in ({}, GOES_ON):
        rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.05), **({"region": 256} | shape))
        request = rig.open(1, [1, 2, 3], credit=40)
        rig.settle()
        rig.commit(1, continuation(request.tokens, 2), credit=40)
        rig.settle()
        request.check()
        assert len(set(rig.runner.ran)) == len(rig.runner.ran)
        grown.append(path_scores(request.held()))
    assert grown[0][:12] == pytest.approx(grown[1][:12], rel=1e-6)


@pytest.mark.parametrize("what", ["commit", "open", "close", "pause"])
def test_a_burst_does_not_go_on_when_something_waits_for_its_end(what: str) -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0), **GOES_ON)
    request = rig.open(1, [1, 2, 3], credit=60)
    rig.open(2, [4, 5], credit=60)
    for _ in range(2):
        rig.turn()
    parts, bursts = len(rig.runner.parts), len(rig.runner.bursts)
    assert parts
    if what == "commit":
        rig.commit(1, continuation(request.tokens, 2), credit=60)
    elif what == "open":
        rig.open(3, [6], credit=60)
    elif what == "close":
        rig.close(2)
    else:
        rig.pause(2)
    rig.turn()
    assert (len(rig.runner.parts), len(rig.runner.bursts)) == (parts, bursts + 1)
    request.check()


def test_a_part_that_fails_takes_its_requests_along_and_no_other() -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0), **GOES_ON)
    rig.open(1, [1, 2, 3], credit=60)
    rig.turn()
    rig.runner.wait_fault = lambda burst: RuntimeError("no memory")
    rig.turn()
    rig.runner.wait_fault = lambda burst: None
    rig.settle()
    assert rig.gone[1].declined is DeclineReason.UNSPECIFIED
    request = rig.open(2, [5, 6])
    rig.settle()
    assert request.held()
    rig.close(2)
    rig.settle()
    rig.check_nothing_left()


@pytest.mark.parametrize(("num_rows", "width"), [(1, 64), (16, 64), (20, 80), (32, 128)])
def test_steps_are_wide_for_many_requests_alone(num_rows: int, width: int) -> None:
    rig = Rig(
        DraftOptions(max_positions=300, min_path_probability=0.0, speculative_algorithm=("STANDALONE",)),
        num_rows=num_rows, num_pages=1024, max_seeds=512, max_width=128, **GOES_ON,
    )  # fmt: skip
    for number in range(num_rows):
        rig.open(number, [number + 1, 2, 3], credit=200)
    for _ in range(8):
        rig.turn()
    assert max(burst.width for burst in rig.runner.bursts) == width


def test_a_burst_that_cannot_go_on_lands_and_others_follow() -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0), **GOES_ON)
    request = rig.open(1, [1, 2, 3], credit=60)
    rig.turn()
    growth = rig.requests.growth
    rig.runner.launch_fault = RuntimeError("no memory")
    growth.grow(math.inf, lambda: True)
    assert growth.pressed and not rig.runner.parts
    rig.runner.launch_fault = None
    rig.settle()
    request.check()
    assert request.held() and not rig.gone
    assert len(rig.runner.bursts) > 1 and rig.runner.parts


def test_a_hit_keeps_the_tree_below_the_new_root_and_runs_nothing_twice() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3])
    rig.settle()
    accepted = continuation(request.tokens, 2)
    below = {path[2:] for path in request.held() if path[:2] == tuple(accepted) and len(path) > 2}
    assert below
    rig.commit(1, accepted)
    rig.settle()
    assert below <= request.held().keys()
    request.check()
    assert len(set(rig.runner.ran)) == len(rig.runner.ran)
    assert rig.runner.rows[0].context == request.tokens[:-1]


def test_a_miss_starts_anew_at_the_new_root_and_keeps_the_context() -> None:
    rig = Rig()
    request = rig.open(1, list(range(1, 20)))
    rig.settle()
    extended = list(rig.runner.extended)
    missed = next(token for token in range(40) if token not in dict(scripted(tuple(request.tokens))))
    rig.commit(1, [missed])
    rig.settle()
    request.check()
    assert request.mirror.epoch == 2
    assert len(request.held()) == 24
    assert rig.runner.extended == extended
    assert rig.runner.rows[0].context == request.tokens[:-1]


def test_a_miss_of_the_author_that_the_model_foresaw_costs_no_new_tree() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3], credit=2)
    rig.settle()
    token = next(token for token, _ in scripted((1, 2, 3)) if (token,) not in request.held())
    ran = len(rig.runner.ran)
    rig.commit(1, [token], credit=2)
    rig.settle()
    assert request.mirror.epoch == 2
    assert len(request.held()) == 2
    assert len(set(rig.runner.ran)) == len(rig.runner.ran) > ran


def test_many_tokens_at_once_are_computed_apart() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3])
    rig.settle()
    rig.commit(1, [5] * 30)
    rig.settle()
    request.check()
    assert sum(count for _, count in rig.runner.extended) > 20
    assert request.held()


def test_prompts_are_computed_in_chunks_between_the_bursts_of_others() -> None:
    rig = Rig(max_context=1000, num_pages=500, options=None)
    first = rig.open(1, [1, 2, 3], credit=60)
    rig.turn()
    rig.open(2, [4] * 280)
    bursts = len(rig.runner.bursts)
    for _ in range(3):
        rig.turn()
    assert [count for row, count in rig.runner.extended if row == 1] == [128, 128, 23]
    assert len(rig.runner.bursts) > bursts + 1
    assert first.held()
    rig.settle()
    assert rig.open_requests[2].held()


def test_a_paused_request_follows_and_does_not_grow() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3])
    rig.settle()
    rig.pause(1)
    rig.commit(1, [30, 31])
    rig.settle()
    bursts = len(rig.runner.bursts)
    rig.settle()
    assert len(rig.runner.bursts) == bursts
    assert not request.held()
    rig.resume(1)
    rig.settle()
    request.check()
    assert request.held()


def test_credit_bounds_what_is_sent_and_what_is_run() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3], credit=5)
    rig.settle()
    assert len(request.held()) == 5
    assert len(rig.runner.ran) <= 3 + 2 * 5
    rig.commit(1, continuation(request.tokens, 1), credit=0)
    rig.settle()
    bursts = len(rig.runner.bursts)
    rig.commit(1, continuation(request.tokens, 1), credit=0)
    rig.settle()
    assert len(rig.runner.bursts) == bursts


def test_without_a_floor_the_tree_fills_its_credit() -> None:
    rig = Rig(DraftOptions(max_positions=300, min_path_probability=0.0))
    request = rig.open(1, [1, 2, 3], credit=64)
    rig.settle()
    rig.commit(1, continuation(request.tokens, 2), credit=64)
    rig.settle()
    request.check()
    assert len(request.held()) == 64


def test_requests_past_the_rows_are_declined_and_rows_are_used_again() -> None:
    rig = Rig(num_rows=2)
    for number in (1, 2, 3):
        rig.open(number, [number])
    rig.settle()
    assert rig.gone[3].declined is DeclineReason.OVERLOADED
    rig.close(1)
    request = rig.open(4, [4])
    rig.settle()
    assert request.held()


def test_without_pages_a_request_is_declined_and_may_come_again() -> None:
    rig = Rig(num_pages=6)
    rig.open(1, list(range(1, 21)))
    rig.settle()
    rig.open(2, list(range(1, 13)))
    rig.settle()
    assert rig.gone[2].declined is DeclineReason.OVERLOADED
    rig.close(1)
    request = rig.open(3, list(range(1, 13)))
    rig.settle()
    assert request.held()
    rig.close(3)
    rig.settle()
    rig.check_nothing_left()


def test_a_sequence_is_served_as_far_as_positions_go() -> None:
    rig = Rig(max_context=24)
    request = rig.open(1, list(range(1, 10)))
    rig.settle()
    while 1 in rig.open_requests:
        if len(request.tokens) < 18:
            assert request.held()
        rig.commit(1, continuation(request.tokens, 1))
        rig.settle()
    assert request.declined is DeclineReason.TOO_LONG
    assert len(request.tokens) == 25
    rig.check_nothing_left()


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_burst_that_fails_takes_its_requests_along_and_no_other(where: str) -> None:
    rig = Rig()
    other = rig.open(1, [1, 2, 3], credit=6)
    rig.settle()
    rig.open(2, [5, 6])
    rig.open(3, [7, 8])
    if where == "launch":
        rig.runner.launch_fault = RuntimeError("no memory")
    else:
        rig.runner.wait_fault = lambda burst: RuntimeError("no memory")
    rig.turn()
    rig.runner.launch_fault, rig.runner.wait_fault = None, lambda burst: None
    rig.settle()
    assert {number: gone.declined for number, gone in rig.gone.items()} == {
        2: DeclineReason.UNSPECIFIED,
        3: DeclineReason.UNSPECIFIED,
    }
    rig.commit(1, continuation(other.tokens, 1))
    rig.settle()
    assert other.held()
    rig.close(1)
    rig.settle()
    rig.check_nothing_left()


def test_a_prompt_that_fails_harms_no_other() -> None:
    rig = Rig()
    other = rig.open(1, [1, 2, 3])
    rig.settle()
    rig.runner.extend_fault = RuntimeError("no memory")
    rig.open(2, [3] * 50)
    rig.settle()
    assert rig.gone[2].declined is DeclineReason.UNSPECIFIED
    rig.commit(1, continuation(other.tokens, 2))
    rig.settle()
    assert other.held()


def test_nothing_waits_for_a_device_while_something_arrives() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3])
    rig.runner.auto_ready = False
    rig.turn()
    pending = rig.runner.pending
    rig.turn(wait=False)
    assert rig.runner.pending is pending
    rig.commit(1, [9])
    rig.requests.tell()
    rig.deliver()
    assert request.mirror.acked_len == 4
    rig.runner.auto_ready = True
    rig.settle()
    request.check()
    assert request.held()


def test_what_arrives_during_a_burst_is_applied_before_the_next_one_is_launched() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3])
    rig.turn()
    growth = rig.requests.growth
    growth.grow(math.inf, lambda: True)
    assert growth.pressed
    assert len(rig.runner.bursts) == 1
    ran = len(rig.runner.ran)
    rig.commit(1, continuation(request.tokens, 2))
    rig.turn()
    assert not growth.pressed
    assert len(rig.runner.bursts) == 2
    assert all(path[:5] == tuple(request.tokens) for path in rig.runner.ran[ran:])
    assert len(rig.runner.ran) > ran
    request.check()


def test_lockstep_grows_one_tree_after_each_commit_and_sends_it_as_one() -> None:
    rig = Rig(DraftOptions(lockstep=True, speculative_num_steps=8, speculative_algorithm=("STANDALONE",)))
    request = rig.open(1, [1, 2, 3], credit=40)
    sent: list[int] = []
    for _ in range(4):
        while not rig.requests.growth.idle:
            rig.requests.growth.grow(math.inf, lambda: False)
            rig.requests.tell()
            grows = [message for message in rig.peer.received if isinstance(message, Grow)]
            sent += [len(grow.token_ids) for grow in grows if len(grow.token_ids)]
            rig.deliver()
        assert sum(burst.num_steps for burst in rig.runner.bursts) <= 8
        assert max(len(path) for path in request.held()) > 4
        assert len(sent) == 1
        sent.clear()
        rig.runner.bursts.clear()
        rig.commit(1, [*continuation(request.tokens, 2), 39], credit=40)
        request.check()


steps = st.one_of(
    st.tuples(st.just("turn"), st.booleans()),
    st.tuples(st.just("open"), st.integers(1, 40)),
    st.tuples(st.just("commit"), st.integers(0, 9), st.integers(1, 4), st.integers(0, 40)),
    st.tuples(st.just("miss"), st.integers(0, 9), st.lists(st.integers(0, 39), min_size=1, max_size=12)),
    st.tuples(st.sampled_from(["stale", "gap", "pause", "resume", "close"]), st.integers(0, 9)),
    st.tuples(st.just("slow"), st.booleans()),
    st.tuples(st.just("lose")),
    st.tuples(st.just("detach")),
)


def act(rig: Rig, number: int, step: tuple) -> None:
    numbers = sorted(rig.open_requests)
    if step[0] == "turn":
        rig.turn(wait=step[1])
    elif step[0] == "open":
        rig.open(number, [1, *range(2, 1 + step[1])])
    elif step[0] == "slow":
        rig.runner.auto_ready = not step[1]
    elif step[0] == "lose":
        rig.requests.tell()
        rig.peer.received.clear()
    elif step[0] == "detach":
        rig.requests.detach(rig.peer)
        rig.open_requests.clear()
    elif numbers:
        which = numbers[step[1] % len(numbers)]
        request = rig.open_requests[which]
        match step:
            case ("commit", _, count, credit):
                rig.commit(which, continuation(request.tokens, count), credit)
            case ("miss", _, tokens):
                rig.commit(which, tokens)
            case ("stale", _):
                tokens = request.tokens[-1:]
                del request.tokens[-1:]
                rig.commit(which, tokens)
            case ("gap", _):
                held = request.tokens[:]
                request.tokens += [1, 2]
                rig.commit(which, [3])
                request.tokens[:] = held
                rig.close(which)
            case ("pause", _):
                rig.pause(which)
            case ("resume", _):
                rig.resume(which)
            case ("close", _):
                rig.close(which)
    for request in rig.open_requests.values():
        request.check()


@pytest.mark.parametrize("shape", [{}, GOES_ON], ids=["one part", "goes on"])
@settings(max_examples=100, deadline=None)
@given(trace=st.lists(steps, max_size=50))
def test_whatever_verify_does_the_runner_has_no_complaint_and_nothing_leaks(
    shape: dict[str, int], trace: list[tuple]
) -> None:
    rig = Rig(**shape)
    for number, step in enumerate([("open", 3), *trace]):
        act(rig, number, step)
    rig.runner.auto_ready = True
    rig.settle()
    for _ in range(2):  # what was lost is noticed and grown anew within two exchanges
        for number in sorted(rig.open_requests):
            rig.resume(number)
            rig.commit(number, continuation(rig.open_requests[number].tokens, 1))
        rig.settle()
    for request in rig.open_requests.values():
        request.check()
        assert request.held()
    for number in sorted(rig.open_requests):
        rig.close(number)
    rig.settle()
    if not rig.growth._flight:
        rig.growth._apply()
    rig.check_nothing_left()

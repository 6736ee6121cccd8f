"""Growth with a model: what verify gets is what the model says, and nothing is lost on the way."""

from __future__ import annotations

import math

import pytest
from growth_rig import GOES_ON, Rig, continuation, path_scores, scripted

from outrider.config.draft import DraftOptions
from outrider.protocol.speculation import Grow
from verify_service.speculation.replica import ReplicaHealth


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


def test_the_next_burst_is_under_way_before_nodes_are_published() -> None:
    rig = Rig()
    rig.open(1, [1, 2, 3], credit=60)
    rig.turn()
    launched: list[int] = []
    rig.runner.wait_fault = lambda burst: launched.append(rig.requests.growth.num_live)  # type: ignore[func-returns-value]
    rig.turn()
    assert launched == [0]
    assert rig.requests.growth.num_live > 8


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


def test_nothing_waits_for_a_device_while_something_arrives() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3])
    rig.runner.auto_ready = False
    rig.turn()
    pending = rig.runner.pending
    rig.turn(wait=False)
    assert rig.runner.pending is pending
    rig.commit(1, [9])
    rig.requests.send_nodes()
    rig.deliver()
    assert request.mirror.acked_len == 0, "it is answered with its nodes, which come in a moment"
    rig.runner.auto_ready = True
    rig.settle()
    assert request.mirror.acked_len == 4
    request.check()
    assert request.held()


def test_a_commit_is_answered_alone_where_no_nodes_will_come() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3])
    rig.settle()
    rig.pause(1)
    rig.commit(1, [9])
    rig.settle()
    assert request.mirror.acked_len == 4


def test_what_arrives_during_a_burst_is_applied_before_the_next_one_is_launched() -> None:
    rig = Rig()
    request = rig.open(1, [1, 2, 3])
    rig.turn()
    growth = rig.requests.growth
    growth.grow(math.inf, lambda: True)
    assert growth.device_idle
    assert len(rig.runner.bursts) == 1
    ran = len(rig.runner.ran)
    rig.commit(1, continuation(request.tokens, 2))
    rig.turn()
    assert not growth.device_idle
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
            rig.requests.send_nodes()
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


def test_lockstep_acknowledges_commits_while_it_computes_a_long_prompt() -> None:
    options = DraftOptions(lockstep=True, speculative_algorithm=("STANDALONE",), max_positions=2000)
    rig, seconds = Rig(options, max_context=2000, num_pages=600), 0.0
    health = ReplicaHealth(lambda: seconds)
    prompts = {1: [4] * 900, 2: [5] * 700}
    for number, prompt in prompts.items():
        rig.open(number, prompt)
        health.sent(number, len(prompt))
    while not all(request.held() for request in rig.open_requests.values()):
        num_extended = rig.growth._kv_manager.num_extended
        rig.requests.growth.grow(math.inf, lambda: False)
        seconds += 0.8 if rig.growth._kv_manager.num_extended > num_extended else 0.02
        rig.requests.send_nodes()
        for message in rig.peer.received:
            assert isinstance(message, Grow)
            health.answered(message.request, message.acked_len, seconds)
        rig.deliver()
        assert not health.lost, f"no answer for two seconds, after {seconds:.0f}"
        for number, request in rig.open_requests.items():
            if number not in health._unanswered and not request.held():
                rig.commit(number, continuation(request.tokens, 1))
                health.sent(number, len(request.tokens))
    assert seconds > 9
    for request in rig.open_requests.values():
        request.check()


@pytest.mark.parametrize("shape", [{}, GOES_ON], ids=["one part", "goes on"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_node_that_is_sent_is_deeper_than_asked_for(shape: dict[str, int], depth: int) -> None:
    """Bursts run deeper ones; their turn comes when the root is closer."""
    rig = Rig(DraftOptions(max_positions=300, speculative_num_steps=depth, min_path_probability=0.0), **shape)
    request = rig.open(1, [1, 2, 3], credit=40)
    for _ in range(5):
        rig.settle()
        request.check()
        assert max(map(len, request.held())) == depth
        rig.commit(1, continuation(request.tokens, 2), credit=40)

"""Whose turn it is: priority, then who was preempted, then API keys and their users; and whose prompt is next."""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
from examples import examples
from harness import Answer, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.params import SamplingParams
from verify_service.engine.request import _MAX_PASSES, FairQueue, PromptTurns, Request

_arrivals = count()


def request(client: str = "", priority: int = 0) -> Request:
    made = make_request(Answer(), [1], SamplingParams(), 61, 1, client=client, priority=priority)
    made.arrival = next(_arrivals)
    return made


def drain(queue: FairQueue) -> list[Request]:
    return [queue.pop() for _ in range(len(queue))]


def test_a_flood_of_one_client_delays_another_by_one_request() -> None:
    queue = FairQueue()
    for _ in range(1000):
        queue.add(request("key/ann"))
    late = request("other/bob")
    queue.add(late)
    assert late in [queue.pop(), queue.pop()]


def test_keys_take_turns_and_so_do_the_users_of_a_key() -> None:
    queue = FairQueue()
    for client in ("a/1", "a/1", "a/1", "a/1", "a/2", "a/2", "b/1", "b/1", "b/1"):
        queue.add(request(client))
    order = [one.params.client for one in drain(queue)]
    assert [name[0] for name in order] == list("abababaaa")
    assert [name for name in order if name[0] == "a"] == ["a/1", "a/2", "a/1", "a/2", "a/1", "a/1"]


def test_a_lower_priority_goes_first_and_a_preempted_request_before_its_equals() -> None:
    queue = FairQueue()
    old = request("a/1")
    waiting = [request("a/1"), request("b/1", priority=5), request("b/1", priority=-5)]
    for one in waiting:
        queue.add(one)
    queue.put_back(old)
    assert drain(queue) == [waiting[2], old, waiting[0], waiting[1]]


def test_requests_of_one_client_keep_their_order() -> None:
    queue = FairQueue()
    ours = [request() for _ in range(20)]
    for one in ours:
        queue.add(one)
    assert list(queue) == ours == drain(queue)


def test_only_what_waits_can_be_taken_out() -> None:
    queue = FairQueue()
    queue.add(request("a/1"))
    for stranger in (request("a/1"), request("b/1"), request("a/1", priority=3)):
        assert stranger not in queue
        with pytest.raises(ValueError, match="does not wait"):
            queue.remove(stranger)
    assert len(queue) == 1


clients = st.sampled_from(["", "a", "a/1", "a/2", "b/1", "b/2/3", "/"])
steps = st.lists(st.tuples(st.sampled_from(["add", "add", "pop", "remove", "put_back"]), clients, st.integers(-1, 1)))


@settings(max_examples=examples(30))
@given(steps, st.randoms(use_true_random=False))
def test_nothing_is_lost_or_served_twice_and_the_head_is_what_pops(steps: list[tuple[str, str, int]], random) -> None:  # type: ignore[no-untyped-def]
    queue, waiting = FairQueue(), set()
    for step, client, priority in steps:
        if step in ("add", "put_back"):
            made = request(client, priority)
            (queue.add if step == "add" else queue.put_back)(made)
            waiting.add(id(made))
        elif len(queue):
            head = queue.head
            taken = queue.pop() if step == "pop" else random.choice(list(queue))
            if step == "remove":
                queue.remove(taken)
            else:
                assert taken is head
            waiting.remove(id(taken))
        assert len(queue) == len(waiting) and {id(one) for one in queue} == waiting
    while queue:
        best, oldest = min(one.priority for one in queue), min(one.arrival for one in queue)
        head, priority = queue.head, queue.head.priority
        assert queue.pop() is head and (priority == best or head.arrival == oldest)


waiting_priorities = st.lists(st.tuples(clients, st.integers(0, 3)), min_size=1, max_size=12)


@settings(max_examples=examples(30))
@given(waiting_priorities, st.lists(clients, min_size=1, max_size=4), st.integers(1, 2))
def test_no_request_waits_for_ever_under_a_stream_of_higher_priorities(
    early: list[tuple[str, int]], floods: list[str], num_new: int
) -> None:
    queue = FairQueue()
    left = {}
    for client, priority in early:
        made = request(client, priority)
        queue.add(made)
        left[id(made)] = made
    turns = 0
    while left:
        for index in range(num_new):
            queue.add(request(floods[(turns + index) % len(floods)], priority=-1))
        left.pop(id(queue.pop()), None)
        turns += 1
        assert turns <= len(early) * (_MAX_PASSES + 1)


prompts = st.lists(st.tuples(clients, st.integers(2, 30)), min_size=1, max_size=6)


@settings(max_examples=examples(30))
@given(prompts, prompts)
def test_no_prompt_waits_for_ever_under_a_stream_of_others(
    early: list[tuple[str, int]], flood: list[tuple[str, int]]
) -> None:
    turns, left = PromptTurns(), []
    for client, length in early:
        left.append(request(client))
        left[-1].tokens = [0] * length
    num_tokens, num_chunks, others = sum(length for _, length in early), 0, []
    while left:
        client, length = flood[num_chunks % len(flood)]
        others.append(request(client))
        others[-1].tokens = [0] * length
        order = turns.order(left + others)
        assert sorted(map(id, order)) == sorted(map(id, left + others))
        order[0].cached_len += 1
        left, others = ([one for one in some if len(one.tokens) - one.cached_len > 1] for some in (left, others))
        num_chunks += 1
        # Every second chunk is of a prompt that has its turn, and so many clients have one between two of one client.
        assert num_chunks <= 2 * (num_tokens + 30 * len(early) * 9)


def test_no_prompt_waits_for_ever_under_a_stream_of_higher_priorities() -> None:
    turns, num_chunks = PromptTurns(), 0
    low = [request("low", priority) for priority in (7, 3)]
    for one in low:
        one.tokens = [0] * 6
    while any(one.cached_len < 5 for one in low):
        urgent = request("urgent", 0)
        urgent.tokens = [0] * 2
        turns.order([*(one for one in low if one.cached_len < 5), urgent])[0].cached_len += 1
        num_chunks += 1
        assert num_chunks <= 10 * (_MAX_PASSES + 1)
    assert num_chunks == 10 * (_MAX_PASSES + 1)


def test_who_had_its_turn_by_age_does_not_give_way_to_those_that_came_later() -> None:
    queue = FairQueue()
    old = request(priority=7)
    queue.add(old)
    for _ in range(_MAX_PASSES + 1):
        queue.add(request("flood", priority=-2))
        queue.pop()
    assert old not in queue
    later = request("flood", priority=-2)
    assert old.rank < later.rank
    queue.add(later)
    queue.put_back(old)
    assert queue.head is old


@settings(max_examples=examples(30))
@given(st.lists(clients, min_size=1, max_size=80))
def test_while_keys_wait_none_has_had_two_turns_more_than_another(names: list[str]) -> None:
    queue = FairQueue()
    for name in names:
        queue.add(request(name))
    left = Counter(name.split("/")[0] for name in names)
    turns: Counter[str] = Counter()
    while queue:
        key = queue.pop().params.client.split("/")[0]
        turns[key] += 1
        left[key] -= 1
        waiting = [turns[one] for one in left if left[one]]
        assert not waiting or turns[key] <= min(waiting) + 1

"""Growth is best first, over all requests, and bounded."""

from __future__ import annotations

import math
from itertools import product

import pytest
from draft_fakes import GREEDY, VOCAB, Guesses, RecordingPort, ScriptedDrafter, commit_message, open_message
from hypothesis import given
from hypothesis import strategies as st

from outrider.config.draft import DraftOptions
from outrider.drafting.base import FrontierNode
from outrider.drafting.requests import Requests
from outrider.protocol.speculation import Grow, Pause, Resume
from outrider.tree.mirror import TreeMirror

FOREVER = math.inf


def never() -> bool:
    return False


def grown(requests: Requests) -> None:
    requests.growth.grow(FOREVER, never)
    requests.send_nodes()


def one(drafter: ScriptedDrafter, credit: int = 64, **options: object) -> tuple[Requests, RecordingPort]:
    requests, peer = Requests(drafter, DraftOptions(**options)), RecordingPort()  # type: ignore[arg-type]
    requests.handle(peer, open_message([5, 6], credit=credit))
    grown(requests)
    return requests, peer


def path_chances(grow: Grow) -> list[float]:
    chances = {0: 1.0}
    for index, parent in enumerate(grow.parents):
        chances[grow.first_id + index] = chances[parent] * math.exp(float(grow.scores[index]))
    del chances[0]
    return list(chances.values())


def test_a_burst_is_one_message_best_nodes_first() -> None:
    _, peer = one(ScriptedDrafter())
    grows = peer.grows()
    assert len(grows) == 1
    chances = path_chances(grows[0])
    assert len(chances) > 10
    assert chances == pytest.approx(sorted(chances, reverse=True))


def test_nothing_less_likely_is_grown_while_something_likelier_is_not() -> None:
    _, peer = one(ScriptedDrafter(), credit=20)
    (grow,) = peer.grows()
    best = sorted(math.prod(edges) for length in range(1, 9) for edges in product((0.6, 0.3), repeat=length))[-20:]
    assert path_chances(grow) == pytest.approx(best[::-1], rel=1e-4)


@given(st.integers(0, 40))
def test_credit_bounds_the_nodes(credit: int) -> None:
    requests, peer = one(ScriptedDrafter(), credit=credit, min_path_probability=0.0)
    assert requests.growth.num_live == credit
    assert sum(len(grow.token_ids) for grow in peer.grows()) == credit


def test_num_draft_tokens_bounds_the_nodes_whatever_the_credit() -> None:
    requests, _ = one(ScriptedDrafter(), credit=1000, speculative_num_draft_tokens=12, min_path_probability=0.0)
    assert requests.growth.num_live == 12


def test_hopeless_nodes_are_not_grown() -> None:
    _, peer = one(ScriptedDrafter(), min_path_probability=0.1)
    (grow,) = peer.grows()
    assert min(path_chances(grow)) >= 0.1


def test_depth_is_bounded() -> None:
    drafter = ScriptedDrafter(lambda node: {1: 0.99})
    requests, peer = one(drafter, speculative_num_steps=5)
    assert requests.growth.num_live == 5
    requests.handle(peer, commit_message(2, [1]))
    requests.growth.grow(FOREVER, never)
    assert requests.growth.num_live == 5


def test_memory_is_bounded_over_all_requests_and_newcomers_are_declined() -> None:
    drafter = ScriptedDrafter()
    requests = Requests(drafter, DraftOptions(max_nodes=64, min_path_probability=0.0))
    peer = RecordingPort()
    for number in range(3):
        requests.handle(peer, open_message([number], request=number))
        grown(requests)
        assert requests.growth.num_live <= 64
    assert not requests.growth.has_memory
    assert len(requests) < 3
    assert [reason.name for reason in peer.reasons()] == ["OVERLOADED"] * (3 - len(requests))
    assert requests.growth.idle


def test_freed_memory_is_used_again() -> None:
    requests = Requests(ScriptedDrafter(), DraftOptions(max_nodes=64, min_path_probability=0.0))
    peer = RecordingPort()
    requests.handle(peer, open_message([1], request=1))
    grown(requests)
    assert not requests.growth.has_memory
    requests.handle(peer, commit_message(1, [2]))
    assert requests.growth.has_memory
    grown(requests)
    assert requests.growth.num_live == 64


def test_the_likeliest_node_of_any_request_is_grown_first() -> None:
    def guess(node: FrontierNode) -> Guesses:
        return {1: 0.9} if node.request == 2 else {1: 0.3}

    drafter = ScriptedDrafter(guess)
    requests, peer = Requests(drafter, DraftOptions()), RecordingPort()
    for number in (1, 2, 3):
        requests.handle(peer, open_message([7], request=number))
    growth = requests.growth
    growth.grow(0.0, never)  # asks about all roots at once
    assert drafter.widths == [3]
    growth.grow(0.0, never)
    assert drafter.asked[3].request == 2
    grown(requests)
    lengths = {grow.request: len(grow.token_ids) for grow in peer.grows()}
    assert lengths[2] > lengths[1] == lengths[3]


def test_growth_stops_when_something_arrives() -> None:
    drafter = ScriptedDrafter()
    requests, peer = Requests(drafter, DraftOptions()), RecordingPort()
    requests.handle(peer, open_message([7]))
    requests.growth.grow(FOREVER, lambda: len(drafter.widths) >= 3)
    assert len(drafter.widths) == 3
    assert not requests.growth.idle


def test_a_used_up_credit_costs_no_guesses() -> None:
    drafter = ScriptedDrafter(lambda node: {1: 0.9})
    one(drafter, credit=4)
    assert len(drafter.asked) == 4  # the root and the three nodes that got a child


def test_after_a_hit_the_survivors_stay_and_growth_goes_on_below_them() -> None:
    drafter = ScriptedDrafter(lambda node: {(node.token + 1) % VOCAB: 0.95})
    requests, peer = one(drafter, credit=8)
    mirror = TreeMirror(tokens := [5, 6], VOCAB, 64)
    for grow in peer.grows():
        mirror.insert(grow)
    tokens += [7, 8]
    mirror.commit()
    drafter.asked.clear()
    requests.handle(peer, commit_message(2, [7, 8], mirror=mirror, credit=8))
    grown(requests)
    (grow,) = peer.grows()
    assert (grow.epoch, grow.acked_len, len(grow.token_ids)) == (1, 4, 2)
    assert grow.token_ids == [15, 16]
    assert len(drafter.asked) <= 4  # the root once more, and the two leaves that grew
    assert drafter.known[1] >= {2}
    assert not drafter.known[1] & {0, 1}


def test_more_children_of_a_node_in_flight_are_grown_beside_it() -> None:
    requests, peer = one(ScriptedDrafter(), credit=3)
    (first,) = peer.grows()
    mirror = TreeMirror(tokens := [5, 6], VOCAB, 64)
    mirror.insert(first)
    tokens += [7]
    mirror.commit()
    requests.handle(peer, commit_message(2, [7], mirror=mirror, credit=10))
    grown(requests)
    for grow in peer.grows():
        mirror.insert(grow)
    assert {mirror.token_ids[child] for _, child in mirror.below[mirror.root]} == {8, 9}


def test_a_miss_starts_an_epoch_at_the_new_root() -> None:
    drafter = ScriptedDrafter()
    requests, peer = one(drafter)
    peer.take()
    requests.handle(peer, commit_message(2, [50, 51]))
    grown(requests)
    grows = peer.grows()
    assert [(grow.epoch, grow.base_len, grow.acked_len) for grow in grows] == [(2, 4, 4)]
    assert set(grows[0].token_ids[:2]) == {52, 53}
    assert requests.growth.num_live == len(grows[0].token_ids)


def test_a_paused_tree_does_not_grow_and_a_resumed_one_does() -> None:
    requests, peer = one(ScriptedDrafter(), credit=4)
    requests.handle(peer, Pause(1))
    requests.handle(peer, commit_message(2, [7], credit=30))
    assert requests.growth.idle
    requests.send_nodes()
    assert [grow.acked_len for grow in peer.grows()][-1] == 3
    requests.handle(peer, Resume(1, credit=30))
    grown(requests)
    assert 0 < requests.growth.num_live <= 30


def test_a_drafter_that_fails_for_one_request_serves_the_others() -> None:
    def guess(node: FrontierNode) -> Guesses:
        if node.request == 2:
            raise RuntimeError("no guess")
        return {1: 0.9}

    requests, peer = Requests(ScriptedDrafter(guess), DraftOptions()), RecordingPort()
    for number in (1, 2, 3):
        requests.handle(peer, open_message([7], request=number, sampling=GREEDY))
    grown(requests)
    received = peer.take()
    assert [message.request for message in received if not isinstance(message, Grow)] == [2]
    assert {message.request for message in received if isinstance(message, Grow) and len(message.token_ids)} == {1, 3}
    assert len(requests) == 2

"""Peers come, go, fall silent and lie; requests are assigned, opened anew and held for only when that pays."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_peer import Clock, Recorder, follow, request, tree

from outrider.protocol.speculation import Close, Commit, Decline, DeclineReason, Open, Pause, Resume
from verify_service.speculation.budget import WIDTHS, Budget, CostModel, Forest
from verify_service.speculation.draft_wait import DraftWaitPolicy
from verify_service.speculation.drafts import MAX_CALIBRATORS, Drafts, SpeculativeRequest
from verify_service.speculation.replica import Calibrator


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def drafts(clock: Clock) -> Drafts:
    return Drafts(vocab_size=50, max_nodes=64, clock=clock)


def test_a_request_is_opened_committed_paused_and_closed(drafts: Drafts) -> None:
    port, one = Recorder(), request([1, 2, 3])
    drafts.admit(one)
    drafts.connected(port)
    (opened,) = port.take(drafts)
    assert isinstance(opened, Open) and opened.token_ids == [1, 2, 3] and opened.prompt_len == 3
    drafts.receive(port, [tree(opened.request, 1, 3, [4, 5])], 100.0)
    one.tokens += [4, 9]
    follow(drafts, one, 2)
    drafts.pause(one)
    drafts.resume(one)
    drafts.close(one)
    commit, pause, resume, close = port.take(drafts)
    assert isinstance(commit, Commit) and commit.length_before == 3 and commit.token_ids == [4, 9]
    assert (commit.epoch, commit.received_through, commit.resolved_root) == (1, 2, None)
    assert isinstance(pause, Pause) and isinstance(resume, Resume) and isinstance(close, Close)


def test_a_request_that_was_preempted_without_a_draft_is_opened_paused(drafts: Drafts) -> None:
    port, one = Recorder(), request([1, 2, 3])
    drafts.admit(one)
    drafts.pause(one)
    drafts.connected(port)
    assert [type(message) for message in port.take(drafts)] == [Open, Pause]
    drafts.resume(one)
    assert [type(message) for message in port.take(drafts)] == [Resume]


def test_requests_spread_over_drafts_and_move_when_one_is_lost(drafts: Drafts) -> None:
    ports = [Recorder(), Recorder()]
    for port in ports:
        drafts.connected(port)
    requests = [request([i + 1]) for i in range(4)]
    for one in requests:
        drafts.admit(one)
    assert [len(peer.requests) for peer in drafts.replicas.values()] == [2, 2]
    drafts.disconnected(ports[0])
    assert [len(peer.requests) for peer in drafts.replicas.values()] == [4]
    drafts.disconnected(ports[1])
    assert all((spec := drafts.spec(one)) is not None and spec.replica is None for one in requests)
    drafts.connected(ports[0])
    ports[0].take(drafts)
    assert [len(peer.requests) for peer in drafts.replicas.values()] == [4]


def test_a_gap_is_answered_by_opening_under_a_new_number_and_a_liar_is_left_alone(drafts: Drafts, clock: Clock) -> None:
    port, one = Recorder(), request([1, 2])
    drafts.connected(port)
    drafts.admit(one)
    (opened,) = port.take(drafts)
    assert isinstance(opened, Open)
    clock.now += 5
    drafts.receive(port, [Decline(opened.request, DeclineReason.GAP, True)], clock.now)
    closed, again = port.take(drafts)
    assert isinstance(closed, Close) and isinstance(again, Open) and again.request > opened.request
    drafts.receive(port, [Decline(again.request, DeclineReason.GAP, True)], clock.now)
    assert [type(message) for message in port.take(drafts)] == [Close]
    clock.now += 2
    one.tokens.append(3)
    follow(drafts, one)
    assert [type(message) for message in port.take(drafts)] == [Open]


def test_a_draft_that_drains_or_refuses_for_good_gives_way_to_another(drafts: Drafts, clock: Clock) -> None:
    ports, one = [Recorder(), Recorder()], request([1, 2])
    drafts.connected(ports[0])
    drafts.admit(one)
    (opened,) = ports[0].take(drafts)
    drafts.connected(ports[1])
    drafts.receive(ports[0], [Decline(opened.request, DeclineReason.DRAINING, True)], clock.now)  # type: ignore[union-attr]
    assert ports[0].take(drafts) == [Close(opened.request)], "a Decline may have been another message once"  # type: ignore[union-attr]
    assert [type(message) for message in ports[1].take(drafts)] == [Open]
    drafts.admit(request([3, 4]))
    drafts.admit(request([5, 6]))
    assert ports[0].take(drafts) == [], "one that goes away is asked once"
    assert [type(message) for message in ports[1].take(drafts)] == [Open, Open]


def test_one_drafts_bad_guesses_do_not_discount_another_ones(drafts: Drafts, clock: Clock) -> None:
    ports, requests = [Recorder("one"), Recorder("two")], [request([1]), request([2])]
    for port, one in zip(ports, requests, strict=True):
        drafts.connected(port)
        drafts.admit(one)
    specs = [spec for one in requests if (spec := drafts.spec(one)) is not None]
    for _ in range(200):
        spec, one = specs[0], requests[0]
        drafts.receive(ports[0], [tree(spec.number, spec.mirror.epoch + 1, one.committed_len, [5])], clock.now)
        one.tokens.append(6)
        follow(drafts, one)
    for port, spec, one in zip(ports, specs, requests, strict=True):
        drafts.receive(port, [tree(spec.number, spec.mirror.epoch + 1, one.committed_len, [5])], clock.now)
    bad, fresh = (next(Forest([spec.mirror], [1]).best()) for spec in specs)
    assert bad < 0.14 and fresh > 0.9


def test_a_final_decline_means_plain_decoding(drafts: Drafts, clock: Clock) -> None:
    port, one = Recorder(), request([1, 2])
    drafts.connected(port)
    drafts.admit(one)
    (opened,) = port.take(drafts)
    drafts.receive(port, [Decline(opened.request, DeclineReason.TOO_LONG, False)], clock.now)  # type: ignore[union-attr]
    clock.now += 3600
    one.tokens.append(3)
    follow(drafts, one)
    assert port.take(drafts) == [Close(opened.request)]  # type: ignore[union-attr]


def test_a_silent_peer_is_not_waited_for_and_reset_after_two_seconds(drafts: Drafts, clock: Clock) -> None:
    port, one = Recorder(), request([1, 2])
    drafts.connected(port)
    drafts.admit(one)
    peer = drafts.replicas[port]
    assert peer.health.good
    clock.now += 0.2
    assert not peer.health.good
    drafts.check_replicas()
    assert port.num_resets == 0
    clock.now += 2
    drafts.check_replicas()
    assert port.num_resets == 0, "its answer may lie behind a frame that is read in part"
    clock.now += 0.2
    drafts.check_replicas()
    assert port.num_resets == 1


def serve_short(drafts: Drafts, clock: Clock, seconds: float) -> SpeculativeRequest:
    """A request that ends so long after it was opened; its spec."""
    one = request([1, 2])
    drafts.admit(one)
    spec = drafts.spec(one)
    assert spec is not None
    clock.now += seconds
    drafts.close(one)
    drafts.check_replicas()
    return spec


def test_a_silent_peer_is_reset_even_if_no_request_lasts_for_two_seconds(drafts: Drafts, clock: Clock) -> None:
    port = Recorder()
    drafts.connected(port)
    began = clock.now
    while not port.num_resets and clock.now < began + 60:
        serve_short(drafts, clock, 0.3)
    assert 2 < clock.now - began < 3


def test_requests_that_end_before_they_are_answered_make_no_peer_silent_that_answers_others(
    drafts: Drafts, clock: Clock
) -> None:
    port = Recorder()
    drafts.connected(port)
    for _ in range(1000):
        serve_short(drafts, clock, 0.01)  # an answer was hardly to be expected
    for _ in range(20):
        spec = serve_short(drafts, clock, 0.3)
        drafts.receive(port, [tree(spec.number, 1, 2, [3])], clock.now)  # late, yet a sign of life
    clock.now += 60
    serve_short(drafts, clock, 1.5)
    clock.now += 1
    drafts.check_replicas()
    assert port.num_resets == 0


def num_nodes(spec: SpeculativeRequest) -> int:
    return len(list(spec.mirror.descend()))


def hold_seconds(spec: SpeculativeRequest, clock: Clock, seconds: float = 0.03) -> float:
    """How long a round of this request alone waits, if rounds of any width take `seconds`."""
    budget = Budget(CostModel([seconds] * len(WIDTHS)), 63)
    choice = budget.choose(1, 1, Forest([spec.mirror], [99]).best())
    return DraftWaitPolicy(budget, max_seconds=0.02).wait_seconds([spec.wait], 1, choice, now=clock.now)


def test_a_round_is_held_for_a_draft_that_promises_more_than_the_wait_costs(drafts: Drafts, clock: Clock) -> None:
    port, one = Recorder(), request([1, 2])
    drafts.connected(port)
    drafts.admit(one)
    spec = drafts.spec(one)
    assert spec is not None
    held = hold_seconds(spec, clock)
    assert 0 < held <= 0.02
    assert hold_seconds(spec, clock, 0.0005) < held
    clock.now += 0.2  # the peer has not answered for long: it is unhealthy
    assert hold_seconds(spec, clock) == 0
    for epoch in range(1, 40):  # it answers, and promises nothing
        drafts.receive(port, [tree(spec.number, epoch, one.committed_len, [])], clock.now)
        clock.now += 0.001
        one.tokens.append(9)
        follow(drafts, one)
    assert spec.wait.awaits_answer and hold_seconds(spec, clock) == 0


def test_nobody_waits_when_nodes_are_at_hand_or_no_draft_is_there(drafts: Drafts, clock: Clock) -> None:
    port, one = Recorder(), request([1, 2])
    drafts.admit(one)
    spec = drafts.spec(one)
    assert spec is not None
    assert hold_seconds(spec, clock) == 0
    drafts.connected(port)
    drafts.receive(port, [tree(spec.number, 1, 2, [3, 4, 5])], clock.now)
    assert num_nodes(spec) == 3 and not spec.wait.awaits_answer
    assert hold_seconds(spec, clock) == 0


def test_nobody_waits_for_nodes_that_no_round_may_take(drafts: Drafts, clock: Clock) -> None:
    port, one = Recorder(), request([1, 2])
    drafts.connected(port)
    drafts.admit(one)
    spec = drafts.spec(one)
    assert spec is not None and spec.wait.awaits_answer
    budget = Budget(CostModel([0.03] * len(WIDTHS)), max_nodes=0)
    policy = DraftWaitPolicy(budget, max_seconds=0.02)
    assert policy.wait_seconds([spec.wait], 1, budget.choose(1, 1, np.empty(0)), now=clock.now) == 0


def test_every_commit_counts_until_it_is_answered(drafts: Drafts, clock: Clock) -> None:
    port, one = Recorder(), request([1, 2])
    drafts.connected(port)
    drafts.admit(one)
    spec = drafts.spec(one)
    assert spec is not None
    clock.now += 0.01
    one.tokens.append(3)
    follow(drafts, one)
    drafts.receive(port, [tree(spec.number, 1, 2, [4])], clock.now)  # of the opening, not of the commit
    clock.now += 0.01
    assert spec.wait.awaits_answer and drafts.replicas[port].health._oldest() == pytest.approx(0.01)
    assert hold_seconds(spec, clock) == 0, "the commit is late already"
    clock.now += 2
    drafts.check_replicas()
    clock.now += 0.2
    drafts.check_replicas()
    assert port.num_resets == 1


def test_a_request_finds_a_draft_while_rounds_are_longer_than_a_healthy_answer(drafts: Drafts, clock: Clock) -> None:
    port, one, two = Recorder(), request([1, 2]), request([3, 4])
    drafts.connected(port)
    for it in (one, two):
        drafts.admit(it)
    first, second = drafts.spec(one), drafts.spec(two)
    assert first is not None and second is not None
    epoch = 1
    drafts.receive(port, [tree(first.number, epoch, 2, [4]), Decline(second.number, DeclineReason.OVERLOADED, True)], 0)
    for _ in range(30):
        drafts.check_replicas()
        drafts.flush()
        answered_at = clock.now + 0.002
        length = one.committed_len
        clock.now += 0.1  # the round, whose end finds the answer unread
        for it in (one, two):
            it.tokens.append(9)
            follow(drafts, it)
        epoch += 1
        drafts.receive(port, [tree(first.number, epoch, length, [4])], answered_at)
    assert second.replica is not None


def test_a_draft_that_speaks_of_another_epoch_is_told_of_its_request_anew_but_not_again_and_again() -> None:
    clock, port = Clock(), Recorder()
    drafts = Drafts(vocab_size=50, max_nodes=16, clock=clock)
    drafts.connected(port)
    asked = request([1, 2])
    drafts.admit(asked)
    spec = drafts.spec(asked)
    assert spec is not None
    first = spec.number
    clock.now += 2.0
    drafts.receive(port, [tree(first, 40, 2, [3])], clock.now)
    assert spec.number > first and drafts.dropped["epoch"] == 1
    assert [type(message) for message in port.take(drafts)] == [Open, Close, Open]
    drafts.receive(port, [tree(spec.number, 40, 2, [3])], clock.now)
    assert spec.replica is None and isinstance(port.take(drafts)[-1], Close)
    drafts.receive(port, [tree(first, 1, 2, [3]), tree(first + 1, 1, 2, [3])], clock.now)
    assert not spec.mirror.has_nodes, "what was said of an earlier life is not believed"
    clock.now += 2.0
    drafts.check_replicas()
    drafts.receive(port, [tree(spec.number, 1, 2, [3, 4])], clock.now)
    assert num_nodes(spec) == 2


def test_a_draft_that_comes_back_is_known_and_addresses_without_end_are_not_all_remembered(drafts: Drafts) -> None:
    def calibrator(address: str) -> Calibrator:
        port = Recorder(address)
        drafts.connected(port)
        found = drafts.replicas[port].calibrator
        drafts.disconnected(port)
        return found

    first, kept = calibrator("first:1"), calibrator("kept:1")
    for number in range(2 * MAX_CALIBRATORS):
        calibrator(f"pod-{number}:1")
        assert calibrator("kept:1") is kept
    assert calibrator("first:1") is not first

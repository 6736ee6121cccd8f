"""What each message does, also when it makes no sense."""

from __future__ import annotations

import gc
import math
import random
import weakref

import pytest
from draft_fakes import GREEDY, VOCAB, RecordingPort, ScriptedDrafter, commit_message, open_message
from mirror_integrity import check_mirror

from outrider.config.draft import DraftOptions
from outrider.drafting.ngram.drafter import NgramDrafter
from outrider.drafting.requests import GrammarGuide, Requests
from outrider.protocol.speculation import Close, Commit, Decline, Grow, Hello, Open, Pause, Resume
from outrider.tree.author import Outcome
from outrider.tree.mirror import TreeMirror


@pytest.fixture
def drafter() -> ScriptedDrafter:
    return ScriptedDrafter()


@pytest.fixture
def requests(drafter: ScriptedDrafter) -> Requests:
    return Requests(drafter, DraftOptions(max_requests=3, max_positions=50))


@pytest.fixture
def peer() -> RecordingPort:
    return RecordingPort()


def settle(requests: Requests) -> None:
    while not requests.growth.idle:
        requests.growth.grow(math.inf, lambda: False)
    requests.send_nodes()


def test_every_commit_is_acknowledged_even_without_a_node(requests: Requests, peer: RecordingPort) -> None:
    requests.handle(peer, open_message([1, 2], credit=0))
    requests.send_nodes()
    requests.handle(peer, commit_message(2, [3], credit=0))
    requests.send_nodes()
    assert [(grow.acked_len, len(grow.token_ids)) for grow in peer.grows()] == [(2, 0), (3, 0)]


def test_opening_twice_changes_nothing_and_longer_ones_catch_up(requests: Requests, peer: RecordingPort) -> None:
    for _ in range(2):
        requests.handle(peer, open_message([1, 2]))
        settle(requests)
    assert len(requests) == 1
    assert len(peer.grows()) == 1
    requests.handle(peer, open_message([1, 2, 3]))
    settle(requests)
    assert [(grow.epoch, grow.acked_len) for grow in peer.grows()] == [(1, 3)]
    requests.handle(peer, open_message([1, 2, 3, 90]))
    settle(requests)
    assert [(grow.epoch, grow.acked_len) for grow in peer.grows()] == [(2, 4)]


def test_a_gap_is_declined_and_opening_again_heals_it(requests: Requests, peer: RecordingPort) -> None:
    requests.handle(peer, open_message([1, 2]))
    settle(requests)
    peer.take()
    requests.handle(peer, commit_message(5, [6]))
    (decline,) = peer.take()
    assert isinstance(decline, Decline)
    assert (decline.reason.name, decline.retryable) == ("GAP", True)
    requests.handle(peer, open_message([1, 2, 3, 4, 5, 6]))
    settle(requests)
    assert peer.grows()[-1].acked_len == 6


def test_commits_are_counted_by_outcome(requests: Requests, peer: RecordingPort) -> None:
    requests.handle(peer, open_message([1, 2]))
    settle(requests)
    for commit in (commit_message(2, [3]), commit_message(3, [90]), commit_message(2, [3]), commit_message(9, [1])):
        requests.handle(peer, commit)
    counts = {outcome: requests.commits[outcome] for outcome in Outcome}
    assert counts == {Outcome.HIT: 1, Outcome.MISS: 1, Outcome.STALE: 1, Outcome.GAP: 1}


@pytest.mark.parametrize("message", [commit_message(1, [1], request=9), Pause(9), Resume(9, 4)])
def test_unknown_requests_are_declined(
    requests: Requests, peer: RecordingPort, message: Commit | Pause | Resume
) -> None:
    requests.handle(peer, message)
    (decline,) = peer.take()
    assert isinstance(decline, Decline)
    assert (decline.request, decline.reason.name, decline.retryable) == (9, "UNKNOWN_REQUEST", True)


def test_what_means_nothing_is_dropped(requests: Requests, peer: RecordingPort) -> None:
    requests.handle(peer, Close(9))
    requests.handle(peer, Hello(1, 1))
    assert peer.take() == []
    assert requests.dropped["unexpected"] == 1


@pytest.mark.parametrize("tokens", [[-1], [VOCAB], [2**31 - 1], [1, 2, -(2**31)]])
def test_tokens_outside_the_vocabulary_are_declined_and_change_nothing(
    requests: Requests, peer: RecordingPort, tokens: list[int]
) -> None:
    requests.handle(peer, open_message(tokens, request=1))
    requests.handle(peer, open_message([1, 2], request=2))
    settle(requests)
    requests.handle(peer, commit_message(2, tokens, request=2))
    settle(requests)
    received = peer.take()
    assert [m.reason.name for m in received if isinstance(m, Decline)] == ["INVALID", "INVALID"]
    assert [m.acked_len for m in received if isinstance(m, Grow)] == [2]
    assert len(requests) == 1


def test_too_long_is_declined_for_good(requests: Requests, peer: RecordingPort, drafter: ScriptedDrafter) -> None:
    requests.handle(peer, open_message([1] * 51))
    requests.handle(peer, open_message([1] * 49, request=2))
    requests.handle(peer, commit_message(49, [1, 2], request=2))
    declines = [m for m in peer.take() if isinstance(m, Decline)]
    assert [(m.request, m.reason.name, m.retryable) for m in declines] == [
        (1, "TOO_LONG", False),
        (2, "TOO_LONG", False),
    ]
    assert not len(requests) and not drafter.open_requests


def test_too_many_requests_are_declined_until_one_closes(requests: Requests, peer: RecordingPort) -> None:
    for number in range(4):
        requests.handle(peer, open_message([1], request=number))
    (decline,) = peer.take()
    assert isinstance(decline, Decline)
    assert (decline.request, decline.reason.name, decline.retryable) == (3, "OVERLOADED", True)
    requests.handle(peer, Close(0))
    requests.handle(peer, open_message([1], request=3))
    assert len(requests) == 3


def test_a_closed_requests_grammar_does_not_wait_for_the_collector(requests: Requests, peer: RecordingPort) -> None:
    requests.handle(peer, open_message([1, 2]))
    (tree,) = requests._trees.values()
    guide = tree.author.guide = GrammarGuide(tree.author)
    left = weakref.ref(guide)
    settle(requests)
    del guide, tree
    gc.disable()
    try:
        requests.handle(peer, Close(1))
        assert left() is None
    finally:
        gc.enable()


def test_a_draining_service_opens_nothing_and_finishes_what_is_open(requests: Requests, peer: RecordingPort) -> None:
    requests.handle(peer, open_message([1, 2]))
    requests.draining = True
    requests.handle(peer, open_message([1], request=2))
    requests.handle(peer, commit_message(2, [3]))
    settle(requests)
    received = peer.take()
    assert [m.reason.name for m in received if isinstance(m, Decline)] == ["DRAINING"]
    assert [m.acked_len for m in received if isinstance(m, Grow)] == [3]


def test_sessions_do_not_see_each_other(requests: Requests, drafter: ScriptedDrafter) -> None:
    here, there = RecordingPort(), RecordingPort()
    requests.handle(here, open_message([1, 2]))
    requests.handle(there, open_message([7, 8, 9]))
    settle(requests)
    assert [grow.acked_len for grow in here.grows()] == [2]
    assert [grow.acked_len for grow in there.grows()] == [3]
    requests.detach(here)
    assert list(drafter.open_requests.values()) == [[7, 8, 9]]
    requests.detach(there)
    assert not drafter.open_requests
    assert requests.growth.num_live == 0


def test_a_request_that_fails_here_is_given_up_alone(requests: Requests, peer: RecordingPort) -> None:
    requests.handle(peer, open_message([1, 2], request=1))
    requests.handle(peer, open_message([1, 2], request=2))
    requests.fail(peer, commit_message(2, [3], request=1))
    (decline,) = peer.take()
    assert isinstance(decline, Decline)
    assert (decline.request, decline.retryable) == (1, False)
    assert len(requests) == 1
    requests.fail(peer, open_message([1, 2], request=3))
    (decline,) = peer.take()
    assert isinstance(decline, Decline)
    assert (decline.request, decline.retryable) == (3, False)
    assert len(requests) == 1


@pytest.mark.parametrize("seed", range(6))
def test_the_mirror_follows_any_text_and_hits_where_it_repeats(seed: int) -> None:
    """A whole request with the real drafter, committing what a mirror has and what it has not."""
    rng = random.Random(seed)
    phrase = [rng.randrange(VOCAB) for _ in range(20)]
    text = [rng.choice(phrase) if rng.random() < 0.1 else phrase[i % 20] for i in range(200)]
    drafter = NgramDrafter(DraftOptions())
    requests, peer = Requests(drafter, DraftOptions()), RecordingPort()
    tokens = text[:30]
    mirror = TreeMirror(tokens, VOCAB, 256)
    requests.handle(peer, Open(1, list(tokens), 10, GREEDY, 64))
    accepted = 0
    while len(tokens) < len(text):
        while drafter.has_work:
            requests.growth.work(math.inf)
        settle(requests)
        for grow in peer.grows():
            mirror.insert(grow)
        check_mirror(mirror)
        assert mirror.num_unresolved == 0
        row, new = mirror.root, []
        for token in text[len(tokens) : len(tokens) + 8]:
            new.append(token)
            below = mirror.child(row, token)
            if below is None:
                break
            accepted += 1
            row = below
        before = len(tokens)
        tokens += new
        mirror.commit()
        requests.handle(peer, commit_message(before, new, mirror=mirror))
    assert accepted > 100
    assert requests.growth.num_live <= 64

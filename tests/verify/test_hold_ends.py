"""When a hold ends: what is still awaited must be worth what is left of the wait, however it began."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial
from itertools import count

import numpy as np
import pytest
from fake_device import VOCAB, FakeDevice, submit
from harness import PAGE_SIZE, Silence
from scripted_peer import Clock, Recorder

from outrider.tree.messages import Grow
from verify_service.budget import WIDTHS, CostModel
from verify_service.drafts import Drafts
from verify_service.engine import Engine
from verify_service.health import PeerHealth
from verify_service.inbox import Action, ThreadInbox
from verify_service.limits import EngineLimits
from verify_service.link import Link
from verify_service.memory import Memory

ROUND = 0.0045
"""Seconds of a round of an 8B model on a large GPU."""
LOOK = 1e-5
"""Seconds between two looks for news."""


class Mail(ThreadInbox):
    """Brings what was posted for a moment when that has come; each look takes some time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._later: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def post_in(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._later, (self._clock.now + seconds, next(self._numbers), action))

    def take(self, timeout: float | None) -> list[Action]:
        self._clock.now += LOOK
        while self._later and self._later[0][0] <= self._clock.now:
            self.post(heapq.heappop(self._later)[2])
        return super().take(None)


class Scene:
    """Requests between two rounds, of which all have trees but those whose last token nobody had expected."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_requests: int) -> None:
        self.clock = clock = Clock()
        monkeypatch.setattr("verify_service.engine.time.monotonic", clock)
        monkeypatch.setattr("verify_service.engine.Drafts", partial(Drafts, clock=clock))
        limits = EngineLimits(VOCAB, 200, max_nodes=64, max_hold_seconds=0.02, spin=True)
        cost = CostModel([ROUND] * len(WIDTHS))
        self.mail = Mail(clock)
        self.engine = Engine(FakeDevice(), Memory(256, PAGE_SIZE), cost, limits, Silence(), self.mail)
        self.port = Recorder()
        self.engine.draft_connected(self.port)
        self.requests = [submit(self.engine).request for _ in range(num_requests)]
        self.engine._take_inbox(None)
        self.engine._attend()
        for request in self.requests:
            assert request is not None
            request.cached_len = request.committed_len - 1

    def link(self, index: int) -> Link:
        request = self.requests[index]
        assert request is not None
        link = self.engine.drafts.link(request)
        assert link is not None and link.peer is not None
        return link

    @property
    def health(self) -> PeerHealth:
        return self.engine.drafts.peers[self.port].health

    def answer(self, index: int, tokens: int = 2) -> None:
        """The draft has said so many nodes, each below the one before."""
        link = self.link(index)
        length = link.request.committed_len
        grow = Grow(
            link.number, link.mirror.epoch + 1, length, length, 1,
            np.arange(tokens, dtype=np.uint32), np.full(tokens, 7, np.int32),
            np.full(tokens, -0.2, np.float32), np.zeros(tokens, np.uint8),
        )  # fmt: skip
        self.engine.drafts.receive(self.port, [grow], self.clock.now)

    def miss(self, index: int, gain: float) -> None:
        """A token is committed that is in no tree; the answer to such is likely to bring `gain` tokens."""
        link = self.link(index)
        link.gain = gain
        link.request.tokens.append(40)
        link.request.cached_len += 1
        self.engine.drafts.committed(link.request)
        self.engine.drafts.report(link.request, 1, credit=16)

    def hold(self) -> tuple[float, int]:
        """Choose the nodes of a round: how long it was held, and how many it has."""
        entries, held, _ = self.engine._choose(self.engine.scheduler.plan())
        return held, sum(len(entry.nodes) for entry in entries)


Make = Callable[[int], Scene]


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Make:
    return partial(Scene, monkeypatch)


def test_rounds_are_not_held_while_a_draft_computes_prompts(scene: Make) -> None:
    """Prompts take 5 to 36 ms; those that are overdue by the mean of them may be here at once, or in 20 ms."""
    many = scene(16)
    for index in range(4):
        many.answer(index)
    for seconds in (0.005, 0.012, 0.036) * 10:
        many.health.opens.note(seconds)
    held = []
    for waited in np.arange(0.0, 1.5 * many.health.opens.late, 0.001):
        for index in range(4, 16):
            many.link(index).opened_at = many.link(index).asked_at = many.clock.now - float(waited)
        held.append(many.hold()[0])
    assert not any(held), f"a round was held {1e3 * max(held):.1f} ms"


def test_a_hold_in_vain_ends_when_it_cost_twice_what_the_gain_is_worth(scene: Make) -> None:
    """However late answers may be: once in a while one takes ten times as long as usual."""
    one = scene(1)
    one.answer(0)
    for _ in range(50):
        one.health.misses.answer.note(0.001)
    one.health.misses.answer.late = 0.015
    one.miss(0, gain=0.6)
    held, _ = one.hold()
    worth = 0.6 * ROUND
    assert 0.001 < held < 2 * worth, f"held {1e3 * held:.1f} ms for what is worth {1e3 * worth:.1f} ms"


def test_a_hold_goes_on_for_nobody_who_is_not_worth_it(scene: Make) -> None:
    """Eight answers come after 0.5 ms. What the ninth brings would not be worth waiting for on its own."""
    many = scene(16)
    for index in range(16):
        many.answer(index)
    for _ in range(50):
        many.health.misses.answer.note(0.0005)
    many.health.misses.answer.late = 0.002
    for index in range(9):
        many.miss(index, gain=3.0)
    for index in range(8):
        many.mail.post_in(0.0005, partial(many.answer, index))
    held, num_nodes = many.hold()
    assert num_nodes == 15 * 2
    assert 0.0004 < held < 0.0015


def test_a_round_of_one_is_held_until_its_answer_is_here(scene: Make) -> None:
    one = scene(1)
    one.answer(0)
    for seconds in (0.001, 0.0013, 0.002) * 20:
        one.health.misses.answer.note(seconds)
    for seconds in (0.0011, 0.0013, 0.002):
        one.miss(0, gain=2.0)
        one.mail.post_in(seconds, partial(one.answer, 0))
        held, num_nodes = one.hold()
        assert num_nodes == 2
        assert seconds <= held < seconds + 3 * LOOK

"""What rounds wait for: a burst that follows an answer, everything in lockstep, and never a peer that is unwell."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fake_device import VOCAB, FakeDevice, count_up, submit
from harness import PAGE_SIZE, Silence
from local_draft import LocalDraft, chain
from scripted_peer import Clock, Recorder, follow, request, tree
from threaded_engine import ThreadedEngine, ThreadInbox

from outrider.protocol.speculation import Commit, VerifyMessage
from outrider.tree.author import TreeAuthor
from outrider.tree.handshake import Terms
from verify_service.engine.engine import Action
from verify_service.engine.memory import Memory
from verify_service.engine.request import Request
from verify_service.engine.scheduler import EngineLimits
from verify_service.frames import RoundFigures
from verify_service.speculation.budget import WIDTHS, Budget, CostModel, Forest
from verify_service.speculation.draft_wait import DraftWaitMode, DraftWaitPolicy
from verify_service.speculation.drafts import Drafts, SpeculativeRequest
from verify_service.speculation.replica import AnswerStats

ROUND = 0.0045
"""Seconds of a round of an 8B model on a large GPU."""


class Peer:
    """A draft that answers each miss in two steps: what it has, and later what its burst has found."""

    def __init__(self, clock: Clock, lockstep: bool = False) -> None:
        self.clock = clock
        self.drafts = Drafts(vocab_size=50, max_nodes=64, clock=clock, mode=DraftWaitMode(lockstep=lockstep))
        self.port = Recorder()
        self.drafts.connected(self.port)
        self.request: Request = request([1, 2])
        self.drafts.admit(self.request)
        self.epoch = 0
        self.answer([3])

    @property
    def spec(self) -> SpeculativeRequest:
        spec = self.drafts.spec(self.request)
        assert spec is not None
        return spec

    def miss(self) -> None:
        """A round accepts the whole chain that there is, and then nothing of the tree is left."""
        mirror = self.spec.mirror
        chain = [mirror.token_ids[slot] for slot in mirror.descend()] if mirror.has_nodes else []
        self.request.tokens += [*chain, 40]
        follow(self.drafts, self.request, len(chain) + 1)

    def answer(self, tokens: list[int]) -> None:
        self.epoch += 1
        grow = tree(self.spec.number, self.epoch, self.request.committed_len, tokens)
        self.drafts.receive(self.port, [grow], self.clock.now)

    def follow_up(self, first: int, tokens: list[int]) -> None:
        """More nodes, each below the one before."""
        grow = tree(self.spec.number, self.epoch, self.request.committed_len, tokens, first)
        self.drafts.receive(self.port, [grow], self.clock.now)

    def wait(self, lockstep: bool = False, others: int = 0) -> float:
        """How long a round of this request, and of `others` that have no draft, would wait."""
        budget = Budget(CostModel([ROUND] * len(WIDTHS)), 63)
        choice = budget.choose(1 + others, 1 + others, Forest([self.spec.mirror], [99]).best())
        awaited = [self.spec.wait] if self.spec.wait.expects else []
        return DraftWaitPolicy(budget, 0.02, DraftWaitMode(lockstep)).wait_seconds(
            awaited, 1 + others, choice, now=self.clock.now
        )


@pytest.fixture
def peer() -> Peer:
    return Peer(Clock())


def misses(peer: Peer, count: int, burst: Sequence[int], answer: float = 0.001, more: float = 0.002) -> None:
    """Rounds that miss: an answer without nodes after `answer` seconds, `burst` after another `more`."""
    for _ in range(count):
        peer.miss()
        peer.clock.now += answer
        peer.answer([])
        peer.clock.now += more
        if burst:
            peer.follow_up(1, list(burst))
        peer.clock.now += ROUND


def test_a_round_waits_for_the_burst_that_follows_an_empty_answer(peer: Peer) -> None:
    misses(peer, 60, burst=[5, 6, 7])
    peer.miss()
    assert 0.003 <= peer.wait() <= 0.02, "answer and burst together"
    peer.clock.now += 0.001
    peer.answer([])
    assert peer.wait() >= 0.0019, "the burst alone"
    peer.clock.now += 0.002
    peer.follow_up(1, [5, 6, 7])
    assert peer.wait() == 0, "nothing more is expected"


@pytest.mark.parametrize(("share", "lands", "waits"), [(0.2, True, True), (0.9, True, False), (0.9, False, True)])
def test_a_round_runs_rather_than_wait_as_long_as_it_takes(peer: Peer, share: float, lands: bool, waits: bool) -> None:
    """What the draft answers meanwhile is there for the round after, unless what is committed lies beside its tree."""
    for _ in range(60):
        peer.miss()
        peer.clock.now += share * ROUND
        peer.answer([5, 6])
        peer.clock.now += ROUND
        if lands:
            peer.request.tokens.append(5)
            follow(peer.drafts, peer.request, 1)
    peer.miss()
    assert (peer.wait() > 0) == waits


def taking_turns() -> tuple[Clock, Drafts, Recorder, Request, SpeculativeRequest, AnswerStats]:
    """A request whose draft takes turns with rounds, and what is known of its answers after misses."""
    clock = Clock()
    drafts = Drafts(vocab_size=50, max_nodes=64, clock=clock, mode=DraftWaitMode(shares_cores=True))
    port = Recorder()
    drafts.connected(port)
    asked = request([1, 2])
    drafts.admit(asked)
    spec = drafts.spec(asked)
    assert spec is not None and spec.replica is not None
    return clock, drafts, port, asked, spec, spec.replica.health.misses


def test_where_drafts_take_turns_what_came_beside_a_round_teaches_nothing_but_hope() -> None:
    clock, drafts, port, asked, spec, answers = taking_turns()
    answers.note_more_gain(0.0)
    gain, more_gain, typical = spec.wait.miss_gain, answers.more_gain, answers.answer.typical
    drafts.on_launch(clock.now)
    for epoch in (1, 2):
        clock.now += 0.03
        drafts.receive(port, [tree(spec.number, epoch, asked.committed_len, [3])], clock.now)
    assert not spec.wait.expects and spec.wait.miss_gain == gain, "a round had the cores"
    asked.tokens += [3]
    follow(drafts, asked, 1)
    assert answers.more_gain > more_gain and answers.answer.typical < typical
    assert spec.wait.expects, "the answer to every commit may be worth a wait"
    clock.now += 0.001
    drafts.receive(port, [tree(spec.number, 3, asked.committed_len, [4, 5])], clock.now)
    assert spec.wait.miss_gain != gain and spec.wait.answered_at == clock.now


def test_where_drafts_take_turns_what_is_caught_up_with_is_no_price_of_an_answer() -> None:
    clock, drafts, port, asked, spec, answers = taking_turns()
    times, first = answers.answer, answers.answer.typical
    epochs = iter(range(1, 20))

    def answer(seconds: float, tokens: list[int]) -> None:
        clock.now += seconds
        drafts.receive(port, [tree(spec.number, next(epochs), asked.committed_len, tokens)], clock.now)

    def commit() -> None:
        asked.tokens += [40]
        follow(drafts, asked, 1)

    answer(0.03, [])
    assert (spec.wait.miss_gain, times.typical) == (1.0, first), "the prompt was to be computed"
    commit()
    answer(0.004, [3])
    usual = times.typical
    assert usual > first and spec.wait.miss_gain < 1.0, "it keeps up now"
    commit()
    commit()
    answer(0.05, [3])
    assert times.typical <= usual, "it had two commits to follow"
    commit()
    commit()
    answer(0.0005, [3])
    assert times.typical < usual, "what is faster is so whatever came before"
    usual = times.typical
    commit()
    answer(0.05, [3])
    assert times.typical > usual


def test_where_drafts_take_turns_a_wait_lasts_as_long_as_it_pays() -> None:
    clock = Clock()
    peer = Peer(clock)
    peer.miss()
    spec = peer.spec
    budget = Budget(CostModel([10 * ROUND] * len(WIDTHS)), 63)
    choice = budget.choose(1, 1, np.empty(0))
    short = DraftWaitPolicy(budget, 0.02).wait_seconds([spec.wait], 1, choice, now=clock.now)
    assert (
        0
        < short
        < DraftWaitPolicy(budget, 0.02, DraftWaitMode(shares_cores=True)).wait_seconds(
            [spec.wait], 1, choice, now=clock.now
        )
        <= 0.02
    )


def test_a_round_does_not_wait_again_for_a_draft_that_says_all_at_once(peer: Peer) -> None:
    for _ in range(60):
        peer.miss()
        peer.clock.now += 0.001
        peer.answer([5, 6, 7])
        peer.clock.now += ROUND
    peer.miss()
    assert peer.wait() > 0.0005
    peer.clock.now += 0.001
    peer.answer([])
    assert peer.wait() == 0


def test_a_draft_that_finds_nothing_is_soon_not_waited_for(peer: Peer) -> None:
    misses(peer, 60, burst=[])
    peer.miss()
    assert peer.wait() == 0


def test_one_miss_does_not_stop_many_others(peer: Peer) -> None:
    misses(peer, 60, burst=[5, 6, 7])
    peer.miss()
    assert peer.wait() > 0
    assert peer.wait(others=31) == 0


def test_a_burst_that_is_slower_than_a_round_is_not_waited_for(peer: Peer) -> None:
    misses(peer, 100, burst=[5], answer=0.001, more=0.012)
    peer.miss()
    assert peer.wait() == 0


def test_lockstep_waits_for_every_answer_but_never_for_a_peer_that_is_unwell() -> None:
    peer = Peer(Clock(), lockstep=True)
    peer.request.tokens.append(3)  # a hit
    follow(peer.drafts, peer.request)
    assert peer.wait(lockstep=True) == 0.02
    peer.clock.now += 0.5
    assert peer.wait(lockstep=True) == 0
    peer.answer([4])
    assert peer.wait(lockstep=True) == 0
    peer.miss()
    assert peer.wait(lockstep=True, others=31) == 0.02


class Patient(ThreadInbox):
    """Hands the draft's answers over only to an engine that waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.held_back: list[Callable[[], None]] = []
        self.waiting = False

    def take(self, timeout: float | None) -> list[Action]:
        if timeout is not None:
            answers, self.held_back = self.held_back, []
            for answer in answers:
                answer()
        return super().take(None if len(self) else timeout)


class Slow(LocalDraft):
    """Grows a fresh tree after each commit, when it is waited for."""

    def __init__(self, engine: ThreadedEngine, inbox: Patient) -> None:
        super().__init__(engine, VOCAB, self._fresh)
        self._inbox = inbox

    def send(self, messages: list[VerifyMessage]) -> None:
        copy = list(messages)
        self._inbox.held_back.append(lambda: LocalDraft.send(self, copy))

    def _fresh(self, author: TreeAuthor) -> None:
        chain(author, [count_up(author.committed_len + ahead) for ahead in range(6)], -3.0)


def test_a_lockstep_engine_takes_a_fixed_number_of_nodes_in_every_round() -> None:
    device, inbox = FakeDevice(), Patient()
    # Nodes that cost this much and promise this little are never taken by choice.
    cost = CostModel([1e-3 * width for width in WIDTHS])
    limits = EngineLimits(VOCAB, 200, max_nodes=4, max_hold_seconds=5.0, lockstep=True)
    engine = ThreadedEngine(device, Memory(64, PAGE_SIZE), cost, limits, Silence(), inbox=inbox)
    engine.draft_connected(Slow(engine, inbox))
    answer = submit(engine, max_tokens=26)
    engine.start()
    assert answer.done.wait(10)
    engine.stop()
    assert answer.token_ids == [count_up(position) for position in range(3, 29)]
    nodes = [entries[0][2] for entries in device.rounds]
    assert nodes[1:-1] == [4] * len(nodes[1:-1]) and len(nodes) <= 7


def test_credit_follows_what_rounds_take_and_stays_within_a_tree(peer: Peer) -> None:
    assert peer.drafts.credit(peer.request, share=1, num_nodes=1) == 32
    assert peer.drafts.credit(peer.request, share=1, num_nodes=7) == 56
    assert peer.drafts.credit(peer.request, share=1, num_nodes=1) < 56
    assert peer.drafts.credit(peer.request, share=63, num_nodes=60) == 64
    for _ in range(40):
        last = peer.drafts.credit(peer.request, share=1, num_nodes=0)
    assert last == 32


@pytest.mark.parametrize("delay", [0.03, 0.3])
def test_a_draft_that_answers_after_the_longest_wait_costs_little(delay: float) -> None:
    clock, longest, seconds = Clock(), 0.02, 0.033
    drafts = Drafts(vocab_size=50, max_nodes=64, clock=clock, mode=DraftWaitMode(shares_cores=True))
    port = Recorder()
    drafts.connected(port, Terms(drafts_on_demand=True))
    asked = request([1, 2])
    drafts.admit(asked)
    spec = drafts.spec(asked)
    assert spec is not None
    budget = Budget(CostModel([seconds] * len(WIDTHS)), 63)
    policy = DraftWaitPolicy(budget, longest, DraftWaitMode(shares_cores=True))
    due = [(clock.now + delay, asked.committed_len)]

    def advance(until: float) -> None:
        while due and due[0][0] <= until:
            clock.now, length = due.pop(0)
            drafts.receive(port, [tree(spec.number, length - 1, length, [])], clock.now)
        clock.now = until

    def held_by(num_rounds: int) -> float:
        held = 0.0
        for _ in range(num_rounds):
            choice = budget.choose(1, 1, Forest([spec.mirror], [99]).best())
            if spec.wait.expects and policy.wait_seconds([spec.wait], 1, choice, now=clock.now):
                spec.wait.on_wait()
                if spec.num_unsent_tokens:
                    due.append((clock.now + delay, asked.committed_len))
                drafts.send_awaited_commits([asked])
                held += longest
                advance(clock.now + longest)
            drafts.on_launch(clock.now)
            advance(clock.now + seconds)
            asked.tokens.append(40)
            follow(drafts, asked)
        return held

    assert 0 < held_by(200) < 0.05 * 200 * seconds, "it is tried now and then"
    delay = 0.001
    due.clear()
    held_by(40)
    assert spec.wait.num_vain_waits == 0, "one that is quick again is waited for again"


def test_where_cores_are_shared_a_draft_hears_of_commits_when_a_round_waits_for_it() -> None:
    """What it grew beside a round would take the round's cores."""
    drafts = Drafts(vocab_size=50, max_nodes=64, clock=Clock(), mode=DraftWaitMode(shares_cores=True))
    port, asked = Recorder(), request([1, 2])
    drafts.connected(port, Terms(drafts_on_demand=True))
    drafts.admit(asked)
    spec = drafts.spec(asked)
    assert spec is not None and len(port.take(drafts)) == 1, "it is opened"
    for token in (40, 41, 42):
        asked.tokens.append(token)
        follow(drafts, asked)
    assert not port.take(drafts)
    spec.wait.on_wait()
    drafts.send_awaited_commits([asked])
    (commit,) = port.take(drafts)
    assert isinstance(commit, Commit) and (commit.length_before, list(commit.token_ids)) == (2, [40, 41, 42])
    asked.tokens.append(43)
    drafts.on_commit(asked)
    spec.wait.on_wait()
    drafts.send_commit(asked, 1, credit=16)
    assert len(port.take(drafts)) == 1, "the round waits already"
    for token in range(1, 40):
        asked.tokens += [token, token]
        follow(drafts, asked, 2)
    (commit,) = port.take(drafts)
    assert isinstance(commit, Commit) and 64 < len(commit.token_ids) <= 66, "more would take long when it is waited for"


def test_a_draft_that_grows_ahead_hears_of_every_commit() -> None:
    drafts = Drafts(vocab_size=50, max_nodes=64, clock=Clock(), mode=DraftWaitMode(shares_cores=True))
    port, asked = Recorder(), request([1, 2])
    drafts.connected(port, Terms())
    drafts.admit(asked)
    asked.tokens.append(40)
    follow(drafts, asked)
    assert len(port.take(drafts)) == 2


def test_a_preempted_request_is_not_waited_for_and_says_nothing_of_waits() -> None:
    clock = Clock()
    drafts = Drafts(vocab_size=50, max_nodes=64, clock=clock, mode=DraftWaitMode(shares_cores=True))
    drafts.connected(Recorder())
    asked = request([1, 2])
    drafts.admit(asked)
    spec = drafts.spec(asked)
    assert spec is not None and spec.replica is not None and spec.wait.expects
    typical = spec.replica.health.misses.answer.typical
    drafts.pause(asked)
    clock.now += 60.0
    drafts.on_launch(clock.now)
    assert not spec.wait.expects and spec.replica.health.misses.answer.typical == typical
    drafts.resume(asked)
    assert spec.wait.expects


class Chatty(ThreadInbox):
    """Always has something to send, and nothing that a round waits for, shortly before a wait is over."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def take(self, timeout: float | None) -> list[Action]:
        if timeout is None:
            return super().take(None)
        self._clock.now += 0.95 * timeout
        return super().take(None) or [lambda: None]


class FirstRound(Silence):
    """Notes how long the first round was held, and ends the engine."""

    engine: ThreadedEngine
    held: float | None = None

    def round(self, entries: object, updates: object, figures: RoundFigures) -> None:
        if self.held is None:
            self.held = figures.held
            self.engine.stop()


def test_no_round_waits_longer_than_it_may_however_often_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("verify_service.engine.engine.time.monotonic", clock)
    limits = EngineLimits(VOCAB, 200, max_nodes=4, max_hold_seconds=0.02, lockstep=True)
    first = FirstRound()
    first.engine = engine = ThreadedEngine(
        FakeDevice(), Memory(64, PAGE_SIZE), CostModel([1e-3] * len(WIDTHS)), limits, first, inbox=Chatty(clock)
    )
    engine.draft_connected(Recorder())
    submit(engine)
    engine.run()
    assert first.held is not None and 0.019 < first.held <= 0.0201

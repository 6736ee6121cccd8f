"""A draft that is never right, and what it may still cost: commits are sent rarely, and nobody waits for it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
from cuda_harness import VOCAB, jobs, texts
from fake_device import FakeDevice, fake_engine, submit
from feature_draft import FeatureDraft
from harness import Answer, run_all, tokens
from local_draft import wrong
from scripted_peer import Clock, Recorder, follow, request, tree
from threaded_engine import ThreadedEngine

from outrider.models.decoder import CausalLM
from outrider.protocol.speculation import Commit
from verify_service.engine import engine as engine_module
from verify_service.engine.request import Request
from verify_service.speculation.draft_wait import DraftWaitMode
from verify_service.speculation.drafts import CREDIT_ROUNDS, Drafts, SpeculativeRequest
from verify_service.speculation.replica import MAX_WRONG_LOOKS, DraftBackoff

RIGHT, WRONG = 7, 5


class Session:
    """A request that commits the same token again and again, and a draft that guesses when a commit reaches it."""

    def __init__(self, drafts: Drafts) -> None:
        self.drafts = drafts
        self.port = Recorder()
        drafts.connected(self.port)
        self.one, self.spec = self.admit()
        self.num_sent: list[int] = []
        """Tokens of each commit that was sent."""

    def admit(self) -> tuple[Request, SpeculativeRequest]:
        one = request([1, 2])
        self.drafts.admit(one)
        spec = self.drafts.spec(one)
        assert spec is not None
        self.port.take(self.drafts)
        return one, spec

    def commit(self, guess: int, rounds: int = 1) -> int:
        """Commit `rounds` tokens, with a guess at the next whenever the draft was sent a commit; how often it was."""
        before = len(self.num_sent)
        for _ in range(rounds):
            self.one.tokens.append(RIGHT)
            follow(self.drafts, self.one)
            for message in self.port.take(self.drafts):
                assert isinstance(message, Commit)
                assert message.length_before + len(message.token_ids) == self.one.committed_len
                self.num_sent.append(len(message.token_ids))
                self.guess(guess)
        return len(self.num_sent) - before

    def guess(self, token: int) -> None:
        grow = tree(self.spec.number, self.spec.mirror.epoch + 1, self.one.committed_len, [token])
        self.drafts.receive(self.port, [grow], 100.0)


@pytest.fixture
def session() -> Session:
    return Session(Drafts(vocab_size=50, max_nodes=256, clock=Clock()))


def test_a_draft_that_is_never_right_is_told_of_few_commits_and_of_every_token(session: Session) -> None:
    assert session.commit(WRONG, MAX_WRONG_LOOKS) == MAX_WRONG_LOOKS
    session.commit(WRONG)
    assert session.spec.backoff.in_doubt
    assert session.commit(WRONG, 320) <= 320 // 20
    assert sum(session.num_sent) == MAX_WRONG_LOOKS + 1 + 320 - session.spec.num_unsent_tokens
    # Its trees may be no larger than those of a request among many.
    assert session.drafts.credit(session.one, 63, 0) < CREDIT_ROUNDS * 63


def test_one_right_guess_ends_the_doubt(session: Session) -> None:
    session.commit(WRONG, 2 * MAX_WRONG_LOOKS)
    assert session.spec.backoff.in_doubt
    while not session.commit(RIGHT):
        pass
    session.commit(RIGHT)
    assert not session.spec.backoff.in_doubt
    assert session.commit(RIGHT, 10) == 10
    assert session.num_sent[-9:] == [1] * 9, "behind one with what it had not been sent"
    assert session.drafts.credit(session.one, 63, 0) == min(CREDIT_ROUNDS * 63, 256)


def test_a_draft_that_is_seldom_right_is_not_in_doubt(session: Session) -> None:
    for _ in range(8):
        assert session.commit(RIGHT) == 1
        assert session.commit(WRONG, MAX_WRONG_LOOKS - 1) == MAX_WRONG_LOOKS - 1


def test_a_draft_that_guesses_nothing_is_told_of_every_commit(session: Session) -> None:
    for _ in range(3 * MAX_WRONG_LOOKS):
        session.one.tokens.append(RIGHT)
        follow(session.drafts, session.one)
        session.drafts.receive(
            session.port, [tree(session.spec.number, session.spec.mirror.epoch + 1, session.one.committed_len, [])], 1.0
        )
    assert len(session.port.take(session.drafts)) == 3 * MAX_WRONG_LOOKS


def test_nobody_waits_for_a_draft_in_doubt(session: Session) -> None:
    session.one.tokens.append(RIGHT)
    session.drafts.on_commit(session.one)
    assert session.spec.wait.expects
    session.spec.backoff.num_wrong = MAX_WRONG_LOOKS
    assert not session.spec.wait.expects


def test_a_new_request_begins_with_what_is_known_of_its_draft(session: Session) -> None:
    session.commit(WRONG, MAX_WRONG_LOOKS + 1)
    _, late = session.admit()
    assert late.backoff.in_doubt
    session.drafts.disconnected(session.port)
    session.drafts.connected(Recorder())
    assert not late.backoff.in_doubt, "another session may be another draft"
    assert late.num_unsent_tokens == 0, "it was opened with all that is committed"


def test_in_lockstep_every_commit_is_told() -> None:
    session = Session(Drafts(vocab_size=50, max_nodes=256, clock=Clock(), mode=DraftWaitMode(lockstep=True)))
    assert session.commit(WRONG, 3 * MAX_WRONG_LOOKS) == 3 * MAX_WRONG_LOOKS


def test_looks_grow_rarer_but_never_stop() -> None:
    backoff = DraftBackoff(MAX_WRONG_LOOKS)
    passes = []
    for look in range(8):
        backoff.num_wrong = MAX_WRONG_LOOKS + look
        count = 0
        while backoff.skips():
            count += 1
        passes.append(count)
    assert passes == sorted(passes) and 0 < passes[0] < passes[-1] == passes[-2] <= 32


def test_features_leave_for_a_draft_in_doubt_as_rarely_as_commits(
    model: CausalLM, truth: list[Answer], start: Callable[..., ThreadedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verify_service.speculation.replica.MAX_WRONG_LOOKS", 8)
    engine = start("paged")
    draft = FeatureDraft(engine, VOCAB, wrong(texts(truth), VOCAB), layers=(0, 1, 3))
    draft.connect()
    engine.start()
    answers = run_all(engine, jobs(), 1)
    engine.stop()
    assert tokens(answers) == tokens(truth)
    assert draft.check(model, preempted=True) > 0, "what came was right, from the first position on"
    assert len(jobs()) < len(draft.messages) < sum(len(answer.token_ids) for answer in answers) // 3


@pytest.mark.parametrize("calm", [True, False])
def test_what_would_hold_up_the_next_request_waits_for_calm(calm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_CALM_SECONDS", 0.0 if calm else math.inf)
    device = FakeDevice()
    engine = fake_engine(device)

    def refresh() -> bool:
        device.events.append("refresh")
        return False

    monkeypatch.setattr(engine.features, "refresh", refresh)
    answer = submit(engine, max_tokens=5)
    engine.start()
    assert answer.done.wait(10)
    device.events.clear()
    for _ in range(2):
        asked = threading.Event()
        engine.ask(asked.set)
        assert asked.wait(10)
    engine.stop()
    assert ("refresh" in device.events) == calm

"""Between two rounds only what the next one needs is done; all else happens while a round runs, and harms nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from fake_device import VOCAB, FakeDevice, FakeRound, count_up, fake_engine, submit
from harness import Answer
from local_draft import Guess, LocalDraft, chain
from threaded_engine import ThreadedEngine

from outrider.errors import InternalError, UnavailableError
from outrider.protocol.generation import GenerationUpdate
from outrider.protocol.speculation import Commit, VerifyMessage
from outrider.tree.author import TreeAuthor
from verify_service.engine.round import Entry, Growth, Result
from verify_service.frames import RoundFigures


@pytest.fixture(params=[False, True], ids=["sleeping", "spinning"])
def device(request: pytest.FixtureRequest) -> FakeDevice:
    return FakeDevice(spin=request.param)


def guess_right(depth: int = 4) -> Guess:
    """Grows a chain of the tokens that the fake target commits."""

    def guess(author: TreeAuthor) -> None:
        chain(author, [count_up(author.committed_len + ahead) for ahead in range(depth)])

    return guess


class Noted(LocalDraft):
    """Notes when commits reach it."""

    def __init__(self, engine: ThreadedEngine, events: list[str], depth: int = 4) -> None:
        super().__init__(engine, VOCAB, guess_right(depth))
        self._events = events

    def send(self, messages: list[VerifyMessage]) -> None:
        self._events += ["told" for message in messages if isinstance(message, Commit)]
        super().send(messages)


class NotedAnswer(Answer):
    """Notes when updates come."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events

    def take(self, update: GenerationUpdate) -> None:
        self._events.append("update")
        super().take(update)


class NotedRounds:
    """An observer that notes what it is told."""

    def __init__(self, events: list[str]) -> None:
        self.gaps: list[float | None] = []
        self._events = events

    def round(self, entries: Sequence[Entry], updates: Sequence[GenerationUpdate], figures: RoundFigures) -> None:
        assert len(entries) == len(updates) and figures.seconds >= 0 and figures.held >= 0 and figures.gpu == 0.5
        self.gaps.append(figures.gap)
        self._events.append("observed")

    def flush(self) -> None:
        if self._events[-1:] != ["flush"]:
            self._events.append("flush")


def test_drafts_clients_and_metrics_are_told_while_the_next_round_runs(
    device: FakeDevice, engines: list[ThreadedEngine]
) -> None:
    events = device.events
    observer = NotedRounds(events)
    engine = fake_engine(device, observer=observer)
    engines.append(engine)
    engine.draft_connected(Noted(engine, events))
    answer = submit(engine, max_tokens=12, answer=NotedAnswer(events))
    engine.start()
    assert answer.done.wait(10)
    engine.stop()
    assert answer.token_ids == [count_up(position) for position in range(3, 15)]
    text = " ".join(events)
    # Every second round has no nodes: where the device is waited for, it goes behind what brings the next ones.
    bare = "told launch" if device.spin else "launch told"
    assert text[text.index("wait") :].startswith(
        f"wait launch told update observed flush wait {bare} update observed flush"
    )
    assert text.endswith("wait update observed flush"), "the last round's end waits for no other round"
    assert observer.gaps[1:] == [0.25] * (len(observer.gaps) - 1)


def test_a_draft_is_told_before_a_round_is_held_for_it(device: FakeDevice, engines: list[ThreadedEngine]) -> None:
    engine = fake_engine(device, seconds=0.5, max_hold_seconds=5.0)
    engines.append(engine)
    engine.draft_connected(Noted(engine, device.events, depth=2))
    answer = submit(engine, max_tokens=12)
    engine.start()
    assert answer.done.wait(10)
    # Every commit takes the whole chain and one more, so each round but those of no use has to wait for the answer.
    nodes = [entries[0][2] for entries in device.rounds]
    assert nodes[:4] == [2, 2, 2, 2]
    launches = [index for index, event in enumerate(device.events) if event == "launch"]
    assert all(device.events[index - 1] == "told" for index in launches[1:4])


def test_what_a_draft_says_during_a_round_is_in_the_next(device: FakeDevice, engines: list[ThreadedEngine]) -> None:
    engine = fake_engine(device)
    engines.append(engine)
    draft = LocalDraft(engine, VOCAB, lambda author: None)
    engine.draft_connected(draft)

    def speak() -> None:
        for number, author in draft.authors.items():
            guess_right(6)(author)
            draft._grow(number)

    device.during = speak
    answer = submit(engine, max_tokens=30)
    engine.start()
    assert answer.done.wait(10)
    assert answer.token_ids == [count_up(position) for position in range(3, 33)]
    assert answer.num_accepted > 10


def test_a_request_that_is_cancelled_during_a_round_says_nothing_more(
    device: FakeDevice, engines: list[ThreadedEngine]
) -> None:
    engine = fake_engine(device)
    engines.append(engine)
    victim, other = submit(engine, max_tokens=100), submit(engine, max_tokens=20)
    seen: list[int] = []

    def cancel() -> None:
        if len(device.rounds) == 5:
            engine.cancel(victim.request)
            engine.ask(lambda: seen.append(len(victim.updates)))

    device.during = cancel
    engine.start()
    assert other.done.wait(10)
    engine.stop()
    assert seen == [len(victim.updates)] and not victim.done.is_set()
    assert victim.request in device.forgotten and victim.request.pages == []
    assert [len(entries) for entries in device.rounds[4:6]] == [2, 1]
    assert other.token_ids == [count_up(position) for position in range(3, 23)]


def test_a_request_that_comes_during_a_round_is_in_the_next(device: FakeDevice, engines: list[ThreadedEngine]) -> None:
    engine = fake_engine(device)
    engines.append(engine)
    late: list[Answer] = []

    def come() -> None:
        if not late:
            late.append(submit(engine, max_tokens=3))

    device.during = come
    first = submit(engine, max_tokens=6)
    engine.start()
    assert first.done.wait(10) and late[0].done.wait(10)
    assert [len(entries) for entries in device.rounds[:3]] == [1, 2, 2]


def test_pages_of_a_request_that_has_just_ended_serve_before_anybody_is_preempted(
    device: FakeDevice, engines: list[ThreadedEngine]
) -> None:
    # Six pages of four: the first answer ends with two of them just as the others need their third.
    engine = fake_engine(device, num_pages=6, max_nodes=0)
    engines.append(engine)
    answers = [submit(engine, 3, max_tokens=5), submit(engine, 4, max_tokens=8), submit(engine, 4, max_tokens=8)]
    engine.start()
    assert all(answer.done.wait(10) for answer in answers)
    assert engine.scheduler.num_preemptions == 0


class Broken(FakeDevice):
    """A device that fails in its third round."""

    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> FakeRound:
        launched = super().launch(entries)
        if len(self.rounds) == 3:
            launched.wait = self._fail  # type: ignore[method-assign]
        return launched

    def _fail(self) -> list[Result]:
        raise InternalError("the device failed: illegal address", code="device_failed")


def test_what_a_device_fails_with_is_what_its_requests_are_told() -> None:
    engine = fake_engine(Broken())
    answers = [submit(engine), submit(engine)]
    engine.start()
    for answer in answers:
        assert answer.done.wait(10)
        error = answer.updates[-1].error
        assert isinstance(error, UnavailableError) and "illegal address" in error.message
        assert len(answer.token_ids) == 2, "what was committed before is told first"
    engine.stop()
    assert engine.stopping


def test_an_engine_may_run_on_its_callers_thread(device: FakeDevice) -> None:
    engine = fake_engine(device)
    answer = submit(engine)
    stopper = threading.Thread(target=lambda: (answer.done.wait(10), engine.stop()))
    stopper.start()
    engine.run()
    stopper.join()
    assert len(answer.token_ids) == 8 and engine.stopping

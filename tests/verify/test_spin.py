"""An engine whose device waits for it: it never sleeps while requests run, and sees the end of a round at once."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Sequence

import pytest
from fake_device import VOCAB, FakeDevice, count_up, fake_engine, submit
from harness import PAGE_SIZE, Silence
from local_draft import LocalDraft, chain
from threaded_engine import ThreadedEngine, ThreadInbox

from outrider.host.worker import GarbageCollector
from outrider.protocol.speculation import Commit, VerifyMessage
from outrider.tree.author import TreeAuthor
from verify_service.engine.engine import Action
from verify_service.engine.host_gap import LONG_GAP_SECONDS, GapWatch, log_long_gap
from verify_service.engine.memory import Memory
from verify_service.engine.scheduler import EngineLimits
from verify_service.speculation.budget import WIDTHS, CostModel


def test_what_comes_is_done_piece_by_piece_and_a_round_s_end_goes_first() -> None:
    device = FakeDevice(spin=True)
    engine = fake_engine(device)

    def ask() -> None:
        if len(device.rounds) == 4:
            for number in range(6):
                engine.ask(lambda number=number: device.events.append(f"piece {number}"))  # type: ignore[misc]

    device.during = ask
    answer = submit(engine, max_tokens=20)
    engine.start()
    assert answer.done.wait(10)
    engine.stop()
    # A round is over at the third look, and one piece is done between two looks. What is left waits for the next.
    text = " ".join(device.events)
    assert "launch piece 0 piece 1 wait launch piece 2 piece 3 wait launch piece 4 piece 5 wait" in text
    assert answer.token_ids == [count_up(position) for position in range(3, 23)]


def test_an_inbox_that_never_empties_keeps_nobody_waiting() -> None:
    device = FakeDevice(spin=True)
    engine = fake_engine(device)

    def again() -> None:
        for _ in range(5):
            engine.ask(lambda: None)

    device.during = again
    first = submit(engine, max_tokens=30)
    engine.start()
    late = submit(engine, max_tokens=5)
    assert first.done.wait(10) and late.done.wait(10)
    engine.stop()


class Sleepless(ThreadInbox):
    """Notes when the engine waits; answers of a draft come at the third look during a hold."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0
        self.num_looks = 0
        self.later: list[Action] = []

    def take(self, timeout: float | None) -> list[Action]:
        self.num_waits += timeout is not None
        self.num_looks += 1
        if self.num_looks >= 3 and self.later:
            later, self.later = self.later, []
            for action in later:
                action()
        return super().take(timeout)


class Later(LocalDraft):
    """Answers a little later."""

    def __init__(self, engine: ThreadedEngine, inbox: Sleepless) -> None:
        super().__init__(engine, VOCAB, self._two)
        self._inbox = inbox

    def send(self, messages: list[VerifyMessage]) -> None:
        self._inbox.num_looks = 0
        copy: Sequence[VerifyMessage] = list(messages)
        self._inbox.later.append(lambda: LocalDraft.send(self, list(copy)))

    def _two(self, author: TreeAuthor) -> None:
        chain(author, [count_up(author.committed_len + ahead) for ahead in range(2)])


def test_holds_are_spent_awake_and_end_with_the_answer() -> None:
    device, inbox = FakeDevice(spin=True), Sleepless()
    limits = EngineLimits(VOCAB, 200, max_hold_seconds=5.0, spin=True)
    engine = ThreadedEngine(
        device, Memory(64, PAGE_SIZE), CostModel([0.5] * len(WIDTHS)), limits, Silence(), inbox=inbox
    )
    engine.draft_connected(Later(engine, inbox))
    answer = submit(engine, max_tokens=12)
    asleep: list[int] = []
    device.during = lambda: asleep.append(inbox.num_waits)
    engine.start()
    assert answer.done.wait(10)
    engine.stop()
    assert [entries[0][2] for entries in device.rounds][:3] == [2, 2, 2]
    assert asleep[0] == asleep[-1], "it slept while a request ran"


class EngineUpdates(LocalDraft):
    """Notes when it is sent a commit, beside the launches of rounds."""

    def __init__(self, engine: ThreadedEngine, device: FakeDevice, right: bool) -> None:
        super().__init__(engine, VOCAB, self._right if right else self._wrong)
        self._device = device

    def send(self, messages: list[VerifyMessage]) -> None:
        self._device.events += ["told" for message in messages if isinstance(message, Commit)]
        super().send(messages)

    def _right(self, author: TreeAuthor) -> None:
        chain(author, [count_up(author.committed_len + ahead) for ahead in range(4)])

    def _wrong(self, author: TreeAuthor) -> None:
        chain(author, [count_up(author.committed_len) + 1])


@pytest.mark.parametrize(("right", "num_requests"), [(False, 1), (True, 1), (False, 6)])
def test_a_draft_hears_first_of_what_leaves_nothing_to_verify(right: bool, num_requests: int) -> None:
    """Else it is sent while the next round runs: where nodes are there, or where there is much to send."""
    device = FakeDevice(spin=True)
    engine = fake_engine(device, num_pages=256)
    engine.draft_connected(EngineUpdates(engine, device, right))
    answers = [submit(engine, max_tokens=60) for _ in range(num_requests)]
    engine.start()
    assert all(answer.done.wait(20) for answer in answers)
    engine.stop()
    events = [event for event in device.events if event in ("launch", "told", "wait")]
    launches = [place for place, event in enumerate(events) if event == "launch"]
    # The first rounds have nothing to send, the last nobody to send it to, or fewer.
    rounds = list(zip(launches, device.rounds, strict=True))[2:-4]
    first = [events[place - 1] == "told" for place, _ in rounds]
    bare = [not any(nodes for _, _, nodes in entries) for _, entries in rounds]
    assert first == (bare if num_requests == 1 else [False] * len(rounds)), events
    assert any(bare) if not right else not all(bare)


def test_garbage_is_swept_when_told_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int] = []
    count = 10
    monkeypatch.setattr(gc, "isenabled", lambda: False)
    monkeypatch.setattr(gc, "get_count", lambda: (count, 0, 0))
    monkeypatch.setattr(gc, "collect", lambda generation=2: swept.append(generation))
    one = GarbageCollector()
    one.collect_young()
    one.collect_all()
    assert swept == []
    count = 5000
    for _ in range(32):
        one.collect_young()
    assert swept == [0] * 31 + [1]
    one.collect_all()
    assert swept[-1] == 2


@pytest.mark.parametrize("looks_at_all", [False, True])
def test_who_keeps_much_has_all_of_it_looked_at_only_where_nothing_is_open(
    monkeypatch: pytest.MonkeyPatch, looks_at_all: bool
) -> None:
    swept: list[int] = []
    monkeypatch.setattr(gc, "isenabled", lambda: False)
    monkeypatch.setattr(gc, "get_count", lambda: (5000, 0, 0))
    monkeypatch.setattr(gc, "collect", lambda generation=2: swept.append(generation))
    one = GarbageCollector(looks_at_all=looks_at_all)
    for _ in range(5000):
        one.collect_young()
    assert swept.count(2) == looks_at_all
    one.collect_all()
    assert swept[-1] == 2


def test_what_is_left_where_nothing_is_open_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    count = 10
    monkeypatch.setattr(gc, "isenabled", lambda: False)
    monkeypatch.setattr(gc, "get_count", lambda: (count, 0, 0))
    monkeypatch.setattr(gc, "collect", lambda generation=2: done.append(generation))
    monkeypatch.setattr(gc, "freeze", lambda: done.append("freeze"))
    one = GarbageCollector()
    one.collect_and_freeze()
    assert done == [], "nothing was made"
    count = 5000
    one.collect_young()
    count = 10
    one.collect_and_freeze()
    assert done == [0, 2, "freeze"]
    one.collect_and_freeze()
    assert done == [0, 2, "freeze"]


def test_garbage_is_swept_beside_rounds_that_leave_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    swept: list[int] = []
    monkeypatch.setattr(gc, "isenabled", lambda: False)
    monkeypatch.setattr(gc, "get_count", lambda: (10**6, 0, 0))
    monkeypatch.setattr(gc, "collect", lambda generation=2: swept.append(generation))
    # On a CPU every round is over when it is looked at, and so may those be that a busy device runs.
    monkeypatch.setattr("fake_device.FakeRound.done", lambda round: True)
    for spin in (False, True):
        engine = fake_engine(FakeDevice(spin=spin))
        seen: list[int] = []
        answer = submit(engine, max_tokens=20)
        request = answer.request
        assert request is not None
        request.sink = lambda update, take=answer.take, seen=seen: (seen.append(len(swept)), take(update))  # type: ignore[misc, assignment]
        engine.start()
        assert answer.done.wait(10)
        engine.stop()
        assert seen[-1] - seen[0] > 10, f"spin={spin}"


def test_a_long_gap_is_taken_apart(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"):
        watch = GapWatch()
        watch.begin(time.monotonic())
        watch.mark("commit")
        phases = watch.end()
        log_long_gap(LONG_GAP_SECONDS / 2, phases)
        log_long_gap(None, phases)
        assert not caplog.messages
        log_long_gap(0.0093, phases)
    parts = ", ".join(rf"{name} \d+\.\d\d ms" for name in ("commit", "launch", "CPU time"))
    (warning,) = caplog.messages
    assert re.fullmatch(rf"the device was idle for 9\.3 ms: {parts}, taken off the CPU \d+ times", warning)


def test_a_dry_run_leaves_no_trace() -> None:
    device = FakeDevice(spin=True)
    engine = fake_engine(device, root_apart=True)
    engine.draft_connected(LocalDraft(engine, VOCAB, lambda author: chain(author, [count_up(author.committed_len)])))
    answer = submit(engine, max_tokens=12)
    states: list[object] = []

    def dry_run() -> None:
        request = answer.request
        assert request is not None
        spec = engine.drafts.spec(request)
        assert spec is not None
        for _ in range(3):
            engine._warmer.resume()
            engine._warmer.run(engine.scheduler.plan())
            states.append((len(request.tokens), request.cached_len, spec.mirror.root_len, spec.wait.num_messages))
        assert len(set(states[-3:])) == 1
        assert len(engine.drafts._requests) == len(engine.scheduler.running) == 1

    device.during = dry_run
    engine.start()
    assert answer.done.wait(10)
    engine.stop()
    assert states and answer.token_ids == [count_up(position) for position in range(3, 15)]
    assert len(engine._warmer._request.tokens) == 1

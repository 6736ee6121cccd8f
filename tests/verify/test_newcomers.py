"""A client of another API key finds a place at once, however long the answers of the one that has all places."""

from __future__ import annotations

import pytest
from fake_device import FakeDevice, fake_engine, submit
from harness import Answer
from threaded_engine import ThreadedEngine

from verify_service.engine.scheduler import Scheduler

ALONE = 90


def run(
    engine: ThreadedEngine,
    device: FakeDevice,
    first: list[Answer],
    late: dict[int, tuple[str, int]],
    prompt_len: int = 3,
) -> list[Answer]:
    """Run requests, and those that come while a round runs: by its number, the key and the tokens of each.

    `prompt_len`: of the first of these; others have 3 tokens.
    """
    came: list[Answer] = []

    def come() -> None:
        if (one := late.get(len(device.rounds))) is not None:
            came.append(submit(engine, 3 if came else prompt_len, one[1], client=f"{one[0]}/0"))

    device.during = come
    engine.start()
    assert all(answer.done.wait(20) for answer in first)
    assert all(answer.done.wait(20) for answer in came) and len(came) == len(late)
    engine.stop()
    return came


def first_round(device: FakeDevice, answer: Answer) -> int:
    return next(at for at, entries in enumerate(device.rounds) if any(one is answer.request for one, *_ in entries))


@pytest.mark.parametrize("spin", [False, True])
def test_one_that_has_several_places_makes_way_and_its_text_stays(spin: bool) -> None:
    alone = FakeDevice()
    engine = fake_engine(alone, max_running=2)
    expected = submit(engine, 3, ALONE)
    run(engine, alone, [expected], {})

    device = FakeDevice(spin=spin)
    engine = fake_engine(device, max_running=2)
    flood = [submit(engine, 3, ALONE, client="flood/0") for _ in range(4)]
    # The second one comes when the one that made way for the first waits before all others.
    first, second = run(engine, device, flood, {5: ("one", 8), 7: ("two", 8)})
    assert first_round(device, first) <= 8
    assert first_round(device, second) <= 20, "behind the other's 8 tokens, and not behind the flood's 90"
    assert [answer.token_ids for answer in flood] == [expected.token_ids] * 4
    assert first.token_ids == second.token_ids == expected.token_ids[:8]
    assert engine.scheduler.num_preemptions == 0, "they lacked no pages"
    assert engine.scheduler.num_displaced == 2


def test_nobody_makes_way_for_requests_of_its_own_key_or_where_each_key_has_one() -> None:
    device = FakeDevice()
    engine = fake_engine(device, max_running=2)
    running = [submit(engine, 3, 30, client="one/0"), submit(engine, 3, 30, client="two/0")]
    for late in run(engine, device, running, {5: ("one", 4), 7: ("three", 4)}):
        assert first_round(device, late) >= 30


def test_without_pages_the_key_that_has_the_most_gives_way_not_the_youngest_of_all() -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=12, keep_prefixes=False, max_nodes=0)
    flood = [submit(engine, 3, 20, client="flood/0") for _ in range(2)]
    (late,) = run(engine, device, flood, {3: ("one", 20)})
    assert engine.scheduler.num_preemptions >= 1
    began = first_round(device, late)
    rounds = [any(one is late.request for one, *_ in entries) for entries in device.rounds[began:]]
    assert rounds.index(False) == sum(rounds), "it never paused"


def test_one_for_which_there_are_no_pages_keeps_no_other_key_waiting() -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=64, max_running=4, max_nodes=0)
    flood = [submit(engine, 3, 50, client="flood/0") for _ in range(4)]
    long, short = run(engine, device, flood, {30: ("one", 4), 34: ("two", 4)}, prompt_len=150)
    assert first_round(device, long) > 40, "nobody makes so much way"
    assert first_round(device, short) <= 37


def test_a_key_whose_other_answers_have_ended_has_no_more_than_the_one_that_is_left() -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=40, keep_prefixes=False, max_nodes=0)
    short = [submit(engine, 3, 6, client="one/0") for _ in range(2)]
    left = submit(engine, 3, 60, client="one/0")
    flood = [submit(engine, 3, 60, client="flood/0") for _ in range(2)]
    run(engine, device, [*short, left, *flood], {})
    assert engine.scheduler.num_preemptions >= 1
    rounds = [any(one is left.request for one, *_ in entries) for entries in device.rounds]
    assert rounds.index(False) == sum(rounds), "it never paused"


def test_places_are_counted_anew_behind_an_end_only_where_someone_may_have_to_give_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted: list[int] = []
    count = Scheduler._sort_running
    monkeypatch.setattr(Scheduler, "_sort_running", lambda scheduler: counted.append(1) or count(scheduler))
    device = FakeDevice()
    engine = fake_engine(device, num_pages=200, max_nodes=0)
    answers = [submit(engine, 3, 5 + 3 * number, client=f"{number % 2}/0") for number in range(6)]
    run(engine, device, answers, {})
    assert len(counted) == len(answers), "once for each that began"

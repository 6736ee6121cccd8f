"""What prompts have in common is computed once, though their requests run at the same time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from examples import examples
from fake_device import VOCAB, FakeDevice, count_up, fake_engine, submit
from harness import PAGE_SIZE, Answer, make_request
from page_integrity import check_memory
from threaded_engine import ThreadedEngine

from outrider.sampling.params import SamplingParams
from verify_service.engine.scheduler import _MIN_LED_PAGES

GREEDY = SamplingParams(temperature=0.0)
SPREAD = 4


def ask(engine: ThreadedEngine, prompt: Sequence[int], max_tokens: int = 4, **fields: object) -> Answer:
    answer = Answer()
    answer.request = make_request(answer, prompt, GREEDY, VOCAB, max_tokens, **fields)
    engine.submit(answer.request)
    return answer


def run(engine: ThreadedEngine, answers: Sequence[Answer]) -> None:
    """Round by round on this thread, until all have ended; every page must be accounted for throughout."""
    while not all(answer.done.is_set() for answer in answers):
        engine._step()
        check_memory(engine.memory)
    engine.stop()
    engine.run()
    check_memory(engine.memory)
    assert not engine.scheduler.running and engine.memory.num_used == engine.memory.radix.num_pages, "a page leaked"


def computed(device: FakeDevice, answer: Answer) -> int:
    """Tokens of its prompt that were computed for a request."""
    generated = len(answer.token_ids) - 1
    return sum(extend for entries in device.rounds for one, extend, _ in entries if one is answer.request) - generated


def first_round(device: FakeDevice, answer: Answer) -> int:
    return next(at for at, entries in enumerate(device.rounds) if any(one is answer.request for one, *_ in entries))


def cached(answer: Answer) -> int:
    return next(update.cached_prompt_tokens for update in answer.updates if update.token_ids)


RULES: list[dict[str, object]] = [
    {},
    {"root_apart": True},
    {"root_apart": True, "deterministic": True, "max_nodes": 0},
]


@pytest.mark.parametrize("spin", [False, True])
@pytest.mark.parametrize("rules", RULES)
def test_answers_to_one_prompt_share_it_and_its_pages(rules: dict[str, object], spin: bool) -> None:
    device = FakeDevice(spin)
    engine = fake_engine(device, chunk_size=16, **rules)
    answers = [submit(engine, 50, max_tokens=6) for _ in range(4)]
    most_used: list[int] = []
    device.during = lambda: most_used.append(engine.memory.num_used)
    run(engine, answers)
    assert [computed(device, answer) for answer in answers] == [50, 2, 2, 2]
    assert [cached(answer) for answer in answers] == [0, 48, 48, 48]
    # 12 full pages of the prompt once, and of each the last of it and one of its answer or two.
    assert max(most_used) <= 12 + 4 * 3
    assert all(answer.token_ids == [count_up(50 + at) for at in range(6)] for answer in answers)


def test_a_prompt_is_found_while_its_request_goes_on() -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=64)
    first, late = submit(engine, 50, max_tokens=30), Answer()

    def come() -> None:
        if len(device.rounds) == 3:
            submit(engine, 50, max_tokens=4, answer=late)

    device.during = come
    run(engine, [first, late])
    assert (computed(device, late), cached(late)) == (2, 48)
    assert not late.updates[-1].error and late.token_ids == first.token_ids[:4]


def test_a_follower_waits_for_what_it_shares_alone() -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=16)
    long = submit(engine, 150, max_tokens=1)
    short = ask(engine, [*(count_up(at) for at in range(40)), 7, 7, 7, 7])
    run(engine, [long, short])
    assert computed(device, short) == 4
    # 40 tokens are three chunks of the ten of the long one, which may have the next one, too.
    assert first_round(device, short) <= 4


@pytest.mark.parametrize(
    "apart",
    [
        {"tenant": "another"},
        {"skip_prefix_cache": True},
        {"num_prompt_logprobs": 0},
    ],
)
def test_those_that_must_not_share_compute_their_own_at_once(apart: dict[str, object]) -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=128)
    first = submit(engine, 50)
    other = submit(engine, 50, **apart)
    run(engine, [first, other])
    assert computed(device, other) == 50 and cached(other) == 0
    assert {one for one, *_ in device.rounds[0]} == {first.request, other.request}


def test_without_a_radix_cache_nothing_is_shared() -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=16, keep_prefixes=False)
    answers = [submit(engine, 50) for _ in range(3)]
    run(engine, answers)
    assert [computed(device, answer) for answer in answers] == [50] * 3


def test_few_pages_are_worth_no_wait() -> None:
    device = FakeDevice()
    engine = fake_engine(device, chunk_size=128)
    answers = [submit(engine, PAGE_SIZE * _MIN_LED_PAGES) for _ in range(3)]  # the root is never shared
    run(engine, answers)
    assert len(device.rounds[0]) == 3


@pytest.mark.parametrize("leaves", ["cancelled", "preempted"])
def test_another_one_leads_where_the_first_gives_up(leaves: str) -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=200, chunk_size=16, max_running=4)
    answers = [submit(engine, 100, priority=1, client="flood/0")]

    def happen() -> None:
        if len(device.rounds) == 1:
            answers.extend(submit(engine, 100, client="flood/0") for _ in range(3))
        elif len(device.rounds) == 3 and leaves == "cancelled":
            assert answers[0].request is not None
            engine.cancel(answers[0].request)
            answers[0].done.set()
        elif len(device.rounds) == 3:
            answers.append(submit(engine, 3, client="newcomer/0"))

    device.during = happen
    run(engine, answers)
    first, *others = [computed(device, answer) for answer in answers]
    # 48 tokens of the first one, the others' 52, and the last page of each. A round of the cancelled one is lost.
    assert sorted(others[:3]) == [4, 4, 68 if leaves == "cancelled" else 52]
    assert len(answers[0].token_ids) == (0 if leaves == "cancelled" else 8)
    if leaves == "preempted":
        assert first == 48 + 4


def test_a_follower_s_turn_is_its_leader_s() -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=400, chunk_size=16)
    flood = [ask(engine, [number] * 100, client="flood/0", priority=1) for number in range(6)]
    # Of the flood, whose turn comes last, is the one that computes what another key's more urgent one needs.
    common = [count_up(at) for at in range(90)]
    flood.append(ask(engine, [*common, *[50] * 20], client="flood/0", priority=1))
    urgent = Answer()

    def come() -> None:
        if len(device.rounds) == 1:
            urgent.request = make_request(urgent, common, GREEDY, VOCAB, 4, client="one/0")
            engine.submit(urgent.request)

    device.during = come
    run(engine, [*flood, urgent])
    assert computed(device, urgent) == 2
    assert first_round(device, urgent) <= 1 + 6, "six chunks of the shared tokens, and then its own"


def test_one_that_waits_for_pages_is_let_in_once_the_cache_has_its_prompt() -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=88, chunk_size=256, max_nodes=0)
    answers = [ask(engine, [7] * 100, max_tokens=60)]

    def come() -> None:
        if len(device.rounds) == 3:
            # 41 pages each, 40 of the same prompt; beside the first one's there are 62.
            answers.extend(submit(engine, 160, max_tokens=count) for count in (20, 4))

    device.during = come
    run(engine, answers)
    assert max(map(len, device.rounds)) == 3
    assert engine.scheduler.num_preemptions == 0


def test_what_is_led_once_more_after_a_preemption_is_counted_once() -> None:
    device = FakeDevice()
    engine = fake_engine(device, num_pages=60, chunk_size=256, max_nodes=0)
    answers = [submit(engine, 100, max_tokens=count, priority=1) for count in (1, 20)]

    def come() -> None:
        if len(device.rounds) == 2:  # which needs the pages of the second one
            answers.append(ask(engine, [7] * 120, max_tokens=60))
        elif len(device.rounds) == 50:  # which has the lost ones computed
            answers.append(submit(engine, 100))

    device.during = come
    run(engine, answers)
    assert engine.scheduler.num_preemptions == 1
    assert [max(update.cached_prompt_tokens for update in one.updates) for one in answers] == [0, 96, 0, 44]
    assert computed(device, answers[1]) < 4 + 20, "it was led twice"


def prompts_of(source: random.Random) -> list[list[int]]:
    """Prompts that part at random places, some of them equal."""
    prompts = [[source.randrange(SPREAD) for _ in range(source.randint(1, 60))]]
    for _ in range(source.randint(1, 7)):
        before = source.choice(prompts)
        kept = before[: source.randint(0, len(before))]
        prompts.append(kept + [source.randrange(SPREAD) for _ in range(source.choice((0, 0, 5, 30)))] or [0])
    return prompts


@pytest.mark.parametrize("seed", range(examples(60)))
def test_no_page_is_computed_twice_but_for_a_few_of_each_request(seed: int) -> None:
    source = random.Random(seed)
    rules = dict(source.choice(RULES)) | {"chunk_size": source.choice((5, 16, 64, 256)), "max_nodes": 0}
    device = FakeDevice(source.random() < 0.5)
    engine = fake_engine(device, 1000, **rules)
    prompts = prompts_of(source)
    answers = [ask(engine, prompt, source.randint(1, 6), priority=source.randint(0, 1)) for prompt in prompts]
    run(engine, answers)
    pages = {tuple(prompt[: at + PAGE_SIZE]) for prompt in prompts for at in range(0, len(prompt), PAGE_SIZE)}
    total = sum(computed(device, answer) for answer in answers)
    assert total <= PAGE_SIZE * (len(pages) + len(prompts) * _MIN_LED_PAGES)
    # Whoever waits does so while others compute.
    assert all(device.rounds)
    assert all(len(answer.token_ids) == answer.request.params.max_tokens for answer in answers if answer.request)

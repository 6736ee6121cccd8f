"""Rounds that are launched before the one before was read change no token, and nobody hears of one too many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from cuda_harness import KINDS, VOCAB, jobs, make_paged_engine, texts
from harness import Answer, make_request, run_all
from local_draft import LocalDraft, oracle, wrong
from page_integrity import check_memory
from threaded_engine import ThreadedEngine

from outrider.attention.triton_backend import TritonAttention
from outrider.grammar.compiler import GrammarVocabulary
from outrider.grammar.spec import Grammar, GrammarKind
from outrider.models.decoder import CausalLM
from outrider.sampling.params import SamplingParams
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth
from verify_service.executors.cuda import CudaExecutor

GREEDY = SamplingParams(temperature=0.0)


class Rounds(list[tuple[Entry, ...]]):
    """Entries of every round that an engine launched."""

    def __init__(self, executor: CudaExecutor) -> None:
        super().__init__()
        self.during: Callable[[], None] = lambda: None
        launch = executor.launch

        def noted(entries: Sequence[Entry], growth: Growth | None = None) -> Any:
            self.append(tuple(entries))
            pending = launch(entries, growth)
            self.during()
            return pending

        executor.launch = noted  # type: ignore[method-assign]

    @property
    def num_ahead(self) -> int:
        return sum(any(entry.is_ahead for entry in entries) for entries in self)


Start = Callable[..., tuple[ThreadedEngine, Rounds]]


@pytest.fixture
def begin(model: CausalLM) -> Iterator[Start]:
    """Makes engines; in the end nothing may be left in them."""
    made: list[tuple[ThreadedEngine, CudaExecutor]] = []

    def start(**options: Any) -> tuple[ThreadedEngine, Rounds]:
        engine, executor = make_paged_engine(model, **options)
        rounds = Rounds(executor)
        made.append((engine, executor))
        engine.start()
        return engine, rounds

    yield start
    for engine, executor in made:
        engine.stop()
        assert engine.scheduler.running == [] and not engine.scheduler.waiting
        check_memory(engine.memory)
        assert engine.memory.num_used == engine.memory.radix.num_pages, "a page leaked"
        assert len(executor.rows) == 0, "a row leaked"


def submit(engine: ThreadedEngine, prompt: Sequence[int], **fields: Any) -> Answer:
    answer = Answer()
    answer.request = make_request(answer, prompt, fields.pop("params", GREEDY), VOCAB, **fields)
    engine.submit(answer.request)
    return answer


def test_a_round_without_nodes_is_launched_before_the_one_before_is_read(truth: list[Answer], begin: Start) -> None:
    engine, rounds = begin()
    answers = run_all(engine, jobs(), width=4, speculate=False)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    assert rounds.num_ahead > 0.6 * len(rounds)
    # Who comes to the limit is in no round too many.
    assert all(entry.start < entry.request.prompt_len + 23 for entries in rounds for entry in entries)


@pytest.mark.parametrize("width", [1, 3])
def test_a_stop_token_is_found_late_and_ends_the_answer_there(truth: list[Answer], begin: Start, width: int) -> None:
    engine, rounds = begin()
    for number, (prompt, params) in enumerate(jobs()[:3]):
        expected = truth[number].token_ids
        end = next(index for index in range(6, 20) if expected[index] not in expected[:index])
        others = [submit(engine, *job[:1], params=job[1]) for job in jobs()[3 : 2 + width]]
        answer = submit(engine, prompt, params=params, stop_token_ids=frozenset([expected[end]]))
        assert answer.done.wait(30) and all(other.done.wait(30) for other in others)
        assert answer.token_ids == expected[: end + 1]
        assert [other.token_ids for other in others] == [job.token_ids for job in truth[3 : 2 + width]]
        counts = [len(update.logprobs) for update in answer.updates]
        assert sum(counts) == (end + 1 if params.num_logprobs is not None else 0)
        # The round too many has run and brought nothing.
        request = answer.request
        assert request is not None and len(request.tokens) == len(prompt) + end + 1
        late = [entry for entries in rounds for entry in entries if entry.request is request]
        assert late[-1].is_ahead and late[-1].start == len(prompt) + end


def test_the_cache_has_what_it_has_without(truth: list[Answer], begin: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for ahead in (True, False):
        monkeypatch.setattr(TritonAttention, "plans_on_host", not ahead)
        engine, rounds = begin()
        for number, (prompt, params) in enumerate(jobs()):
            stop = frozenset([truth[number].token_ids[13]])
            assert submit(engine, prompt, params=params, stop_token_ids=stop).done.wait(30)
        engine.stop()
        assert (rounds.num_ahead > 0) == ahead
        radix = engine.memory.radix
        found.append(sorted(str(node.chunks) for node in radix._nodes()))
    assert found[0] == found[1] and found[0]


def test_what_follows_in_the_pages_of_one_that_ended_late_is_right(truth: list[Answer], begin: Start) -> None:
    engine, _ = begin(num_pages=24)
    for turn in range(3):
        answers = []
        for number, (prompt, params) in enumerate(jobs()):
            stop = truth[number].token_ids[4 + turn * 5]
            answers.append(submit(engine, prompt, params=params, stop_token_ids=frozenset([stop])))
        for answer, expected in zip(answers, truth, strict=True):
            assert answer.done.wait(60)
            end = expected.token_ids.index(expected.token_ids[4 + turn * 5])
            assert answer.token_ids == expected.token_ids[: end + 1]
    assert engine.scheduler.num_preemptions > 0


def test_a_client_of_another_key_has_a_round_laid_out_anew(truth: list[Answer], begin: Start) -> None:
    engine, rounds = begin(max_running=2)
    came: list[Answer] = []

    def come() -> None:
        if not came and rounds.num_ahead > 5:
            came.append(submit(engine, jobs()[1][0], params=jobs()[1][1], client="one/0"))

    rounds.during = come
    flood = [submit(engine, jobs()[2][0], max_tokens=150, speculate=False, client="flood/0") for _ in range(2)]
    assert all(answer.done.wait(60) for answer in flood) and came[0].done.wait(60)
    assert came[0].token_ids == truth[1].token_ids
    assert flood[0].token_ids == flood[1].token_ids
    first = next(at for at, entries in enumerate(rounds) if any(e.request is came[0].request for e in entries))
    assert first < 75, "long before either long answer ends"


def test_a_client_of_another_key_finds_the_place_of_one_that_has_just_ended(truth: list[Answer], begin: Start) -> None:
    engine, rounds = begin(max_running=3)
    came: list[Answer] = []
    prompt, params = jobs()[2]

    def come() -> None:
        last = [entry for entry in rounds[-1] if entry.request.draft_room == entry.is_ahead]
        if not came and any(entry.request.params.max_tokens == 6 for entry in last):
            came.append(submit(engine, jobs()[1][0], params=jobs()[1][1], client="one/0"))

    rounds.during = come
    flood = [submit(engine, prompt, params=params, max_tokens=most, client="flood/0") for most in (16, 16, 6)]
    assert all(answer.done.wait(60) for answer in flood) and came[0].done.wait(60)
    assert [answer.token_ids for answer in flood] == [truth[2].token_ids] * 2 + [truth[2].token_ids[:6]]
    assert came[0].token_ids == truth[1].token_ids


def test_cancelled_while_two_rounds_are_under_way(truth: list[Answer], begin: Start) -> None:
    engine, rounds = begin()
    stays = submit(engine, jobs()[1][0], params=jobs()[1][1])
    goes = submit(engine, jobs()[2][0], params=jobs()[2][1], max_tokens=200)
    gone: list[Request] = []

    def cancel() -> None:
        if goes.request is not None and not gone and any(e.is_ahead and e.request is goes.request for e in rounds[-1]):
            gone.append(goes.request)
            engine.cancel(goes.request)

    rounds.during = cancel
    assert stays.done.wait(30)
    assert stays.token_ids == truth[1].token_ids
    assert gone and not goes.done.is_set() and len(goes.token_ids) < 24
    assert submit(engine, jobs()[2][0], params=jobs()[2][1]).done.wait(30)


def test_an_admitted_request_is_in_the_next_round(truth: list[Answer], begin: Start) -> None:
    engine, rounds = begin()
    first = submit(engine, jobs()[1][0], params=jobs()[1][1])
    late: list[Answer] = []

    def come() -> None:
        if rounds.num_ahead == 3 and not late:
            late.append(submit(engine, jobs()[4][0], params=jobs()[4][1]))

    rounds.during = come
    assert first.done.wait(30) and late[0].done.wait(30)
    assert [first.token_ids, late[0].token_ids] == [truth[1].token_ids, truth[4].token_ids]


def test_requests_that_need_the_host_between_rounds_are_waited_for(
    truth: list[Answer], begin: Start, vocabulary: GrammarVocabulary
) -> None:
    engine, rounds = begin(vocabulary=vocabulary)
    params = SamplingParams(temperature=0.0, grammar=Grammar(GrammarKind.REGEX, "[ab]{1,12}"))
    assert submit(engine, [5, 6, 7], params=params, max_tokens=10).done.wait(30)
    assert len(rounds) > 1 and rounds.num_ahead == 0
    engine.draft_connected(LocalDraft(engine, VOCAB, oracle(texts(truth), VOCAB)))
    answers = run_all(engine, jobs()[:4], width=1)
    assert sum(answer.num_accepted for answer in answers) > 20


def test_a_draft_in_doubt_holds_nothing_up(truth: list[Answer], begin: Start) -> None:
    engine, rounds = begin()
    engine.draft_connected(LocalDraft(engine, VOCAB, wrong(texts(truth), VOCAB)))
    answers = run_all(engine, jobs(), width=1)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    assert rounds.num_ahead > 0


def test_all_ways_to_sample_at_once(model: CausalLM, truth: list[Answer], begin: Start) -> None:
    engine, rounds = begin(deterministic=True)
    assert len(KINDS) <= len(jobs())
    answers = run_all(engine, jobs(), width=8, speculate=False)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    assert rounds.num_ahead > 0

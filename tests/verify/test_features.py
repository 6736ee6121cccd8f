"""A draft that takes features gets the target's own, for every committed position, whatever happened on the way."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_harness import VOCAB, jobs, texts
from feature_draft import FeatureDraft, wait_for
from harness import Answer, make_request, run_all, tokens
from local_draft import Guess, LocalDraft, noise, oracle, wrong
from msgspec.structs import replace
from threaded_engine import ThreadedEngine

from outrider.errors import ConfigError
from outrider.models.decoder import CausalLM
from outrider.sampling.params import SamplingParams
from outrider.tree.author import TreeAuthor

GREEDY = SamplingParams(temperature=0.0)
LAYERS = (0, 1, 3)
"""The embedding, the second layer's input, and the output behind the final norm."""

Start = Callable[..., ThreadedEngine]


def guesser(name: str, truth: list[Answer]) -> Guess:
    known = texts(truth)
    return {
        "none": lambda author: None,
        "right": oracle(known, VOCAB),
        "wrong": wrong(known, VOCAB),
        "random": noise(9, VOCAB),
    }[name]


@pytest.mark.parametrize(
    ("kind", "guess", "width", "num_pages"),
    [
        *(("torch", "none", 4, 256), ("torch", "right", 4, 24), ("torch", "random", 4, 256)),
        *(("paged", "right", 1, 256), ("paged", "right", 4, 24), ("paged", "random", 4, 256)),
        *(("deterministic", "none", 4, 256), ("deterministic", "right", 4, 24)),
    ],
)
def test_every_committed_position_arrives(
    model: CausalLM, truth: list[Answer], start: Start, kind: str, guess: str, width: int, num_pages: int
) -> None:
    engine = start(kind, num_pages=num_pages)
    draft = FeatureDraft(engine, VOCAB, guesser(guess, truth), LAYERS)
    draft.connect()
    engine.start()
    draft.wait()
    answers = run_all(engine, jobs(), width)
    assert tokens(answers) == tokens(truth)
    engine.stop()
    assert draft.check(model, preempted=num_pages == 24) > 145
    if num_pages == 24:
        assert engine.scheduler.num_preemptions > 0
    else:
        assert any(update.cached_prompt_tokens for answer in answers for update in answer.updates)
    if guess == "right":
        assert sum(answer.num_accepted for answer in answers) > 70


@pytest.mark.parametrize("window", [0, 3000])
def test_a_spinning_engine_sends_piece_by_piece(
    model: CausalLM, truth: list[Answer], start: Start, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()
    # A round on a CPU is over when it was launched: let the engine look a few times before it sees that.
    monkeypatch.setattr("verify_service.executors.cuda.CudaRound.done", lambda round: next(looks) % 40 == 39)
    engine = start("paged", spin=True)
    draft = FeatureDraft(engine, VOCAB, guesser("right", truth), LAYERS)
    draft.window = window
    draft.connect()
    engine.start()
    draft.wait()
    assert tokens(run_all(engine, jobs(), 2)) == tokens(truth)
    engine.stop()
    # Rounds are short: not all of what a request's last ones brought was sent before it ended.
    assert draft.check(model, preempted=True) > 105
    assert not window or max(len(message.data) for message in draft.messages) <= window


@pytest.mark.parametrize("step", [0.0, 1.0])
def test_how_long_features_were_waited_for_is_logged_where_they_were(
    start: Start, step: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(monotonic=itertools.count(0.0, step).__next__)
    monkeypatch.setattr("verify_service.features.sender.time", clock)
    engine = start("torch")
    draft = FeatureDraft(engine, VOCAB, lambda author: None, LAYERS)
    draft.connect()
    with caplog.at_level("INFO"):
        engine.start()
        draft.wait()
        engine.stop()
    found = [text for text in caplog.messages if "features are stored" in text]
    assert len(found) == (step > 0), found


@pytest.mark.parametrize("kind", ["torch", "paged"])
def test_a_draft_that_takes_no_features_costs_no_store(start: Start, kind: str, truth: list[Answer]) -> None:
    engine = start(kind)
    engine.draft_connected(LocalDraft(engine, VOCAB, guesser("right", truth)))
    engine.start()
    assert tokens(run_all(engine, jobs()[:4])) == tokens(truth[:4])
    assert engine._executor._features is None  # type: ignore[attr-defined]
    assert engine.memory.feature_epoch == 0


@pytest.mark.parametrize("kind", ["torch", "paged"])
def test_requests_from_before_stay_plain_and_their_prefixes_are_not_shared(
    model: CausalLM, start: Start, kind: str
) -> None:
    engine = start(kind)
    draft = FeatureDraft(engine, VOCAB, lambda author: None, LAYERS)
    prompt = list(range(20))
    early, late = Answer(), Answer()

    def connect_then_ask(update: object) -> None:
        early.take(update)  # type: ignore[arg-type]
        if len(early.updates) == 3:
            draft.connect()
        if len(early.updates) == 9:
            engine.submit(make_request(late, prompt, GREEDY, VOCAB))

    request = make_request(early, prompt, GREEDY, VOCAB)
    request.sink = connect_then_ask
    engine.start()
    engine.submit(request)
    wait_for([early, late])
    assert tokens([early]) == tokens([late])
    assert len(draft.texts) == 1, "the early request was opened without features"
    assert late.updates[0].cached_prompt_tokens == 0
    again = run_all(engine, [(prompt, GREEDY)])
    engine.stop()
    assert again[0].updates[0].cached_prompt_tokens
    draft.check(model)


@pytest.mark.parametrize("kind", ["torch", "paged"])
def test_a_preempted_request_gets_features_when_it_comes_back(
    model: CausalLM, truth: list[Answer], start: Start, kind: str
) -> None:
    engine = start(kind, num_pages=24)
    draft = FeatureDraft(engine, VOCAB, guesser("right", truth), LAYERS)
    answers = []
    for number, (prompt, params) in enumerate(jobs()[:6]):
        answers.append(Answer())
        request = make_request(answers[-1], prompt, params, VOCAB)
        if number == 0:
            sink = request.sink

            def connect(update: Any, sink: Any = sink, answer: Answer = answers[-1]) -> None:
                sink(update)
                if len(answer.updates) == 2:
                    draft.connect()

            request.sink = connect
        engine.submit(request)
    engine.start()
    wait_for(answers)
    engine.stop()
    assert tokens(answers) == tokens(truth[:6])
    assert engine.scheduler.num_preemptions > 0
    assert draft.check(model, preempted=True) > 50


@pytest.mark.parametrize("kind", ["torch", "paged"])
def test_a_draft_that_can_do_without_features_drafts_before_they_come(
    model: CausalLM, truth: list[Answer], start: Start, kind: str
) -> None:
    engine = start(kind)
    draft = FeatureDraft(engine, VOCAB, guesser("right", truth), LAYERS)
    draft.terms = replace(draft.terms, features_optional=True)
    accept, begun = draft.accept, []
    draft.accept = begun.append  # type: ignore[method-assign]
    draft.connect()
    engine.start()
    assert tokens(run_all(engine, jobs()[:3])) == tokens(truth[:3])
    assert begun and not draft.messages, "the stream is asked for, and not open"
    assert len(draft.texts) == 3 and engine.drafts.dropped["closed"] == 0
    engine.ask(lambda: accept(begun[0]))
    answers = run_all(engine, jobs()[3:6])
    engine.stop()
    assert tokens(answers) == tokens(truth[3:6])
    draft.texts = {number: text for number, text in draft.texts.items() if draft.rows[number]}
    assert len(draft.texts) == 3 and draft.check(model) > 30


@pytest.mark.parametrize("kind", ["torch", "paged"])
def test_a_request_from_before_is_drafted_for_and_gets_no_features(
    model: CausalLM, truth: list[Answer], start: Start, kind: str
) -> None:
    """What was computed before the store was filled has none, and never will."""
    engine = start(kind)
    draft = FeatureDraft(engine, VOCAB, guesser("right", truth), LAYERS)
    draft.terms = replace(draft.terms, features_optional=True)
    prompt, params = jobs()[0]
    answer = Answer()
    request = make_request(answer, prompt, params, VOCAB)
    sink = request.sink

    def connect(update: Any) -> None:
        sink(update)
        if len(answer.updates) == 2:
            draft.connect()

    request.sink = connect
    engine.start()
    engine.submit(request)
    wait_for([answer])
    engine.stop()
    assert tokens([answer]) == tokens(truth[:1])
    assert len(draft.texts) == 1, "a request without features is not opened anew when there is a store"
    assert not draft.messages
    assert answer.num_accepted > 3


def test_a_second_draft_with_other_layers_gets_its_own(model: CausalLM, truth: list[Answer], start: Start) -> None:
    engine = start("paged")
    first = FeatureDraft(engine, VOCAB, guesser("right", truth), (1,))
    second = FeatureDraft(engine, VOCAB, guesser("random", truth), (3, 0))
    first.connect()
    engine.start()
    first.wait()
    assert tokens(run_all(engine, jobs()[:4])) == tokens(truth[:4])
    assert first.check(model) > 50
    second.connect()
    # While the store is begun anew, what is open with the first draft is closed, and opened again later.
    run_all(engine, jobs()[:1], speculate=False)
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    engine.stop()
    assert first.check(model) > 70 and second.check(model) > 50
    assert (first.num_begun, second.num_begun) == (1, 1)


def test_a_draft_that_releases_nothing_gets_no_more_than_its_window(
    model: CausalLM, truth: list[Answer], start: Start
) -> None:
    engine = start("torch")
    slow = FeatureDraft(engine, VOCAB, guesser("right", truth), LAYERS)
    slow.window, slow.releases = 20_000, False
    slow.connect()
    engine.start()
    slow.wait()
    assert tokens(run_all(engine, jobs(), 1)) == tokens(truth)
    assert 0 < sum(len(message.data) for message in slow.messages) <= slow.window
    slow.releases = True
    slow.texts.clear()
    slow.release()
    engine.ask(lambda: engine.features.opened(slow, 0))
    assert tokens(run_all(engine, jobs()[:3])) == tokens(truth[:3])
    engine.stop()
    slow.check(model)


@pytest.mark.parametrize("error", [ConfigError("no room"), MemoryError("no room")])
def test_a_store_that_cannot_be_had_leaves_the_engine_as_it_was(
    truth: list[Answer], start: Start, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    engine = start("torch")
    monkeypatch.setattr("verify_service.executors.base.FeatureStore", fail)
    draft = FeatureDraft(engine, VOCAB, guesser("right", truth), LAYERS)
    draft.connect()
    engine.start()
    draft.wait()
    assert tokens(run_all(engine, jobs()[:4])) == tokens(truth[:4])
    assert not draft.texts and draft.num_begun == 0
    assert not engine.features.preparing
    monkeypatch.undo()
    draft.connect()
    assert tokens(run_all(engine, jobs()[:4])) == tokens(truth[:4])
    assert draft.num_begun == 1


def test_layers_that_cannot_be_had_beside_the_others_do_not_harm_those(
    model: CausalLM, truth: list[Answer], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("paged")
    first, second = (FeatureDraft(engine, VOCAB, guesser("right", truth), layers) for layers in ((1,), (3, 0)))
    first.connect()
    engine.start()
    first.wait()
    assert tokens(run_all(engine, jobs()[:2])) == tokens(truth[:2])

    def fail(*arguments: object) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr("verify_service.executors.base.FeatureStore", fail)
    second.connect()
    run_all(engine, jobs()[:1], speculate=False)
    first.texts.clear()
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    engine.stop()
    assert first.check(model) > 145 and not second.texts


def test_a_draft_for_which_there_is_no_memory_takes_nothing_from_the_others_however_often_it_comes(
    model: CausalLM, truth: list[Answer], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("torch")
    first, second = (FeatureDraft(engine, VOCAB, guesser("right", truth), layers) for layers in ((1,), (3, 0)))
    first.connect()
    engine.start()
    first.wait()
    assert tokens(run_all(engine, jobs()[:1])) == tokens(truth[:1])
    epoch = engine.memory.feature_epoch

    def fail(*arguments: object) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr("verify_service.executors.base.FeatureStore", fail)
    for _ in range(3):
        second.connect()
        assert tokens(run_all(engine, jobs()[:2])) == tokens(truth[:2])
        engine.draft_disconnected(second)
    assert not engine.features.preparing and not second.texts
    assert engine.memory.feature_epoch == engine.drafts.feature_epoch == epoch, "what is stored stays of use"
    engine.stop()
    assert first.check(model) > 50


def test_layers_that_nobody_takes_any_more_go_when_others_are_wanted(
    model: CausalLM, truth: list[Answer], start: Start
) -> None:
    engine = start("torch")
    drafts = [FeatureDraft(engine, VOCAB, guesser("right", truth), layers) for layers in ((0, 1), (2, 1), (3,))]
    drafts[0].connect()
    drafts[1].connect()
    engine.start()
    drafts[1].wait()
    assert tokens(run_all(engine, jobs()[:2])) == tokens(truth[:2])
    engine.draft_disconnected(drafts[0])
    drafts[2].connect()
    run_all(engine, jobs()[:1], speculate=False)
    assert tokens(run_all(engine, jobs()[:4])) == tokens(truth[:4])
    engine.stop()
    assert engine._executor._features.parts == (1, 2, 3)  # type: ignore[attr-defined]
    for draft in drafts[1:]:
        draft.check(model)


def test_more_layers_than_a_store_may_have_are_refused(truth: list[Answer], start: Start) -> None:
    engine = start("torch")
    draft = FeatureDraft(engine, VOCAB, guesser("right", truth), tuple(range(17)))
    draft.connect()
    engine.start()
    draft.wait()
    assert tokens(run_all(engine, jobs()[:2])) == tokens(truth[:2])
    assert draft.num_begun == 0 and not draft.texts


def test_a_window_smaller_than_a_position_lets_one_through_at_a_time(
    model: CausalLM, truth: list[Answer], start: Start
) -> None:
    engine = start("torch")
    draft = FeatureDraft(engine, VOCAB, guesser("none", truth), LAYERS)
    draft.window = 1
    draft.connect()
    engine.start()
    draft.wait()
    assert tokens(run_all(engine, jobs()[:2])) == tokens(truth[:2])
    assert {message.count for message in draft.messages} == {1}


def test_features_wait_while_the_door_is_behind(model: CausalLM, truth: list[Answer], start: Start) -> None:
    engine = start("torch")
    draft = FeatureDraft(engine, VOCAB, guesser("right", truth), LAYERS)
    draft.has_room = False
    draft.connect()
    engine.start()
    draft.wait()
    assert tokens(run_all(engine, jobs()[:3])) == tokens(truth[:3])
    assert not draft.messages
    draft.has_room = True
    draft.texts.clear()
    assert tokens(run_all(engine, jobs()[3:6])) == tokens(truth[3:6])
    engine.stop()
    draft.check(model)


def test_a_request_longer_than_the_draft_serves_is_not_opened(truth: list[Answer], start: Start) -> None:
    engine = start("torch")
    opened: list[int] = []

    def note(author: TreeAuthor) -> None:
        opened.append(author.prompt_len)

    draft = FeatureDraft(engine, VOCAB, note, ())
    draft.terms = type(draft.terms)(max_positions=20)
    draft.connect()
    engine.start()
    draft.wait()
    assert tokens(run_all(engine, jobs())) == tokens(truth)
    lengths = [len(prompt) for prompt, _ in jobs()]
    assert set(opened) == {length for length in lengths if length <= 20}
    assert max(lengths) > 20

"""Grammars in the engine: compiled beside its work, cached, and failing alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from harness import Answer, make_engine, make_request
from local_draft import LocalDraft, noise
from threaded_engine import ThreadedEngine
from tiny_grammar import CHOICE, END, OBJECT, VOCAB, text_of

from outrider.errors import InternalError, InvalidRequestError
from outrider.grammar import compiler
from outrider.grammar.compiler import GrammarState, GrammarVocabulary, Mask, TokenPath
from outrider.grammar.spec import Grammar, GrammarKind
from outrider.models.decoder import CausalLM
from outrider.protocol.generation import FinishReason
from outrider.sampling.params import SamplingParams
from verify_service.engine import grammars
from verify_service.engine.grammars import Grammars
from verify_service.speculation.budget import Forest

PROMPT = [1, 2, 3]
LONG = Grammar(GrammarKind.REGEX, "([a-e]{1,9}x){5,9}")


@pytest.fixture
def engine(model: CausalLM, vocabulary: GrammarVocabulary) -> Iterator[ThreadedEngine]:
    made = make_engine(model, vocabulary=vocabulary)
    made.start()
    yield made
    made.stop()
    assert made.memory.num_used == made.memory.radix.num_pages, "a page leaked"


Ask = Callable[..., Answer]


def ask(engine: ThreadedEngine, grammar: Grammar | None, max_tokens: int = 40, client: str = "") -> Answer:
    answer, params = Answer(), SamplingParams(temperature=1.0, seed=7, grammar=grammar)
    fields = {"stop_token_ids": frozenset([END]), "client": client}
    answer.request = make_request(answer, PROMPT, params, VOCAB, max_tokens, **fields)
    engine.submit(answer.request)
    return answer


def finished(answer: Answer) -> Answer:
    assert answer.done.wait(60)
    return answer


def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(engine: ThreadedEngine) -> None:
    wrong = ask(engine, Grammar(GrammarKind.REGEX, "(a"))
    others = [ask(engine, None), ask(engine, CHOICE)]
    error = finished(wrong).updates[-1].error
    assert isinstance(error, InvalidRequestError) and error.field == "grammar.regex"
    assert all(finished(other).updates[-1].error is None for other in others)
    assert text_of(others[1].token_ids) in CHOICE.choices
    assert others[1].updates[-1].finish_reason is FinishReason.STOP


def test_a_request_whose_grammar_is_given_up_on_fails_alone_and_with_a_reason(
    model: CausalLM, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_LIMITS", type(compiler._LIMITS)(max_lexer_states=30, verbose_errors=False))
    engine = make_engine(model, vocabulary=vocabulary)
    engine.start()
    try:
        other, hard = ask(engine, None), ask(engine, LONG)
        error = finished(hard).updates[-1].error
        assert isinstance(error, InvalidRequestError) and "too complex" in error.problem
        assert 0 < len(hard.token_ids) < 40, "what was legal is told"
        assert finished(other).updates[-1].error is None and len(other.token_ids) == 40
    finally:
        engine.stop()


def test_without_a_vocabulary_requests_with_a_grammar_are_refused(model: CausalLM) -> None:
    engine = make_engine(model)
    engine.start()
    try:
        error = finished(ask(engine, OBJECT)).updates[-1].error
        assert isinstance(error, InvalidRequestError) and "tokenizer" in error.problem
        assert finished(ask(engine, None)).updates[-1].error is None
    finally:
        engine.stop()


class Held:
    """Compiles when it is allowed to, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go = threading.Event()
        self.count = 0
        self.threads: list[str] = []
        self.texts: list[str] = []
        real = grammars.compile_grammar

        def compile_held(grammar: Grammar, vocabulary: GrammarVocabulary) -> compiler.CompiledGrammar:
            self.count += 1
            self.texts.append(grammar.source)
            self.threads.append(threading.current_thread().name)
            self.begun.set()
            assert self.go.wait(60)
            return real(grammar, vocabulary)

        monkeypatch.setattr(grammars, "compile_grammar", compile_held)


def test_a_key_with_many_grammars_holds_up_another_one_s_by_one(
    engine: ThreadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    flood = [ask(engine, Grammar(GrammarKind.REGEX, f"a{{{count}}}"), client="flood/0") for count in range(1, 7)]
    other = ask(engine, Grammar(GrammarKind.REGEX, "b"), client="other/0")
    asked = threading.Event()
    engine.ask(asked.set)
    assert held.begun.wait(60) and asked.wait(60)
    held.go.set()
    assert all(finished(answer).updates[-1].error is None for answer in (*flood, other))
    assert held.texts.index("b") <= 2, "the one that was begun, and one turn of the flood's"


def test_others_are_answered_while_a_grammar_is_compiled_and_it_is_compiled_once(
    engine: ThreadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    first, second = ask(engine, CHOICE), ask(engine, CHOICE)
    assert held.begun.wait(60)
    assert finished(ask(engine, None)).updates[-1].error is None
    assert not first.done.is_set() and not second.done.is_set()
    held.go.set()
    third = finished(ask(engine, CHOICE))
    assert finished(first).token_ids == finished(second).token_ids == third.token_ids
    assert held.count == 1


def test_others_are_answered_while_a_grammar_is_compiled_anew_and_it_is_compiled_once_for_all(
    engine: ThreadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What answers share is used up in mid-answer, by all at once."""
    want = [finished(one).token_ids for one in (ask(engine, LONG), ask(engine, LONG))]
    held = Held(monkeypatch)
    real = GrammarState._try

    def used_up(state: GrammarState, path: TokenPath) -> Mask | None:
        return None if state.num_committed > 2 and not state.compiled.num_renewals else real(state, path)

    monkeypatch.setattr(GrammarState, "_try", used_up)
    bound = [ask(engine, LONG), ask(engine, LONG)]
    assert held.begun.wait(60)
    for _ in range(2):
        assert finished(ask(engine, None)).updates[-1].error is None
    assert not any(answer.done.is_set() for answer in bound)
    held.go.set()
    assert [finished(answer).token_ids for answer in bound] == want
    assert held.threads == ["grammars"], "once, and not by the engine"


def test_a_request_may_be_cancelled_while_its_grammar_is_compiled_anew(
    engine: ThreadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(ask(engine, LONG))
    held = Held(monkeypatch)
    monkeypatch.setattr(GrammarState, "_try", lambda state, path: None)
    gone = ask(engine, LONG)
    assert held.begun.wait(60) and gone.request is not None
    engine.cancel(gone.request)
    held.go.set()
    assert finished(ask(engine, None)).updates[-1].error is None
    assert gone.updates == []


def test_a_request_whose_mask_cannot_be_had_from_a_fresh_grammar_either_fails(
    engine: ThreadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished(ask(engine, LONG))
    monkeypatch.setattr(GrammarState, "_try", lambda state, path: None)
    assert isinstance(finished(ask(engine, LONG)).updates[-1].error, InvalidRequestError)
    monkeypatch.setattr(grammars, "compile_grammar", lambda *given: 1 / 0)
    assert isinstance(finished(ask(engine, LONG)).updates[-1].error, InternalError)


def test_a_request_may_be_cancelled_while_its_grammar_is_compiled(
    engine: ThreadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    gone = ask(engine, CHOICE)
    assert held.begun.wait(60) and gone.request is not None
    engine.cancel(gone.request)
    held.go.set()
    assert text_of(finished(ask(engine, CHOICE)).token_ids) in CHOICE.choices
    assert gone.updates == []


def test_stopping_tells_requests_whose_grammar_is_being_compiled(
    model: CausalLM, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    engine = make_engine(model, vocabulary=vocabulary)
    engine.start()
    waiting = ask(engine, CHOICE)
    assert held.begun.wait(60)
    engine.stop()
    assert finished(waiting).updates[-1].error is not None
    held.go.set()


def test_the_cache_of_compiled_grammars_is_bounded_and_worn_ones_are_compiled_anew(
    engine: ThreadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MAX_CACHED_GRAMMARS", 3)
    for index in range(6):
        finished(ask(engine, Grammar.of_choices(["yes", "ab" * (index + 1)])))
    assert len(engine.grammars._cache) == 3
    finished(ask(engine, CHOICE))
    before = engine.grammars._cache[CHOICE.digest]
    finished(ask(engine, CHOICE))
    assert engine.grammars._cache[CHOICE.digest] is before
    monkeypatch.setattr(compiler, "_MOST_MASKS", 0)
    finished(ask(engine, CHOICE))
    assert engine.grammars._cache[CHOICE.digest] is not before


def test_masks_are_computed_ahead_of_the_round_that_needs_them(
    model: CausalLM, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device that works while the engine looks after other things: here, between launch and wait."""
    engine = make_engine(model, vocabulary=vocabulary)
    engine.draft_connected(LocalDraft(engine, VOCAB, noise(3, VOCAB)))
    counted: list[int] = []
    launch = engine._executor.launch

    def launching(entries, *rest):  # type: ignore[no-untyped-def]
        pending = launch(entries, *rest)
        while engine.grammars.work(entries):
            counted.append(1)
        return pending

    monkeypatch.setattr(engine._executor, "launch", launching)
    engine.start()
    try:
        ahead = finished(ask(engine, OBJECT))
        assert counted
    finally:
        engine.stop()
    plain = make_engine(model, vocabulary=vocabulary)
    plain.start()
    try:
        assert finished(ask(plain, OBJECT)).token_ids == ahead.token_ids
    finally:
        plain.stop()


def test_a_look_ahead_takes_one_request_s_tree_and_all_have_their_turn(
    model: CausalLM, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, vocabulary=vocabulary)
    engine.draft_connected(LocalDraft(engine, VOCAB, noise(3, VOCAB)))
    forests: list[Forest] = []
    monkeypatch.setattr(grammars, "Forest", lambda *given: (forests.append(Forest(*given)), forests[-1])[1])
    together: list[int] = []
    launch = engine._executor.launch

    def launching(entries, *rest):  # type: ignore[no-untyped-def]
        pending = launch(entries, *rest)
        idle = 0
        while idle < len(entries):
            before = len(forests)
            idle = 0 if engine.grammars.work(entries) else idle + 1
            assert len(forests) <= before + 1
        specs = [engine.drafts.spec(entry.request) for entry in entries]
        if len(entries) == 3 and all(spec is not None and spec.mirror.has_nodes for spec in specs):
            together.append(sum(bool(entry.request.grammar.root.children) for entry in entries))
        return pending

    monkeypatch.setattr(engine._executor, "launch", launching)
    answers = [ask(engine, OBJECT) for _ in range(3)]
    engine.start()
    try:
        assert all(finished(answer).updates[-1].error is None for answer in answers)
    finally:
        engine.stop()
    assert 3 in together


def test_nodes_whose_masks_are_not_there_in_time_wait_for_a_later_round(
    model: CausalLM, vocabulary: GrammarVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MAX_MASK_SECONDS", -1.0)
    engine = make_engine(model, vocabulary=vocabulary)
    engine.grammars = engine.scheduler.grammars = Grammars(vocabulary, engine.drafts, patient=False)
    engine.draft_connected(LocalDraft(engine, VOCAB, noise(3, VOCAB)))
    sizes: list[int] = []
    launch = engine._executor.launch
    monkeypatch.setattr(
        engine._executor,
        "launch",
        lambda entries, *rest: (sizes.extend(len(e.nodes) for e in entries), launch(entries, *rest))[1],
    )
    engine.start()
    try:
        assert finished(ask(engine, OBJECT)).updates[-1].error is None
        assert sizes and not any(sizes), "a node without its mask was verified"
    finally:
        engine.stop()

"""Under a grammar, too, drafts change speed and never output, and every answer is what the grammar allows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import count

import pytest
from cuda_harness import make_paged_engine
from grammar_cases import fits, guesser, jobs, run
from harness import Answer, make_engine
from local_draft import Guess, LocalDraft
from threaded_engine import ThreadedEngine
from tiny_grammar import CHOICE, END, REGEX, VOCAB, text_of

from outrider.grammar.compiler import GrammarVocabulary
from outrider.grammar.spec import Grammar
from outrider.models.decoder import CausalLM
from outrider.models.drafters.heads import StandaloneDraft
from outrider.protocol.generation import FinishReason
from verify_service.engine.round import Entry, Growth
from verify_service.executors.cuda import CudaExecutor, CudaRound

Start = Callable[[str, Guess | None], ThreadedEngine]

LOOKS = 64
"""At a round's end, while it lasts: more than messages that come in it."""


@pytest.fixture(scope="module")
def truth(model: CausalLM, vocabulary: GrammarVocabulary) -> list[Answer]:
    engine = make_engine(model, vocabulary=vocabulary)
    try:
        return run(engine, width=1, speculate=False)
    finally:
        engine.stop()


def last_for_looks(executor: CudaExecutor) -> None:
    """Have rounds last, as on a device, while the engine reads piece by piece what has come.

    Where a round is over when it was launched, one piece is read beside it and the others wait for later rounds.
    """
    launch = executor.launch

    def launch_lasting(entries: Sequence[Entry], growth: Growth | None = None) -> CudaRound:
        pending, looks = launch(entries, growth), count()
        pending.done = lambda: next(looks) >= LOOKS  # type: ignore[method-assign]
        return pending

    executor.launch = launch_lasting  # type: ignore[method-assign]


@pytest.fixture
def start(model: CausalLM, vocabulary: GrammarVocabulary, engines: list[ThreadedEngine]) -> Start:
    """Makes engines of a kind."""

    def make(kind: str, guess: Guess | None) -> ThreadedEngine:
        if kind in ("cpu", "crowded"):
            engine = make_engine(model, 256 if kind == "cpu" else 24, vocabulary=vocabulary, chunk_size=16)
        else:
            limits = {"deterministic": kind == "deterministic", "spin": kind == "spinning"}
            draft = StandaloneDraft(model, "") if kind == "inside" else None
            engine, executor = make_paged_engine(
                model, vocabulary=vocabulary, draft=draft, growth=Growth(3, 16), **limits
            )
            if kind == "spinning":
                last_for_looks(executor)
        engines.append(engine)
        if guess is not None:
            engine.draft_connected(LocalDraft(engine, VOCAB, guess))
        return engine

    return make


def test_every_complete_answer_is_what_its_grammar_allows_and_ends_with_stop(truth: list[Answer]) -> None:
    num_complete = 0
    for (_, params), answer in zip(jobs(), truth, strict=True):
        assert answer.updates[-1].error is None
        if params.grammar is None:
            continue
        if answer.updates[-1].finish_reason is FinishReason.STOP:
            num_complete += 1
            assert answer.token_ids[-1] == END and answer.token_ids.count(END) == 1
            assert fits(params.grammar, text_of(answer.token_ids))
        else:
            assert len(answer.token_ids) == 40
    assert num_complete >= 8


DRAFTS = ["none", "right", "wrong", "random", "mixed"]
QUICK = [
    ("cpu", "mixed"),
    ("crowded", "mixed"),
    ("paged", "mixed"),
    ("deterministic", "right"),
    ("spinning", "mixed"),
    ("inside", "none"),
    ("inside", "mixed"),
]
SLOW = [(kind, name) for kind in ("cpu", "paged", "deterministic") for name in DRAFTS if (kind, name) not in QUICK]


@pytest.mark.parametrize(("kind", "name"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)])
def test_tokens_are_the_same_with_any_draft(start: Start, truth: list[Answer], kind: str, name: str) -> None:
    engine = start(kind, guesser(name, truth))
    answers = run(engine)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    constrained = [answer for (_, params), answer in zip(jobs(), answers, strict=True) if params.grammar is not None]
    accepted = sum(answer.num_accepted for answer in constrained)
    if name in ("right", "mixed"):
        assert accepted > 0.5 * sum(len(answer.token_ids) for answer in constrained)
    if name in ("wrong", "random", "mixed"):
        assert engine.drafts.dropped["grammar"] > 0
    if kind == "inside":
        assert accepted > 20
    elif name == "none":
        assert accepted == 0 and engine.drafts.dropped["grammar"] == 0
    if kind == "crowded":
        assert engine.scheduler.num_preemptions > 0


def test_nodes_that_the_grammar_forbids_are_not_verified(start: Start, truth: list[Answer]) -> None:
    verified: list[tuple[Grammar, list[int]]] = []
    engine = start("cpu", guesser("random", truth))
    launch = engine._executor.launch

    def watching(entries, *rest):  # type: ignore[no-untyped-def]
        for entry in entries:
            if (grammar := entry.request.params.sampling.grammar) is not None and entry.samples:
                assert len(entry.masks) == 1 + len(entry.nodes)
                for index, token in enumerate(entry.nodes.token_ids):
                    path, parent = [token], entry.nodes.parents[index]
                    while parent >= 0:
                        path.append(entry.nodes.token_ids[parent])
                        parent = entry.nodes.parents[parent]
                    verified.append((grammar, entry.request.tokens[entry.request.prompt_len :] + path[::-1]))
        return launch(entries, *rest)

    engine._executor.launch = watching  # type: ignore[method-assign]
    run(engine)
    partial = re.compile(r"(ab|x|a$)*(\.[0-9]*)?")
    assert len(verified) > 20
    for grammar, token_ids in verified:
        text = text_of(token_ids)
        assert END not in token_ids[:-1]
        if grammar is CHOICE:
            assert any(choice.startswith(text) for choice in grammar.choices)
        if grammar is REGEX:
            assert partial.fullmatch(text), text

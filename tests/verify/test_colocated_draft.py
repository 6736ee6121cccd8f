"""Drafters on the engine's thread change speed and never output, hear no less, and may fail."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import log

import numpy as np
import pytest
from cuda_harness import VOCAB, jobs, texts
from grammar_cases import jobs as grammar_jobs
from grammar_cases import run as run_grammars
from harness import Answer, make_engine, make_request, run_all
from test_round_growth import Clueless, WithFeatures
from threaded_engine import ThreadedEngine
from tiny_grammar import END

from outrider.config.draft import DraftOptions
from outrider.drafting.base import AnyDrafter, Candidate, CombinedDrafter, Drafter, FrontierNode, Needs
from outrider.drafting.model.build import build_runner
from outrider.drafting.model.drafter import ModelDrafter
from outrider.drafting.ngram.drafter import NgramDrafter
from outrider.drafting.requests import introduce
from outrider.drafting.tree_growth import Tree
from outrider.errors import UnavailableError
from outrider.grammar.compiler import GrammarVocabulary
from outrider.models.decoder import CausalLM
from outrider.models.drafters.base import DraftModel
from outrider.models.drafters.heads import StandaloneDraft
from outrider.protocol.speculation import PROTOCOL_VERSION, Hello
from outrider.sampling.noise import NOISE_VERSION
from outrider.sampling.params import SamplingParams
from outrider.tree.handshake import agree
from verify_service.speculation.colocated_draft import ColocatedDraft

OPTIONS = DraftOptions(device="cpu", max_requests=8, max_positions=256, min_path_probability=1e-3)
GREEDY = SamplingParams(temperature=0.0)
WAITS = {"lockstep": True, "shares_cores": True, "max_hold_seconds": 5.0, "max_nodes": 24, "chunk_size": 16}
"""Limits with which every answer to a commit is waited for, whatever the machine does besides."""


class Known(Drafter):
    """Knows how texts go on, and says so node by node."""

    sources = ("known",)

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers
        self.open_trees: dict[int, Tree] = {}

    def open(self, tree: Tree) -> None:
        self.open_trees[tree.handle] = tree

    def commit(self, request: int, tokens: Sequence[int], root: int, live: Collection[int]) -> None:
        return

    def expand(self, frontier: Sequence[FrontierNode]) -> list[list[Candidate]]:
        return [self.candidates(node) for node in frontier]

    def candidates(self, node: FrontierNode) -> list[Candidate]:
        author = self.open_trees[node.request].author
        text = self.answers.get(tuple(author.tokens[: author.prompt_len]), [])
        return [Candidate(text[node.position], log(0.9), 0)] if node.position < len(text) else []

    def close(self, request: int) -> None:
        del self.open_trees[request]

    def forget_target(self) -> None:
        return


def of_model(model: DraftModel, options: DraftOptions) -> ModelDrafter:
    needs = Needs(
        vocab_size=model.target_vocab_size, hidden_size=model.hidden_size, feature_layers=tuple(model.feature_layers)
    )
    return ModelDrafter(build_runner(model, options), ("model",), needs)


def drafter_of(kind: str, model: CausalLM, truth: Sequence[Answer]) -> AnyDrafter:
    options = DraftOptions(speculative_algorithm=("STANDALONE",), device="cpu", max_requests=8, speculative_num_steps=4)
    match kind:
        case "model":
            return of_model(StandaloneDraft(model, ""), options)
        case "features":
            return of_model(WithFeatures(model), options)
        case "clueless":
            return of_model(Clueless(model), options)
        case "n-grams":
            return NgramDrafter(OPTIONS)
        case "both":
            return CombinedDrafter([of_model(WithFeatures(model), options), NgramDrafter(OPTIONS)])
        case _:
            return Known(texts(truth))


def colocated(drafter: AnyDrafter, vocabulary: GrammarVocabulary | None = None) -> ColocatedDraft:
    target = Hello(PROTOCOL_VERSION, NOISE_VERSION, vocab_size=VOCAB, hidden_size=64, num_layers=2)
    return ColocatedDraft(drafter, OPTIONS, agree(target, introduce(drafter, OPTIONS)), "", vocabulary)


Start = Callable[..., ThreadedEngine]


@pytest.fixture
def start(model: CausalLM, engines: list[ThreadedEngine]) -> Start:
    """Makes engines with a drafter on their own thread."""

    def make(drafter: AnyDrafter, vocabulary: GrammarVocabulary | None = None, **limits: object) -> ThreadedEngine:
        draft = colocated(drafter, vocabulary)
        engine = make_engine(model, **{"vocabulary": vocabulary, "colocated": draft} | WAITS | limits)  # type: ignore[arg-type]
        engines.append(engine)
        engine.start()
        return engine

    return make


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize(
    ("kind", "num_pages"),
    [
        *((kind, 256) for kind in ("model", "features", "clueless", "n-grams", "both", "known")),
        ("both", 20),
    ],
)
def test_tokens_are_the_same_with_any_drafter_and_memory(
    start: Start, model: CausalLM, truth: list[Answer], kind: str, num_pages: int
) -> None:
    engine = start(drafter_of(kind, model, truth), num_pages=num_pages)
    answers = run_all(engine, jobs())
    assert tokens(answers) == tokens(truth)
    share = sum(answer.num_accepted for answer in answers) / sum(len(answer.token_ids) for answer in answers)
    # The first answer alone is waited for: of both drafters it is that of n-grams.
    assert share > {"clueless": -1.0, "n-grams": 0.0, "both": 0.1}.get(kind, 0.4)
    if num_pages == 20:
        assert engine.scheduler.num_preemptions > 0
    else:
        assert any(update.cached_prompt_tokens for answer in answers for update in answer.updates)


def test_it_takes_its_turn_where_that_pays(start: Start, model: CausalLM, truth: list[Answer]) -> None:
    engine = start(Known(texts(truth)), lockstep=False, max_hold_seconds=0.05)
    assert tokens(run_all(engine, jobs())) == tokens(truth)


def test_logprobs_cover_every_token(start: Start, model: CausalLM, truth: list[Answer]) -> None:
    chosen = [i for i, (_, params) in enumerate(jobs()) if params.num_logprobs]
    answers = run_all(start(drafter_of("both", model, truth)), [jobs()[i] for i in chosen])
    for i, answer in zip(chosen, answers, strict=True):
        got = [entry for update in answer.updates for entry in update.logprobs]
        want = [entry for update in truth[i].updates for entry in update.logprobs]
        assert len(got) == len(answer.token_ids)
        np.testing.assert_allclose([e.logprob for e in got], [e.logprob for e in want], rtol=1e-4, atol=1e-5)


def test_grammars_are_kept_and_guesses_that_they_forbid_kept_back(
    start: Start, model: CausalLM, vocabulary: GrammarVocabulary
) -> None:
    plain = make_engine(model, vocabulary=vocabulary)
    try:
        truth = run_grammars(plain, width=1, speculate=False)
    finally:
        plain.stop()
    known = {
        tuple(prompt): prompt + answer.token_ids for (prompt, _), answer in zip(grammar_jobs(), truth, strict=True)
    }
    engine = start(CombinedDrafter([Known(known), NgramDrafter(OPTIONS)]), vocabulary)
    answers = run_all(engine, grammar_jobs(), max_tokens=40, stop_token_ids=frozenset([END]))
    assert tokens(answers) == tokens(truth)
    assert sum(answer.num_accepted for answer in answers) > 0.4 * sum(len(answer.token_ids) for answer in answers)


def test_a_trace_names_the_drafters(start: Start, truth: list[Answer]) -> None:
    engine, (prompt, params) = start(Known(texts(truth))), jobs()[0]
    answer = Answer()
    engine.submit(make_request(answer, prompt, params, VOCAB, trace=True))
    assert answer.done.wait(60)
    trees = [tree for update in answer.updates for tree in update.round_trees]
    assert any(tree.accepted for tree in trees)
    assert {name for tree in trees for name in tree.drafter_names} == {"known"}


class Endless(Known):
    """Has guesses for ever, and takes its time."""

    def __init__(self) -> None:
        super().__init__({})
        self.growing = threading.Event()
        self.num_asked = 0

    def expand(self, frontier: Sequence[FrontierNode]) -> list[list[Candidate]]:
        self.num_asked += 1
        self.growing.set()
        time.sleep(0.01)
        return [[Candidate(token, -1e-4 - token, 0) for token in range(8)] for _ in frontier]


def test_what_is_asked_while_trees_grow_is_heard(start: Start) -> None:
    drafter = Endless()
    engine = start(drafter, max_nodes=512)
    answer = Answer()
    request = make_request(answer, [1, 2, 3], GREEDY, VOCAB, max_tokens=200)
    engine.submit(request)
    assert drafter.growing.wait(60)
    ended = threading.Event()
    asked = drafter.num_asked
    engine.cancel(request)
    engine.ask(ended.set)
    assert ended.wait(60)
    assert drafter.num_asked <= asked + 2 and request.finished and not answer.done.is_set()


def test_a_draft_in_doubt_is_looked_at_and_is_used_again(start: Start, truth: list[Answer]) -> None:
    engine = start(Known(texts(truth)), lockstep=False, max_hold_seconds=0.0)

    def doubt() -> None:
        for replica in engine.drafts.replicas.values():
            replica.backoff.num_wrong = 1000

    engine.ask(doubt)
    answers = run_all(engine, jobs())
    assert tokens(answers) == tokens(truth)
    assert sum(answer.num_accepted for answer in answers) > 0


class Failing(Known):
    """Fails at what it is told to."""

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__({})
        self.num_failed = 0
        setattr(self, method, partial(self._fail, error))

    def _fail(self, error: Exception, *_: object, **__: object) -> None:
        self.num_failed += 1
        raise error


@pytest.mark.parametrize("method", ["open", "commit", "take_features"])
def test_a_drafter_that_fails_is_switched_off_with_one_line(
    start: Start, truth: list[Answer], caplog: pytest.LogCaptureFixture, method: str
) -> None:
    drafter = Failing(method, RuntimeError("out of ideas"))
    if method == "take_features":
        drafter.needs = Needs(hidden_size=64, feature_layers=(1,))
    with caplog.at_level(logging.WARNING):
        engine = start(drafter)
        answers = run_all(engine, jobs())
    assert tokens(answers) == tokens(truth)
    assert drafter.num_failed == 1 and not engine.drafts.replicas
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert "switched off" in line and "out of ideas" in line


def test_a_request_that_cannot_be_guessed_for_goes_on_without_its_tree(
    start: Start, truth: list[Answer], caplog: pytest.LogCaptureFixture
) -> None:
    drafter = Failing("expand", RuntimeError("out of ideas"))
    answers = run_all(start(drafter), jobs())
    assert tokens(answers) == tokens(truth) and drafter.num_failed >= len(jobs())


def test_a_broken_device_ends_the_engine(start: Start, truth: list[Answer]) -> None:
    engine = start(Failing("commit", RuntimeError("CUDA error: an illegal memory access was encountered")))
    answer = Answer()
    engine.submit(make_request(answer, *jobs()[0], VOCAB))
    assert answer.done.wait(60)
    assert isinstance(answer.updates[-1].error, UnavailableError)

"""The verify service owns the truth: drafts change speed, never output."""

from __future__ import annotations

import math

import numpy as np
import pytest
from cuda_harness import VOCAB, jobs, texts
from harness import Answer, make_engine, run_all
from local_draft import Guess, LocalDraft, noise, oracle, wrong
from threaded_engine import ThreadedEngine

from outrider.models.decoder import CausalLM
from outrider.protocol.speculation import Decline, DeclineReason, Grow, Hello
from outrider.tree.author import TreeAuthor


def guesser(name: str, truth: list[Answer]) -> Guess:
    match name:
        case "oracle":
            return oracle(texts(truth), VOCAB)
        case "wrong":
            return wrong(texts(truth), VOCAB)
        case _:
            return noise(9, VOCAB)


@pytest.mark.parametrize(
    ("name", "num_pages", "width"),
    [
        *(("none", 256, 1), ("none", 24, 4), ("oracle", 256, 4), ("oracle", 24, 1)),
        *(("wrong", 256, 4), ("wrong", 24, 4), ("random", 256, 1), ("random", 24, 4)),
    ],
)
def test_tokens_are_the_same_with_any_draft_batch_and_memory(
    model: CausalLM, truth: list[Answer], engines: list[ThreadedEngine], name: str, num_pages: int, width: int
) -> None:
    engine = make_engine(model, num_pages, chunk_size=16)
    engines.append(engine)
    if name != "none":
        engine.draft_connected(LocalDraft(engine, VOCAB, guesser(name, truth)))
    engine.start()
    answers = run_all(engine, jobs(), width)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    accepted = sum(answer.num_accepted for answer in answers)
    if name == "oracle":
        assert accepted > 0.6 * sum(len(answer.token_ids) for answer in answers)
    if name == "none":
        assert accepted == 0
    if num_pages == 24 and width == 4:
        assert engine.scheduler.num_preemptions > 0
    if num_pages == 256:
        assert any(update.cached_prompt_tokens for answer in answers for update in answer.updates)


RULES: list[dict[str, object]] = [
    {"root_apart": True},
    {"root_apart": True, "max_depth": 2, "max_round_tokens": 3},
    {"root_apart": True, "deterministic": True, "max_extend": 3, "max_round_tokens": 6},
]


@pytest.mark.parametrize(("rules", "num_pages"), list(zip(RULES, (24, 256, 24), strict=True)))
def test_tokens_are_the_same_whatever_rounds_the_executor_can_run(
    model: CausalLM, truth: list[Answer], engines: list[ThreadedEngine], rules: dict[str, object], num_pages: int
) -> None:
    share = "deterministic" not in rules
    engine = make_engine(model, num_pages, share_generated=share, chunk_size=16, **rules)
    engines.append(engine)
    engine.draft_connected(LocalDraft(engine, VOCAB, guesser("oracle", truth)))
    engine.start()
    answers = run_all(engine, jobs())
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    assert sum(answer.num_accepted for answer in answers) > 0
    if num_pages == 24:
        assert engine.scheduler.num_preemptions > 0


def test_logprobs_are_those_of_the_raw_distribution_and_cover_every_token(
    model: CausalLM, truth: list[Answer], engines: list[ThreadedEngine]
) -> None:
    engine = make_engine(model)
    engines.append(engine)
    engine.draft_connected(LocalDraft(engine, VOCAB, guesser("oracle", truth)))
    engine.start()
    chosen = [i for i, (_, params) in enumerate(jobs()) if params.num_logprobs]
    answers = run_all(engine, [jobs()[i] for i in chosen])
    for i, answer in zip(chosen, answers, strict=True):
        got = [entry for update in answer.updates for entry in update.logprobs]
        want = [entry for update in truth[i].updates for entry in update.logprobs]
        assert len(got) == len(answer.token_ids)
        np.testing.assert_allclose([e.logprob for e in got], [e.logprob for e in want], rtol=1e-4, atol=1e-5)
        assert [[t for t, _ in e.top] for e in got] == [[t for t, _ in e.top] for e in want]


class Hostile(LocalDraft):
    """Answers every message with the oracle's guess and a flood of nonsense."""

    def _grow(self, request: int) -> None:
        author = self.authors[request]
        bad = [2**31 - 1, -1, VOCAB, 3, 4]
        scores = [-1.0, -1.0, -1.0, math.nan, 2.0]
        parents = [0, 0, 0, 0, 99]
        flood = [0] * 4000
        messages = [
            Grow(request, author.epoch, author.base_len, 2**31, 1000, parents, bad, scores, bytes(5)),
            Grow(request, 1, 2**31, 0, 1),
            Grow(request + 50, 1, 1, 1, 1),
            Grow(request, author.epoch, author.base_len, 0, 2000, flood, flood,
                 [0.0] * 4000, bytes(4000)),
            Decline(request + 50, DeclineReason.GAP, True),
            Hello(0, 0),
        ]  # fmt: skip
        self._engine.draft_received(self, messages)
        super()._grow(request)


def test_a_hostile_draft_changes_no_output_and_is_counted(
    model: CausalLM, truth: list[Answer], engines: list[ThreadedEngine]
) -> None:
    engine = make_engine(model)
    engines.append(engine)
    engine.draft_connected(Hostile(engine, VOCAB, guesser("oracle", truth)))
    engine.start()
    answers = run_all(engine, jobs())
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    assert engine.drafts.dropped["token"] > 0 and engine.drafts.dropped["closed"] == 0
    assert engine.drafts.dropped["score"] > 0 and engine.drafts.dropped["unexpected"] > 0


def test_losing_the_draft_mid_stream_changes_nothing_and_speculation_resumes(
    model: CausalLM, truth: list[Answer], engines: list[ThreadedEngine]
) -> None:
    engine = make_engine(model)
    engines.append(engine)
    drafts: list[LocalDraft] = []
    calls = 0

    def flaky(author: TreeAuthor) -> None:
        nonlocal calls
        calls += 1
        if calls % 5 == 0:
            engine.draft_disconnected(drafts[-1])
            drafts.append(LocalDraft(engine, VOCAB, flaky))
            engine.draft_connected(drafts[-1])
        guesser("oracle", truth)(author)

    drafts.append(LocalDraft(engine, VOCAB, flaky))
    engine.draft_connected(drafts[0])
    engine.start()
    answers = run_all(engine, jobs())
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in truth]
    assert len(drafts) > 3
    assert answers[-1].num_accepted > 0

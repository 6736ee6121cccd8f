"""A traced request gets what each round verified; nobody else pays for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cuda_harness import VOCAB, make_paged_engine
from harness import Answer, make_engine, make_request
from local_draft import Guess, LocalDraft, noise, oracle, wrong
from threaded_engine import ThreadedEngine

from outrider.models.decoder import CausalLM
from outrider.protocol.generation import RoundTree, TokenOrigin
from outrider.sampling.params import SamplingParams
from outrider.tree.author import TreeAuthor
from outrider.tree.handshake import Terms

PROMPT = [7, 3, 19, 4]
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(params=["cpu", "device"])
def engine(request: pytest.FixtureRequest, model: CausalLM) -> Iterator[ThreadedEngine]:
    made = make_engine(model) if request.param == "cpu" else make_paged_engine(model)[0]
    made.start()
    yield made
    made.stop()


def ask(engine: ThreadedEngine, trace: bool = True, **fields: object) -> Answer:
    answer = Answer()
    engine.submit(make_request(answer, PROMPT, GREEDY, VOCAB, trace=trace, **fields))  # type: ignore[arg-type]
    assert answer.done.wait(60)
    return answer


def trees(answer: Answer) -> list[RoundTree]:
    return [tree for update in answer.updates for tree in update.round_trees]


def test_trees_tell_where_every_token_came_from(engine: ThreadedEngine) -> None:
    plain = ask(engine, trace=False)
    text = {tuple(PROMPT): PROMPT + plain.token_ids}
    engine.draft_connected(LocalDraft(engine, VOCAB, oracle(text, VOCAB)), Terms(sources=("oracle",)))
    answer = ask(engine)
    assert answer.token_ids == plain.token_ids
    position = len(PROMPT)
    num_accepted = 0
    for update in answer.updates:
        (tree,) = update.round_trees
        assert (tree.position, tree.num_tokens) == (position, len(update.token_ids))
        assert len(tree.parents) == len(tree.token_ids) == len(tree.scores) == update.num_draft_tokens
        accepted = [tree.token_ids[node] for node in tree.accepted]
        assert accepted == list(update.token_ids[: len(accepted)])
        assert len(accepted) == sum(origin is TokenOrigin.ACCEPTED for origin in update.origins)
        assert [tree.parents[node] for node in tree.accepted] == [-1, *tree.accepted][: len(accepted)]
        assert all(tree.drafter_names[drafter] == "oracle" for drafter in tree.drafters)
        assert all(parent < node for node, parent in enumerate(tree.parents))
        position += tree.num_tokens
        num_accepted += len(accepted)
    assert num_accepted > 8


@pytest.mark.parametrize("kind", ["wrong", "none", "off"])
def test_rounds_without_a_right_guess_are_told_too(engine: ThreadedEngine, kind: str) -> None:
    plain = ask(engine, trace=False)
    text = {tuple(PROMPT): PROMPT + plain.token_ids}
    guess: Guess = wrong(text, VOCAB) if kind == "wrong" else oracle(text, VOCAB)
    if kind != "none":
        engine.draft_connected(LocalDraft(engine, VOCAB, guess))
    # By measured times it may not pay to look at a tree in every round, so that wrong guesses are asked for again.
    for _ in range(50 if kind == "wrong" else 1):
        answer = ask(engine, speculate=kind != "off")
        assert answer.token_ids == plain.token_ids
        found = trees(answer)
        assert [tree.num_tokens for tree in found] == [1] * len(answer.token_ids)
        assert not any(tree.accepted for tree in found)
        if any(tree.token_ids for tree in found):
            break
    assert any(tree.token_ids for tree in found) == (kind == "wrong")


def test_scores_and_drafters_are_those_that_the_draft_sent(engine: ThreadedEngine) -> None:
    def two_sources(author: TreeAuthor) -> None:
        for token in range(8):
            author.add(author.root, token, -0.25 * (token + 1), token % 2 + 1)

    terms = Terms(sources=("never", "odd one"))
    engine.draft_connected(LocalDraft(engine, VOCAB, two_sources), terms)
    # By measured times it may not pay to take nodes in every round.
    asked = (tree for _ in range(50) for tree in trees(ask(engine)))
    tree = next(tree for tree in asked if tree.token_ids)
    for token, drafter, score in zip(tree.token_ids, tree.drafters, tree.scores, strict=True):
        assert score == pytest.approx(-0.25 * (token + 1))
        # The second has no name in the draft's hello.
        assert tree.drafter_names[drafter] == ("odd one" if token % 2 == 0 else "source 2")


def test_nothing_is_told_unasked(engine: ThreadedEngine) -> None:
    engine.draft_connected(LocalDraft(engine, VOCAB, noise(9, VOCAB)))
    assert trees(ask(engine, trace=False)) == []

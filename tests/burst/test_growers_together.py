"""A model and n-grams that grow one tree."""

from __future__ import annotations

import gc

import pytest
from draft_fakes import RecordingPort, open_message
from examples import examples
from growth_rig import GOES_ON, VOCAB, Rig, continuation, scripted
from growth_steps import act, steps
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config.draft import DraftOptions
from outrider.drafting.base import CombinedDrafter, Needs
from outrider.drafting.ngram.drafter import NgramDrafter
from outrider.drafting.registry import build_drafter
from outrider.drafting.requests import Requests
from outrider.errors import ConfigError
from outrider.tree.author import TreeAuthor

REPEATING = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4]


def together(**changes: int) -> Rig:
    options = DraftOptions(max_positions=300)
    return Rig(options, NgramDrafter(options), **changes)


def finish(rig: Rig) -> None:
    while rig.requests.growth.has_work:
        rig.requests.growth.work(float("inf"))
    rig.settle()


def test_sources_follow_each_other_and_both_contribute() -> None:
    rig = together()
    request = rig.open(1, REPEATING)
    finish(rig)
    request.check(sources=(0,))
    assert set(request.held_sources()) >= {0, 1}
    assert (5,) in request.held()
    assert (5, 6, 7) in request.held()


def test_the_model_goes_on_below_what_the_n_grams_found() -> None:
    rig = together()
    rig.open(1, REPEATING)
    finish(rig)
    assert (*REPEATING, 5) in rig.runner.ran


def test_n_grams_go_on_alone_where_a_text_has_a_token_that_the_model_has_not() -> None:
    rig = together(vocab_size=VOCAB - 1)
    early, late = rig.open(1, [VOCAB - 1, *REPEATING]), rig.open(2, REPEATING)
    finish(rig)
    assert set(early.held_sources()) == {1}
    assert set(late.held_sources()) == {0, 1}
    ran = len(rig.runner.ran)
    rig.commit(2, [VOCAB - 1, *REPEATING])
    finish(rig)
    assert set(late.held_sources()) == {1}
    assert rig.gone == {}
    assert len(rig.runner.ran) == ran


def prompt_with_a_guess() -> list[int]:
    """One after which the model guesses the token that 33 has always followed, while n-grams know of nothing."""
    for guess in range(33):
        for last in range(35, VOCAB):
            prompt = [guess, 33, 34] * 4 + [last]
            below = scripted((*prompt, guess))
            if scripted(tuple(prompt))[0][0] == guess and 33 not in dict(below):
                return prompt
    raise AssertionError("no such prompt")


def test_the_n_grams_go_on_below_what_the_model_found() -> None:
    rig, prompt = together(branching=1), prompt_with_a_guess()
    request = rig.open(1, prompt, credit=128)
    finish(rig)
    found = dict(zip(request.held(), request.held_sources(), strict=True))
    assert found[prompt[0],] == 0
    assert found[prompt[0], 33] == 1


def test_n_grams_that_know_the_prompt_late_go_on_below_what_the_model_found(caplog: pytest.LogCaptureFixture) -> None:
    rig, prompt = together(), REPEATING * 8
    request = rig.open(1, prompt, credit=128)
    for _ in range(3):
        rig.turn()
    assert rig.requests.growth.has_work and set(request.held_sources()) == {0}
    finish(rig)
    mirror = request.mirror
    _, best = mirror.below[mirror.root][0]
    rig.commit(1, [mirror.token_ids[best]], credit=256)
    finish(rig)
    assert 1 in request.held_sources()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class FiveFirst:
    """A guide that leaves no choice at the root."""

    def allows(self, parent: int, token: int) -> bool:
        return parent != 0 or token == 5

    def forced(self, parent: int) -> int | None:
        return 5 if parent == 0 else None


def test_n_grams_that_know_the_prompt_late_go_on_below_what_a_grammar_forced() -> None:
    rig = together()
    request = rig.open(1, REPEATING * 8, credit=128)
    for tree in rig.requests._trees.values():
        tree.author.guide = FiveFirst()
    for _ in range(3):
        rig.turn()
    assert rig.requests.growth.has_work and set(request.held()) >= {(5,)} and (5, 6, 7) not in request.held()
    finish(rig)
    assert (5, 6, 7) in request.held()


def test_n_grams_alone_go_on_below_what_a_grammar_forced_before_they_knew_the_prompt() -> None:
    options = DraftOptions(speculative_algorithm=("NGRAM",))
    requests, peer = Requests(NgramDrafter(options), options), RecordingPort()
    requests.handle(peer, open_message(REPEATING * 8))
    (tree,) = requests._trees.values()
    tree.author.guide = FiveFirst()
    growth, paths = requests.growth, []
    for _ in range(2):
        growth.grow(float("inf"), lambda: False)
        paths.append([tree.author.node(node).token for node in tree.author.live_ids() if node])
        growth.work(float("inf"))
    assert paths[0] == [5] and paths[1][:3] == [5, 6, 7]


def test_a_request_has_n_grams_at_once_whatever_the_one_before_asked() -> None:
    rig = together()
    grower = next(grower for grower in rig.requests.growth.growers if hasattr(grower, "_asks_left"))
    rig.open(1, REPEATING)
    finish(rig)
    rig.close(1)
    grower._asks_left = 0
    request = rig.open(2, REPEATING)
    finish(rig)
    assert 1 in request.held_sources()


def test_a_node_that_both_find_is_there_once() -> None:
    rig = together()
    request = rig.open(1, REPEATING)
    finish(rig)
    assert not rig.open_requests[1].mirror.dropped["duplicate"]
    accepted = continuation(request.tokens, 1)
    rig.commit(1, accepted)
    finish(rig)
    assert not request.mirror.dropped["duplicate"]
    request.check()


def test_without_rows_the_n_grams_serve_alone() -> None:
    rig = together(num_rows=1)
    rig.open(1, REPEATING)
    request = rig.open(2, REPEATING)
    finish(rig)
    assert request.declined is None
    assert set(request.held_sources()) == {1}
    rig.commit(2, [5])
    finish(rig)
    assert request.held()


def test_in_lockstep_without_rows_the_n_grams_are_told_all_the_same() -> None:
    options = DraftOptions(max_positions=300, lockstep=True, speculative_algorithm=("STANDALONE", "NGRAM"))
    rig = Rig(options, NgramDrafter(options), num_rows=1)
    rig.open(1, REPEATING)
    request = rig.open(2, REPEATING)
    finish(rig)
    for _ in range(2):
        rig.commit(2, [5])
        finish(rig)
        assert request.mirror.acked_len == len(request.tokens)


def test_what_n_grams_find_is_told_before_a_device_is_waited_for() -> None:
    rig = together()
    rig.runner.auto_ready = False
    request = rig.open(1, REPEATING)
    while rig.requests.growth.has_work:
        rig.requests.growth.work(float("inf"))
    rig.turn()
    assert len(rig.runner.bursts) == 1
    assert set(request.held_sources()) == {1}


def test_a_burst_that_fails_leaves_the_n_grams() -> None:
    rig = together()
    rig.runner.launch_fault = RuntimeError("no memory")
    request = rig.open(1, REPEATING)
    finish(rig)
    assert request.declined is None
    assert request.held()
    rig.close(1)
    finish(rig)
    rig.check_nothing_left()


@pytest.mark.parametrize("shape", [{}, GOES_ON], ids=["one part", "goes on"])
@settings(max_examples=examples(20))
@given(trace=st.lists(steps, max_size=40))
def test_whatever_verify_does_both_follow_and_nothing_leaks(shape: dict[str, int], trace: list[tuple]) -> None:
    rig = together(**shape)
    for number, step in enumerate([("open", 3), *trace]):
        act(rig, number, step)
        if number % 3 == 0:
            rig.requests.growth.work(float("inf"))
    rig.runner.auto_ready = True
    finish(rig)
    for number in sorted(rig.open_requests):
        rig.resume(number)
        rig.commit(number, [5])
    finish(rig)
    for request in rig.open_requests.values():
        request.check()
        assert not request.mirror.dropped["duplicate"]
    for number in sorted(rig.open_requests):
        rig.close(number)
    finish(rig)
    rig.check_nothing_left()


def test_bursts_go_on_past_commits_beside_n_grams_and_nodes_are_told_in_bulk(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = together(**GOES_ON | {"max_steps": 32, "max_seeds": 512, "num_pages": 512})
    added: list[int] = []
    add = TreeAuthor.add

    def note(author: TreeAuthor, parent: int, token: int, score: float, source: int) -> int | None:
        added.append(source)
        return add(author, parent, token, score, source)

    monkeypatch.setattr(TreeAuthor, "add", note)
    request = rig.open(1, REPEATING, credit=64)
    sources: set[int] = set()
    for turn in range(40):
        rig.requests.growth.work(float("inf"))
        rig.turn()
        sources |= set(request.held_sources())
        if turn % 4 == 3:
            # N-grams know what comes behind a 4.
            rig.commit(1, continuation(request.tokens, 2) if turn % 8 == 3 else [3, 4], credit=64)
    request.check()
    assert not request.mirror.dropped["duplicate"]
    assert sources == {0, 1} and set(added) == {1}
    assert len(rig.runner.bursts) <= 4


@pytest.mark.parametrize("shape", [{}, GOES_ON], ids=["one part", "goes on"])
def test_requests_end_in_no_circle(shape: dict[str, int]) -> None:
    """The engine leaves what is in one until it is idle."""
    rig = together(**shape)

    def serve(number: int) -> None:
        request = rig.open(number, [1, 2, 3, 4, 2, 3, 4])
        for _ in range(4):
            rig.turn()
            rig.requests.growth.work(float("inf"))
            rig.commit(number, continuation(request.tokens, 2))
        rig.close(number)
        finish(rig)
        rig.gone.clear()
        rig.runner.bursts.clear()

    serve(1)
    gc.collect()
    gc.disable()
    try:
        for number in range(2, 5):
            serve(number)
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speculative_algorithm": ("MAGIC",)}, ("--speculative-algorithm", "'MAGIC'", "NGRAM")),
        ({"speculative_algorithm": ("EAGLE", "EAGLE3")}, ("--speculative-algorithm", "EAGLE,EAGLE3")),
        ({"speculative_algorithm": ("NGRAM", "NGRAM")}, ("--speculative-algorithm", "once")),
        ({"speculative_algorithm": ("EAGLE3",)}, ("--speculative-draft-model-path", "EAGLE3")),
        ({"speculative_algorithm": ("STANDALONE", "NGRAM")}, ("--speculative-draft-model-path", "STANDALONE")),
        ({"speculative_algorithm": ("NEXTN",)}, ("--speculative-draft-model-path", "--target-model-path")),
        ({"lockstep": True}, ("--lockstep", "NGRAM")),
    ],
)
def test_combinations_that_make_no_sense_are_refused_naming_the_option(
    changes: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_drafter(DraftOptions(**changes))  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words)


class _Stub:
    def __init__(self, needs: Needs) -> None:
        self.sources = ("stub",)
        self.needs = needs

    def gauges(self) -> dict[str, int]:
        return {}


def test_what_the_one_with_a_model_needs_several_need() -> None:
    model = _Stub(Needs(100, "cafe", 64, (1, 2), 512))
    both = CombinedDrafter([model, _Stub(Needs())])
    assert both.sources == ("stub", "stub")
    assert both.needs == Needs(100, "cafe", 64, (1, 2), 0)

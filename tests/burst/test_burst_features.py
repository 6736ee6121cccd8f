"""Growth with a drafter that takes the target's features."""

from __future__ import annotations

import pytest
from examples import examples
from growth_rig import GOES_ON, Rig, continuation
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config.draft import DraftOptions
from outrider.drafting.tree_growth import ANSWER_PHASES

BLOCKS = GOES_ON | {"has_blocks": True}


def rig_of(**shape: int) -> Rig:
    return Rig(DraftOptions(max_positions=300), feature_size=1, **shape)


def opened(rig: Rig, tokens: list[int]) -> None:
    rig.open(1, tokens)
    rig.features(1, 0, len(tokens) - 1)
    rig.settle()


def test_nothing_grows_before_the_features_of_the_prompt_are_here() -> None:
    rig = rig_of()
    request = rig.open(1, list(range(1, 31)))
    rig.settle()
    assert not rig.runner.bursts
    rig.features(1, 0, 10)
    rig.settle()
    assert not rig.runner.bursts
    assert sum(count for _, count in rig.runner.extended) == 10
    rig.features(1, 10, 19)
    rig.settle()
    request.check()
    assert request.held()


def test_a_sequence_of_one_token_waits_for_the_next() -> None:
    rig = rig_of()
    request = rig.open(1, [1])
    rig.settle()
    assert not rig.runner.bursts
    rig.commit(1, [9])
    rig.settle()
    assert not request.held()
    rig.features(1, 0, 1)
    rig.settle()
    assert request.held()


def test_growth_goes_on_from_own_features_until_the_true_ones_come() -> None:
    rig = rig_of()
    opened(rig, [1, 2, 3, 4])
    request = rig.open_requests[1]
    rig.commit(1, [*continuation(request.tokens, 2), 39])
    rig.settle()
    assert request.held()
    assert rig.runner.rows[0].context == [2, 3, 4][: len(rig.runner.rows[0].context)]
    rig.features(1, 3, 3)
    rig.settle()
    assert rig.runner.rows[0].context == request.tokens[1:-1]
    request.check()


def test_what_a_hit_committed_is_run_again_with_true_features_but_for_the_root_and_the_tree_stays() -> None:
    rig = rig_of()
    opened(rig, [1, 2, 3, 4])
    request = rig.open_requests[1]
    accepted = continuation(request.tokens, 2)
    below = {path[2:] for path in request.held() if path[:2] == tuple(accepted) and len(path) > 2}
    rig.commit(1, accepted)
    rig.features(1, 3, 2)
    ran = len(rig.runner.ran)
    rig.settle()
    again = rig.runner.ran[ran:]
    assert tuple(request.tokens) not in again
    assert tuple(request.tokens[:-1]) in again
    assert below <= request.held().keys()
    assert rig.runner.rows[0].context == request.tokens[1:-1]
    # What hangs below the root was not run again.
    assert len(set(again)) == len(again)
    assert not {tuple(request.tokens) + path for path in below} & set(again) & set(rig.runner.ran[:ran])


def test_features_that_never_come_do_not_fill_the_tree() -> None:
    rig = rig_of()
    opened(rig, [1, 2, 3, 4])
    request = rig.open_requests[1]
    for _ in range(30):
        rig.commit(1, continuation(request.tokens, 2))
        rig.settle()
        assert request.held()
    assert len(rig.runner.rows[0].context) > 30


def test_in_lockstep_an_opening_is_answered_before_features_and_a_tree_grows_from_true_ones_alone() -> None:
    options = DraftOptions(max_positions=300, lockstep=True, speculative_num_steps=4, speculative_algorithm=("EAGLE3",))
    rig = Rig(options, feature_size=1)
    request = rig.open(1, [1, 2, 3, 4])
    rig.settle()
    # Verify sends features to those who have answered.
    assert request.mirror.epoch and not request.held()
    for _ in range(3):
        rig.commit(1, continuation(request.tokens, 2))
        rig.settle()
        assert request.mirror.acked_len < len(request.tokens)
        assert not rig.requests.growth.has_updates
        rig.features(1, 0, len(request.tokens) - 1)
        rig.settle()
        assert request.mirror.acked_len == len(request.tokens)
        assert max(len(path) for path in request.held()) == 4
        request.check()


steps = st.one_of(
    st.tuples(st.just("turn"), st.booleans()),
    st.tuples(st.just("commit"), st.integers(1, 4)),
    st.tuples(st.just("miss"), st.lists(st.integers(0, 39), min_size=1, max_size=14)),
    st.tuples(st.just("features"), st.integers(1, 12)),
    st.tuples(st.just("again"), st.integers(0, 40), st.integers(1, 12)),
    st.tuples(st.just("skip"), st.integers(1, 3)),
    st.tuples(st.just("slow"), st.booleans()),
    st.tuples(st.sampled_from(["pause", "resume"])),
)


def test_a_long_prompt_is_run_with_true_features_alone() -> None:
    """None of it takes the draft's own because it would not fit a step."""
    rig = rig_of(**GOES_ON, num_pages=1024)
    length = 10 * rig.runner.shape.max_width
    request = rig.open(1, [1 + place % 37 for place in range(length)])
    share = rig.growth._kv_manager.max_forced
    for start in range(0, length - 1, share):
        rig.features(1, start, min(share, length - 1 - start))
        for _ in range(20):
            rig.turn()
        done = min(start + share, length - 1)
        assert rig.growth._batch_manager.rows[0].end <= done + 1
        assert done == length - 1 or not rig.runner.bursts or not request.held()
    rig.settle()
    assert request.held()
    assert len(rig.runner.bursts) <= length // share


@pytest.mark.parametrize("options", [{"lockstep": True}, {"draft_ahead": "never"}], ids=["lockstep", "in turns"])
def test_committed_tokens_that_need_a_burst_of_their_own_take_no_steps_of_the_tree(options: dict[str, object]) -> None:
    fields = {"max_positions": 300, "min_path_probability": 0.0, **options}
    rig = Rig(DraftOptions(speculative_algorithm=("EAGLE3",), **fields), feature_size=1)  # type: ignore[arg-type]
    request = rig.open(1, list(range(1, 31)), credit=40)
    rig.features(1, 0, 5)
    rig.settle()
    assert not request.held()
    rig.features(1, 5, 24)
    rig.settle()
    deep = max(map(len, request.held()))
    rig.commit(1, continuation(request.tokens, 2), credit=40)
    rig.features(1, 29, 2)
    rig.settle()
    assert deep > 4 and max(map(len, request.held())) > 4


def test_features_of_more_tokens_than_a_step_has_nodes_are_taken_in_two() -> None:
    rig = rig_of(**GOES_ON)
    request = rig.open(1, [1, *range(2, 14)])
    rig.features(1, 0, 1)
    rig.turn(wait=False)
    rig.commit(1, continuation(request.tokens, 5))
    rig.settle()
    rig.commit(1, [5])
    assert len(request.tokens) - 1 > rig.runner.shape.max_width
    rig.features(1, 0, len(request.tokens) - 1)
    rig.settle()
    request.check()
    assert request.held()


def test_a_lone_block_is_timed_from_the_commit_to_its_answer() -> None:
    rig = rig_of(**BLOCKS)
    opened(rig, [1, 2, 3, 4])
    rig.requests.growth.answer_phases.take()
    rig.commit(1, continuation(rig.open_requests[1].tokens, 2))
    rig.features(1, 3, 2)
    rig.settle()
    counts, _ = rig.requests.growth.answer_phases.take()
    assert {phase: sum(found) for phase, found in counts.items()} == dict.fromkeys(ANSWER_PHASES, 1)


@pytest.mark.parametrize("shape", [{}, GOES_ON, BLOCKS], ids=["one part", "goes on", "a block"])
@settings(max_examples=examples(40))
@given(length=st.integers(1, 30), trace=st.lists(steps, max_size=40))
def test_features_may_come_in_any_order_or_not_at_all(shape: dict[str, int], length: int, trace: list[tuple]) -> None:
    rig = rig_of(**shape)
    request = rig.open(1, [1, *range(2, length + 1)])
    sent = 0
    for step in trace:
        match step:
            case ("turn", wait):
                rig.turn(wait=wait)
            case ("commit", count):
                rig.commit(1, continuation(request.tokens, count))
            case ("miss", tokens):
                rig.commit(1, tokens)
            case ("features", count):
                count = min(count, len(request.tokens) - 1 - sent)
                if count > 0:
                    rig.features(1, sent, count)
                    sent += count
            case ("again", start, count) if start < len(request.tokens):
                rig.features(1, start, min(count, len(request.tokens) - start))
            case ("skip", count):
                sent += count
            case ("slow", slow):
                rig.runner.auto_ready = not slow
            case ("pause",):
                rig.pause(1)
            case ("resume",):
                rig.resume(1)
        request.check()
    rig.runner.auto_ready = True
    rig.resume(1)
    rig.settle()
    rig.commit(1, [5])
    rig.features(1, 0, len(request.tokens) - 1)
    rig.settle()
    request.check()
    assert request.held()
    assert rig.growth._batch_manager.num_incomplete == 0
    rig.close(1)
    rig.settle()
    rig.check_nothing_left()

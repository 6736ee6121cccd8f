"""Safety, liveness and bounded memory of the replicated tree over arbitrary faults."""

from __future__ import annotations

import math

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror_integrity import check_mirror
from network import CREDIT, VOCAB, Pair

from outrider.protocol.speculation import Commit, Grow
from outrider.protocol.speculation_codec import decode_verify, encode_draft, encode_verify

tokens = st.integers(0, VOCAB - 1)
index = st.integers(0, 1 << 16)

steps = st.one_of(
    st.tuples(st.just("grow"), index, tokens, st.floats(-4, 0, width=32)),
    st.tuples(st.just("flush"), st.integers(1, 5)),
    st.tuples(st.just("commit"), st.lists(tokens, min_size=1, max_size=3)),
    st.tuples(st.just("follow"), index, st.integers(1, 3), tokens),
    st.tuples(
        st.sampled_from(["to_draft", "to_verify", "lose_draft", "lose_verify", "repeat_draft", "repeat_verify"]), index
    ),
    st.tuples(st.just("truth"), st.integers(1, 3)),
    st.tuples(st.just("guess"), st.integers(1, 6)),
    st.tuples(st.just("restart")),
)


def truth(position: int) -> int:
    """The token that the liveness test commits at a position."""
    return position % VOCAB


def guess_rightly(pair: Pair, depth: int) -> None:
    """The draft grows the true continuation of what it knows."""
    author = pair.author
    node = author.root if author is not None else None
    for ahead in range(depth):
        if author is None or node is None:
            break
        token = truth(author.committed_len + ahead)
        known = author.child(node, token)
        node = known if known is not None else author.add(node, token, -0.1, 0)


def follow(pair: Pair, pick: int, depth: int, bonus: int) -> None:
    """Commit a path that the mirror holds, and a bonus token."""
    mirror, path, slot = pair.mirror, [], pair.mirror.root
    for _ in range(depth):
        below = [child for _, child in mirror.below[slot]]
        if not below or mirror.num_unresolved:
            break
        slot = below[pick % len(below)]
        path.append(mirror.token_ids[slot])
    pair.commit([*path, bonus])


def apply(pair: Pair, step: tuple) -> None:
    match step:
        case ("grow", parent, token, score):
            pair.grow(parent, token, score)
        case ("flush", count):
            pair.flush(count)
        case ("commit", new_tokens):
            pair.commit(new_tokens)
        case ("follow", pick, depth, bonus):
            follow(pair, pick, depth, bonus)
        case ("to_draft", at) if pair.to_draft:
            pair.draft_receives(at % len(pair.to_draft))
        case ("to_verify", at) if pair.to_verify:
            pair.verify_receives(at % len(pair.to_verify))
        case ("lose_draft", at) if pair.to_draft:
            pair.to_draft.pop(at % len(pair.to_draft))
        case ("lose_verify", at) if pair.to_verify:
            pair.to_verify.pop(at % len(pair.to_verify))
        case ("repeat_draft", at) if pair.to_draft:
            pair.to_draft.append(pair.to_draft[at % len(pair.to_draft)])
        case ("repeat_verify", at) if pair.to_verify:
            pair.to_verify.append(pair.to_verify[at % len(pair.to_verify)])
        case ("truth", count):
            pair.commit([truth(len(pair.tokens) + ahead) for ahead in range(count)])
        case ("guess", depth):
            guess_rightly(pair, depth)
        case ("restart",):
            pair.restart_draft()


def exchange(pair: Pair) -> bool:
    """Commit the true token, let the draft answer and guess on; whether verify held the token already."""
    token = truth(len(pair.tokens))
    held = not pair.mirror.num_unresolved and pair.mirror.child(pair.mirror.root, token) is not None
    pair.commit([token])
    pair.deliver_all()
    guess_rightly(pair, 3)
    pair.flush()
    pair.deliver_all()
    return held


@settings(max_examples=examples(100))
@given(st.lists(steps, max_size=60))
def test_copies_agree_and_memory_is_bounded_over_any_faults(trace: list[tuple]) -> None:
    pair = Pair()
    for step in trace:
        apply(pair, step)
        pair.check_safety()


@settings(max_examples=examples(200))
@given(st.lists(steps, max_size=60))
def test_hits_resume_within_two_exchanges_once_faults_stop(trace: list[tuple]) -> None:
    pair = Pair()
    for step in trace:
        apply(pair, step)
    pair.flush()
    pair.deliver_all()
    hits = []
    for _ in range(6):
        hits.append(exchange(pair))
        pair.check_safety()
    assert all(hits[2:]), hits


lies = st.tuples(st.integers(0, 9) | st.integers(1, 2**64 - 1), st.integers(-3, 3), st.lists(tokens, max_size=3))


@settings(max_examples=examples(100))
@given(st.lists(steps | lies, max_size=40))
def test_hits_resume_within_two_exchanges_after_epochs_that_never_began(trace: list[tuple]) -> None:
    pair = Pair()
    for step in trace:
        if isinstance(step[0], str):
            apply(pair, step)
        else:
            ahead, base, chain = step
            pair.insert(epoch_out_of_thin_air(pair, pair.mirror.epoch + ahead, len(pair.tokens) + base, chain))
        check_mirror(pair.mirror)
    pair.flush()
    pair.deliver_all()
    hits = [exchange(pair) for _ in range(6)]
    assert all(hits[2:]), hits
    pair.check_safety()


def epoch_out_of_thin_air(pair: Pair, epoch: int, base_len: int, chain: list[int]) -> Grow:
    count = len(chain)
    return Grow(
        pair.life, epoch, base_len, 0, 1, list(range(count)), list(chain),
        [0.0] * count, bytes(count),
    )  # fmt: skip


def test_an_epoch_is_believed_only_as_far_as_commits_allow() -> None:
    for base, epoch, entered in ((4, 6, 0), (4, 5, 1), (3, 5, 0), (1, 2, 1)):
        pair = Pair()
        pair.commit([1, 2, 3])
        assert pair.mirror.insert(epoch_out_of_thin_air(pair, epoch, base, [4])) == entered
        assert pair.mirror.dropped["epoch"] == 1 - entered and pair.mirror.desynced is not bool(entered)


def test_a_draft_goes_past_an_epoch_that_it_never_began_but_not_past_what_travels() -> None:
    pair = Pair()
    pair.deliver_all()
    assert pair.author is not None
    first = pair.author.epoch
    for epoch, then in ((2**64 - 1, first), (first + 7, first + 8)):
        guess_rightly(pair, 1)
        token = truth(len(pair.tokens))
        before = len(pair.author.tokens)
        pair.tokens.append(token)
        pair.author.apply(Commit(pair.life, before, [token], epoch, 0, None, CREDIT))
        assert pair.author.epoch == then
    grow = pair.author.take(4)
    assert grow is not None and encode_draft([grow])


def test_a_lost_tree_is_noticed_and_grown_anew_within_two_exchanges() -> None:
    pair = Pair()
    pair.deliver_all()
    guess_rightly(pair, 8)
    pair.flush()
    pair.to_verify.clear()
    assert [exchange(pair) for _ in range(4)] == [False, False, True, True]


grows = st.builds(
    lambda epoch, base, first, rows, acked: Grow(
        request=1,
        epoch=epoch,
        base_len=base,
        acked_len=acked,
        first_id=first,
        parents=[r[0] for r in rows],
        token_ids=[r[1] for r in rows],
        scores=[r[2] for r in rows],
        sources=bytes(r[3] for r in rows),
    ),
    st.integers(0, 2**64 - 1) | st.integers(0, 3),
    st.integers(0, 2**32 - 1) | st.integers(0, 4),
    st.integers(0, 2**32 - 1) | st.integers(0, 8),
    st.lists(
        st.tuples(
            st.integers(0, 2**32 - 1) | st.integers(0, 9),
            st.integers(-(2**31), 2**31 - 1) | st.integers(-1, VOCAB),
            st.floats(width=32),
            st.integers(0, 255),
        ),
        max_size=80,
    ),
    st.integers(0, 2**32 - 1),
)


@settings(max_examples=examples(100))
@given(st.lists(grows | st.lists(tokens, min_size=1, max_size=3), max_size=20))
def test_a_hostile_draft_is_dropped_and_counted_and_what_enters_is_legal(trace: list) -> None:
    pair = Pair()
    for step in trace:
        if isinstance(step, Grow):
            before = sum(pair.mirror.dropped.values())
            entered = pair.mirror.insert(step)
            dropped = sum(pair.mirror.dropped.values()) - before
            assert entered + dropped >= len(step.token_ids)
        else:
            pair.commit(step)
        mirror = pair.mirror
        check_mirror(mirror)
        live = list(mirror.descend())
        assert len(live) <= 4 * CREDIT
        assert all(0 <= mirror.token_ids[slot] < VOCAB for slot in live)
        assert all(math.isfinite(cost) for slot in live for cost, _ in mirror.below[slot])


def test_ids_that_no_commit_could_carry_back_are_malformed() -> None:
    pair = Pair()
    last = 2**32 - 1
    for first_id, entered in ((last, 0), (last - 1, 2)):
        grow = Grow(
            1, 1, 1, 1, first_id, [0, 0], [0, 1], [0.0, 0.0],
            bytes(2),
        )  # fmt: skip
        assert pair.mirror.insert(grow) == entered
    assert pair.mirror.dropped["malformed"] == 2
    pair.commit([1])
    _, message = pair.to_draft[-1]
    assert decode_verify(encode_verify([message]))


def test_an_array_of_the_wrong_length_is_malformed() -> None:
    pair = Pair()
    grow = Grow(1, 1, 1, 1, 1, [0, 0], [0, 0, 0], [0.0, 0.0, 0.0], bytes(3))
    assert pair.mirror.insert(grow) == 0
    assert pair.mirror.dropped["malformed"] == 3

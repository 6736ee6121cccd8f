"""The trie against counting by hand."""

from __future__ import annotations

from collections import Counter

from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafting.ngram.trie import State, Trie

DEPTH = 5
ROOMY = 10_000

texts = st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=4)


def build(texts: list[list[int]], capacity: int = ROOMY) -> Trie:
    trie = Trie(capacity, DEPTH)
    for number, text in enumerate(texts):
        if number:
            trie.end_text()
        for token in text:
            trie.append(token)
    return trie


def count_followers(texts: list[list[int]], context: list[int]) -> Counter[int]:
    """What followed the context in any of the texts, counted by brute force."""
    width = len(context)
    return Counter(
        text[start + width]
        for text in texts
        for start in range(len(text) - width)
        if text[start : start + width] == context
    )


def followers_by_length(trie: Trie, state: State) -> list[dict[int, int]]:
    return [dict(trie.followers(place, ROOMY)) if place is not None else {} for place in state]


def expected_by_length(texts: list[list[int]], context: list[int]) -> list[dict[int, int]]:
    longest = min(len(context), DEPTH - 1)
    return [dict(count_followers(texts, context[len(context) - width :])) for width in range(longest + 1)]


def trimmed(levels: list[dict[int, int]]) -> list[dict[int, int]]:
    while levels and not levels[-1]:
        levels = levels[:-1]
    return levels


@given(texts)
def test_every_suffix_of_the_text_knows_its_followers_and_counts(texts: list[list[int]]) -> None:
    trie = build(texts)
    found = followers_by_length(trie, trie.context())
    assert trimmed(found) == trimmed(expected_by_length(texts, texts[-1]))


@given(texts, st.lists(st.integers(0, 3), max_size=12))
def test_stepping_finds_what_searching_finds(texts: list[list[int]], context: list[int]) -> None:
    trie = build(texts)
    state = trie.start()
    for length, token in enumerate(context, start=1):
        state = trie.step(state, token)
        expected = expected_by_length(texts, context[:length])
        assert trimmed(followers_by_length(trie, state)) == trimmed(expected)


@given(texts, st.lists(st.integers(0, 3), max_size=12))
def test_stepping_on_from_the_text_joins_both(texts: list[list[int]], more: list[int]) -> None:
    trie = build(texts)
    state = trie.context()
    for token in more:
        state = trie.step(state, token)
    expected = expected_by_length(texts, texts[-1] + more)
    # A suffix that reaches back over the end of what was inserted still occurred within the texts, or not at all.
    assert trimmed(followers_by_length(trie, state)) == trimmed(expected)


@given(texts)
def test_followers_come_latest_first(texts: list[list[int]]) -> None:
    trie = build(texts)
    joined = [token for text in texts for token in text]
    order = list(dict.fromkeys(reversed(joined)))
    assert [token for token, _ in trie.followers(trie.root, ROOMY)] == order
    assert [token for token, _ in trie.followers(trie.root, 2)] == order[:2]


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 30), max_size=400), st.integers(20, 60))
def test_capacity_holds_and_counts_never_exceed_the_truth(text: list[int], capacity: int) -> None:
    trie = Trie(capacity, DEPTH)
    for position, token in enumerate(text):
        trie.append(token)
        assert len(trie) <= capacity
        assert len(list(trie._nodes)) == len(trie)
        for width, place in enumerate(trie.context()):
            if place is not None:
                true = count_followers([text[: position + 1]], text[position + 1 - width : position + 1])
                assert all(count <= true[follower] for follower, count in trie.followers(place, ROOMY))


@settings(max_examples=examples(50))
@given(st.lists(st.integers(0, 30), max_size=300))
def test_every_node_hangs_from_the_root(text: list[int]) -> None:
    trie = build([text], capacity=40)
    for node in trie._nodes:
        parent = trie._nodes[node]
        assert parent is not None and parent.children is not None
        assert parent.children[node.token] is node
        assert parent is trie.root or parent in set(trie._nodes)


def test_the_least_recently_seen_goes_first() -> None:
    trie = Trie(60, DEPTH)
    for token in [1, 2, 3, 4] * 3:
        trie.append(token)
    trie.end_text()
    for token in [*range(100, 120), *[5, 6, 7] * 3]:
        trie.append(token)
    trie.end_text()
    for token in range(200, 230):
        trie.append(token)
    known = {token for token, _ in trie.followers(trie.root, ROOMY)}
    assert not known & {1, 2, 3, 4}
    assert known >= {5, 6, 7} | set(range(200, 230))


def test_unique_text_costs_about_a_node_a_token() -> None:
    trie = build([list(range(1000))])
    assert len(trie) == 1000


def test_old_text_is_forgotten() -> None:
    trie = Trie(40, DEPTH)
    for token in range(1000):
        trie.append(token)
    assert len(trie._text) <= 80
    assert trie.step(trie.start(), 1) == [trie.root]

"""What the NGRAM drafter guesses."""

from __future__ import annotations

import gc
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config.draft import DraftOptions
from outrider.drafting.base import Candidate, FrontierNode
from outrider.drafting.ngram.drafter import NgramDrafter
from outrider.drafting.ngram.predictor import NoiseTrust, chances_given_noise, point_gumbel
from outrider.drafting.ngram.trie import TrieNode
from outrider.drafting.registry import build_drafter
from outrider.drafting.tree_growth import Tree
from outrider.errors import ConfigError
from outrider.protocol.speculation import Open
from outrider.sampling.noise import gumbel
from outrider.sampling.params import SamplingParams
from outrider.tree.author import TreeAuthor

VOCAB = 1000
GREEDY = SamplingParams(temperature=0.0)
FOREVER = math.inf


def tree_of(tokens: list[int], sampling: SamplingParams = GREEDY, handle: int = 1, tenant: str = "") -> Tree:
    message = Open(handle, tokens, len(tokens), sampling, 64, tenant=tenant)
    return Tree(handle, TreeAuthor(message, VOCAB))


def opened(
    tokens: list[int],
    sampling: SamplingParams = GREEDY,
    drafter: NgramDrafter | None = None,
    handle: int = 1,
    tenant: str = "",
) -> NgramDrafter:
    drafter = drafter or NgramDrafter(DraftOptions())
    drafter.open(tree_of(tokens, sampling, handle, tenant))
    drafter.work(FOREVER)
    return drafter


def root_of(tokens: list[int], handle: int = 1) -> FrontierNode:
    return FrontierNode(handle, 0, -1, tokens[-1], len(tokens))


def ask(drafter: NgramDrafter, node: FrontierNode) -> list[Candidate]:
    return drafter.expand([node])[0]


def follow(drafter: NgramDrafter, tokens: list[int], count: int) -> list[int]:
    """The likeliest path below the root."""
    node = root_of(tokens)
    path = []
    for number in range(1, count + 1):
        best = ask(drafter, node)[0]
        path.append(best.token)
        node = FrontierNode(1, number, node.node, best.token, node.position + 1)
    return path


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_repeated_text_is_continued_far_beyond_a_branch(match_type: str, temperature: float) -> None:
    text = random.Random(1).sample(range(VOCAB), 60)
    tokens = [*text, *text[:4]]
    sampling = SamplingParams(temperature=temperature, seed=9)
    drafter = opened(tokens, sampling, NgramDrafter(DraftOptions(match_type=match_type)))
    assert follow(drafter, tokens, 40) == text[4:44]


def test_a_longer_match_is_trusted_more() -> None:
    text = list(range(100, 140))
    scores = []
    for length in (1, 3, 12):
        tokens = [*text, 7, *text[20 - length : 20]]
        scores.append(ask(opened(tokens), root_of(tokens))[0].score)
    assert scores[0] < scores[1] < scores[2] < 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.floats(0, 2))
def test_candidates_are_legal_distinct_and_ordered(tokens: list[int], temperature: float) -> None:
    found = ask(opened(tokens, SamplingParams(temperature=temperature, seed=3)), root_of(tokens))
    assert len({candidate.token for candidate in found}) == len(found)
    assert sum(math.exp(candidate.score) for candidate in found) <= 1.0
    assert all(math.isfinite(candidate.score) and candidate.score <= 0 for candidate in found)
    assert sorted(found, key=lambda candidate: -candidate.score) == found
    assert all(0 <= candidate.source < len(NgramDrafter.sources) for candidate in found)


def test_tokens_outside_the_vocabulary_are_not_guessed() -> None:
    tokens = [1, VOCAB + 5, 1]
    assert ask(opened(tokens), root_of(tokens)) == []


def test_breadth_follows_the_options() -> None:
    tokens = [token for follower in range(10, 30) for token in (1, follower)] + [1]
    narrow = NgramDrafter(DraftOptions(max_bfs_breadth=2))
    wide = NgramDrafter(DraftOptions(max_bfs_breadth=8))
    assert len(ask(opened(tokens, drafter=narrow), root_of(tokens))) == 2
    assert len(ask(opened(tokens, drafter=wide), root_of(tokens))) == 8


def test_matches_shorter_than_the_window_are_not_used() -> None:
    drafter = NgramDrafter(DraftOptions(min_match_window_size=3))
    assert ask(opened([1, 2, 3, 9, 2, 3], drafter=drafter), root_of([1, 2, 3, 9, 2, 3])) == []
    tokens = [1, 2, 3, 9, 1, 2, 3]
    assert ask(opened(tokens, drafter=drafter, handle=2), root_of(tokens, 2))[0].token == 9


def test_committed_tokens_extend_the_trie() -> None:
    drafter = opened([5, 6])
    drafter.commit(1, [7, 8, 5], 0, {0})
    assert ask(drafter, root_of([5, 6, 7, 8, 5]))[0].token == 6


def test_contexts_of_dead_nodes_are_forgotten() -> None:
    text = list(range(20))
    tokens = [*text, *text[:2]]
    drafter = opened(tokens, SamplingParams(temperature=1.0))
    follow(drafter, tokens, 10)
    request = drafter._requests[1]
    assert len(request._contexts) == 10
    drafter.commit(1, text[2:5], 3, {3, 4, 5})
    assert set(request._contexts) <= {3, 4, 5}
    assert set(request._chances) <= {3, 4, 5}
    assert set(request._expanded.values()) <= {3, 4, 5}
    drafter.close(1)
    assert not drafter._requests


def test_what_one_request_put_out_another_gets() -> None:
    output = random.Random(2).sample(range(VOCAB), 50)
    drafter = opened([1, 2])
    drafter.commit(1, output, 0, {0})
    drafter.close(1)
    drafter.work(FOREVER)
    tokens = [3, 4, *output[10:14]]
    opened(tokens, drafter=drafter, handle=2)
    best = ask(drafter, root_of(tokens, 2))[0]
    assert best.token == output[14]
    assert drafter.sources[best.source] == "ngram_shared"


def test_what_one_tenant_put_out_another_never_gets() -> None:
    output = random.Random(2).sample(range(VOCAB), 50)
    drafter = opened([1, 2], tenant="a")
    drafter.commit(1, output, 0, {0})
    drafter.close(1)
    drafter.work(FOREVER)
    tokens = [3, 4, *output[10:14]]
    opened(tokens, drafter=drafter, handle=2, tenant="b")
    assert ask(drafter, root_of(tokens, 2)) == []
    opened(tokens, drafter=drafter, handle=3, tenant="a")
    assert ask(drafter, root_of(tokens, 3))[0].token == output[14]


def test_tenants_whose_requests_put_nothing_out_make_room() -> None:
    drafter = opened([1, 2], tenant="first")
    for number in range(2, 1500):
        opened([1, 2], drafter=drafter, handle=number, tenant=f"tenant {number}")
        drafter.close(number)
    assert len(drafter._tenants) <= 1024


def test_tenants_that_nothing_is_done_for_make_room() -> None:
    drafter = NgramDrafter(DraftOptions(capacity=4096))
    rng = random.Random(4)
    for number in range(40):
        opened([1, 2], drafter=drafter, handle=number, tenant=f"tenant {number}")
        drafter.commit(number, [rng.randrange(VOCAB) for _ in range(1000)], 0, {0})
        drafter.close(number)
        drafter.work(FOREVER)
    assert 1000 < drafter.gauges()["shared_trie_nodes"] <= 4096
    assert 1 < len(drafter._tenants) < 40


def test_tenants_whose_texts_repeat_make_room_too() -> None:
    drafter = NgramDrafter(DraftOptions(capacity=4096))
    for number in range(12):
        opened([1, 2], drafter=drafter, handle=number, tenant=f"tenant {number}")
        drafter.commit(number, [7] * 3000, 0, {0})
        drafter.close(number)
        drafter.work(FOREVER)
    assert drafter.gauges()["shared_trie_nodes"] < 1000, "few nodes, and text that grows on"
    assert 3000 < sum(len(tenant.trie._text) for tenant in drafter._tenants.values()) <= 2 * 4096


def test_a_running_request_shares_before_it_ends() -> None:
    drafter = opened([1, 2])
    drafter.commit(1, list(range(100, 200)), 0, {0})
    drafter.work(FOREVER)
    tokens = [3, 110, 111]
    opened(tokens, drafter=drafter, handle=2)
    assert ask(drafter, root_of(tokens, 2))[0].token == 112


def test_prompts_are_not_shared() -> None:
    drafter = opened(list(range(100, 200)))
    drafter.close(1)
    drafter.work(FOREVER)
    tokens = [3, 110, 111]
    opened(tokens, drafter=drafter, handle=2)
    assert ask(drafter, root_of(tokens, 2)) == []


def test_what_a_request_leaves_behind_does_not_wait_for_the_collector() -> None:
    """An engine that is never idle runs it seldom: it would look at the tries of all requests."""

    def num_nodes() -> int:
        return sum(isinstance(one, TrieNode) for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = num_nodes()
        drafter = opened([token % 50 for token in range(1000)])
        assert num_nodes() > before + 50
        drafter.close(1)
        assert num_nodes() <= before + len(drafter._tenants)  # the root of what a tenant's requests share
    finally:
        gc.enable()


def test_another_target_starts_with_nothing() -> None:
    drafter = opened([1, 2])
    drafter.commit(1, list(range(100, 200)), 0, {0})
    drafter.close(1)
    drafter.forget_target()
    drafter.work(FOREVER)
    assert drafter.gauges() == {"shared_trie_nodes": 0}


def test_a_long_prompt_is_indexed_in_slices_and_commits_may_come_before_its_end() -> None:
    text = random.Random(3).sample(range(VOCAB), 900)
    drafter = NgramDrafter(DraftOptions())
    tokens = [*text, *text[:3]]
    drafter.open(tree_of(tokens))
    assert drafter.has_work
    assert ask(drafter, root_of(tokens)) == []
    drafter.commit(1, text[3:5], 0, {0})
    assert drafter.work(-1.0) == []
    assert drafter.work(FOREVER) == [1]
    assert not drafter.has_work
    assert follow(drafter, [*tokens, *text[3:5]], 5) == text[5:10]


def test_a_long_prompt_keeps_no_short_one_waiting() -> None:
    drafter = NgramDrafter(DraftOptions())
    for handle, length in ((1, 5000), (2, 300), (3, 100)):
        drafter.open(tree_of(list(range(length)), handle=handle))
    assert drafter.work(FOREVER) == [3, 2, 1]


def test_closing_while_a_prompt_is_indexed_frees_it() -> None:
    drafter = NgramDrafter(DraftOptions())
    drafter.open(tree_of(list(range(900))))
    drafter.close(1)
    assert drafter.work(FOREVER) == []
    assert not drafter.has_work


def test_requests_share_the_nodes_that_all_tries_may_have() -> None:
    drafter = NgramDrafter(DraftOptions(total_capacity=8192, request_capacity=4096))
    rng = random.Random(4)
    for handle in range(1, 5):
        opened([rng.randrange(VOCAB) for _ in range(4000)], drafter=drafter, handle=handle)
    for _ in range(100):
        for handle in range(1, 5):
            drafter.commit(handle, [rng.randrange(VOCAB) for _ in range(10)], 0, {0})
    assert sum(len(request.trie) for request in drafter._requests.values()) <= 8192
    for handle in range(1, 5):
        drafter.close(handle)
    opened([1, 2], drafter=drafter, handle=9)
    assert drafter._requests[9].trie.capacity == 4096


def test_trust_falls_where_copies_fail_and_grows_where_they_hold() -> None:
    text = list(range(100, 160))
    wrong, right = opened(text), opened(text)
    for start in range(100, 140):
        wrong.commit(1, [start, 7], 0, {0})
        right.commit(1, [start, start + 1], 0, {0})
    tokens = [*text, 150]
    for drafter in (wrong, right):
        drafter.commit(1, [150], 0, {0})
    best = {name: {c.token: c.score for c in ask(d, root_of(tokens))} for name, d in (("w", wrong), ("r", right))}
    assert best["w"][151] < best["r"][151]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_a_point_of_noise_is_the_entry_of_the_row(seed: int, choice: int, position: int, token: int) -> None:
    row = gumbel(seed, choice, position, np.array([token]))
    assert np.float32(point_gumbel(seed, choice, position, token)) == pytest.approx(row[0], rel=1e-6)


def test_noise_lifts_the_lucky_and_keeps_the_average() -> None:
    rng = np.random.default_rng(5)
    draws = rng.gumbel(size=(20000, 2))
    found = np.array([chances_given_noise([0.5, 0.2], row.tolist()) for row in draws])
    assert found.sum(axis=1).max() < 1.0
    assert np.corrcoef(draws[:, 0], found[:, 0])[0, 1] > 0.5
    assert found.mean(axis=0) == pytest.approx([0.5, 0.2], abs=0.06)


def test_a_strong_match_stays_trusted_under_bad_luck() -> None:
    assert chances_given_noise([0.97], [-1.5])[0] > 0.85


def test_noise_is_trusted_as_far_as_it_foretells() -> None:
    trust = NoiseTrust()
    assert trust.weight == 0.5
    for _ in range(20):
        trust.learn(plain=0.2, noisy=0.6)
    assert trust.weight > 0.9
    for _ in range(40):
        trust.learn(plain=0.6, noisy=0.2)
    assert trust.weight < 0.1


def test_what_was_guessed_behind_a_root_says_nothing_of_the_next_epochs_root() -> None:
    text = list(range(20))
    drafter = opened([*text, *text[:2]], SamplingParams(temperature=1.0, seed=4))
    best = ask(drafter, root_of([*text, *text[:2]]))[0].token
    drafter.commit(1, [500], 0, {0})  # a miss, behind which nothing is guessed
    trusted = drafter._requests[1].trust.weight
    assert ask(drafter, root_of([*text, *text[:2], 500])) == []
    drafter.commit(1, [best], 0, {0})
    assert drafter._requests[1].trust.weight == trusted


def test_an_unknown_drafter_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="NGRAM"):
        build_drafter(DraftOptions(speculative_algorithm=("CRYSTAL",)))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (DraftOptions(min_match_window_size=13), "--min-match-window-size"),
        (DraftOptions(min_bfs_breadth=11), "--min-bfs-breadth"),
        (DraftOptions(branch_length=12), "--branch-length"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options: DraftOptions, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        options.check()

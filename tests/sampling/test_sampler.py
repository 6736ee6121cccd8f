"""The reference sampler: a token is a function of row, history + path, parameters and position, and of nothing else."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dense_row import dense
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from outrider.errors import InternalError
from outrider.sampling.noise import gumbel
from outrider.sampling.params import AnswerEnd, SamplingParams
from outrider.sampling.sampler import LogitsProcessor, RequestSampler

VOCAB = 80
TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, VOCAB]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    choice_index=st.integers(0, 2),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4, 0.9]),
    repetition_penalty=st.sampled_from([1.0, 0.9, 1.4]),
    logit_bias=st.sampled_from([{}, {3: 5.0, 70: -100.0}]),
)


def random_row(seed: int, size: int = VOCAB) -> torch.Tensor:
    return torch.from_numpy((2.5 * np.random.default_rng(seed).normal(size=size)).astype(np.float32))


@settings(max_examples=examples(200))
@given(PARAMS, st.lists(TOKENS, min_size=1, max_size=9), st.lists(TOKENS, max_size=9), st.lists(TOKENS, max_size=5))
def test_sampling_along_a_path_equals_committing_it_first(
    params: SamplingParams, prompt: list[int], output: list[int], path: list[int]
) -> None:
    position = len(prompt) + len(output) + len(path)
    row = random_row(position)
    on_path, committed = (RequestSampler(params, prompt, VOCAB) for _ in range(2))
    on_path.commit(output)
    for token_id in output + path:
        committed.commit([token_id])
    expected = committed.sample(row, [], position)
    assert on_path.sample(row, path, position) == expected
    # Neither what was sampled between nor what is cached by now matters.
    on_path.sample(random_row(1), [1, 2], position)
    assert on_path.sample(row, path, position) == expected
    on_path.commit(path)
    assert on_path.sample(row, [], position) == expected


@settings(max_examples=examples(200))
@given(PARAMS, st.lists(TOKENS, min_size=1, max_size=5), st.lists(TOKENS, max_size=4))
def test_a_token_is_the_argmax_of_processed_logits_plus_the_row_of_noise(
    params: SamplingParams, prompt: list[int], path: list[int]
) -> None:
    sampler, row = RequestSampler(params, prompt, VOCAB), random_row(3)
    candidates = LogitsProcessor(params).process(row.numpy(), sampler._history, path)
    noise = gumbel(params.seed, params.choice_index, 12, vocab_size=VOCAB)
    scores = dense(candidates, VOCAB) + (0 if params.greedy else noise)
    assert sampler.sample(row, path, 12) == int(np.argmax(scores))


@pytest.mark.parametrize("top_p", [0.9, 0.5])
def test_a_cached_row_and_noise_of_the_candidates_alone_choose_the_same_token(top_p: float) -> None:
    params, vocab_size = SamplingParams(top_p=top_p, seed=6), 49152
    for position in range(8):
        row = random_row(position, vocab_size) * 1.5
        fresh, cached = (RequestSampler(params, [1], vocab_size) for _ in range(2))
        cached._noise[position] = gumbel(6, 0, position, vocab_size=vocab_size)
        expected = fresh.sample(row, [], position)
        assert not fresh._noise, "few enough candidates for noise of their own"
        assert cached.sample(row, [], position) == expected


def test_greedy_ties_go_to_the_lowest_id() -> None:
    row = torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0])
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=0, top_k=2, top_p=0.5, min_p=0.5)):
        assert RequestSampler(params, [0], 5).sample(row, [], 1) == 1


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-9}])
def test_the_narrowest_filters_are_greedy(fields: dict[str, float]) -> None:
    for seed in range(20):
        row = random_row(seed)
        sampler = RequestSampler(SamplingParams(**fields), [0], VOCAB)
        assert sampler.sample(row, [], seed) == int(row.argmax())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=2**64 - 1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=2**63),
        SamplingParams(temperature=1.5, top_k=12, seed=0),
        SamplingParams(min_p=0.05, repetition_penalty=1.3, presence_penalty=0.5, seed=77, choice_index=3),
    ],
    ids=str,
)
def test_frequencies_match_the_softmax_of_the_processed_logits(params: SamplingParams) -> None:
    row, prompt, num_samples = random_row(9), [4, 8, 15], 4000
    sampler = RequestSampler(params, prompt, VOCAB)
    kept = dense(LogitsProcessor(params).process(row.numpy(), sampler._history, []), VOCAB).astype(np.float64)
    expected = num_samples * np.exp(kept - kept.max()) / np.exp(kept - kept.max()).sum()
    drawn = [sampler.sample(row, [], position) for position in range(num_samples)]
    observed = np.bincount(drawn, minlength=VOCAB)
    assert (observed[expected == 0] == 0).all()
    # Rare tokens share one cell, as the chi-square approximation wants five or more in each.
    rare = expected < 5
    cells = [(observed[~rare], expected[~rare]), (observed[rare].sum(keepdims=True), expected[rare].sum(keepdims=True))]
    deviations = np.concatenate([(o - e) ** 2 / np.maximum(e, 1e-12) for o, e in cells if e.sum() > 0])
    freedom = len(deviations) - 1
    # Wilson and Hilferty's 0.9999 quantile; the seeds are fixed, so this either always passes or never.
    assert deviations.sum() < freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def test_seeds_and_choice_indices_give_different_answers_and_the_same_ones_again() -> None:
    row = torch.zeros(VOCAB)
    answers = []
    for params in (SamplingParams(seed=s, choice_index=c) for s in (0, 2**32, 2**64 - 1) for c in (0, 1)):
        first, again = (
            [sampler.sample(row, [], position) for position in range(20)]
            for sampler in (RequestSampler(params, [1], VOCAB), RequestSampler(params, [1, 2, 3], VOCAB))
        )
        assert first == again
        answers.append(tuple(first))
    assert len(set(answers)) == len(answers)


def test_padding_beyond_the_vocabulary_is_never_sampled() -> None:
    row = torch.cat([random_row(2), torch.full((16,), 100.0)])
    for temperature in (0.0, 1.0):
        sampler = RequestSampler(SamplingParams(temperature=temperature), [1], VOCAB)
        assert sampler.sample(row, [], 1) == sampler.sample(row[:VOCAB], [], 1) < VOCAB


def test_noise_rows_stay_bounded_and_leave_with_their_positions() -> None:
    sampler = RequestSampler(SamplingParams(), [1], VOCAB)
    for position in range(1, 40):
        sampler.sample(random_row(0), [], position)
    assert len(sampler._noise) == 8
    sampler.commit([2] * 39)
    assert not sampler._noise


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_row_fails_one_call_and_changes_nothing(bad: float) -> None:
    sampler = RequestSampler(SamplingParams(repetition_penalty=1.2), [1], VOCAB)
    good, broken = random_row(4), random_row(4)
    expected = sampler.sample(good, [5], 2)
    broken[7] = bad
    with pytest.raises(InternalError, match="logits"):
        sampler.sample(broken, [5], 2)
    with pytest.raises(InternalError, match="logits"):
        sampler.logprobs(broken, 1, 2)
    with pytest.raises(InternalError, match="shape"):
        sampler.sample(good[:-1], [5], 2)
    assert sampler.sample(good, [5], 2) == expected


def test_logprobs_are_of_the_raw_distribution() -> None:
    row = random_row(6)
    everything = SamplingParams(temperature=0.1, top_k=1, repetition_penalty=2.0, logit_bias={0: 100.0})
    expected = torch.log_softmax(row.double(), 0)
    for params in (SamplingParams(), everything):
        own, likeliest = RequestSampler(params, [1, 2], VOCAB).logprobs(row, 33, 5)
        assert own == pytest.approx(float(expected[33]), abs=1e-12)
        assert [i for i, _ in likeliest] == expected.topk(5).indices.tolist()
        assert [value for _, value in likeliest] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-12)


def test_logprobs_of_a_greedy_token_equal_the_likeliest_exactly_and_ties_stand_by_id() -> None:
    row = torch.tensor([1.0, 4.0, 0.0, 4.0])
    sampler = RequestSampler(replace(SamplingParams(), temperature=0.0), [0], 4)
    token_id = sampler.sample(row, [], 1)
    own, likeliest = sampler.logprobs(row, token_id, 3)
    assert likeliest[0] == (token_id, own)
    assert [i for i, _ in likeliest] == [1, 3, 0]
    assert sampler.logprobs(row, 2, 0)[1] == []
    assert len(sampler.logprobs(row, 2, 99)[1]) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_end_an_answer_are_masked_until_it_has_its_least(temperature: float) -> None:
    row = torch.zeros(5)
    row[[2, 4]] = 50.0
    end = AnswerEnd(frozenset({2, 4}), min_tokens=3)
    sampler = RequestSampler(SamplingParams(temperature=temperature, seed=1), [0, 1], 5, end)
    drawn = [sampler.sample(row, [1] * depth, 2 + depth) in end.token_ids for depth in range(5)]
    assert drawn == [False, False, False, True, True]
    sampler.commit([1, 1])
    assert [sampler.sample(row, [1] * depth, 4 + depth) in end.token_ids for depth in range(2)] == [False, True]
    mask = np.array([False, True, True, True, True])
    assert sampler.sample(row, [], 4, mask) in (1, 3)

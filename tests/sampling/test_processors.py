"""Processors: agreement with transformers' warpers, one answer for ties, and shortcuts that change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_row import dense
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from outrider.errors import InternalError
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import LogitsProcessor, TokenHistory, min_p_indices, top_k_indices, top_p_indices

VOCAB = 300
# Few distinct values, so that borders are ties more often than not.
TIED_ROWS = st.lists(st.sampled_from([-9.0, -4.0, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=60)


def random_row(seed: int, size: int = VOCAB, scale: float = 3.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=size)).astype(np.float32)


def processed(row: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    history = TokenHistory(prompt, len(row))
    history.extend(output)
    return dense(LogitsProcessor(params).process(row, history, []), len(row))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(top_k=20),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(repetition_penalty=0.8),
        SamplingParams(temperature=1.4, top_k=40, top_p=0.95),
        SamplingParams(temperature=0.8, repetition_penalty=1.1, top_k=100, top_p=0.8, min_p=0.02),
    ],
    ids=str,
)
def test_processed_logits_agree_with_transformers(params: SamplingParams, seed: int) -> None:
    from transformers import (
        LogitsProcessorList,
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    row, prompt, output = random_row(seed), [3, 5, 5, 17], [5, 99, 120]
    warpers = LogitsProcessorList()
    if params.repetition_penalty != 1.0:
        warpers.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    expected = warpers(torch.tensor([prompt + output]), torch.tensor(row)[None])[0].numpy()
    actual = processed(row, params, prompt, output)
    assert np.isneginf(actual).tolist() == np.isneginf(expected).tolist()
    np.testing.assert_allclose(actual, expected, rtol=1e-6)


def test_each_penalty_has_its_own_history() -> None:
    row = np.array([2.0, 2.0, 2.0, -2.0], np.float32)
    history = TokenHistory([0, 3], 4)
    history.extend([1, 1])
    path = [2, 1]

    def at(**fields: float) -> list[float]:
        processor = LogitsProcessor(SamplingParams(**fields))
        return processor.process(row, history, path).logits.tolist()

    assert at(repetition_penalty=2.0) == [1.0, 1.0, 1.0, -4.0], "prompt, output and path, once"
    assert at(frequency_penalty=0.5) == [2.0, 0.5, 1.5, -2.0], "output and path, each time"
    assert at(presence_penalty=0.5) == [2.0, 1.5, 1.5, -2.0], "output and path, once"


def test_steps_run_in_the_documented_order() -> None:
    row = np.array([4.0, 1.0, 0.0, -1.0], np.float32)
    params = SamplingParams(
        temperature=0.5, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={0: -1.0}
    )
    # ((4 / 2) - 0.5 * 2 - 0.25 - 1) / 0.5
    assert processed(row, params, [], [0, 0]).tolist() == [-0.5, 2.0, 0.0, -2.0]
    # The bias decides who is among the top two.
    biased = SamplingParams(top_k=2, logit_bias={3: 9.0, 1: -5.0})
    assert np.flatnonzero(np.isfinite(processed(row, biased, [], []))).tolist() == [0, 3]


def test_a_path_is_forgotten_after_the_call() -> None:
    history = TokenHistory([1], 8)
    history.extend([2])
    before = history.counts([]).copy()
    assert history.counts([2, 2, 7]).tolist() == [0, 0, 3, 0, 0, 0, 0, 1]
    assert history.counts([]).tolist() == before.tolist()


@given(TIED_ROWS, st.integers(1, 70))
def test_top_k_keeps_the_lowest_ids_of_a_tie(values: list[float], k: int) -> None:
    row = np.array(values, np.float32)
    expected = sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:k])
    assert top_k_indices(row, k).tolist() == expected


@given(TIED_ROWS, st.floats(0, 1))
def test_top_p_keeps_the_shortest_prefix_that_reaches_the_mass(values: list[float], top_p: float) -> None:
    row = np.array(values, np.float32)
    weights = np.exp(row.astype(np.float64) - row.max())
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    kept, mass = [], 0.0
    for index in order:
        kept.append(index)
        mass += weights[index]
        if mass >= top_p * weights.sum():
            break
    assert top_p_indices(row, top_p).tolist() == sorted(kept)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.99, 0.999999])
def test_shortlists_change_nothing(scale: float, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rounded, so that there are ties at every border.
    row = np.round(random_row(7, 5000, scale), 1)
    short = top_p_indices(row, top_p), [top_k_indices(row, k) for k in (1, 7, 500, 4999)]
    monkeypatch.setattr("outrider.sampling.sampler._SHORTLIST_NATS", ())
    full = top_p_indices(row, top_p), [top_k_indices(row, k) for k in (1, 7, 500, 4999)]
    assert short[0].tolist() == full[0].tolist()
    assert [ids.tolist() for ids in short[1]] == [ids.tolist() for ids in full[1]]


def test_min_p_keeps_every_token_at_the_border() -> None:
    row = np.array([1.0, 3.0, 3.0, 2.0], np.float32)
    assert min_p_indices(row, 1.0).tolist() == [1, 2]
    assert min_p_indices(row, 0.3).tolist() == [1, 2, 3]
    assert min_p_indices(row, 1e-9).tolist() == [0, 1, 2, 3]


def test_a_mask_acts_before_the_filters() -> None:
    row = np.array([5.0, 4.0, 3.0, 2.0], np.float32)
    mask = np.array([False, True, True, True])
    candidates = LogitsProcessor(SamplingParams(top_k=2)).process(row, None, [], mask)
    assert candidates.token_ids is not None
    assert candidates.token_ids.tolist() == [1, 2]


def test_the_row_is_never_written_to() -> None:
    row = random_row(3)
    before = row.copy()
    everything = SamplingParams(
        temperature=0.5,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        repetition_penalty=1.5,
        logit_bias={4: 2.0},
    )
    for params in (everything, replace(everything, temperature=0.0), SamplingParams(), SamplingParams(temperature=0)):
        processed(row, params, [1, 2], [3])
        assert row.tobytes() == before.tobytes()


def test_extreme_temperatures_stay_usable() -> None:
    row = random_row(5)
    for cold in (1e-6, 1e-30, 1e-320):
        kept = processed(row, SamplingParams(temperature=cold, top_p=0.9), [], [])
        assert np.flatnonzero(np.isfinite(kept)).tolist() == [int(row.argmax())]
    hot = processed(row, SamplingParams(temperature=1e30), [], [])
    assert np.abs(hot).max() < 1e-28


@pytest.mark.parametrize(
    ("bad", "word"), [(np.nan, "NaN"), (np.inf, r"\+inf"), (None, "-inf")], ids=["nan", "inf", "nothing"]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_are_an_internal_error_that_says_why(bad: float | None, word: str, temperature: float) -> None:
    row = random_row(1)
    if bad is None:
        row[:] = -np.inf
    else:
        row[123] = bad
    with pytest.raises(InternalError, match=word):
        processed(row, SamplingParams(temperature=temperature, top_p=0.9), [], [])


def test_a_mask_that_allows_nothing_is_an_internal_error() -> None:
    with pytest.raises(InternalError, match="no token"):
        LogitsProcessor(SamplingParams()).process(random_row(1), None, [], np.zeros(VOCAB, np.bool_))

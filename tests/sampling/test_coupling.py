"""What drafters gain from the shared noise, and whether their edge scores mean what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.sampling.noise import edge_scores, gumbel, rank_with_noise

NUM_POSITIONS = 600
NUM_TOKENS = 1000
WIDTHS = (1, 2, 4, 8)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def test_ranking_with_the_shared_noise_hits_far_more_often_than_ranking_by_probability() -> None:
    rng = np.random.default_rng(20240807)
    ids = np.arange(NUM_TOKENS)
    hits = {"shared": np.zeros(len(WIDTHS)), "alone": np.zeros(len(WIDTHS))}
    for position in range(NUM_POSITIONS):
        logits = 2.0 * rng.normal(size=NUM_TOKENS)
        target = np.argmax(log_softmax(logits) + gumbel(5, 0, position, ids))
        log_q = log_softmax(logits + 0.5 * rng.normal(size=NUM_TOKENS)).astype(np.float32)
        ranked = {"shared": rank_with_noise(log_q, ids, 5, 0, position, 1.0), "alone": log_q}
        for name, scores in ranked.items():
            rank = int((scores > scores[target]).sum())
            hits[name] += np.array([rank < width for width in WIDTHS]) / NUM_POSITIONS
    np.testing.assert_allclose(hits["shared"], [0.76, 0.91, 0.98, 1.00], atol=0.05)
    np.testing.assert_allclose(hits["alone"], [0.12, 0.20, 0.27, 0.36], atol=0.10)


def test_at_temperature_0_ranks_and_edges_are_log_q() -> None:
    log_q = np.log(np.array([0.6, 0.3], np.float32))
    ranked = rank_with_noise(log_q, np.array([7, 2]), 5, 0, 3, 0.0)
    assert ranked.tolist() == log_q.tolist()
    assert edge_scores(ranked, 0.1, 0.0).tolist() == log_q.tolist()


def test_over_a_whole_vocabulary_edges_are_a_softmax() -> None:
    ranked = np.random.default_rng(1).normal(size=50).astype(np.float32)
    edges = edge_scores(ranked, 0.0, 1.0, tau=0.7)
    np.testing.assert_allclose(edges, log_softmax(ranked.astype(np.float64) / 0.7), rtol=1e-6)


@pytest.mark.parametrize("chances", [[0.9], [0.6, 0.2, 0.1], [0.3, 0.3], [0.05]])
@pytest.mark.parametrize("spread", ["one token", "many tokens"])
def test_sparse_edges_are_calibrated_however_the_rest_is_spread(chances: list[float], spread: str) -> None:
    rest = 1.0 - sum(chances)
    others = [rest] if spread == "one token" else [rest / 500] * 500
    log_p, ids = np.log(chances + others), np.arange(len(chances))
    num_positions = 1500
    expected, observed = np.zeros(len(ids)), np.zeros(len(ids))
    for position in range(num_positions):
        target = int(np.argmax(log_p + gumbel(9, 0, position, vocab_size=len(log_p))))
        ranked = rank_with_noise(log_p[ids].astype(np.float32), ids, 9, 0, position, 1.0)
        expected += np.exp(edge_scores(ranked, rest, 1.0, tau=0.1)) / num_positions
        observed += (ids == target) / num_positions
    np.testing.assert_allclose(expected, observed, atol=0.03)


def test_lucky_noise_raises_an_edge_and_unlucky_noise_lowers_it() -> None:
    log_q = np.log(np.array([0.5], np.float32))
    unlucky, neutral, lucky = (float(edge_scores(log_q + np.float32(g), 0.5, 1.0)[0]) for g in (-2.0, 0.4, 6.0))
    assert unlucky < np.log(0.1) < np.log(0.3) < neutral < np.log(0.6) < np.log(0.95) < lucky <= 0.0


@settings(deadline=None)
@given(
    st.lists(st.floats(-40, 30, width=32) | st.just(float("-inf")), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0.05, 3),
)
def test_edges_are_log_probabilities_that_leave_room_for_the_rest(ranked: list[float], rest: float, tau: float) -> None:
    edges = edge_scores(np.array(ranked, np.float32), rest, 1.0, tau)
    assert edges.dtype == np.float32
    assert not np.isnan(edges).any()
    assert (edges <= 0).all()
    assert np.exp(edges.astype(np.float64)).sum() <= 1 + 1e-5


def test_rows_of_a_batch_equal_single_calls() -> None:
    ranked = np.random.default_rng(2).normal(size=(4, 3)).astype(np.float32)
    ranked[1, 2] = -np.inf
    rest = np.array([0.0, 0.2, 0.9, 1.0])
    together = edge_scores(ranked, rest, 1.0)
    for row, edges in enumerate(together):
        np.testing.assert_allclose(edges, edge_scores(ranked[row], float(rest[row]), 1.0), rtol=1e-6)

"""What drafters gain from the shared noise."""

from __future__ import annotations

import numpy as np

from outrider.sampling.noise import gumbel

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
        ranked = {"shared": log_q + gumbel(5, 0, position, ids), "alone": log_q}
        for name, scores in ranked.items():
            rank = int((scores > scores[target]).sum())
            hits[name] += np.array([rank < width for width in WIDTHS]) / NUM_POSITIONS
    np.testing.assert_allclose(hits["shared"], [0.76, 0.91, 0.98, 1.00], atol=0.05)
    np.testing.assert_allclose(hits["alone"], [0.12, 0.20, 0.27, 0.36], atol=0.10)

"""Scores are worth what was committed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from outrider.tree.mirror import Observation
from verify_service.speculation.replica import Calibrator


def feed(calibrator: Calibrator, score: float, source: int, chance: float, count: int = 2000) -> None:
    source_of_luck = np.random.default_rng(7)
    for _ in range(count):
        calibrator.observe([Observation(score, source, source_of_luck.random() < chance)])


@pytest.mark.parametrize(("promised", "real"), [(0.9, 0.3), (0.5, 0.5), (0.2, 0.6), (0.05, 0.01)])
def test_a_source_is_corrected_to_its_observed_acceptance(promised: float, real: float) -> None:
    calibrator = Calibrator()
    feed(calibrator, float(np.log(promised)), 1, real)
    assert math.exp(calibrator(math.log(promised), 1)) == pytest.approx(real, abs=0.06)


def test_sources_do_not_mix() -> None:
    calibrator = Calibrator()
    feed(calibrator, -0.1, 1, 0.0)
    bad, fresh = calibrator(-0.1, 1), calibrator(-0.1, 2)
    assert bad < -2.5 and fresh == pytest.approx(-0.1, abs=1e-6)


def test_a_change_of_text_is_followed() -> None:
    calibrator = Calibrator()
    feed(calibrator, -0.2, 0, 0.9)
    feed(calibrator, -0.2, 0, 0.05)
    assert math.exp(calibrator(-0.2, 0)) < 0.25


@given(arrays(np.float32, st.integers(0, 30), elements=st.floats(-(2.0**90), 0, width=32)), st.integers(0, 255))
def test_calibrated_scores_are_log_probabilities(scores: np.ndarray, source: int) -> None:
    calibrator = Calibrator()
    calibrator.observe([Observation(score, source, score > -1) for score in scores.tolist()])
    assert all(-math.inf < calibrator(score, source) < 0 for score in scores.tolist())

"""A model of a round's time: a fixed part, and parts for tokens, requests, and the contexts that they attend to."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider_tools.bench.report import Row

CASE = re.compile(r"(plain|tree) engine b(\d+) m(\d+) ctx([\d.]+)k \S+ greedy")


@dataclass(frozen=True)
class Point:
    """A kind of round: `num_tokens` over `num_rows` requests, each with `context` cached tokens."""

    num_rows: int
    num_tokens: int
    context: int

    @classmethod
    def of(cls, case: str) -> Point | None:
        """Return the round that a row's case describes; None for other cases, and for decoding other than greedy."""
        found = CASE.search(case)
        if found is None:
            return None
        return cls(int(found[2]), int(found[3]), round(float(found[4]) * 1024))

    @property
    def features(self) -> list[float]:
        """The terms that the time is linear in."""
        keys = self.num_rows * self.context
        return [1.0, self.num_tokens, self.num_rows, keys / 1024, self.num_tokens * self.context / 1024]


@dataclass(frozen=True)
class FittedCost:
    """Milliseconds of a round: coefficients of `Point.features`, none of them negative."""

    coefficients: NDArray[np.float64]
    worst: float
    """Largest relative error over the fitted rounds."""

    NAMES = ("base_ms", "ms_per_token", "ms_per_request", "ms_per_1k_keys", "ms_per_token_and_1k_keys")

    @classmethod
    def fit(cls, points: Iterable[tuple[Point, float]]) -> FittedCost:
        """Fit by least squares of the relative error. Raises ValueError for fewer rounds than coefficients."""
        pairs = list(points)
        if len(pairs) < len(cls.NAMES):
            raise ValueError(f"{len(pairs)} rounds are too few for a model of {len(cls.NAMES)} coefficients")
        times = np.array([ms for _, ms in pairs])
        features = np.array([point.features for point, _ in pairs]) / times[:, None]
        used = list(range(len(cls.NAMES)))
        while True:
            solution, *_ = np.linalg.lstsq(features[:, used], np.ones(len(pairs)), rcond=None)
            # A part with a negative coefficient explains nothing: drop it and fit again.
            if (solution >= 0).all() or len(used) == 1:
                break
            used.pop(int(solution.argmin()))
        coefficients = np.zeros(len(cls.NAMES))
        coefficients[used] = solution
        return cls(coefficients, float(np.abs(features @ coefficients - 1).max()))

    def __call__(self, point: Point) -> float:
        """Return the milliseconds of a round."""
        return float(np.dot(self.coefficients, point.features))


def round_times(rows: Iterable[Row], metric: str) -> dict[Point, float]:
    """Return the milliseconds of each greedy round that `rows` have under `metric`."""
    found = ((Point.of(row.case), row.value) for row in rows if row.metric == metric)
    return {point: ms for point, ms in found if point is not None}

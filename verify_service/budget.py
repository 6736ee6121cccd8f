"""How many tree nodes a round takes: as many as pay, by measured times and calibrated scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

WIDTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Token counts at which a forward is measured."""

_LEARN = 0.05
_HYSTERESIS = 1.02


class CostModel:
    """t(M): seconds of a round of M tokens, host work included. Measured at start, followed while serving."""

    def __init__(self, seconds: Sequence[float], widths: Sequence[int] = WIDTHS) -> None:
        self._widths = np.array(widths, np.float64)
        # More tokens never cost less; a dip is noise that would draw rounds to it.
        self._seconds = np.maximum.accumulate(np.array(seconds, np.float64))

    @classmethod
    def measured(cls, measure: Callable[[int], float]) -> CostModel:
        """Times every width once with `measure`."""
        return cls([measure(width) for width in WIDTHS])

    def seconds(self, tokens: NDArray[np.int64] | int) -> NDArray[np.float64]:
        """t at each token count; past the last width it grows as it did between the last two."""
        tokens = np.asarray(tokens, np.float64)
        slope = (self._seconds[-1] - self._seconds[-2]) / (self._widths[-1] - self._widths[-2])
        beyond = np.maximum(tokens - self._widths[-1], 0.0) * slope
        result: NDArray[np.float64] = np.interp(tokens, self._widths, self._seconds) + beyond
        return result

    def observe(self, tokens: int, seconds: float) -> None:
        """Follow a round's wall time: the level of the whole curve, and the shape near this width."""
        ratio = float(np.clip(seconds / float(self.seconds(tokens)), 0.5, 2.0))
        near = np.exp(-np.abs(np.log2(self._widths / max(tokens, 1))))
        self._seconds *= ratio ** (_LEARN * (0.5 + 0.5 * near))
        self._seconds = np.maximum.accumulate(self._seconds)

    def table(self) -> dict[int, float]:
        """Width to seconds, as known now."""
        return {int(width): float(value) for width, value in zip(self._widths, self._seconds, strict=True)}


class Budget:
    """Picks the total number of nodes n that maximises expected committed tokens over t(roots + n)."""

    def __init__(self, cost: CostModel, max_nodes: int) -> None:
        self.cost = cost
        self.max_nodes = max_nodes
        self._last = 0

    def choose(
        self, num_extend: int, num_roots: int, log_probs: Sequence[NDArray[np.float64]]
    ) -> list[NDArray[np.int64]]:
        """Which nodes a round takes.

        `num_extend` tokens are computed anyway, `num_roots` of them are roots that commit one token each for certain.
        `log_probs[r]`, shape [N_r], are the path scores of request r's nodes, parents first. Returns the indices
        taken for each request, ascending, and always with their parents: a path's score never rises from parent to
        child and ties go to the lower index.
        """
        flat = np.concatenate([np.empty(0), *log_probs])
        order = np.argsort(-flat, kind="stable")[: self.max_nodes]
        count = self._count(num_extend, num_roots, np.exp(flat[order]))
        taken = np.sort(order[:count])
        bounds = np.cumsum([0, *(len(scores) for scores in log_probs)])
        cuts = np.searchsorted(taken, bounds)
        return [taken[cuts[i] : cuts[i + 1]] - bounds[i] for i in range(len(log_probs))]

    def rate(self, num_extend: int, num_roots: int, probs: NDArray[np.float64]) -> tuple[float, float]:
        """Expected tokens and seconds of the best round with nodes of these path probabilities, descending."""
        expected, seconds = self._curves(num_extend, num_roots, probs)
        best = int(np.argmax(expected / seconds))
        return float(expected[best]), float(seconds[best])

    def _curves(
        self, num_extend: int, num_roots: int, probs: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        expected = num_roots + np.concatenate([[0.0], np.cumsum(probs)])
        seconds = self.cost.seconds(num_extend + np.arange(len(expected)))
        return expected, seconds

    def _count(self, num_extend: int, num_roots: int, probs: NDArray[np.float64]) -> int:
        expected, seconds = self._curves(num_extend, num_roots, probs)
        rate = expected / seconds
        best = int(np.argmax(rate))
        # Jumping between widths for a gain inside the noise of t would only stir the estimates.
        if self._last < len(rate) and rate[self._last] * _HYSTERESIS >= rate[best] and self._last:
            best = self._last
        self._last = best
        return best

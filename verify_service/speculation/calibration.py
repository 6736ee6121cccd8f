"""What a draft's guesses are worth, from what was committed: its scores, and whether it is told of every commit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.tree.handshake import MAX_SOURCES
from outrider.tree.mirror import Observation

_SCORE_EDGES = (-7.0, -5.0, -3.5, -2.5, -1.8, -1.2, -0.8, -0.5, -0.3, -0.15, -0.05)
_NUM_BINS = len(_SCORE_EDGES) + 1
_PRIOR_OBSERVATIONS = 6.0
"""Observations that the draft's own estimate counts for."""
_MEMORY_OBSERVATIONS = 400.0
"""Observations after which older ones fade, so that a change of text is followed."""
_MAX_SCORE = -1e-4
"""Nothing is certain: keeps deeper nodes below their parents."""


class Calibrator:
    """Corrects edge scores by source and range: observed acceptance over what the scores promised.

    Every child of a committed token is an observation, verified or not, so nothing has to be probed and calibration
    goes on while no drafts are verified.
    """

    def __init__(self) -> None:
        self._promised = np.zeros((MAX_SOURCES, _NUM_BINS))
        self._hits = np.zeros((MAX_SOURCES, _NUM_BINS))
        self._seen = np.zeros((MAX_SOURCES, _NUM_BINS))
        self._shifts = [[0.0] * _NUM_BINS] * MAX_SOURCES

    def __call__(self, score: float, source: int) -> float:
        """The edge score of a source as a calibrated edge log-probability, at most 0."""
        return min(score + self._shifts[source][bisect_left(_SCORE_EDGES, score)], _MAX_SCORE)

    def observe(self, observations: Sequence[Observation]) -> None:
        """Learn from children of committed tokens."""
        if not observations:
            return
        scores = np.array([seen.score for seen in observations], np.float32)
        sources = np.array([seen.source for seen in observations], np.uint8)
        hits = [seen.hit for seen in observations]
        place = (sources, np.searchsorted(_SCORE_EDGES, scores))
        np.add.at(self._promised, place, np.exp(scores))
        np.add.at(self._hits, place, hits)
        np.add.at(self._seen, place, 1.0)
        self._refresh(np.unique(sources))

    def _refresh(self, sources: NDArray[np.uint8]) -> None:
        fade = np.minimum(1.0, _MEMORY_OBSERVATIONS / np.maximum(self._seen[sources], 1.0))
        for table in (self._promised, self._hits, self._seen):
            table[sources] *= fade
        mean = np.where(self._seen[sources] > 0, self._promised[sources] / np.maximum(self._seen[sources], 1e-9), 1.0)
        prior = _PRIOR_OBSERVATIONS * np.maximum(mean, 1e-4)
        shifts = np.log((self._hits[sources] + prior) / (self._promised[sources] + prior))
        for source, shift in zip(sources.tolist(), shifts.tolist(), strict=True):
            self._shifts[source] = shift


MAX_WRONG_LOOKS = 64
"""Looks in a row that found nothing right, after which a draft is in doubt: guesses that are right once in 10 tokens
come so far once in 800 trials, and those that are right less often hardly pay for what they cost."""

_MIN_SKIPPED = 4
_MAX_SKIPPED = 32
"""Commits in a row that a draft in doubt is not told of: the first time, then doubled each time, and at most."""


@dataclass(slots=True)
class DraftBackoff:
    """What came of a draft's guesses lately. One without guesses costs little, and shows nothing of what it is worth.

    A draft in doubt would cost as much as any: commits and features leave, answers are read. So it is told of commits
    rarely, of several at once, and grows little. The first guess that is right ends the doubt.
    """

    num_wrong: int = 0
    """Looks in a row at guesses for committed tokens that found nothing right."""
    num_skipped: int = 0
    """Commits that the draft was not told of since it last was."""

    @property
    def in_doubt(self) -> bool:
        """Whether nothing was right for long."""
        return self.num_wrong >= MAX_WRONG_LOOKS

    def restart(self, num_wrong: int) -> None:
        """Begin with another draft, whose guesses were wrong so many times in a row."""
        self.num_wrong, self.num_skipped = num_wrong, 0

    def judge(self, seen: Sequence[Observation]) -> None:
        """Take what a look has shown: the draft's guesses for tokens that were committed since the last one."""
        if any(one.hit for one in seen):
            self.num_wrong = 0
        elif seen:
            self.num_wrong += 1

    def skips(self) -> bool:
        """Whether the draft need not be told of a commit now; to be asked once for each."""
        doubt = self.num_wrong - MAX_WRONG_LOOKS
        if doubt >= 0 and self.num_skipped < min(_MIN_SKIPPED << min(doubt, 10), _MAX_SKIPPED):
            self.num_skipped += 1
            return True
        self.num_skipped = 0
        return False

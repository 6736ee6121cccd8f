"""A draft as verify's engine knows it: its connection, how fast it answers, and what its guesses are worth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from outrider.protocol.speculation import Features, FeaturesBegin, VerifyMessage
from outrider.tree.handshake import MAX_SOURCES
from outrider.tree.mirror import Observation


class DraftConnection(Protocol):
    """A session with a draft."""

    address: str
    """Where the draft is."""

    @property
    def has_room(self) -> bool:
        """Whether features should be sent now."""

    def send(self, messages: list[VerifyMessage]) -> None:
        """Send messages at once, in order: a round may be held for their answer."""

    def begin_features(self, begin: FeaturesBegin) -> None:
        """Open the features stream, under the session's own token; `FeatureSender.opened` hears when it is."""

    def send_features(self, messages: list[Features]) -> None:
        """Send features, in order. Their bytes are good during the call alone."""

    def reset(self) -> None:
        """End the session, from which nothing is heard, and begin anew."""


PROMISE_NODES = 8
"""Best nodes of a request's tree that a wait counts on: what they bring, and what a round of them costs."""

MAX_PARTS = 6
"""Parts behind an answer that are looked at: with what came before them, a level of the tree for each that is likely to
be followed at all."""

_MIN_END_CHANCE = 0.5
"""Chance that a tree ends too soon, below which what a part adds says little."""
_LEARN_RATE = 0.1
"""Weight of the newest measurement."""
_TIME_OPTIMISM = 0.02
"""Part by which times look shorter with each commit whose answer no round waited for long enough."""
_GAIN_OPTIMISM = 0.003
"""Part by which gains look larger; less, because what was waited for to its end is known well."""
_SLOW_FACTOR = 10.0
_SLOW_MIN_SECONDS = 0.05
"""A replica is slow with an answer that takes both so long, and so many times as long as usual."""
_LOST_SECONDS = 2.0
_TIMEOUT_FACTOR = 1.5
"""Times as long as a wait in vain that an answer is assumed to take."""

_PRIOR_FOUND = 0.7
"""Part of the answers without a wait that are assumed to leave nodes for the round after, before any was seen."""
_FOUND_OPTIMISM = 0.01
"""Part of the way back to the prior with each answer that a round waited for: it says nothing of the others."""


class AnswerTimes:
    """How long something takes, in seconds: the mean of late, and about the 95th percentile."""

    def __init__(self, typical: float = 0.002, late: float = 0.006) -> None:
        self.typical = typical
        self.late = late

    def note(self, seconds: float) -> None:
        """Take the time of one more answer."""
        self.typical += _LEARN_RATE * (seconds - self.typical)
        # A quantile by stochastic steps: up 19 times as far as down settles where 1 in 20 answers is later.
        step = _LEARN_RATE * max(self.typical, 1e-4)
        self.late = max(self.late + (step if seconds > self.late else -step / 19), self.typical)

    def shorten(self) -> None:
        """Take it for a little faster than it was."""
        self.typical *= 1 - _TIME_OPTIMISM
        self.late = max(self.late * (1 - _TIME_OPTIMISM), self.typical)

    def note_timeout(self, seconds: float) -> None:
        """Take a wait that nothing came in. A short one says nothing of what usually takes longer."""
        if _TIMEOUT_FACTOR * seconds > self.typical:
            self.note(_TIMEOUT_FACTOR * seconds)

    def left(self, waited: float) -> tuple[float, float]:
        """What is left of `typical` and `late` after waiting for `waited` seconds."""
        return max(self.typical - waited, 0.0), max(self.late - waited, 0.0)


class AnswerStats:
    """What a draft sends after a commit: an answer, and more of it, part by part, as a model's burst goes on.

    `answer`, `more`, `later`: times of the answer, from it to the first part, and from a part to the next one.
    `more_gain`: accepted tokens that the first part added to what the answer promised, 0 where none came.
    `part_gains`: accepted tokens that the first, second, ... part adds, as a share of the chance that the tree ends too
    soon without it.
    `found`: how often, without a wait for it, an answer left nodes for the round after.
    """

    def __init__(self, more_gain: float = 0.0, found: float = 0.0) -> None:
        self.answer = AnswerTimes()
        self.more = AnswerTimes()
        self.later = AnswerTimes()
        self.more_gain = more_gain
        self.part_gains = [0.0] * MAX_PARTS
        self.found = self._prior_found = found
        self.shares: NDArray[np.float64] = np.arange(1.0, PROMISE_NODES + 1) / PROMISE_NODES

    def part_times(self, part: int) -> AnswerTimes:
        """How long part number `part` takes, from what came before it."""
        return self.later if part else self.more

    def note_shares(self, promise: NDArray[np.float64]) -> None:
        """Tokens that the best 1, 2, ... nodes of an answer are expected to have accepted, shape [PROMISE_NODES]."""
        if promise[-1]:
            self.shares = self.shares + _LEARN_RATE * (promise / promise[-1] - self.shares)

    def note_found(self, waited: bool, has_nodes: bool) -> None:
        """A round began without nodes, after a wait for them or not, and the one after it has some or not."""
        if waited:  # which says nothing of rounds that do not
            self.found += _FOUND_OPTIMISM * (self._prior_found - self.found)
        else:
            self.found += _LEARN_RATE * (has_nodes - self.found)

    def note_more_gain(self, gain: float) -> None:
        """The first part behind an answer brought so much; nothing if none came before the round was over."""
        self.more_gain += _LEARN_RATE * (gain - self.more_gain)

    def note_part_gain(self, part: int, gain: float, end_chance: float) -> None:
        """Part number `part` brought so much, and before it the tree ended too soon with this chance."""
        if end_chance >= _MIN_END_CHANCE:
            self.part_gains[part] += _LEARN_RATE * (gain / end_chance - self.part_gains[part])

    def note_unmeasured(self) -> None:
        """No round waited long enough to measure anything: what may come looks a little better each time.

        So a draft that was not worth waiting for is tried again some day.
        """
        self.more_gain += _GAIN_OPTIMISM * max(1.0 - self.more_gain, 0.0)
        self.answer.shorten()
        self.more.shorten()


class ReplicaHealth:
    """Times from a commit to the draft's acknowledgement of it, in seconds.

    A replica is good while its oldest unanswered commit is young for it, and lost when nothing came back for two
    seconds: it may be stopped, or its connection dead without a word.
    """

    def __init__(self, clock: Callable[[], float], shares_cores: bool = False) -> None:
        """`shares_cores`: a draft shows what it can do only if it is waited for, so much is expected of it at first."""
        self._clock = clock
        self._prior_gain = 1.0 if shares_cores else 0.0
        self._prior_found = 0.0 if shares_cores else _PRIOR_FOUND
        self.unreported: list[float] = []
        """Times of answers that no figures have yet; whoever reports them empties it."""
        self.restart()

    def restart(self) -> None:
        """Forget everything, as at the start of a session."""
        self.times = AnswerTimes()
        self.misses = AnswerStats(self._prior_gain, self._prior_found)
        """After commits that left no nodes."""
        self.hits = AnswerStats(self._prior_gain)
        """After those that left some, where an answer to them is waited for."""
        self.opens = AnswerTimes()
        """Times of the first answers to requests that were opened, prompts included."""
        self._unanswered: dict[int, tuple[int, float]] = {}
        self._newest: dict[int, tuple[int, float]] = {}
        self._silence = 0.0
        """Seconds since anything was heard for which requests were waited for that have ended."""

    def sent(self, number: int, length: int) -> None:
        """A request was opened or committed up to `length`; the oldest unanswered one counts."""
        self._newest[number] = (length, self._clock())
        self._unanswered.setdefault(number, self._newest[number])

    def answered(self, number: int, acked_len: int, at: float) -> None:
        """An answer of time `at` says that the draft has applied commits up to `acked_len`."""
        length, since = self._unanswered.get(number, (0, 0.0))
        if not length or acked_len < length:
            return
        seconds = max(at - since, 0.0)
        self.unreported.append(seconds)
        self.times.note(seconds)
        # What was sent while this one was under way is still to be answered, or nobody would miss its answer.
        if self._newest[number][0] > acked_len:
            self._unanswered[number] = self._newest[number]
        else:
            self._drop(number)

    def heard(self) -> None:
        """The draft has said something, of whatever request."""
        self._silence = 0.0

    def forget(self, number: int) -> None:
        """No answer is expected any more.

        A wait that was long for this replica counts on, or no silence would be noticed among short requests.
        """
        waited, was_good = self._oldest(), self.good
        self._drop(number)
        if not was_good:
            self._silence += max(waited - self._oldest(), 0.0)

    def _drop(self, number: int) -> None:
        self._unanswered.pop(number, None)
        self._newest.pop(number, None)

    @property
    def good(self) -> bool:
        """Whether waiting for this replica can be worth it."""
        return self._oldest() < max(_SLOW_MIN_SECONDS, _SLOW_FACTOR * self.times.typical)

    @property
    def lost(self) -> bool:
        """Whether the session should be given up."""
        return self._silence + self._oldest() > _LOST_SECONDS

    def _oldest(self) -> float:
        return self._clock() - min(since for _, since in self._unanswered.values()) if self._unanswered else 0.0


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
        sources = np.unique(sources)
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

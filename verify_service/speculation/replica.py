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
        """Open the features stream, under the session's own token; `FeatureSender.opened` is called when it is open."""

    def send_features(self, messages: list[Features]) -> None:
        """Send features, in order. Their bytes are valid only during the call."""

    def reset(self) -> None:
        """End the session, which has gone silent, and begin a new one."""


PROMISE_NODES = 8
"""Number of best nodes of a request's tree that a wait counts on: what they bring, and what a round of them costs."""

MAX_PARTS = 6
"""Most parts behind an answer that are looked at: together with the answer, one for each level of a tree that is likely
to be reached at all."""

_MIN_END_CHANCE = 0.5
"""Chance that a tree ends too soon; below it, what a part adds says little."""
_LEARN_RATE = 0.1
"""Weight of the newest measurement."""
_TIME_OPTIMISM = 0.02
"""Part by which times look shorter with each commit whose answer no round waited for long enough."""
_GAIN_OPTIMISM = 0.003
"""Part by which gains then look larger; less, because gains of answers waited for to the end are known well."""
_SLOW_FACTOR = 10.0
_SLOW_MIN_SECONDS = 0.05
"""A replica is slow if an answer takes this long, and _SLOW_FACTOR times as long as usual."""
_LOST_SECONDS = 2.0
_TIMEOUT_FACTOR = 1.5
"""After a wait in vain, an answer is assumed to take this many times as long as the wait."""

_PRIOR_FOUND = 0.7
"""Part of the answers without a wait that are assumed, before any was seen, to leave nodes for the round after."""
_FOUND_OPTIMISM = 0.01
"""Part of the way back to the prior that each awaited answer brings: it says nothing about answers without a wait."""


class AnswerTimes:
    """How long something takes, in seconds: the recent mean, and about the 95th percentile."""

    def __init__(self, typical: float = 0.002, late: float = 0.006) -> None:
        self.typical = typical
        self.late = late

    def note(self, seconds: float) -> None:
        """Take the time of one more answer."""
        self.typical += _LEARN_RATE * (seconds - self.typical)
        # A quantile by stochastic steps: with steps up 19 times as large as down, 1 in 20 answers is later in the end.
        step = _LEARN_RATE * max(self.typical, 1e-4)
        self.late = max(self.late + (step if seconds > self.late else -step / 19), self.typical)

    def shorten(self) -> None:
        """Assume that it has become a little faster."""
        self.typical *= 1 - _TIME_OPTIMISM
        self.late = max(self.late * (1 - _TIME_OPTIMISM), self.typical)

    def note_timeout(self, seconds: float) -> None:
        """Note a wait in which nothing came. A short one says nothing about something that usually takes longer."""
        if _TIMEOUT_FACTOR * seconds > self.typical:
            self.note(_TIMEOUT_FACTOR * seconds)

    def left(self, waited: float) -> tuple[float, float]:
        """Return what is left of `typical` and `late` after waiting for `waited` seconds."""
        return max(self.typical - waited, 0.0), max(self.late - waited, 0.0)


class AnswerStats:
    """What a draft sends after a commit: an answer, and more of it, part by part, as a model's burst goes on.

    `answer`, `more`, `later`: times of the answer, from it to the first part, and from a part to the next one.
    `more_gain`: accepted tokens that the first part added to what the answer promised, 0 if none came.
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
        """Return how long part number `part` takes, from the part or answer before it."""
        return self.later if part else self.more

    def note_shares(self, promise: NDArray[np.float64]) -> None:
        """Learn how many accepted tokens the best 1, 2, ... nodes of an answer promise, shape [PROMISE_NODES]."""
        if promise[-1]:
            self.shares = self.shares + _LEARN_RATE * (promise / promise[-1] - self.shares)

    def note_found(self, waited: bool, has_nodes: bool) -> None:
        """Note whether a round that began without nodes waited for some, and whether the round after it has any."""
        if waited:  # which says nothing about rounds that do not wait
            self.found += _FOUND_OPTIMISM * (self._prior_found - self.found)
        else:
            self.found += _LEARN_RATE * (has_nodes - self.found)

    def note_more_gain(self, gain: float) -> None:
        """Note the gain of the first part behind an answer; 0 if none came before the round was over."""
        self.more_gain += _LEARN_RATE * (gain - self.more_gain)

    def note_part_gain(self, part: int, gain: float, end_chance: float) -> None:
        """Note the gain of part number `part`, and the chance before it that the tree ended too soon."""
        if end_chance >= _MIN_END_CHANCE:
            self.part_gains[part] += _LEARN_RATE * (gain / end_chance - self.part_gains[part])

    def note_unmeasured(self) -> None:
        """Note that no round waited long enough to measure anything: estimates then become a little better each time.

        So a draft that was not worth waiting for is tried again eventually.
        """
        self.more_gain += _GAIN_OPTIMISM * max(1.0 - self.more_gain, 0.0)
        self.answer.shorten()
        self.more.shorten()


class ReplicaHealth:
    """How long a draft takes to acknowledge commits, in seconds, and what its answers bring.

    A replica is good while its oldest unanswered commit is not unusually old, and lost when nothing came back for two
    seconds: it may be stopped, or its connection dead without notice.
    """

    def __init__(self, clock: Callable[[], float], shares_cores: bool = False) -> None:
        """`shares_cores`: such a draft shows what it can do only if it is waited for, so much is expected at first."""
        self._clock = clock
        self._prior_gain = 1.0 if shares_cores else 0.0
        self._prior_found = 0.0 if shares_cores else _PRIOR_FOUND
        self.unreported: list[float] = []
        """Times of answers that were not reported yet; whoever reports them empties this list."""
        self.restart()

    def restart(self) -> None:
        """Forget everything, as at the start of a session."""
        self.times = AnswerTimes()
        self.misses = AnswerStats(self._prior_gain, self._prior_found)
        """Answers to commits that left no nodes."""
        self.hits = AnswerStats(self._prior_gain)
        """Answers to commits that left some, if these are waited for."""
        self.opens = AnswerTimes()
        """Times of the first answers to requests that were opened, prompts included."""
        self._unanswered: dict[int, tuple[int, float]] = {}
        self._newest: dict[int, tuple[int, float]] = {}
        self._silence = 0.0
        """Seconds, since the last message, of waits for answers about requests that have ended."""

    def sent(self, number: int, length: int) -> None:
        """Note that a request was opened or committed up to `length`; its oldest unanswered message counts."""
        self._newest[number] = (length, self._clock())
        self._unanswered.setdefault(number, self._newest[number])

    def answered(self, number: int, acked_len: int, at: float) -> None:
        """Note that an answer, received at `at`, says that the draft has applied commits up to `acked_len`."""
        length, since = self._unanswered.get(number, (0, 0.0))
        if not length or acked_len < length:
            return
        seconds = max(at - since, 0.0)
        self.unreported.append(seconds)
        self.times.note(seconds)
        # A commit sent while this answer was under way is still unanswered: nothing else would notice a missing answer.
        if self._newest[number][0] > acked_len:
            self._unanswered[number] = self._newest[number]
        else:
            self._drop(number)

    def on_message(self) -> None:
        """Note that the draft has sent a message, about whatever request."""
        self._silence = 0.0

    def forget(self, number: int) -> None:
        """Expect no answer about a request any more.

        A wait that was long for this replica still counts: otherwise silence would go unnoticed among short requests.
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
        """Return the edge score of a source as a calibrated edge log-probability, at most 0."""
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
"""Looks in a row without a right guess after which a draft is in doubt. Guesses that are right once in 10 tokens get
there once in 800 trials, and guesses that are right less often hardly pay for what they cost."""

_MIN_SKIPPED = 4
_MAX_SKIPPED = 32
"""Commits in a row that are not sent to a draft in doubt: at first, and at most. The number doubles each time."""


@dataclass(slots=True)
class DraftBackoff:
    """How a draft's guesses did lately. A draft without guesses costs little, and does not show what it is worth.

    A draft in doubt would cost as much as any: commits and features are sent, answers are read. So it gets
    commits rarely, several at once, and grows little. The first right guess ends the doubt.
    """

    num_wrong: int = 0
    """Looks in a row at guesses for committed tokens that found no right one."""
    num_skipped: int = 0
    """Commits that were not sent since one last was."""

    @property
    def in_doubt(self) -> bool:
        """Whether no guess was right for long."""
        return self.num_wrong >= MAX_WRONG_LOOKS

    def restart(self, num_wrong: int) -> None:
        """Begin with another draft, whose guesses were wrong in so many looks in a row."""
        self.num_wrong, self.num_skipped = num_wrong, 0

    def judge(self, seen: Sequence[Observation]) -> None:
        """Learn from a look at the draft's guesses for tokens that were committed since the look before."""
        if any(one.hit for one in seen):
            self.num_wrong = 0
        elif seen:
            self.num_wrong += 1

    def skips(self) -> bool:
        """Whether a commit need not be sent now; call this once for each commit."""
        doubt = self.num_wrong - MAX_WRONG_LOOKS
        if doubt >= 0 and self.num_skipped < min(_MIN_SKIPPED << min(doubt, 10), _MAX_SKIPPED):
            self.num_skipped += 1
            return True
        self.num_skipped = 0
        return False

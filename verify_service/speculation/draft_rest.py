"""Decides whether drafts rest, because rounds without them bring more tokens per second.

A device runs plain rounds back to back: each is launched before the one before is read. A round that may take draft
nodes waits for the host, so with many requests a draft can bring more tokens per round but fewer per second. While
drafts are in use no plain rounds are seen, and the other way round, so now and then a few rounds of the other kind are
run. Both kinds are compared by wall time: rounds, gaps and waits.
"""

from __future__ import annotations

from verify_service.speculation.budget import CostModel

_MEMORY_ROUNDS = 64
"""Rounds after which older ones fade from the measured speeds."""
_LEAST_ROUNDS = 32
"""Rounds with drafts that are measured before plain decoding is tried."""
_PLAIN_ROUNDS = 8
_DRAFTED_ROUNDS = 24
"""Measured rounds of a trial, by its kind: plain rounds all take the same time, but what drafts bring varies."""
_SETTLING = 8
"""First rounds of a kind that are not measured. Without drafts, two were planned before, and drafts, maybe on the same
device, still use up their credit. With drafts, these first follow the commits made meanwhile; their trees are small."""
_PROMPT_ROUNDS = 2
"""A trial ends after this many times its usual rounds, however few of them could be measured beside prompts."""
_LASTING_ROUNDS = 12
"""Rounds in a row with fewer or more requests before the measurements for that number are used: when answers end
together, others take their places sooner than that."""
_HYSTERESIS = 1.02
"""How many times as fast the other kind of round must be."""

_MAX_REST_SECONDS = 3.5
"""Seconds of rest between two trials of the drafts: a draft that has recovered is in use within 5 seconds."""
_DRAFTED_TRIAL_SHARE = 0.01
"""Part of that time by which a trial may fall behind plain decoding before it is given up."""
_PLAIN_TRIAL_SHARE = 0.005
_FIRST_TRIAL_SHARE = 0.02
"""Part of the time with drafts in use that trials of plain decoding may cost: later trials, and the first one."""
_LEAST_LOSS = 0.1
"""Least part of a trial's time that counts as lost, however fast plain decoding is thought to be. That time includes
the rounds in which trees grow again."""


class _Speed:
    """Tokens per request and second in the last rounds of a kind."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self._tokens = self._seconds = 0.0

    def note(self, tokens: float, seconds: float) -> None:
        """Add a round in which a request got `tokens` tokens on average."""
        self.num_rounds += 1
        keep = 1 - 1 / _MEMORY_ROUNDS
        self._tokens, self._seconds = keep * self._tokens + tokens, keep * self._seconds + seconds

    @property
    def rate(self) -> float:
        """Tokens per request and second; 0 while nothing was measured."""
        return self._tokens / self._seconds if self._seconds else 0.0


class _Load:
    """Measurements of rounds with about the same number of requests."""

    def __init__(self) -> None:
        self.rests = False
        """Whether plain rounds were found to be faster; a trial runs rounds of the other kind."""
        self.plain, self.drafted = _Speed(), _Speed()
        self.since_trial = 0.0
        """Seconds of rounds since the last trial."""
        self.was_tried = False
        """Whether plain decoding was tried."""


class DraftRest:
    """Compares decoding with and without drafts, for each range of request counts from one power of two to the next.

    Trials may cost a certain part of the time between them: a trial of plain decoding waits until enough time has
    passed, and a trial of drafts ends when it is too far behind.
    """

    def __init__(self, cost: CostModel) -> None:
        """`cost`: estimates the time of a plain round before any was measured."""
        self._cost = cost
        self._loads: dict[int, _Load] = {}
        self._load = _Load()
        self._numbers = range(0)
        """Numbers of requests that `_load` is for."""
        self._num_outside = 0
        """Rounds in a row with other numbers of requests."""
        self._on_trial = False
        self._num_settling = self._num_on_trial = 0
        self._behind = 0.0
        """Seconds by which a trial of drafts is behind plain decoding."""

    @property
    def rests(self) -> bool:
        """Whether the next rounds are to be plain."""
        return self._load.rests != self._on_trial

    def forget_drafts(self) -> None:
        """Use a draft that has connected, and measure again: what was measured of others says nothing about it."""
        if self._on_trial:
            self._end_trial()
        for load in self._loads.values():
            load.rests, load.drafted = False, _Speed()
        self._num_settling = _SETTLING

    def observe(self, num_requests: int, num_tokens: int, seconds: float, is_usual: bool = True) -> None:
        """Learn from a round; call this in the order in which rounds run. The next one may be under way.

        `num_requests`: requests whose next token was sampled. `num_tokens`: tokens committed. `seconds`: time since the
        round before ended. `is_usual`: there was no pause before the round, and no prompt was computed.
        """
        if not num_requests or not self._covers(num_requests):
            return
        load = self._load
        load.since_trial += seconds
        was_resting, self._num_on_trial = self.rests, self._num_on_trial + self._on_trial
        if is_usual and num_tokens:
            self._learn(load, num_requests, num_tokens / num_requests, seconds)
        num_measured = _DRAFTED_ROUNDS if load.rests else _PLAIN_ROUNDS
        if self._on_trial and self._num_on_trial >= _PROMPT_ROUNDS * (_SETTLING + num_measured):
            self._end_trial()
        if self.rests != was_resting:
            self._num_settling = _SETTLING

    def _learn(self, load: _Load, num_requests: int, tokens: float, seconds: float) -> None:
        """Learn from a usual round in which a request got so many tokens on average."""
        if self._on_trial and load.rests:
            self._behind += seconds - tokens / load.plain.rate
        if self._num_settling:
            self._num_settling -= 1
        else:
            (load.plain if self.rests else load.drafted).note(tokens, seconds)
        if self._on_trial:
            self._judge(load)
        elif self._is_due(load, num_requests):
            self._begin_trial(load)

    def _covers(self, num_requests: int) -> bool:
        """Whether `_load` is for so many requests. After some rounds with so many, this switches to their `_load`."""
        if num_requests in self._numbers:
            self._num_outside = 0
            return True
        self._num_outside += 1
        if self._numbers and self._num_outside < _LASTING_ROUNDS:
            return False
        self._switch_to(num_requests)
        return True

    def _switch_to(self, num_requests: int) -> None:
        """Switch to the measurements for so many requests; they stay in use for numbers just outside their range."""
        self._num_outside = 0
        power = (num_requests - 1).bit_length()
        least, most = (1 << power >> 1) + 1 if power else 1, 1 << power
        self._numbers = range(least - (least >> 3), most + (most >> 3) + 1)
        if self._on_trial:
            self._end_trial()
        self._load, self._num_settling = self._loads.setdefault(power, _Load()), _SETTLING

    def _is_due(self, load: _Load, num_requests: int) -> bool:
        """Whether the other way to decode is to be tried."""
        if load.rests:
            return load.since_trial >= max(_MAX_REST_SECONDS, self._least_allowance / (2 * _DRAFTED_TRIAL_SHARE))
        if load.drafted.num_rounds < _LEAST_ROUNDS:
            return False
        plain = load.plain.rate or 1 / self._cost.seconds(num_requests)
        lost = 1 - plain / load.drafted.rate
        if load.was_tried and plain > _HYSTERESIS * load.drafted.rate:
            return True
        share = _PLAIN_TRIAL_SHARE if load.was_tried else _FIRST_TRIAL_SHARE
        num_rounds = _SETTLING + _PLAIN_ROUNDS + _SETTLING
        return load.since_trial * share >= max(lost, _LEAST_LOSS) * num_rounds / plain

    @property
    def _least_allowance(self) -> float:
        """Least number of seconds that a trial of drafts may be behind, which gives their trees time to grow again."""
        return _SETTLING / 2 / self._load.plain.rate

    def _begin_trial(self, load: _Load) -> None:
        """Begin a trial, or go on with one that ended because the number of requests changed."""
        self._on_trial, self._behind, self._num_on_trial = True, 0.0, 0
        if load.rests and load.drafted.num_rounds >= _DRAFTED_ROUNDS:
            load.drafted = _Speed()
        elif not load.rests and load.plain.num_rounds >= _PLAIN_ROUNDS:
            load.plain = _Speed()

    def _end_trial(self) -> None:
        self._on_trial, self._load.since_trial, self._load.was_tried = False, 0.0, True

    def _judge(self, load: _Load) -> None:
        """End a trial that has shown what it can, or costs too much."""
        if load.rests:
            is_over = load.drafted.num_rounds >= _DRAFTED_ROUNDS
            gives_up = self._behind > max(_DRAFTED_TRIAL_SHARE * load.since_trial, self._least_allowance)
            is_better = is_over and load.drafted.rate > _HYSTERESIS * load.plain.rate
        else:
            is_over, gives_up = load.plain.num_rounds >= _PLAIN_ROUNDS, False
            is_better = is_over and load.plain.rate > _HYSTERESIS * load.drafted.rate
        if is_over or gives_up:
            load.rests ^= is_better
            self._end_trial()

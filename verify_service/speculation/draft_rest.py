"""Whether drafts rest, because rounds without them bring more tokens per second.

A device runs plain rounds one behind the other: each is launched before the one before is read. A round that may take
draft nodes waits for the host, so with many requests a draft can bring more tokens a round and fewer a second. No round
of the other kind is seen while drafts are in use, or rest, so now and then a few are run, and both kinds are compared
by wall time: rounds, gaps and waits.
"""

from __future__ import annotations

from verify_service.speculation.budget import CostModel

_MEMORY_ROUNDS = 64
"""Rounds after which older ones fade from the measured speeds."""
_LEAST_ROUNDS = 32
"""Rounds with drafts that are measured before plain decoding is tried."""
_PLAIN_ROUNDS = 8
_DRAFTED_ROUNDS = 24
"""Rounds of a trial that are measured: plain ones take the same time each, what drafts bring differs."""
_SETTLING = 8
"""First rounds of a kind that say nothing. Without drafts: two were planned before, and drafts, maybe on the same
device, still use up their credit. With them: drafts follow what was committed meanwhile, and their trees are small."""
_PROMPT_ROUNDS = 2
"""Times as many rounds after which a trial ends, however few of them could be measured beside prompts."""
_LASTING_ROUNDS = 12
"""Rounds in a row with fewer or more requests, after which what is known of so many counts: when answers end together
others take their places within that."""
_HYSTERESIS = 1.02
"""Times as fast that the other kind of round must be."""

_MAX_REST_SECONDS = 3.5
"""Seconds of rest between two trials of the drafts: one that is well again is in use within 5."""
_DRAFTED_TRIAL_SHARE = 0.01
"""Part of that time by which a trial may be behind plain decoding before it is given up."""
_PLAIN_TRIAL_SHARE = 0.005
_FIRST_TRIAL_SHARE = 0.02
"""Part of the time in which drafts are in use that trials of plain decoding may cost; and before the first of them."""
_LEAST_LOSS = 0.1
"""Part of a trial's time that counts as lost, however fast plain decoding is thought to be. To that time belong the
rounds in which trees grow anew."""


class _Speed:
    """Tokens of each request per second in the last rounds of a kind."""

    def __init__(self) -> None:
        self.num_rounds = 0
        self._tokens = self._seconds = 0.0

    def note(self, tokens: float, seconds: float) -> None:
        """Take a round in which a request got so many tokens on average."""
        self.num_rounds += 1
        keep = 1 - 1 / _MEMORY_ROUNDS
        self._tokens, self._seconds = keep * self._tokens + tokens, keep * self._seconds + seconds

    @property
    def rate(self) -> float:
        """0 while nothing was measured."""
        return self._tokens / self._seconds if self._seconds else 0.0


class _Load:
    """What is known of rounds with about as many requests."""

    def __init__(self) -> None:
        self.rests = False
        """What was found to be faster; a trial does the other."""
        self.plain, self.drafted = _Speed(), _Speed()
        self.since_trial = 0.0
        """Seconds of rounds since the last one."""
        self.was_tried = False
        """Whether plain decoding was."""


class DraftRest:
    """Compares decoding with drafts and without, for each number of requests up to a factor of two.

    A trial costs a part of the time that lies between two, by its own measure: of plain decoding it waits until that
    much time has passed, of drafts it ends when it is as far behind.
    """

    def __init__(self, cost: CostModel) -> None:
        """`cost`: what a plain round is thought to take before any was measured."""
        self._cost = cost
        self._loads: dict[int, _Load] = {}
        self._load = _Load()
        self._numbers = range(0)
        """Numbers of requests for which `_load` is."""
        self._num_outside = 0
        """Rounds in a row with other numbers."""
        self._on_trial = False
        self._num_settling = self._num_on_trial = 0
        self._behind = 0.0
        """Seconds by which a trial of drafts is behind plain decoding."""

    @property
    def rests(self) -> bool:
        """Whether the next rounds are to be plain."""
        return self._load.rests != self._on_trial

    def forget_drafts(self) -> None:
        """A draft came: what was measured of others says nothing of it, so it is used, and measured anew."""
        if self._on_trial:
            self._end_trial()
        for load in self._loads.values():
            load.rests, load.drafted = False, _Speed()
        self._num_settling = _SETTLING

    def observe(self, num_requests: int, num_tokens: int, seconds: float, is_usual: bool = True) -> None:
        """Learn from a round, in the order in which they are run; the one after it may be under way.

        `num_requests`, `num_tokens`: whose next token was sampled, and tokens that were committed. `seconds`: since the
        round before ended. `is_usual`: nothing lay between, and no prompt was computed.
        """
        if not num_requests or not self._is_at(num_requests):
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
        """From a round in which a request got so many tokens."""
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

    def _is_at(self, num_requests: int) -> bool:
        """Whether what is known now is of so many requests. It is once there have been so many for some rounds."""
        if num_requests in self._numbers:
            self._num_outside = 0
            return True
        self._num_outside += 1
        if self._numbers and self._num_outside < _LASTING_ROUNDS:
            return False
        self._turn_to(num_requests)
        return True

    def _turn_to(self, num_requests: int) -> None:
        """Go on with what is known of so many requests. A number just outside of a range does not leave it again."""
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
        """Seconds by which a trial of drafts may be behind so that it is not given up while their trees grow anew."""
        return _SETTLING / 2 / self._load.plain.rate

    def _begin_trial(self, load: _Load) -> None:
        """Measure anew, or go on with a trial that ended because the number of requests changed."""
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

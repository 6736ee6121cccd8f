"""The decision to wait for a draft's answer before a round: what is due, what it may bring, and whether that pays.

Rule 2 of the design: verify never waits blindly. After a commit that left no nodes (in lockstep, or if drafts share
cores with rounds, after every commit) a draft at once answers with what it has; a little later, a model's burst deepens
the tree part by part. Times and gains of both are measured for each draft replica (`ReplicaHealth`). That needs no
waits, since answers come during rounds, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.tree.mirror import TreeMirror
from verify_service.speculation.budget import Budget, Choice, Forest
from verify_service.speculation.replica import (
    MAX_PARTS,
    PROMISE_NODES,
    AnswerStats,
    AnswerTimes,
    DraftBackoff,
    ReplicaHealth,
)

_MIN_SPEEDUP_SHARED_CORES = 1.02
"""Speedup that a wait must promise, in tokens per second, if the draft shares cores with rounds: its times are known no
better than that. A draft with a device of its own is waited for even without a speedup: the same tokens per second then
take fewer rounds."""

_MIN_PART_GAIN = 0.05
"""Accepted tokens that a draft's next part must be likely to bring, or it is not waited for."""

_OVERDUE_FACTOR = 1.5
"""A later part is not waited for after this many times its usual time: the draft has other work by then."""

_MIN_LEFT_SHARE = 0.3
"""A later part is expected to take at least this part of its usual time, even if it is due now: otherwise every round
would wait a little."""

_MAX_VAIN_WAITS = 3
"""Waits in a row without an answer, after which commits pass without a wait."""

_MAX_SKIPPED_COMMITS = 32
"""Most commits that pass without a wait between two further waits: 1 at first, and twice as many each time."""

_MAX_PART_NODES = 24
"""Most nodes of a tree that are looked at to find what a part behind the answer adds to it."""

_MAX_PART_REQUESTS = 4
"""Most requests of a replica with which more than one part behind an answer is looked at: with more requests, depth is
worth no wait, and looking at all parts takes the engine's time."""

_LEARN_RATE = 0.2
"""Weight of the newest answer in the gain that answers bring."""

_NODE_COUNTS = np.arange(1, PROMISE_NODES + 1)


class Wait(NamedTuple):
    """A wait for something that a draft is expected to send."""

    gain: float
    """Accepted tokens that it is likely to bring."""
    typical: float
    """Seconds from now until it should be here; 0 if it is overdue."""
    late: float
    """Seconds from now until it is here in 19 of 20 such waits."""
    shares: NDArray[np.float64]
    """Part of the gain that the best 1, 2, ... nodes bring, shape [PROMISE_NODES]."""
    found: float = 0.0
    """How often the round after this one finds nodes if this one does not wait."""


@dataclass(slots=True)
class DraftWaitMode:
    """How an engine waits for drafts; one object for all of its requests."""

    lockstep: bool = False
    """Every answer is waited for, whatever it brings."""
    shares_cores: bool = False
    """Drafts share cores with rounds and grow between them: the answer to every commit may be worth a wait."""
    resting: bool = False
    """Rounds without drafts are faster, so none waits for drafts."""
    launched_at: float = math.inf
    """When the running round was launched; from then on, drafts that share cores with it are slow."""

    every_answer: bool = field(init=False)
    """Whether the answer to every commit is awaited, even to one that left nodes."""

    def __post_init__(self) -> None:
        self.every_answer = self.lockstep or self.shares_cores  # stored, as it is read at each commit


@dataclass(eq=False, slots=True)
class DraftWaitState:
    """What one request's draft owes, and what its answers brought lately. Times in seconds, gains in accepted tokens.

    `Drafts` and the engine call the `on_` methods, in this order for each round: `on_commit`, `on_sent`, `on_wait` and
    `on_launch`; and `on_answer` for each message that follows the newest commit.
    """

    mirror: TreeMirror
    mode: DraftWaitMode
    backoff: DraftBackoff
    """Record of the draft's guesses for the request: a draft in doubt is not waited for."""
    health: ReplicaHealth = field(init=False, repr=False)
    """Health of the replica that grows the tree, or grew it last."""
    is_served: bool = False
    """Whether a replica grows the tree."""
    paused: bool = False
    """Whether the request is preempted."""
    opened_at: float = -math.inf
    """When the request was opened with the replica."""
    sent_at: float | None = None
    """When the commit that the draft should answer was sent; None until then."""
    awaits_answer: bool = False
    """Whether the answer to the last commit is worth waiting for and has not come."""
    after_hit: bool = False
    """Whether the last commit left nodes."""
    is_miss: bool = False
    """Whether the last commit left no nodes, and answers to others are not awaited."""
    has_answered: bool = False
    """Whether the draft has ever followed the newest commit; until then it computes the prompt."""
    round_waited: bool = False
    """Whether the next round has waited for the draft."""
    keeps_up: bool = False
    """Whether the draft answered the commit before the last one in time. If not, a draft that shares cores with rounds
    must first do all work that it was not waited for, such as the prompt: a price that is paid once."""
    is_new: bool = True
    """Whether no awaited answer of the draft has come yet."""
    num_messages: int = 0
    """Messages that followed the last commit."""
    num_late: int = 0
    """How many of these came after the round was launched, from cores that the round had taken."""
    num_vain_waits: int = 0
    """Waits in a row that brought no answer; counted if drafts share cores with rounds."""
    num_skipped: int = 0
    """Commits since the last such wait that passed without a wait because of `num_vain_waits`."""
    answered_at: float | None = None
    """When the answer came, or the last part behind it; None if no further part is awaited."""
    num_parts: int = 0
    """Parts that have come behind the answer."""
    miss_gain: float = 1.0
    """Gain that a tree grown after a miss promised lately."""
    hit_gain: float = 0.0
    """Gain that the first answer after a hit promised lately, beyond what was left of the tree."""
    promised: float = 0.0
    """Gain that answer and parts promise, with PROMISE_NODES nodes."""
    deep_promised: float = 0.0
    """Gain that answer and parts promise with as many nodes as a round of one request may well take."""
    deep_end_chance: float = 0.0
    """The chance that the path committed next runs past one of those nodes that has no children yet."""
    end_chance: float = 0.0
    """The same chance for the nodes that the next round would take, as far as it could take deeper ones."""

    @property
    def expects(self) -> bool:
        """Whether the draft may soon bring nodes that a round could take."""
        if not self.awaits_answer and self.answered_at is None:
            return False
        return not (self.paused or self.mode.resting or self.skips_wait or self.backoff.in_doubt)

    @property
    def skips_wait(self) -> bool:
        """Whether the draft has answered too late so often that it is not waited for now."""
        excess = self.num_vain_waits - _MAX_VAIN_WAITS
        return excess >= 0 and self.num_skipped < min(1 << min(excess, 30), _MAX_SKIPPED_COMMITS)

    def on_open(self, health: ReplicaHealth, at: float) -> None:
        """Note that the request was opened with a replica of this health."""
        self.health, self.is_served = health, True
        self.opened_at = self.sent_at = at
        self.awaits_answer = True
        self.after_hit = self.round_waited = False
        # If every answer is awaited, the first one is treated like all others.
        self.has_answered = self.mode.every_answer
        self.num_messages = self.num_late = self.num_vain_waits = self.num_skipped = 0
        self.keeps_up, self.is_new = False, True
        self.promised = 0.0
        self._forget_answer()

    def on_close(self) -> None:
        """Note that no replica grows the tree any more."""
        self.answered_at = None
        self.is_served = self.awaits_answer = self.is_miss = False

    def on_pause(self) -> None:
        """Note that the request was preempted: what comes until it runs again does not show how long parts take."""
        self.paused, self.answered_at = True, None

    def on_silence(self) -> None:
        """Note that the draft sends nothing more in answer to the newest commit."""
        self.awaits_answer, self.answered_at = False, None

    def on_commit(self) -> None:
        """Note that the mirror was re-rooted: answers to the commit before are over, and this one was not sent yet."""
        mode, has_nodes = self.mode, self.mirror.has_nodes
        mode.launched_at = math.inf
        self.num_skipped += self.skips_wait
        if self.is_served:
            if self.is_miss:
                self.health.misses.note_found(self.round_waited, has_nodes)
            if mode.shares_cores and not self.backoff.in_doubt and (self.num_late or not self.num_messages):
                self._stats.note_unmeasured()
            elif self.answered_at is not None:
                # The round was over before a further part came.
                if not self.num_parts:
                    self._stats.note_more_gain(0.0)
                self._stats.note_part_gain(self.num_parts, 0.0, self.deep_end_chance)
        self.round_waited = False
        self.keeps_up = self.num_messages > self.num_late
        self.num_messages = self.num_late = 0
        self.sent_at = None
        self._forget_answer()
        self.awaits_answer = self.is_served and not mode.resting and (mode.every_answer or not has_nodes)
        self.is_miss = self.awaits_answer and self.has_answered and not mode.every_answer
        self.after_hit = mode.shares_cores and has_nodes
        self.promised = sum(self._best_chances(PROMISE_NODES)[0]) if self.after_hit else 0.0

    def on_sent(self, at: float) -> None:
        """Note that the commit was sent."""
        self.sent_at = at if self.has_answered else self.opened_at

    def on_wait(self) -> None:
        """Note that the next round waits for this draft."""
        self.round_waited = True

    def on_launch(self, at: float) -> None:
        """Note that a round was launched, if drafts share cores with rounds: a wait before it is over."""
        if not self.round_waited or not self.expects or self.sent_at is None:
            return
        if self.answered_at is not None:
            self._stats.more.note_timeout(at - self.answered_at)
        else:
            self._stats.answer.note_timeout(at - self.sent_at)
            self.num_vain_waits, self.num_skipped = self.num_vain_waits + 1, 0

    def on_answer(self, at: float, num_nodes: int, num_requests: int) -> None:
        """Note that a message that follows the newest commit arrived, with `num_nodes` new nodes.

        `num_requests`: number of requests that the replica serves.
        """
        # A draft that shares cores with rounds sends all its nodes in its answer.
        by_parts = num_requests <= _MAX_PART_REQUESTS and not self.mode.every_answer
        self.num_messages += 1
        if at > self.mode.launched_at:
            # A message that no round could wait for does not show what a wait would bring.
            self.num_late += 1
            self.awaits_answer, self.answered_at = False, None
        elif self.awaits_answer:
            self._on_first_message(at, by_parts)
        elif self.answered_at is not None and (num_nodes or not self.num_parts):
            if at > self.answered_at:
                self._on_part(at, at - self.answered_at, by_parts)
            else:
                # The same answer, or part, in a further message.
                gain = self._update_promise(by_parts)
                if not self.num_parts:
                    self._learn_gain(gain)
        self.has_answered = True

    def _on_first_message(self, at: float, by_parts: bool) -> None:
        self.awaits_answer = False
        self.num_vain_waits = self.num_skipped = 0
        gain = self._update_promise(by_parts)
        catches_up = self.mode.shares_cores and not self.keeps_up
        # A first answer without nodes comes while the draft still computes the prompt.
        if gain > 0.0 or not (catches_up and self.is_new):
            self._learn_gain(max(gain, 0.0) - self._first_gain)
        if self.sent_at is not None:
            times, seconds = self._first_times, max(at - self.sent_at, 0.0)
            if not catches_up or seconds < times.typical:
                times.note(seconds)
        self.is_new = False
        # In lockstep a tree is one message, and the answer to a hit says nothing about that to a miss.
        self.answered_at = None if self.mode.lockstep else at

    def _on_part(self, at: float, seconds: float, by_parts: bool) -> None:
        stats, part = self._stats, self.num_parts
        deep_promised, end_chance = self.deep_promised, self.deep_end_chance
        gain = self._update_promise(by_parts)
        if not part:
            stats.note_more_gain(max(gain, 0.0))
        stats.note_part_gain(part, max(self.deep_promised - deep_promised, 0.0), end_chance)
        stats.part_times(part).note(seconds)
        self.num_parts += 1
        self.answered_at = at if self.num_parts < MAX_PARTS and by_parts else None

    def _update_promise(self, by_parts: bool) -> float:
        """Update what the best nodes promise, and learn how they share it. Returns the gain since the last message."""
        chances, self.deep_end_chance = self._best_chances(_MAX_PART_NODES if by_parts else PROMISE_NODES)
        promise = np.array(chances[:PROMISE_NODES] + [0.0] * (PROMISE_NODES - len(chances))).cumsum()
        self._stats.note_shares(promise)
        before, self.promised, self.deep_promised = self.promised, float(promise[-1]), sum(chances)
        return self.promised - before

    def _best_chances(self, count: int) -> tuple[list[float], float]:
        """Return the chances of the best `count` nodes, and that of a committed path past a childless one of them."""
        forest = Forest([self.mirror], [count])
        chances = list(islice(forest.best(), count))
        return chances, forest.end_chance(0, len(chances))

    def _learn_gain(self, excess: float) -> None:
        """Learn that an answer promised so much more than expected."""
        if self.after_hit:
            self.hit_gain += _LEARN_RATE * excess
        else:
            self.miss_gain += _LEARN_RATE * excess

    def _forget_answer(self) -> None:
        self.answered_at, self.num_parts = None, 0
        self.deep_promised = self.deep_end_chance = self.end_chance = 0.0

    @property
    def _first_gain(self) -> float:
        """Gain that the next answer to a commit like the last one is likely to bring."""
        return self.hit_gain if self.after_hit else self.miss_gain

    @property
    def _stats(self) -> AnswerStats:
        """Statistics of what the draft sent after commits like the last one."""
        return self.health.hits if self.after_hit else self.health.misses

    @property
    def _first_times(self) -> AnswerTimes:
        """Times of the answer that is awaited first."""
        return self._stats.answer if self.has_answered else self.health.opens

    @property
    def _more_gain(self) -> float:
        """Gain that the next part behind the answer is likely to bring.

        For the first part, this is what first parts brought lately. Later ones bring little to most trees, but much if
        the whole tree is likely to be accepted.
        """
        if self.awaits_answer or not self.num_parts:
            return self._stats.more_gain
        return self._stats.part_gains[self.num_parts] * self.end_chance

    @property
    def max_gain(self) -> float:
        """Gain that no wait for the draft is likely to exceed."""
        first = self._first_gain if self.awaits_answer else 0.0
        return max(first, 0.0) + max(self._more_gain, 0.0)

    def min_seconds(self, now: float) -> float:
        """Return the seconds left of the shortest wait for the draft that is likely to bring anything."""
        times, since = self._first_times, self.sent_at
        if not self.awaits_answer:
            times, since = self._stats.part_times(self.num_parts), self.answered_at
        return times.left(0.0 if since is None else now - since)[0]

    def first_wait(self, now: float) -> Wait | None:
        """Return the wait for the answer to the last commit; None if none is due."""
        if not self.awaits_answer:
            return None
        waited = 0.0 if self.sent_at is None else now - self.sent_at
        return Wait(self._first_gain, *self._first_times.left(waited), self._stats.shares, self._stats.found)

    def whole_wait(self, now: float) -> Wait | None:
        """Return the wait for the next part, and for the answer if that is due; None if little is likely to follow."""
        stats, more_gain = self._stats, self._more_gain
        if more_gain < _MIN_PART_GAIN:
            return None
        if self.answered_at is not None:
            waited, times = now - self.answered_at, stats.part_times(self.num_parts)
            typical, late = times.left(waited)
            if self.num_parts:
                typical = max(typical, _MIN_LEFT_SHARE * times.typical)
                late = min(late, _OVERDUE_FACTOR * times.typical - waited)
                if late <= 0:
                    return None
            return Wait(more_gain, typical, late, stats.shares)
        first = self.first_wait(now)
        if first is None:
            return None
        more = stats.more
        gain, typical, late = first.gain + more_gain, first.typical + more.typical, first.late + more.late
        return Wait(gain, typical, late, stats.shares, stats.found)


class DraftWaitPolicy:
    """Compares tokens per second of a round now with those of a round after the awaited answers."""

    def __init__(self, budget: Budget, max_seconds: float, mode: DraftWaitMode | None = None) -> None:
        """`max_seconds`: longest wait.

        If drafts share cores with rounds, a draft that is not waited for has no cores to answer on, so a wait that has
        begun lasts as long as it pays.
        """
        self._budget = budget
        self._max_seconds = max_seconds
        self._mode = mode or DraftWaitMode()
        self._min_speedup = _MIN_SPEEDUP_SHARED_CORES if self._mode.shares_cores else 1.0

    def wait_seconds(
        self, awaited: Sequence[DraftWaitState], num_tokens: int, choice: Choice, beside: float = 0.0, *, now: float
    ) -> float:
        """Return how long to wait at most, from `now`; 0 means not at all.

        `awaited`: the round's requests that expect an answer, or a further part of one. `num_tokens`: tokens that the
        round computes without nodes. `choice`: its nodes as of now. `beside`: its seconds for other things.
        """
        if not awaited or not self._max_seconds or not self._budget.max_nodes:
            return 0.0
        served = [state for state in awaited if state.is_served]
        good = {health for health in {state.health for state in served} if health.good}
        awaited = [state for state in served if state.health in good]
        if self._mode.lockstep:
            return self._max_seconds if any(state.awaits_answer for state in awaited) else 0.0
        if not awaited or self._is_hopeless(awaited, choice, now):
            return 0.0
        # A draft that computes a request's prompt must not keep the others from being waited for.
        answering = [state for state in awaited if state.has_answered]
        groups = [awaited] if len(answering) == len(awaited) else [awaited, answering]
        waits = [[state.first_wait(now) for state in group] for group in groups]
        waits += [[state.whole_wait(now) for state in group] for group in groups]
        return max(self._worth(group, num_tokens, choice, beside) for group in waits)

    def _is_hopeless(self, awaited: Sequence[DraftWaitState], choice: Choice, now: float) -> bool:
        """Whether clearly no wait can pay: not even if all that is awaited came with its first part, at no cost.

        In rounds of many requests some nearly always await something, and the device is idle during a longer look.
        """
        rate = self._min_speedup * self._rate(choice, 0.0)
        longest = (choice.expected + sum(state.max_gain for state in awaited)) / rate - choice.seconds
        return all(longest <= state.min_seconds(now) for state in awaited)

    def _worth(self, waits: Sequence[Wait | None], num_tokens: int, choice: Choice, beside: float) -> float:
        """Return the seconds to wait for all of `waits`; 0 if that does not pay.

        After the wait, the round has the number of nodes that suits it best, just as it has now.
        """
        real = [wait for wait in waits if wait is not None]
        if not real:
            return 0.0
        gains = np.sum([wait.gain * wait.shares for wait in real], axis=0)
        num_nodes = np.minimum(choice.num_nodes + len(real) * _NODE_COUNTS, self._budget.max_nodes)
        seconds, _ = self._budget.cost.seconds_from(num_tokens, int(num_nodes[-1]) + 1)
        then = np.array(seconds)[num_nodes] + beside
        typical = max(wait.typical for wait in real)
        # A wait of w pays while (expected + gain) / (then + w) beats the rate without it.
        rate = self._min_speedup * self._rate(choice, sum(wait.found * wait.gain for wait in real))
        pays = float(((choice.expected + gains) / rate - np.maximum(then, choice.seconds)).max())
        if pays <= typical:
            return 0.0
        longest = self._max_seconds if self._mode.shares_cores else max(wait.late for wait in real)
        return min(pays, longest, self._max_seconds)

    def _rate(self, choice: Choice, found: float) -> float:
        """Return the tokens per second without a wait.

        A draft with a device of its own answers while rounds run. By recent experience, `found` tokens are then there
        for the round after, which makes a wait as long as a round worth less than the round.
        """
        return (choice.expected + found / 2) / choice.seconds

"""Whether a round should wait for a draft's answer (rule 2 of the design: never blindly)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from verify_service.speculation.budget import Budget, Choice
from verify_service.speculation.health import PROMISE_NODES, Wait
from verify_service.speculation.link import SpeculativeRequest

MIN_GAIN = 1.02
"""Holding must promise this much more tokens per second of a draft that shares its cores with rounds: what it takes
then is known no better than that. One with a device of its own is waited for where that costs nothing: as many tokens
per second take fewer rounds."""

_COUNTS = np.arange(1, PROMISE_NODES + 1)


class DraftWaitPolicy:
    """Compares tokens per second of a round now with those of a round after the awaited answers.

    After a miss a draft answers with what it has at once, and a model's burst may follow a little later. So there are
    two ends of a wait: the first answers, and what follows them. Times and gains of both are measured, per peer; no
    hold is needed for that, since answers come during rounds, too.
    """

    def __init__(
        self,
        budget: Budget,
        max_seconds: float,
        lockstep: bool = False,
        turns: bool = False,
    ) -> None:
        """`lockstep`: wait for every answer that a healthy peer owes, whatever it brings.

        `turns`: a draft that is not waited for has no cores to answer on, so that a wait, once begun, lasts as long as
        it pays.
        """
        self._budget = budget
        self._max_seconds = max_seconds
        self._lockstep = lockstep
        self._turns = turns
        self._min_gain = MIN_GAIN if turns else 1.0

    def seconds(
        self, awaited: Sequence[SpeculativeRequest], num_tokens: int, choice: Choice, beside: float = 0.0
    ) -> float:
        """How long to wait at most, from now; 0 means not at all.

        `awaited` are links of the round that await an answer, or more of it. The round computes `num_tokens` tokens
        before any nodes, and as it stands would be `choice`, with `beside` seconds for other things.
        """
        if not awaited or not self._max_seconds or not self._budget.max_nodes:
            return 0.0
        good = {peer for peer in {link.peer for link in awaited} if peer is not None and peer.health.good}
        awaited = [link for link in awaited if link.peer in good]
        if self._lockstep:
            return self._max_seconds if any(link.awaited for link in awaited) else 0.0
        if not awaited or self._is_hopeless(awaited, choice):
            return 0.0
        # A draft that computes a request's prompt must not keep the others from being waited for.
        caught_up = [link for link in awaited if link.caught_up]
        groups = [awaited] if len(caught_up) == len(awaited) else [awaited, caught_up]
        waits = [[link.first_wait() for link in group] for group in groups]
        waits += [[link.whole_wait() for link in group] for group in groups]
        return max(self._pays(group, num_tokens, choice, beside) for group in waits)

    def _is_hopeless(self, awaited: Sequence[SpeculativeRequest], choice: Choice) -> bool:
        """Whether no wait can pay, told at a glance: if all that is awaited came with the first of it, at no cost.

        In rounds of many requests some nearly always await something, and the device has nothing to do meanwhile.
        """
        rate = self._min_gain * self._rate(choice, 0.0)
        most = (choice.expected + sum(link.most_gain for link in awaited)) / rate - choice.seconds
        return all(most <= link.least_seconds for link in awaited)

    def _pays(self, waits: Sequence[Wait | None], num_tokens: int, choice: Choice, beside: float) -> float:
        """How long to wait for all of these, if that pays.

        As the round now has the number of nodes that suits it best, so has the one after the wait.
        """
        real = [wait for wait in waits if wait is not None]
        if not real:
            return 0.0
        gains = np.sum([wait.gain * wait.shares for wait in real], axis=0)
        promised = np.minimum(choice.num_nodes + len(real) * _COUNTS, self._budget.max_nodes)
        seconds, _ = self._budget.cost.after(num_tokens, int(promised[-1]) + 1)
        then = np.array(seconds)[promised] + beside
        typical = max(wait.typical for wait in real)
        # A wait of w pays while (expected + gain) / (then + w) beats the rate without it.
        rate = self._min_gain * self._rate(choice, sum(wait.found * wait.gain for wait in real))
        pays = float(((choice.expected + gains) / rate - np.maximum(then, choice.seconds)).max())
        if pays <= typical:
            return 0.0
        longest = self._max_seconds if self._turns else max(wait.late for wait in real)
        return min(pays, longest, self._max_seconds)

    def _rate(self, choice: Choice, found: float) -> float:
        """Tokens a second without a wait.

        A draft with a device of its own answers while rounds run. What it brings, `found` tokens, is there for the
        round after, as far as it was so lately, which makes a wait as long as a round worth less than the round.
        """
        return (choice.expected + found / 2) / choice.seconds

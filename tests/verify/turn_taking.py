"""Verify and a draft that share two cores, in simulated time: the engine's own hold rule, and a model of the rest.

A draft works at full speed while a round is held, and slowly while one runs. It takes up a commit when the burst before
is done, answers with what it has at once, and a burst later with its tree: a chain of guesses, each right as often as
its score says.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from scripted_peer import Clock, Recorder, request

from outrider.protocol.speculation import Commit, DraftMessage, Open, VerifyMessage
from outrider.tree.author import Outcome, TreeAuthor
from outrider.tree.handshake import Terms
from verify_service.speculation.budget import Budget, CostModel, Forest
from verify_service.speculation.draft_wait import DraftWaitMode, DraftWaitPolicy
from verify_service.speculation.drafts import CREDIT_ROUNDS, Drafts

VOCAB = 50
SLOW = 0.3
"""Speed of a draft beside a round."""
DEPTH = 6
WIDTHS = (1, 2, 4, 8, 16)


@dataclass
class Machine:
    """Times in seconds on a machine that does nothing else."""

    rounds: tuple[float, ...] = (0.033, 0.034, 0.036, 0.046, 0.060)
    """Of rounds of so many tokens as WIDTHS has."""
    answer: float = 0.002
    burst: float = 0.014
    chance: float = 0.7
    """Of each guess."""
    delay: Callable[[int], float] = field(default=lambda number: 1.0)
    """How much slower the draft works for the commit of the round of this number."""


class TurnTaking:
    """One request, answered round by round. `wait`: "rule" asks the policy, "always" and "never" do not."""

    def __init__(self, machine: Machine, wait: str = "rule", longest: float = 0.05) -> None:
        self.clock = Clock()
        self.held = 0.0
        self.num_held = self.num_rounds = 0
        self._machine, self._wait, self._longest = machine, wait, longest
        mode = DraftWaitMode(shares_cores=True)
        self._drafts = Drafts(VOCAB, max_nodes=8 * CREDIT_ROUNDS, clock=self.clock, mode=mode)
        self._budget = Budget(CostModel(machine.rounds, WIDTHS), 15)
        self._policy = DraftWaitPolicy(self._budget, longest, mode)
        self._random = random.Random(7)
        self._port = Recorder()
        self._drafts.connected(self._port, Terms(drafts_on_demand=True))
        self.request = request([1, 2])
        self._drafts.admit(self.request)
        self._author: TreeAuthor | None = None
        self._sent: list[VerifyMessage] = []
        self._steps: list[tuple[float, Callable[[], list[DraftMessage]]]] = []
        """What the draft is at: seconds of work left, and what comes of it."""
        self._unsent = 0

    @property
    def rate(self) -> float:
        """Tokens per second so far."""
        return (self.request.committed_len - 2) / (self.clock.now - 100.0)

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self._round()

    def _round(self) -> None:
        spec = self._drafts.spec(self.request)
        assert spec is not None
        start = self.clock.now
        while (left := self._longest - (self.clock.now - start)) > 1e-9 and (seconds := self._seconds()):
            spec.wait.on_wait()
            self._send_commit()
            self._advance(min(seconds, left), 1.0, until_answer=True)
        self.held += self.clock.now - start
        self.num_held += self.clock.now > start
        choice = self._choice()
        self._drafts.on_launch(self.clock.now)
        self._send_commit()
        self._budget.took(choice)
        taken = set(self._forest.take(choice.num_nodes)[0].slots)
        tokens, slot = [], spec.mirror.root
        while True:
            tokens.append(self._truth(self.request.committed_len + len(tokens)))
            below = spec.mirror.child(slot, tokens[-1])
            if below is None or below not in taken:
                break
            slot = below
        self._advance(choice.seconds, SLOW, until_answer=False)
        self.request.tokens.extend(tokens)
        self._drafts.on_commit(self.request)
        self._unsent += len(tokens)
        self.num_rounds += 1

    def _choice(self):
        spec = self._drafts.spec(self.request)
        assert spec is not None
        self._forest = Forest([spec.mirror], [99])
        return self._budget.choose(1, 1, self._forest.best())

    def _seconds(self) -> float:
        spec = self._drafts.spec(self.request)
        assert spec is not None
        if self._wait == "rule":
            return self._policy.wait_seconds(
                [spec.wait] if spec.wait.expects else [], 1, self._choice(), now=self.clock.now
            )
        return self._longest if self._wait == "always" and (self._steps or self._sent or self._unsent) else 0.0

    def _send_commit(self) -> None:
        """What the engine and the session do: the draft is sent the last commit, if the round waits for it."""
        if self._unsent:
            self._drafts.send_commit(self.request, self._unsent, credit=60)
            self._unsent = 0
            self._drafts.learn()
        self._sent += self._port.take(self._drafts)

    def _advance(self, seconds: float, speed: float, *, until_answer: bool) -> None:
        """Let the draft work for so long, or until it answers."""
        end = self.clock.now + seconds
        while True:
            if not self._steps:
                self._take_up()
            if not self._steps or self.clock.now + self._steps[0][0] / speed > end:
                break
            work, do = self._steps.pop(0)
            self.clock.now += work / speed
            self._drafts.receive(self._port, do(), self.clock.now)
            if until_answer:
                return
        if self._steps:
            work, do = self._steps[0]
            self._steps[0] = (work - (end - self.clock.now) * speed, do)
        self.clock.now = end

    def _take_up(self) -> None:
        """The draft follows all that it was sent, and begins to answer."""
        machine, messages, self._sent = self._machine, self._sent, []
        for message in messages:
            if isinstance(message, Open):
                self._author = TreeAuthor(message, VOCAB)
            elif isinstance(message, Commit) and self._author is not None:
                assert self._author.apply(message) in (Outcome.HIT, Outcome.MISS)
        if messages:
            slower = machine.delay(self.num_rounds)
            self._steps = [(slower * machine.answer, self._answer), (slower * machine.burst, self._grow)]

    def _grow(self) -> list[DraftMessage]:
        author = self._author
        assert author is not None
        node, position = author.root, author.committed_len
        for _ in range(DEPTH):
            guess = self._guess(position)
            known = author.child(node, guess)
            below = known if known is not None else author.add(node, guess, math.log(self._machine.chance), 0)
            if below is None:
                break
            node, position = below, position + 1
        return self._answer()

    def _answer(self) -> list[DraftMessage]:
        assert self._author is not None
        messages: list[DraftMessage] = []
        while (grow := self._author.take(64)) is not None:
            messages.append(grow)
        return messages

    def _truth(self, position: int) -> int:
        return position % 40

    def _guess(self, position: int) -> int:
        right = random.Random(position).random() < self._machine.chance
        return self._truth(position) if right else 45

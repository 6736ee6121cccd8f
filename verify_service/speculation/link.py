"""A request's tree and the peer that grows it; a peer and what goes to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from outrider.protocol.speculation import VerifyMessage
from outrider.tree.handshake import Terms
from outrider.tree.mirror import TreeMirror
from verify_service.engine.request import Request
from verify_service.speculation.calibration import Calibrator, DraftBackoff
from verify_service.speculation.health import Answers, AnswerTimes, PeerHealth, Wait

if TYPE_CHECKING:
    from verify_service.features.ports import FeatureLine

LEAST_MORE = 0.05
"""Accepted tokens; a draft that adds less to its answers a little later has said all at once."""

_OVERDUE = 1.5
"""Times as long as a later part usually takes, after which it is not waited for any more: the draft has other work."""

_LEAST_LEFT = 0.3
"""Of the time that a later part usually takes: so much more is reckoned with for one that is due, or rounds would be
held for every one, a little each time."""

_MOST_VAIN = 3
"""Waits in a row that may be in vain. A draft that answers after the longest wait would cost one in every round."""

_MOST_PASSED = 32
"""Commits at most that are not waited for between two further ones; 1 at first, and twice as many each time."""


class DraftPort(Protocol):
    """A session with one draft service. Methods must not block; `send` is called on the engine thread alone."""

    address: str

    def send(self, messages: list[VerifyMessage]) -> None:
        """Queue messages, in order."""

    def reset(self) -> None:
        """End the session; it reports itself down, and up again when it is."""


@dataclass(eq=False, slots=True)
class SpeculativeRequest:
    """One request's tree, and the peer that grows it, if any does."""

    request: Request
    mirror: TreeMirror
    number: int = 0
    peer: DraftReplica | None = None
    paused: bool = False
    opened_at: float = float("-inf")
    retry_at: float = 0.0
    refused_by: set[DraftPort] = field(default_factory=set)
    """Sessions whose draft will not take the request, however often it is asked."""
    features_sent: int = 0
    """Positions whose features the draft was sent, or that are on their way."""
    credit: int = 0
    merit: DraftBackoff = field(default_factory=DraftBackoff)
    num_untold: int = 0
    """Committed tokens that the draft was not told of because it is in doubt."""
    gain: float = 1.0
    """Accepted tokens that a tree grown after a miss promised lately; what holding a round for one may bring."""
    hit_gain: float = 0.0
    """The same of the first answer after a hit, beyond what was left of the tree."""
    awaited: bool = False
    """The last commit left no nodes (in lockstep, and where drafts take turns with rounds: whatever it left), and the
    draft's answer to it is not here yet."""
    after_hit: bool = False
    """Whether the last commit left nodes."""
    caught_up: bool = False
    """Whether the draft has ever answered to what was then the last commit: before, it computes the prompt."""
    num_answers: int = 0
    """Messages that followed the last commit."""
    num_late: int = 0
    """Of these, those that came after the round was launched, on cores that the round had taken."""
    missed: bool = False
    """Whether the last commit left no nodes, and an answer is not awaited anyway."""
    held: bool = False
    """Whether the next round was held for the draft's answer, or for more of it."""
    num_vain: int = 0
    """Waits in a row that brought no answer; counted where drafts take turns with rounds."""
    num_passed: int = 0
    """Commits since the last of them that were not waited for because of that."""
    asked_at: float | None = None
    """When the draft was told of what it should answer; None while it has not been."""
    answered_at: float | None = None
    """When the answer to a commit that left no nodes came, or the last part behind it; None where no further part is
    awaited."""
    num_parts: int = 0
    """Parts that have come behind the answer."""
    promised: float = 0.0
    """Accepted tokens that answer and parts promised, with few nodes."""
    reach: float = 0.0
    """The same with as many nodes as a round of one request may well take."""
    reach_ends: float = 0.0
    """The chance that what is committed next runs past one of those nodes which has no children yet."""
    ends: float = 0.0
    """The same of the nodes that the next round would take, as far as it could take deeper ones."""
    used: float = 0.0
    """Nodes that its rounds took lately."""
    clock: Callable[[], float] = time.monotonic

    @property
    def expects(self) -> bool:
        """Whether the draft may bring nodes soon that a round would want."""
        if not self.awaited and self.answered_at is None:
            return False
        return not (self.paused or self.waits_in_vain or self.merit.in_doubt)

    @property
    def waits_in_vain(self) -> bool:
        """Whether the draft has answered too late so often that it is not waited for now."""
        most = self.num_vain - _MOST_VAIN
        return most >= 0 and self.num_passed < min(1 << min(most, 30), _MOST_PASSED)

    def first_wait(self) -> Wait | None:
        """For the answer to a miss."""
        if not self.awaited or self.peer is None:
            return None
        answers = self.answers(self.peer)
        waited = 0.0 if self.asked_at is None else self.clock() - self.asked_at
        return Wait(self.first_gain, *self.first_times(self.peer).left(waited), answers.shares, answers.found)

    @property
    def first_gain(self) -> float:
        """Accepted tokens that the answer which is awaited first is likely to bring."""
        return self.hit_gain if self.after_hit else self.gain

    @property
    def most_gain(self) -> float:
        """Accepted tokens that no wait for the draft is likely to exceed."""
        if self.peer is None:
            return 0.0
        first = self.first_gain if self.awaited else 0.0
        return max(first, 0.0) + max(self.more_gain(self.peer), 0.0)

    @property
    def least_seconds(self) -> float:
        """What is left of the shortest wait for the draft that is likely to bring anything."""
        if self.peer is None:
            return 0.0
        answers = self.answers(self.peer)
        times, since = self.first_times(self.peer), self.asked_at
        if not self.awaited:
            times, since = answers.part_times(self.num_parts), self.answered_at
        return times.left(0.0 if since is None else self.clock() - since)[0]

    def whole_wait(self) -> Wait | None:
        """For the next part, and for the answer itself if it has not come; None if little is likely to follow."""
        if self.peer is None or (more_gain := self.more_gain(self.peer)) < LEAST_MORE:
            return None
        answers = self.answers(self.peer)
        if self.answered_at is not None:
            waited, times = self.clock() - self.answered_at, answers.part_times(self.num_parts)
            typical, late = times.left(waited)
            if self.num_parts:
                typical = max(typical, _LEAST_LEFT * times.typical)
                late = min(late, _OVERDUE * times.typical - waited)
                if late <= 0:
                    return None
            return Wait(more_gain, typical, late, answers.shares)
        first = self.first_wait()
        if first is None:
            return None
        more = answers.more
        gain, typical, late = first.gain + more_gain, first.typical + more.typical, first.late + more.late
        return Wait(gain, typical, late, answers.shares, answers.found)

    def more_gain(self, peer: DraftReplica) -> float:
        """Accepted tokens that the next part behind the answer is likely to bring.

        Of the first part it is what such parts brought lately. Later ones bring little to most trees, and much where
        all that is there is likely to be accepted.
        """
        answers = self.answers(peer)
        if self.awaited or not self.num_parts:
            return answers.more_gain
        return answers.deepens[self.num_parts] * self.ends

    @property
    def feature_end(self) -> int:
        """Positions whose features the draft should have: all that are stored, of tokens that it was told of."""
        return min(self.request.cached_len, len(self.request.tokens) - 1 - self.num_untold)

    def first_times(self, peer: DraftReplica) -> AnswerTimes:
        """How long the answer takes that is awaited first."""
        return self.answers(peer).answer if self.caught_up else peer.health.opens

    def answers(self, peer: DraftReplica) -> Answers:
        """What the draft sent lately after commits like the last one."""
        return peer.health.hits if self.after_hit else peer.health.misses


@dataclass(eq=False, slots=True)
class DraftReplica:
    """A draft service that is connected."""

    port: DraftPort
    health: PeerHealth
    calibrator: Calibrator
    """Of this draft's sources; what another draft's scores are worth says nothing about it."""
    terms: Terms = field(default_factory=Terms)
    takes: tuple[int, ...] = ()
    """Parts of a stored row that its features are; empty if it gets none."""
    line: FeatureLine | None = None
    """Where its features go, if it takes any and its stream is asked for."""
    links: dict[int, SpeculativeRequest] = field(default_factory=dict)
    outbox: list[VerifyMessage] = field(default_factory=list)
    draining: bool = False
    """It goes away: what it has it keeps, and nothing new is opened with it."""
    missed_at: float | None = None
    """When it was first found lost; None while it is not."""
    merit: DraftBackoff = field(default_factory=DraftBackoff)
    """Of its guesses for all of its requests; what new ones begin with."""

"""What is awaited of drafts after each commit, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

import numpy as np

from verify_service.speculation.budget import Forest
from verify_service.speculation.health import MOST_PARTS, PROMISE_NODES
from verify_service.speculation.link import DraftReplica, SpeculativeRequest

_LOOKED_AT = 24
"""Nodes of a tree that are looked at for what a part behind the answer adds to it."""
_FEW = 4
"""Requests of a draft at most for which more than one part behind an answer is looked at: among more, depth is worth no
wait, and looking at all parts takes the engine's time."""
_LEARN = 0.2
"""Weight of the newest answer in what answers bring."""


class AnswerTracker:
    """Keeps what links know of their drafts' answers: whether one is awaited, what it brings, how long it takes."""

    def __init__(self, *, lockstep: bool, turns: bool) -> None:
        """See `Drafts`."""
        self._lockstep = lockstep
        self._turns = turns
        self._always = lockstep or turns
        """Whether the answer to every commit is awaited."""
        self._launched_at = math.inf

    def opened(self, link: SpeculativeRequest, at: float) -> None:
        """The link's peer was told of its request at this time."""
        link.asked_at = at
        link.awaited = True
        _forget_answer(link)
        link.after_hit = False
        link.promised = 0.0
        link.held = False
        # Where every answer is waited for, the first one is none of another kind.
        link.caught_up = self._always
        link.num_answers = link.num_late = link.num_vain = link.num_passed = 0

    def given_up(self, link: SpeculativeRequest) -> None:
        """The link has no peer any more."""
        link.awaited, link.missed, link.answered_at = False, False, None

    def committed(self, link: SpeculativeRequest) -> None:
        """The link's mirror was re-rooted. What followed the commit before is over; its draft is not told yet."""
        self._launched_at = math.inf
        if link.missed and link.peer is not None:
            link.peer.health.misses.passed(link.held, link.mirror.has_nodes)
        link.num_passed += link.waits_in_vain
        link.held = False
        tempts = self._turns and not link.merit.in_doubt
        if tempts and link.peer is not None and (link.num_late or not link.num_answers):
            link.answers(link.peer).tempt()
        elif link.answered_at is not None:
            _nothing_followed(link)
        _forget_answer(link)
        link.num_answers = link.num_late = 0
        link.asked_at = None
        link.awaited = link.peer is not None and (self._always or not link.mirror.has_nodes)
        link.missed = link.awaited and link.caught_up and not self._always
        link.after_hit = self._turns and link.mirror.has_nodes
        link.promised = sum(_best(link, PROMISE_NODES)[0]) if link.after_hit else 0.0

    def told(self, link: SpeculativeRequest, at: float) -> None:
        """The draft was told of the commit at this time."""
        link.asked_at = at if link.caught_up else link.opened_at

    def waits_for(self, links: Iterable[SpeculativeRequest]) -> None:
        """The next round is held for these."""
        for link in links:
            link.held = True

    def launched(self, links: Iterable[SpeculativeRequest], at: float) -> None:
        """A round was launched at this time; where drafts take turns with rounds, what they do from then on is slow."""
        if not self._turns:
            return
        self._launched_at = at
        for link in links:
            if link.peer is not None and link.held and link.expects and link.asked_at is not None:
                answers = link.answers(link.peer)
                if link.answered_at is not None:
                    answers.more.not_within(at - link.answered_at)
                else:
                    answers.answer.not_within(at - link.asked_at)
                    link.num_vain, link.num_passed = link.num_vain + 1, 0

    def answered(self, link: SpeculativeRequest, peer: DraftReplica, arrived_at: float, num_nodes: int) -> None:
        """The draft has said something that follows the newest commit, with so many nodes for its tree."""
        link.num_answers += 1
        if arrived_at > self._launched_at:
            # What nobody could wait for says nothing of what a wait would bring.
            link.num_late += 1
            link.awaited, link.answered_at = False, None
        elif link.awaited:
            self._first_came(link, peer, arrived_at)
        elif link.answered_at is not None and (num_nodes or not link.num_parts):
            if arrived_at > link.answered_at:
                self._part_came(link, peer, arrived_at)
            else:
                # One answer in several messages, or one part.
                gain = self._look_at(link, peer)
                if link.num_parts == 0:
                    _gained_more(link, gain)
        link.caught_up = True

    def _first_came(self, link: SpeculativeRequest, peer: DraftReplica, arrived_at: float) -> None:
        link.awaited = False
        link.num_vain = link.num_passed = 0
        gain = self._look_at(link, peer)
        _gained(link, max(gain, 0.0))
        if link.asked_at is not None:
            seconds = max(arrived_at - link.asked_at, 0.0)
            link.first_times(peer).note(seconds)
        # In lockstep a tree is one message, and the answer to a hit says nothing of one to a miss.
        link.answered_at = None if self._lockstep else arrived_at

    def _part_came(self, link: SpeculativeRequest, peer: DraftReplica, arrived_at: float) -> None:
        assert link.answered_at is not None
        answers, part, seconds = link.answers(peer), link.num_parts, arrived_at - link.answered_at
        reach, ends = link.reach, link.reach_ends
        gain = self._look_at(link, peer)
        if part == 0:
            answers.added(max(gain, 0.0))
        answers.deepened(part, max(link.reach - reach, 0.0), ends)
        answers.part_times(part).note(seconds)
        link.num_parts += 1
        link.answered_at = arrived_at if link.num_parts < MOST_PARTS and self._goes_on(peer) else None

    def _look_at(self, link: SpeculativeRequest, peer: DraftReplica) -> float:
        """What the best nodes promise more than they did, now that something has come.

        How they share it is remembered for the peer.
        """
        chances, link.reach_ends = _best(link, _LOOKED_AT if self._goes_on(peer) else PROMISE_NODES)
        promise = np.array(chances[:PROMISE_NODES] + [0.0] * (PROMISE_NODES - len(chances))).cumsum()
        link.answers(peer).promised(promise)
        before, link.promised, link.reach = link.promised, float(promise[-1]), sum(chances)
        return link.promised - before

    def _goes_on(self, peer: DraftReplica) -> bool:
        """Whether a draft is looked at for more than one part: one that takes turns with rounds has no more to say."""
        return len(peer.links) <= _FEW and not self._always


def _forget_answer(link: SpeculativeRequest) -> None:
    """Nothing of an answer is here."""
    link.answered_at, link.num_parts = None, 0
    link.reach = link.reach_ends = link.ends = 0.0


def _gained(link: SpeculativeRequest, gain: float) -> None:
    """The first answer to a commit brought so many tokens that are likely to be accepted."""
    _gained_more(link, gain - (link.hit_gain if link.after_hit else link.gain))


def _gained_more(link: SpeculativeRequest, gain: float) -> None:
    """It brought so many more."""
    if link.after_hit:
        link.hit_gain += _LEARN * gain
    else:
        link.gain += _LEARN * gain


def _nothing_followed(link: SpeculativeRequest) -> None:
    """The round was over before a further part came."""
    if link.peer is None:
        return
    answers = link.answers(link.peer)
    if link.num_parts == 0:
        answers.added(0.0)
    answers.deepened(link.num_parts, 0.0, link.reach_ends)


def _best(link: SpeculativeRequest, count: int) -> tuple[list[float], float]:
    """How likely the best so many nodes of a tree are committed, and how likely something is that ends behind them.

    See `Forest.ends`.
    """
    forest = Forest([link.mirror], [count])
    chances = list(islice(forest.best(), count))
    return chances, forest.ends(0, len(chances))

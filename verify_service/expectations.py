"""What is awaited of drafts after each commit, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from verify_service.forest import Forest
from verify_service.health import PROMISE_NODES
from verify_service.link import Link, Peer

_LEARN = 0.2
"""Weight of the newest answer in what answers bring."""


class Expectations:
    """Keeps what links know of their drafts' answers: whether one is awaited, what it brings, how long it takes."""

    def __init__(self, *, lockstep: bool, turns: bool) -> None:
        """See `Drafts`."""
        self._lockstep = lockstep
        self._turns = turns
        self._always = lockstep or turns
        """Whether the answer to every commit is awaited."""
        self._launched_at = math.inf

    def opened(self, link: Link, at: float) -> None:
        """The link's peer was told of its request at this time."""
        link.asked_at = at
        link.awaited, link.answered_at = True, None
        link.after_hit, link.promised = False, 0.0
        link.held = False
        # Where every answer is waited for, the first one is none of another kind.
        link.caught_up = self._always
        link.num_answers = link.num_late = link.num_vain = link.num_passed = 0

    def given_up(self, link: Link) -> None:
        """The link has no peer any more."""
        link.awaited, link.missed, link.answered_at = False, False, None

    def committed(self, link: Link) -> None:
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
            _end_wait(link, 0.0, None)
        link.answered_at = None
        link.num_answers = link.num_late = 0
        link.asked_at = None
        link.awaited = link.peer is not None and (self._always or not link.mirror.has_nodes)
        link.missed = link.awaited and link.caught_up and not self._always
        link.after_hit = self._turns and link.mirror.has_nodes
        link.promised = float(_promise(link)[-1]) if link.after_hit else 0.0

    def told(self, link: Link, at: float) -> None:
        """The draft was told of the commit at this time."""
        link.asked_at = at if link.caught_up else link.opened_at

    def waits_for(self, links: Iterable[Link]) -> None:
        """The next round is held for these."""
        for link in links:
            link.held = True

    def launched(self, links: Iterable[Link], at: float) -> None:
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

    def answered(self, link: Link, peer: Peer, arrived_at: float) -> None:
        """The draft has said something that follows the newest commit."""
        link.num_answers += 1
        if arrived_at > self._launched_at:
            # What nobody could wait for says nothing of what a wait would bring.
            link.num_late += 1
            link.awaited, link.answered_at = False, None
        elif link.awaited:
            self._first_came(link, peer, arrived_at)
        elif link.answered_at is not None:
            promise = self._promised(link, peer)
            if arrived_at > link.answered_at:
                _end_wait(link, promise - link.promised, arrived_at - link.answered_at)
            else:
                # One answer in several messages.
                if link.after_hit:
                    link.hit_gain += _LEARN * (promise - link.promised)
                else:
                    link.gain += _LEARN * (promise - link.promised)
                link.promised = promise
        link.caught_up = True

    def _first_came(self, link: Link, peer: Peer, arrived_at: float) -> None:
        link.awaited = False
        link.num_vain = link.num_passed = 0
        promise = self._promised(link, peer)
        _gained(link, max(promise - link.promised, 0.0))
        link.promised = promise
        if link.asked_at is not None:
            seconds = max(arrived_at - link.asked_at, 0.0)
            link.first_times(peer).note(seconds)
        # In lockstep a tree is one message, and the answer to a hit says nothing of one to a miss.
        link.answered_at = None if self._lockstep else arrived_at

    def _promised(self, link: Link, peer: Peer) -> float:
        """What the best nodes promise now that an answer has come; its peer is remembered for how they share it."""
        promise = _promise(link)
        link.answers(peer).promised(promise)
        return float(promise[-1])


def _gained(link: Link, gain: float) -> None:
    """The first answer to a commit brought so many tokens that are likely to be accepted."""
    if link.after_hit:
        link.hit_gain += _LEARN * (gain - link.hit_gain)
    else:
        link.gain += _LEARN * (gain - link.gain)


def _end_wait(link: Link, gain: float, seconds: float | None) -> None:
    """More of an answer came, or did not."""
    link.answered_at = None
    if link.peer is not None:
        link.answers(link.peer).followed(max(gain, 0.0), seconds)


def _promise(link: Link) -> NDArray[np.float64]:
    """Tokens that the best 1, 2, ... nodes of a tree are expected to have accepted, shape [PROMISE_NODES]."""
    best = list(islice(Forest([link.mirror], [PROMISE_NODES]).best(), PROMISE_NODES))
    return np.array(best + [0.0] * (PROMISE_NODES - len(best))).cumsum()

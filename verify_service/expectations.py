"""What is awaited of drafts after each commit, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from verify_service.link import PROMISE_NODES, Link, Peer

_IN_VAIN = 1.5
"""Of the wait: what was waited for in vain takes longer than that."""
_LEARN = 0.2
"""Weight of the newest answer in what answers bring."""


class Expectations:
    """Keeps what links know of their drafts' answers: whether one is awaited, what it brings, how long it takes."""

    def __init__(self, *, lockstep: bool, turns: bool) -> None:
        """See `Drafts`."""
        self._lockstep = lockstep
        self._turns = turns
        self._launched_at = math.inf

    def opened(self, link: Link, at: float) -> None:
        """The link's peer was told of its request at this time."""
        link.asked_at = at
        link.awaited, link.answered_at = True, None
        link.after_hit, link.promised = False, 0.0
        link.num_answers = link.num_late = link.num_vain = 0

    def given_up(self, link: Link) -> None:
        """The link has no peer any more."""
        link.awaited, link.answered_at = False, None

    def committed(self, link: Link) -> None:
        """The link's mirror was re-rooted. What followed the commit before is over; its draft is not told yet."""
        self._launched_at = math.inf
        link.num_vain += link.waits_in_vain
        nothing_in_time = not link.num_answers or (link.num_late and link.num_answers > 1)
        if self._turns and link.peer is not None and nothing_in_time:
            link.answers(link.peer).tempt()
        elif link.answered_at is not None:
            _end_wait(link, 0.0, None)
        link.answered_at = None
        link.num_answers = link.num_late = 0
        link.asked_at = None
        always = self._lockstep or self._turns
        link.awaited = link.peer is not None and (always or not link.mirror.num_nodes)
        link.after_hit = self._turns and link.mirror.num_nodes > 0
        link.promised = _promise(link) if link.after_hit else 0.0

    def told(self, link: Link, at: float) -> None:
        """The draft was told of the commit at this time."""
        link.asked_at = at

    def launched(self, links: Iterable[Link], at: float) -> None:
        """A round was launched at this time; where drafts take turns with rounds, what they do from then on is slow."""
        if not self._turns:
            return
        self._launched_at = at
        for link in links:
            if link.peer is not None and link.expects and link.asked_at is not None:
                answers = link.answers(link.peer)
                if link.answered_at is not None:
                    answers.more.note(_IN_VAIN * max(at - link.answered_at, 0.0))
                else:
                    answers.answer.note(_IN_VAIN * max(at - link.asked_at, 0.0))
                    link.num_vain += 1

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
            promise = _promise(link)
            if arrived_at > link.answered_at:
                _end_wait(link, promise - link.promised, arrived_at - link.answered_at)
            else:
                # One answer in several messages.
                if link.after_hit:
                    link.hit_gain += _LEARN * (promise - link.promised)
                else:
                    link.gain += _LEARN * (promise - link.promised)
                link.promised = promise

    def _first_came(self, link: Link, peer: Peer, arrived_at: float) -> None:
        link.awaited = False
        link.num_vain = 0
        promise = _promise(link)
        _gained(link, max(promise - link.promised, 0.0))
        link.promised = promise
        if link.asked_at is not None:
            seconds = max(arrived_at - link.asked_at, 0.0)
            link.answers(peer).answer.note(seconds)
        # In lockstep a tree is one message, and the answer to a hit says nothing of one to a miss.
        link.answered_at = None if self._lockstep else arrived_at


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


def _promise(link: Link) -> float:
    """Tokens that the best nodes of a tree are expected to have accepted."""
    return float(np.exp(np.sort(link.mirror.log_probs)[::-1][:PROMISE_NODES]).sum())

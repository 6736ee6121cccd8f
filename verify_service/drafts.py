"""Verify's copies of the trees, and the draft services that grow them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from outrider.tree.messages import (
    Close,
    Commit,
    Decline,
    DeclineReason,
    DraftMessage,
    Grow,
    Open,
    Pause,
    Resume,
    VerifyMessage,
)
from outrider.tree.mirror import Observation, TreeMirror, token_array
from verify_service.calibration import Calibrator
from verify_service.health import PeerHealth
from verify_service.request import Request

REOPEN_SECONDS = 1.0
"""How long a request waits for a draft that declined it for lack of room, or twice in a row."""

CONFIRM_SECONDS = 0.1
"""A peer is lost if it is found so for this long: once is no proof, its answer may lie behind a frame read in part."""

PROMISE_NODES = 8
"""Best nodes of a request's tree that a hold counts on: what they bring, and what a round of them costs."""


class DraftPort(Protocol):
    """A session with one draft service. Methods must not block; `send` is called on the engine thread alone."""

    address: str

    def send(self, messages: list[VerifyMessage]) -> None:
        """Queue messages, in order."""

    def reset(self) -> None:
        """End the session; it reports itself down, and up again when it is."""


@dataclass(eq=False, slots=True)
class Link:
    """One request's tree, and the peer that grows it, if any does."""

    request: Request
    mirror: TreeMirror
    number: int = 0
    peer: Peer | None = None
    paused: bool = False
    opened_at: float = float("-inf")
    retry_at: float = 0.0
    refused_by: set[DraftPort] = field(default_factory=set)
    """Sessions whose draft will not take the request, however often it is asked."""
    credit: int = 0
    gain: float = 1.0
    """Accepted tokens that a tree grown after a miss promised lately; what holding a round for one may bring."""
    awaited: bool = False
    """The last commit left no nodes, and the draft's answer to it is not here yet."""


@dataclass(eq=False, slots=True)
class Peer:
    """A draft service that is connected."""

    port: DraftPort
    health: PeerHealth
    calibrator: Calibrator
    """Of this draft's sources; what another draft's scores are worth says nothing about it."""
    links: dict[int, Link] = field(default_factory=dict)
    outbox: list[VerifyMessage] = field(default_factory=list)
    missed_at: float | None = None
    """When it was first found lost; None while it is not."""


class Drafts:
    """All trees of a verify service. The engine thread alone uses it.

    Losing a peer forgets its trees and nothing else: their requests go on with plain decoding until a peer is there.
    """

    def __init__(self, vocab_size: int, max_nodes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.dropped: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self.peers: dict[DraftPort, Peer] = {}
        self._links: dict[Request, Link] = {}
        self._calibrators: dict[str, Calibrator] = {}
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes
        self._clock = clock
        self._next_number = 1

    def link(self, request: Request) -> Link | None:
        """The request's tree, if it speculates."""
        return self._links.get(request)

    def admit(self, request: Request) -> None:
        """Begin to speculate for a request."""
        if request.speculate:
            mirror = TreeMirror(request.tokens, self._vocab_size, self._max_nodes)
            self._links[request] = Link(request, mirror, credit=self._max_nodes // 4)
            self._assign(self._links[request])

    def committed(self, request: Request) -> None:
        """Tokens were committed: re-root the tree. All else that follows from it can wait for `report`."""
        link = self._links.get(request)
        if link is not None:
            link.mirror.commit()
            link.awaited = link.peer is not None and not link.mirror.num_nodes

    def report(self, request: Request, num_tokens: int, credit: int) -> None:
        """Tell the draft of the request's last `num_tokens` tokens, which `committed` has followed."""
        link = self._links.get(request)
        if link is None:
            return
        if link.peer is None:
            self._assign(link)
            return
        mirror = link.mirror
        link.credit = credit
        link.peer.health.sent(link.number, request.committed_len)
        message = Commit(
            request=link.number,
            length_before=request.committed_len - num_tokens,
            token_ids=token_array(request.tokens[-num_tokens:]),
            epoch=mirror.epoch,
            received_through=mirror.received_through,
            resolved_root=mirror.resolved_root,
            credit=credit,
        )
        link.peer.outbox.append(message)

    def pause(self, request: Request) -> None:
        """The request was preempted: nothing need grow."""
        link = self._links.get(request)
        if link is not None and link.peer is not None and not link.paused:
            link.peer.outbox.append(Pause(link.number))
            link.paused = True

    def resume(self, request: Request) -> None:
        """The request runs again."""
        link = self._links.get(request)
        if link is not None and link.peer is not None and link.paused:
            link.peer.outbox.append(Resume(link.number, link.credit))
        if link is not None:
            link.paused = False

    def close(self, request: Request) -> None:
        """The request ended."""
        link = self._links.pop(request, None)
        if link is not None:
            self._detach(link, tell=True)

    def connected(self, port: DraftPort) -> None:
        """A session began; requests without a draft get this one."""
        calibrator = self._calibrators.setdefault(port.address, Calibrator())
        self.peers[port] = Peer(port, PeerHealth(self._clock), calibrator)
        self._assign_all()

    def disconnected(self, port: DraftPort) -> None:
        """A session ended, and with it the epochs of its trees."""
        peer = self.peers.pop(port, None)
        for link in self._links.values():
            link.refused_by.discard(port)
        for link in list(peer.links.values()) if peer else []:
            self._detach(link, tell=False)
            self._assign(link)

    def receive(self, port: DraftPort, messages: Iterable[DraftMessage], arrived_at: float) -> None:
        """Take what a draft sent, and when it arrived. Whatever is wrong with it is dropped and counted."""
        peer = self.peers.get(port)
        if peer is None:
            return
        for message in messages:
            match message:
                case Grow():
                    self._grow(peer, message, arrived_at)
                case Decline():
                    self._decline(peer, message)
                case _:
                    self.dropped["unexpected"] += 1

    def flush(self) -> None:
        """Hand all queued messages to their sessions."""
        for peer in list(self.peers.values()):
            if peer.outbox:
                peer.port.send(peer.outbox)
                peer.outbox = []

    def learn(self) -> None:
        """Learn from what was committed and received; it may wait until there is time."""
        for peer in self.peers.values():
            self._learn(peer, peer.links.values())

    def attend(self) -> None:
        """Reset sessions that answer nothing any more, and find drafts for requests that have none.

        Call it when all that arrived was taken: during a round answers lie unread, and peers seem slow or lost.
        """
        now = self._clock()
        for peer in list(self.peers.values()):
            if not peer.health.lost:
                peer.missed_at = None
            elif peer.missed_at is None:
                peer.missed_at = now
            elif now - peer.missed_at > CONFIRM_SECONDS:
                peer.missed_at = None
                peer.health.restart()
                peer.port.reset()
        self._assign_all()

    def _assign_all(self) -> None:
        for link in self._links.values():
            if link.peer is None:
                self._assign(link)

    def _assign(self, link: Link) -> None:
        """Open the request with the healthy peer that has the fewest."""
        if self._clock() >= link.retry_at:
            fit = [peer for port, peer in self.peers.items() if peer.health.good and port not in link.refused_by]
            if fit:
                self._open(link, min(fit, key=lambda peer: len(peer.links)))

    def _open(self, link: Link, peer: Peer) -> None:
        """Open under a new number, so that nothing said of an earlier life can be taken for this one."""
        link.number, self._next_number = self._next_number, self._next_number + 1
        link.peer = peer
        link.opened_at = self._clock()
        link.awaited = True
        link.mirror.forget()
        link.mirror.calibrate = peer.calibrator
        peer.links[link.number] = link
        request = link.request
        peer.health.sent(link.number, request.committed_len)
        opened = Open(link.number, token_array(request.tokens), request.prompt_len, request.sampling, link.credit)
        peer.outbox.append(opened)
        if link.paused:
            peer.outbox.append(Pause(link.number))

    def _detach(self, link: Link, tell: bool) -> None:
        if link.peer is not None:
            self._learn(link.peer, [link])
            link.peer.links.pop(link.number, None)
            link.peer.health.forget(link.number)
            if tell:
                link.peer.outbox.append(Close(link.number))
            link.peer = None
        link.awaited = False
        link.mirror.forget()

    def _grow(self, peer: Peer, grow: Grow, arrived_at: float) -> None:
        link = peer.links.get(grow.request)
        if link is None:
            self.dropped["closed"] += len(grow.token_ids)
            return
        link.mirror.insert(grow)
        peer.health.answered(link.number, link.mirror.acked_len, arrived_at)
        if link.awaited and link.mirror.acked_len == link.request.committed_len:
            link.awaited = False
            link.gain += 0.2 * (self._promise(link) - link.gain)

    def _promise(self, link: Link) -> float:
        """Tokens that the best nodes of a tree are expected to have accepted."""
        return float(np.exp(np.sort(link.mirror.log_probs)[::-1][:PROMISE_NODES]).sum())

    def _decline(self, peer: Peer, decline: Decline) -> None:
        link = peer.links.get(decline.request)
        self.declined[decline.reason.name.lower()] += 1
        if link is None:
            return
        self._detach(link, tell=decline.reason is DeclineReason.GAP)
        if not decline.retryable or decline.reason is DeclineReason.DRAINING:
            link.refused_by.add(peer.port)
        else:
            told_anew = decline.reason in (DeclineReason.GAP, DeclineReason.UNKNOWN_REQUEST)
            if not told_anew or self._clock() - link.opened_at < REOPEN_SECONDS:
                link.retry_at = self._clock() + REOPEN_SECONDS
        self._assign(link)

    def _learn(self, peer: Peer, links: Iterable[Link]) -> None:
        seen: list[Observation] = []
        for link in links:
            seen += link.mirror.take_observations()
            if link.mirror.dropped:
                self.dropped.update(link.mirror.dropped)
                link.mirror.dropped.clear()
        peer.calibrator.observe(seen)

"""Verify's copies of the trees, and the draft services that grow them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable

from outrider.protocol.speculation import (
    Close,
    Commit,
    Decline,
    DeclineReason,
    DraftMessage,
    Grow,
    Open,
    Pause,
    Resume,
)
from outrider.tree.handshake import Terms
from outrider.tree.mirror import Observation, TreeMirror
from verify_service.engine.request import Request
from verify_service.speculation.answer_tracker import AnswerTracker
from verify_service.speculation.calibration import TRIAL, Calibrator, DraftBackoff
from verify_service.speculation.health import PeerHealth
from verify_service.speculation.link import DraftPort, DraftReplica, SpeculativeRequest

REOPEN_SECONDS = 1.0
"""How long a request waits for a draft that declined it for lack of room, or twice in a row."""

CONFIRM_SECONDS = 0.1
"""A peer is lost if it is found so for this long: once is no proof, its answer may lie behind a frame read in part."""

CREDIT_ROUNDS = 16
"""Rounds' worth of nodes that a draft may hold for a request, half of that where more than two share the rounds.

When a round is chosen, the draft has not heard of the last commit; what the next one takes must be there by then. So
its tree reaches over two rounds in depth: the nodes in flight, and those below the most likely of them. No more than a
part of either is on the path that is committed, and a round ends with a token that was unlikely: what the next one
takes hangs below one of many such tokens. Simulated, half as many cost 2 to 3 % of tokens per second, and twice as many
bring nothing.
"""

_LEAST_SHARE = 4
"""Nodes of a round that a request is granted at least, however many others there are."""


class Drafts:
    """All trees of a verify service. The engine thread alone uses it.

    Losing a peer forgets its trees and nothing else: their requests go on with plain decoding until a peer is there.
    """

    def __init__(
        self,
        vocab_size: int,
        max_nodes: int,
        clock: Callable[[], float] = time.monotonic,
        lockstep: bool = False,
        turns: bool = False,
    ) -> None:
        """`max_nodes`: that a draft may hold for a request.

        In `lockstep` the answer to every commit is awaited, whatever nodes are left. So it is with `turns`, where
        drafts share cores with rounds: they grow between rounds, and one that is not waited for grows slowly.
        """
        self.dropped: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self.peers: dict[DraftPort, DraftReplica] = {}
        self.feature_epoch = 0
        """Requests of this one (`Memory.feature_epoch`) have their features stored; 0 while none has."""
        self._links: dict[Request, SpeculativeRequest] = {}
        self._calibrators: dict[str, Calibrator] = {}
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes
        self._clock = clock
        self._turns = turns
        self._lockstep = lockstep
        self._expectations = AnswerTracker(lockstep=lockstep, turns=turns)
        self._next_number = 1

    def link(self, request: Request) -> SpeculativeRequest | None:
        """The request's tree, if it speculates."""
        return self._links.get(request)

    def admit(self, request: Request) -> None:
        """Begin to speculate for a request."""
        if request.speculate:
            # Half of them may be dead until they are in the way.
            mirror = TreeMirror(request.tokens, self._vocab_size, 2 * self._max_nodes)
            credit = self._max_nodes // CREDIT_ROUNDS
            self._links[request] = SpeculativeRequest(request, mirror, credit=credit, clock=self._clock)
            self._assign(self._links[request])

    def committed(self, request: Request) -> None:
        """Tokens were committed: re-root the tree. All else that follows from it can wait for `report`."""
        link = self._links.get(request)
        if link is not None:
            link.mirror.commit()
            self._expectations.committed(link)

    def waits_for(self, links: Iterable[SpeculativeRequest]) -> None:
        """The next round is held for what these may bring."""
        self._expectations.waits_for(links)

    def launched(self, at: float) -> None:
        """A round was launched at this time; where drafts take turns with rounds, what they do from then on is slow."""
        self._expectations.launched(self._links.values(), at)

    def credit(self, request: Request, share: int, num_nodes: int) -> int:
        """Live nodes that the request's draft may hold from now on, after a round that took `num_nodes` of them.

        `share`: nodes of a round that the request would have if all had as many. What it uses may be more: its text is
        easier than the others'. In all this is bounded, since rounds are; and no more than its tree has room for.
        """
        link = self._links.get(request)
        if link is None:
            return 0
        link.used = max(num_nodes, link.used + 0.2 * (num_nodes - link.used))
        if link.merit.in_doubt:
            rounds, share = CREDIT_ROUNDS // 4, 0
        else:
            is_roomy = 2 * share >= self._max_nodes / CREDIT_ROUNDS - 1  # about half of a round or more
            rounds = CREDIT_ROUNDS if is_roomy else CREDIT_ROUNDS // 2
        return min(rounds * max(share, math.ceil(link.used), _LEAST_SHARE), self._max_nodes)

    def report(self, request: Request, num_tokens: int, credit: int) -> None:
        """Tell the draft of the request's last `num_tokens` tokens, which `committed` has followed."""
        link = self._links.get(request)
        if link is None:
            return
        if link.peer is None:
            self._assign(link)
            return
        if link.merit.passes():
            link.num_untold += num_tokens
            return
        num_tokens, link.num_untold = num_tokens + link.num_untold, 0
        mirror, tokens = link.mirror, request.tokens
        link.credit = credit
        self._expectations.told(link, self._clock())
        link.peer.health.sent(link.number, len(tokens))
        length_before, token_ids = len(tokens) - num_tokens, tokens[-num_tokens:]
        state = (mirror.epoch, mirror.received_through, mirror.resolved_root)
        link.peer.outbox.append(Commit(link.number, length_before, token_ids, *state, credit))

    def pause(self, request: Request) -> None:
        """The request was preempted: nothing need grow, with this draft or one that connects before it runs again."""
        link = self._links.get(request)
        if link is None or link.paused:
            return
        link.paused = True
        link.answered_at = None
        if link.peer is not None:
            link.peer.outbox.append(Pause(link.number))

    def resume(self, request: Request) -> None:
        """The request runs again."""
        link = self._links.get(request)
        if link is None or not link.paused:
            return
        link.paused = False
        if link.peer is not None:
            link.peer.outbox.append(Resume(link.number, link.credit))

    def close(self, request: Request) -> None:
        """The request ended."""
        link = self._links.pop(request, None)
        if link is not None:
            self._detach(link, tell=True)

    def connected(self, port: DraftPort, terms: Terms | None = None) -> None:
        """A session began; requests without a draft get this one."""
        calibrator = self._calibrators.setdefault(port.address, Calibrator())
        self.peers[port] = DraftReplica(port, PeerHealth(self._clock, self._turns), calibrator, terms or Terms())
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
        peer.health.heard()
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

    def serves(self, request: Request) -> bool:
        """Whether a draft grows the request's tree."""
        link = self._links.get(request)
        return link is not None and link.peer is not None

    def take_answers(self) -> list[float]:
        """Seconds of the answers to commits since this was asked last."""
        taken: list[float] = []
        for peer in self.peers.values():
            if peer.health.answers:
                taken += peer.health.answers
                peer.health.answers = []
        return taken

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

    def _assign(self, link: SpeculativeRequest) -> None:
        """Open the request with the healthy peer that has the fewest."""
        if self._clock() >= link.retry_at:
            fit = [
                peer
                for port, peer in self.peers.items()
                if peer.health.good and port not in link.refused_by and self._may_serve(peer, link.request)
            ]
            if fit:
                self._open(link, min(fit, key=lambda peer: len(peer.links)))

    def _may_serve(self, peer: DraftReplica, request: Request) -> bool:
        """Whether a draft can take the request as it stands: its length, and the features that the draft needs."""
        terms = peer.terms
        if peer.draining:
            return False
        if terms.max_positions and request.committed_len > terms.max_positions:
            return False
        if not terms.feature_layers or terms.features_optional:
            return True
        return self.has_features(request) and peer.line is not None and peer.line.open

    def has_features(self, request: Request) -> bool:
        """Whether the features of all of the request's positions are stored."""
        return bool(self.feature_epoch) and request.feature_epoch == self.feature_epoch

    def suspend_features(self) -> None:
        """Features are not stored any more, or other ones: drafts that need them serve nobody for now.

        Those that can do without are told of their requests anew, and so get the new ones from the first position on.
        """
        self.feature_epoch = 0
        for peer in self.peers.values():
            for link in list(peer.links.values()) if peer.terms.feature_layers else []:
                self._detach(link, tell=True)
                self._assign(link)

    def _open(self, link: SpeculativeRequest, peer: DraftReplica) -> None:
        """Open under a new number, so that nothing said of an earlier life can be taken for this one."""
        link.number, self._next_number = self._next_number, self._next_number + 1
        link.peer = peer
        link.opened_at = self._clock()
        self._expectations.opened(link, link.opened_at)
        link.mirror.forget()
        link.mirror.calibrate = peer.calibrator
        link.features_sent = link.num_untold = 0
        link.merit = DraftBackoff(min(peer.merit.num_wrong, TRIAL))
        peer.links[link.number] = link
        request = link.request
        peer.health.sent(link.number, request.committed_len)
        opened = Open(link.number, request.tokens[:], request.prompt_len, request.sampling, link.credit, request.tenant)
        peer.outbox.append(opened)
        if link.paused:
            peer.outbox.append(Pause(link.number))

    def _detach(self, link: SpeculativeRequest, tell: bool) -> None:
        if link.peer is not None:
            self._learn(link.peer, [link])
            link.peer.links.pop(link.number, None)
            link.peer.health.forget(link.number)
            if tell:
                link.peer.outbox.append(Close(link.number))
            link.peer = None
        self._expectations.given_up(link)
        link.mirror.forget()

    def _grow(self, peer: DraftReplica, grow: Grow, arrived_at: float) -> None:
        link = peer.links.get(grow.request)
        if link is None:
            self.dropped["closed"] += len(grow.token_ids)
            return
        num_nodes = link.mirror.insert(grow)
        if link.mirror.estranged:
            self._open_again(link)
            return
        peer.health.answered(link.number, link.mirror.acked_len, arrived_at)
        if link.mirror.acked_len == link.request.committed_len:
            self._expectations.answered(link, peer, arrived_at, num_nodes)

    def _open_again(self, link: SpeculativeRequest) -> None:
        """Open a request anew, with whoever may serve it; not again and again."""
        again = self._clock() - link.opened_at < REOPEN_SECONDS
        link.retry_at = self._clock() + REOPEN_SECONDS if again else link.retry_at
        self._detach(link, tell=True)
        self._assign(link)

    def _decline(self, peer: DraftReplica, decline: Decline) -> None:
        link = peer.links.get(decline.request)
        self.declined[decline.reason.name.lower()] += 1
        if link is None:
            return
        # Told in any case: what a broken message has declined is open with the draft still.
        self._detach(link, tell=True)
        if decline.reason is DeclineReason.DRAINING:
            peer.draining = True
        elif not decline.retryable:
            link.refused_by.add(peer.port)
        else:
            told_anew = decline.reason in (DeclineReason.GAP, DeclineReason.UNKNOWN_REQUEST)
            if not told_anew or self._clock() - link.opened_at < REOPEN_SECONDS:
                link.retry_at = self._clock() + REOPEN_SECONDS
        self._assign(link)

    def _learn(self, peer: DraftReplica, links: Iterable[SpeculativeRequest]) -> None:
        seen: list[Observation] = []
        for link in links:
            news = link.mirror.take_observations()
            seen += news
            # In lockstep every answer is waited for.
            if not self._lockstep:
                link.merit.judge(news)
                peer.merit.judge(news)
            if link.mirror.dropped:
                self.dropped.update(link.mirror.dropped)
                link.mirror.dropped.clear()
        peer.calibrator.observe(seen)

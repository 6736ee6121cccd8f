"""Draft replicas, the speculative requests that they serve, and the messages to and from them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

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
    VerifyMessage,
)
from outrider.tree.handshake import Terms
from outrider.tree.mirror import Observation, TreeMirror
from verify_service.engine.request import Request
from verify_service.features.staging import FeatureChannel
from verify_service.speculation.draft_wait import DraftWaitMode, DraftWaitState
from verify_service.speculation.replica import MAX_WRONG_LOOKS, Calibrator, DraftBackoff, DraftConnection, ReplicaHealth

REOPEN_SECONDS = 1.0
"""How long a request waits to be opened again after a draft had no room for it, or had to start over twice in a row."""

CONFIRM_SECONDS = 0.1
"""A replica is reset if it seems lost for this long: once is no proof, its answer may lie in a frame read in part."""

CREDIT_ROUNDS = 16
"""Rounds' worth of nodes that a draft may hold for a request, half of that if more than two share the rounds.

When a round's nodes are chosen, the draft has not received the last commit; the nodes for the next round must be there
by then. So the tree must reach two rounds deep: the nodes in flight, and those below the most likely of them. Only some
of either are on the committed path, and a round ends with a token that was unlikely: the next round's nodes hang below
one of many such tokens. In simulations, half as many nodes cost 2 to 3 % of tokens per second, and twice as many bring
nothing.
"""

MAX_CALIBRATORS = 64
"""Most drafts whose calibration is remembered; those behind a DNS name come with ever new addresses."""

_MAX_UNSENT_TOKENS = 64
"""Most committed tokens that are not sent to a draft because no round waits for it, or it rests: it must compute them
once they are sent."""

_MIN_GRANTED_NODES = 4
"""Fewest nodes of a round that a request is granted, however many other requests there are."""

_RESTING_CREDIT = 1
"""Live nodes that a draft at rest may hold for a request: its guesses are still judged, and it takes little of a device
that rounds may run on, too."""


@dataclass(eq=False, slots=True)
class SpeculativeRequest:
    """One request's tree, and the replica that grows it, if any does."""

    request: Request
    mirror: TreeMirror
    wait: DraftWaitState
    backoff: DraftBackoff
    credit: int
    """Live nodes that the draft may hold."""
    number: int = 0
    """The request's number in messages to the replica; a new one each time the request is opened."""
    replica: DraftReplica | None = None
    retry_at: float = 0.0
    refused_by: set[DraftConnection] = field(default_factory=set)
    """Sessions whose draft will not take the request, however often it is asked."""
    num_features_sent: int = 0
    """Number of positions whose features were sent to the draft, or are on their way."""
    num_unsent_tokens: int = 0
    """Committed tokens that were not sent, because the draft is in doubt, rests, or no round waited for it."""
    num_used_nodes: float = 0.0
    """Nodes that rounds took of the tree lately."""

    @property
    def feature_end(self) -> int:
        """Number of positions whose features the draft should have: all stored ones of tokens that were sent."""
        return min(self.request.cached_len, len(self.request.tokens) - 1 - self.num_unsent_tokens)


@dataclass(eq=False, slots=True)
class DraftReplica:
    """A draft service that is connected."""

    connection: DraftConnection
    health: ReplicaHealth
    calibrator: Calibrator
    """Calibration of this draft's sources; another draft's scores say nothing about it."""
    terms: Terms = field(default_factory=Terms)
    feature_parts: tuple[int, ...] = ()
    """Parts of a stored row that the draft gets as features; empty if it gets none."""
    channel: FeatureChannel | None = None
    """The draft's features stream, if it takes features and the stream was asked for."""
    requests: dict[int, SpeculativeRequest] = field(default_factory=dict)
    """Requests that the draft serves, by number."""
    outbox: list[VerifyMessage] = field(default_factory=list)
    draining: bool = False
    """Whether the draft is going away: it keeps its requests, and no new ones are opened with it."""
    lost_since: float | None = None
    """When the draft was first found lost; None while it is not."""
    backoff: DraftBackoff = field(default_factory=DraftBackoff)
    """Record of the draft's guesses for all of its requests; new requests begin with it."""


@dataclass(eq=False, repr=False)
class Drafts:
    """All draft replicas and speculative requests of a verify engine, whose thread alone uses it.

    Losing a replica loses its trees and nothing else: their requests go on with plain decoding until another connects.
    """

    vocab_size: int
    max_nodes: int
    """Most nodes that a draft may hold for a request."""
    clock: Callable[[], float] = time.monotonic
    mode: DraftWaitMode = field(default_factory=DraftWaitMode)
    """How rounds wait for drafts; this changes while serving."""
    dropped: Counter[str] = field(default_factory=Counter)
    declined: Counter[str] = field(default_factory=Counter)
    replicas: dict[DraftConnection, DraftReplica] = field(default_factory=dict)
    feature_epoch: int = 0
    """Requests of this epoch (`Memory.feature_epoch`) have their features stored; 0 while no request has."""
    _requests: dict[Request, SpeculativeRequest] = field(default_factory=dict)
    _calibrators: dict[str, Calibrator] = field(default_factory=dict)
    _next_number: int = 1

    @property
    def resting(self) -> bool:
        """Whether rounds are to be plain for now, whatever nodes trees have."""
        return self.mode.resting

    def rest(self, resting: bool) -> None:
        """Let drafts rest, so that they rarely get commits and grow little; or end that, and send them all commits."""
        ends = self.mode.resting and not resting
        self.mode.resting = resting
        if ends:
            for spec in self._requests.values():
                if spec.replica is not None and spec.num_unsent_tokens and not spec.backoff.in_doubt:
                    self._queue_commit(spec)
            self.flush()

    def spec(self, request: Request) -> SpeculativeRequest | None:
        """Return the speculative request; None if the request does not speculate."""
        return self._requests.get(request)

    def admit(self, request: Request) -> None:
        """Begin to speculate for a request."""
        if not request.params.disable_speculation:
            # Half of the mirror's nodes may be dead ones, which are kept until they are in the way.
            mirror = TreeMirror(request.tokens, self.vocab_size, 2 * self.max_nodes)
            backoff = DraftBackoff()
            wait = DraftWaitState(mirror, self.mode, backoff)
            spec = SpeculativeRequest(request, mirror, wait, backoff, self.max_nodes // CREDIT_ROUNDS)
            self._requests[request] = spec
            self._assign(spec)

    def on_commit(self, request: Request) -> None:
        """Re-root the tree of a request whose tokens were committed. All else can wait for `send_commit`."""
        spec = self._requests.get(request)
        if spec is not None and spec.replica is not None:
            spec.mirror.commit()
            spec.wait.on_commit()

    def on_launch(self, at: float) -> None:
        """Note that a round was launched: from then on, drafts that share cores with rounds are slow."""
        if self.mode.shares_cores:
            self.mode.launched_at = at
            for spec in self._requests.values():
                spec.wait.on_launch(at)

    def credit(self, request: Request, share: int, num_nodes: int) -> int:
        """Return how many live nodes the request's draft may hold from now on, after a round that took `num_nodes`.

        `share`: nodes of a round for each request if all got as many. The request may use more, if its text is easier
        than others. All credits together are bounded, since rounds are, and each by the room in a tree.
        """
        spec = self._requests.get(request)
        if spec is None:
            return 0
        if not self.resting:
            spec.num_used_nodes = max(num_nodes, spec.num_used_nodes + 0.2 * (num_nodes - spec.num_used_nodes))
        if spec.backoff.in_doubt:
            rounds, share = CREDIT_ROUNDS // 4, 0
        else:
            is_roomy = 2 * share >= self.max_nodes / CREDIT_ROUNDS - 1  # about half of a round or more
            rounds = CREDIT_ROUNDS if is_roomy else CREDIT_ROUNDS // 2
        return min(rounds * max(share, math.ceil(spec.num_used_nodes), _MIN_GRANTED_NODES), self.max_nodes)

    def send_commit(self, request: Request, num_tokens: int, credit: int) -> None:
        """Queue a commit of the request's last `num_tokens` tokens for the draft, unless it can wait."""
        spec = self._requests.get(request)
        if spec is None:
            return
        if spec.replica is None:
            self._assign(spec)
            return
        spec.num_unsent_tokens += num_tokens
        spec.credit = credit
        if not spec.backoff.skips() and not self._can_wait(spec):
            self._queue_commit(spec)

    def send_awaited_commits(self, requests: Iterable[Request]) -> None:
        """Send drafts the commits that they lack, if the next round waits for them."""
        for request in requests:
            spec = self._requests.get(request)
            if spec is not None and spec.wait.round_waited and spec.replica is not None and spec.num_unsent_tokens:
                self._queue_commit(spec)
        self.flush()

    def _can_wait(self, spec: SpeculativeRequest) -> bool:
        """Whether a commit need not be sent yet: the draft rests, or shares cores with rounds and none
        waits for it. Growth beside a round would take its cores, for a commit that is outdated once the tree is there.
        """
        if self.resting:
            return spec.num_unsent_tokens <= _MAX_UNSENT_TOKENS
        on_demand = self.mode.shares_cores and spec.replica is not None and spec.replica.terms.drafts_on_demand
        if not on_demand or self.mode.lockstep or spec.backoff.in_doubt:
            return False
        return not spec.wait.round_waited and spec.num_unsent_tokens <= _MAX_UNSENT_TOKENS

    def _queue_commit(self, spec: SpeculativeRequest) -> None:
        assert spec.replica is not None
        mirror, tokens = spec.mirror, spec.request.tokens
        num_tokens, spec.num_unsent_tokens = spec.num_unsent_tokens, 0
        spec.wait.on_sent(self.clock())
        spec.replica.health.sent(spec.number, len(tokens))
        length_before, token_ids = len(tokens) - num_tokens, tokens[-num_tokens:]
        state = (mirror.epoch, mirror.received_through, mirror.resolved_root)
        spec.replica.outbox.append(Commit(spec.number, length_before, token_ids, *state, self._granted(spec)))

    def _granted(self, spec: SpeculativeRequest) -> int:
        return min(spec.credit, _RESTING_CREDIT) if self.resting else spec.credit

    def pause(self, request: Request) -> None:
        """Note that the request was preempted: until it runs again no draft, not even a new one, need grow its tree."""
        spec = self._requests.get(request)
        if spec is None or spec.wait.paused:
            return
        spec.wait.on_pause()
        if spec.replica is not None:
            spec.replica.outbox.append(Pause(spec.number))

    def resume(self, request: Request) -> None:
        """Note that the request runs again."""
        spec = self._requests.get(request)
        if spec is None or not spec.wait.paused:
            return
        spec.wait.paused = False
        if spec.replica is not None:
            spec.replica.outbox.append(Resume(spec.number, self._granted(spec)))

    def close(self, request: Request) -> None:
        """Stop speculating for a request that ended."""
        spec = self._requests.pop(request, None)
        if spec is not None:
            self._detach(spec, send_close=True)

    def connected(self, connection: DraftConnection, terms: Terms | None = None) -> None:
        """Add a draft whose session began; requests without a draft get this one."""
        calibrator = self._calibrators.pop(connection.address, None) or Calibrator()
        self._calibrators[connection.address] = calibrator
        if len(self._calibrators) > MAX_CALIBRATORS:
            del self._calibrators[next(iter(self._calibrators))]
        health = ReplicaHealth(self.clock, self.mode.shares_cores)
        self.replicas[connection] = DraftReplica(connection, health, calibrator, terms or Terms())
        self._assign_all()

    def disconnected(self, connection: DraftConnection) -> None:
        """Drop a draft whose session ended, and with it the epochs of its trees."""
        replica = self.replicas.pop(connection, None)
        for spec in self._requests.values():
            spec.refused_by.discard(connection)
        for spec in list(replica.requests.values()) if replica else []:
            self._detach(spec, send_close=False)
            self._assign(spec)

    def receive(self, connection: DraftConnection, messages: Iterable[DraftMessage], arrived_at: float) -> None:
        """Take messages of a draft that arrived at `arrived_at`. Whatever is wrong in them is dropped and counted."""
        replica = self.replicas.get(connection)
        if replica is None:
            return
        replica.health.on_message()
        for message in messages:
            match message:
                case Grow():
                    self._grow(replica, message, arrived_at)
                case Decline():
                    self._decline(replica, message)
                case _:
                    self.dropped["unexpected"] += 1

    def on_silence(self, connection: DraftConnection) -> None:
        """Note that a draft sends nothing more until it gets a message."""
        for spec in self.replicas[connection].requests.values():
            spec.wait.on_silence()

    def awaits_probe_answer(self, connection: DraftConnection) -> bool:
        """Whether a draft in doubt was sent a commit to judge it by, for which no round waits, and has not answered."""
        return any(
            spec.backoff.in_doubt and spec.wait.sent_at is not None and not spec.wait.num_messages
            for spec in self.replicas[connection].requests.values()
        )

    def flush(self) -> None:
        """Hand all queued messages to their sessions."""
        for replica in list(self.replicas.values()):
            if replica.outbox:
                replica.connection.send(replica.outbox)
                replica.outbox = []

    def learn(self) -> None:
        """Learn from what was committed and received; this can be done whenever there is time."""
        for replica in self.replicas.values():
            self._learn(replica, replica.requests.values())

    def serves(self, request: Request) -> bool:
        """Whether a draft grows the request's tree."""
        spec = self._requests.get(request)
        return spec is not None and spec.replica is not None

    def may_have_nodes(self, request: Request) -> bool:
        """Whether the request's tree has nodes, or a draft that is not in doubt grows it; never while drafts rest."""
        if self.resting:
            return False
        spec = self._requests.get(request)
        return spec is not None and (spec.mirror.has_nodes or (spec.replica is not None and not spec.backoff.in_doubt))

    def take_answer_seconds(self) -> list[float]:
        """Return the seconds of all answers to commits since the last call."""
        taken: list[float] = []
        for replica in self.replicas.values():
            if replica.health.unreported:
                taken += replica.health.unreported
                replica.health.unreported = []
        return taken

    def check_replicas(self) -> None:
        """Reset sessions that no longer answer, and find drafts for requests that have none.

        Call this when all messages were taken: during a round answers lie unread, and replicas seem slow or lost.
        """
        now = self.clock()
        for replica in list(self.replicas.values()):
            if not replica.health.lost:
                replica.lost_since = None
            elif replica.lost_since is None:
                replica.lost_since = now
            elif now - replica.lost_since > CONFIRM_SECONDS:
                replica.lost_since = None
                replica.health.restart()
                replica.connection.reset()
        self._assign_all()

    def _assign_all(self) -> None:
        for spec in self._requests.values():
            if spec.replica is None:
                self._assign(spec)

    def _assign(self, spec: SpeculativeRequest) -> None:
        """Open the request with the healthy replica that has the fewest requests, if any may serve it now."""
        if self.clock() >= spec.retry_at:
            fit = [
                replica
                for connection, replica in self.replicas.items()
                if replica.health.good and connection not in spec.refused_by and self._may_serve(replica, spec.request)
            ]
            if fit:
                self._open(spec, min(fit, key=lambda replica: len(replica.requests)))

    def _may_serve(self, replica: DraftReplica, request: Request) -> bool:
        """Whether a draft can take the request as it stands: its length, and the features that the draft needs."""
        terms = replica.terms
        if replica.draining:
            return False
        if terms.max_positions and request.committed_len > terms.max_positions:
            return False
        if not terms.feature_layers or terms.features_optional:
            return True
        return self.has_features(request) and replica.channel is not None and replica.channel.open

    def has_features(self, request: Request) -> bool:
        """Whether the features of all of the request's positions are stored."""
        return bool(self.feature_epoch) and request.feature_epoch == self.feature_epoch

    def renew_features(self, epoch: int) -> None:
        """Begin an epoch whose requests have features stored, or other ones than before. Drafts that need features
        serve no requests for now.

        Drafts that can do without keep requests for which they have got none; other requests are opened again, since
        their new features begin at the first position.
        """
        self.feature_epoch = epoch
        for replica in self.replicas.values():
            terms = replica.terms
            for spec in list(replica.requests.values()) if terms.feature_layers else []:
                if spec.num_features_sent or not terms.features_optional:
                    self._detach(spec, send_close=True)
                    self._assign(spec)

    def _open(self, spec: SpeculativeRequest, replica: DraftReplica) -> None:
        """Open the request under a new number, so that no late message can be taken for one about this opening."""
        spec.number, self._next_number = self._next_number, self._next_number + 1
        spec.replica = replica
        spec.wait.on_open(replica.health, self.clock())
        spec.mirror.forget()
        spec.mirror.calibrate = replica.calibrator
        spec.num_features_sent = spec.num_unsent_tokens = 0
        spec.backoff.restart(min(replica.backoff.num_wrong, MAX_WRONG_LOOKS))
        replica.requests[spec.number] = spec
        request = spec.request
        replica.health.sent(spec.number, request.committed_len)
        tokens, params = request.tokens[:], request.params
        opened = Open(spec.number, tokens, request.prompt_len, params.sampling, self._granted(spec), params.tenant)
        replica.outbox.append(opened)
        if spec.wait.paused:
            replica.outbox.append(Pause(spec.number))

    def _detach(self, spec: SpeculativeRequest, send_close: bool) -> None:
        if spec.replica is not None:
            self._learn(spec.replica, [spec])
            spec.replica.requests.pop(spec.number, None)
            spec.replica.health.forget(spec.number)
            if send_close:
                spec.replica.outbox.append(Close(spec.number))
            spec.replica = None
        spec.wait.on_close()
        spec.mirror.forget()

    def _grow(self, replica: DraftReplica, grow: Grow, arrived_at: float) -> None:
        spec = replica.requests.get(grow.request)
        if spec is None:
            self.dropped["closed"] += len(grow.token_ids)
            return
        num_nodes = spec.mirror.insert(grow)
        if spec.mirror.desynced:
            self._open_again(spec)
            return
        replica.health.answered(spec.number, spec.mirror.acked_len, arrived_at)
        if spec.mirror.acked_len == spec.request.committed_len:
            spec.wait.on_answer(arrived_at, num_nodes, len(replica.requests))

    def _open_again(self, spec: SpeculativeRequest) -> None:
        """Open a request again, with any replica that may serve it; with a pause if it was opened just before."""
        again = self.clock() - spec.wait.opened_at < REOPEN_SECONDS
        spec.retry_at = self.clock() + REOPEN_SECONDS if again else spec.retry_at
        self._detach(spec, send_close=True)
        self._assign(spec)

    def _decline(self, replica: DraftReplica, decline: Decline) -> None:
        spec = replica.requests.get(decline.request)
        self.declined[decline.reason.name.lower()] += 1
        if spec is None:
            return
        # Close it with the draft in any case: a request declined by a broken message is still open there.
        self._detach(spec, send_close=True)
        if decline.reason is DeclineReason.DRAINING:
            replica.draining = True
        elif not decline.retryable:
            spec.refused_by.add(replica.connection)
        else:
            cured_by_open = decline.reason in (DeclineReason.GAP, DeclineReason.UNKNOWN_REQUEST)
            if not cured_by_open or self.clock() - spec.wait.opened_at < REOPEN_SECONDS:
                spec.retry_at = self.clock() + REOPEN_SECONDS
        self._assign(spec)

    def _learn(self, replica: DraftReplica, specs: Iterable[SpeculativeRequest]) -> None:
        seen: list[Observation] = []
        for spec in specs:
            news = spec.mirror.take_observations()
            seen += news
            # In lockstep every answer is waited for, whatever guesses are worth.
            if not self.mode.lockstep:
                spec.backoff.judge(news)
                replica.backoff.judge(news)
            if spec.mirror.dropped:
                self.dropped.update(spec.mirror.dropped)
                spec.mirror.dropped.clear()
        replica.calibrator.observe(seen)

"""The work that follows a committed round, done while the next one runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from outrider.protocol.generation import FinishReason, GenerationUpdate, RoundCounts, RoundTree, TokenOrigin
from verify_service.engine.host_gap import log_long_gap
from verify_service.engine.request import Request
from verify_service.engine.round import Batch, Entry, Pending, Result, follow
from verify_service.engine.round_growth import RoundGrowth
from verify_service.engine.scheduler import Scheduler
from verify_service.features.sender import FeatureSender
from verify_service.frames import RoundFigures
from verify_service.speculation.budget import CostModel
from verify_service.speculation.draft_rest import DraftRest
from verify_service.speculation.drafts import Drafts

_MAX_EARLY_COMMITS = 4
"""Most commits sent before the next round is launched: each takes 20 us, and the device is idle meanwhile."""


@dataclass(eq=False, repr=False)
class RoundPostprocessor:
    """Tells drafts, clients and metrics of the last round, and learns from it. The engine's thread alone uses it."""

    scheduler: Scheduler
    drafts: Drafts
    features: FeatureSender
    active_requests: set[Request]
    observer: Observer
    cost: CostModel
    max_nodes: int
    """Most nodes of a round."""
    growth: RoundGrowth | None
    """Decides on trees on verify's own device, if any grow there."""
    rest: DraftRest | None
    """Decides when drafts rest, if they may."""
    _done: RoundDone | None = None
    _commits_sent: bool = False
    """Whether the commits of `_done` were sent to drafts."""
    _prefilled: bool = False

    def add(self, done: RoundDone) -> None:
        """Take a committed round, for `process`."""
        self._done, self._commits_sent = done, False

    def send_commits_early(self) -> None:
        """Send drafts the last round's commits before the next round is launched, if they are few.

        Called if the next round has no nodes: it brings little, and the round after needs the drafts' answers.
        """
        if self._done is not None and not self._commits_sent and len(self._done.commits) <= _MAX_EARLY_COMMITS:
            self._send_commits(self._done)
            self._commits_sent = True

    def process(self, with_features: bool = True) -> None:
        """Do the work that follows the last round, unless it is done already.

        `with_features`: also copy features that drafts lack, which needs a working device.
        """
        done, self._done = self._done, None
        if done is None:
            return
        if not self._commits_sent:
            self._send_commits(done)
        if with_features:
            self.features.collect(done.pending)
        updates = [self._send_update(commit) for commit in done.commits]
        drafted = any(entry.samples and self.drafts.serves(entry.request) for entry in done.batch.entries)
        self.scheduler.release_ended()
        for entry in done.batch.entries:
            request = entry.request
            # True twice if the prompt's last token, the first root, is computed in a round of its own.
            if entry.start < request.prompt_len <= request.cached_len + 1:
                self.scheduler.memory.keep_prompt(request)
        figures = RoundFigures(
            seconds=done.seconds,
            held=done.batch.wait_seconds,
            gap=done.gap,
            gpu=done.pending.gpu_seconds,
            ready=done.batch.num_ready_nodes if drafted else None,
            answers=self.drafts.take_answer_seconds(),
            drafting=done.pending.drafting_seconds,
            resting=drafted and done.batch.resting,
        )
        self.observer.round(done.batch.entries, updates, figures)
        self.observer.flush()
        if with_features:
            # Features have been copied by now, and a draft's answer may wait for them.
            self.features.work()
        log_long_gap(done.gap, done.phases)
        self.drafts.learn()
        if self.growth is not None and done.batch.taken is not None:
            self.growth.learn(done.batch.taken, done.batch.entries, done.results, done.pending.drafting_seconds)
        self.cost.follow_contexts(sum(entry.start for entry in done.batch.entries if entry.samples))
        # After a round with prefill the device may still be busy with it.
        is_usual = not done.prefills and not self._prefilled
        if self.rest is not None and drafted:
            self.rest.observe(*done.num_sampled, done.wall_seconds, is_usual and done.host_gap is not None)
            self.drafts.rest(self.rest.rests)
        if is_usual:
            own, gpu_seconds = self.growth is not None, done.pending.gpu_seconds
            # Wall time from one round's end to the next includes drafting on verify's device.
            seconds = gpu_seconds if own and gpu_seconds is not None else done.seconds + (done.host_gap or 0.0)
            self.cost.observe(done.num_tokens, seconds)
        self._prefilled = done.prefills

    def on_draft_connected(self) -> None:
        """Measure again whether drafts should rest, since one has connected."""
        if self.rest is not None:
            self.rest.forget_drafts()
            self.drafts.rest(self.rest.rests)

    def _send_commits(self, done: RoundDone) -> None:
        done.pending.take_nodes()
        share = self.max_nodes // max(len(self.scheduler.running), 1)
        for commit in done.commits:
            if commit is None or not commit.tokens or (request := commit.entry.request).finished:
                continue
            credit = self.drafts.credit(request, share, len(commit.entry.nodes.token_ids))
            self.drafts.send_commit(request, len(commit.tokens), credit)
        self.drafts.flush()

    def _send_update(self, commit: RoundCommit | None) -> GenerationUpdate:
        """Send a request its update of the round, unless that is empty, and return it."""
        update = GenerationUpdate() if commit is None else commit.update()
        if commit is not None and update.last:
            self.active_requests.discard(commit.entry.request)
        if commit is not None and (update.token_ids or update.last or update.prompt_logprobs):
            commit.entry.request.sink(update)
        return update


class Observer(Protocol):
    """Takes note of every round, on the engine's thread, while the next one runs."""

    def round(self, entries: Sequence[Entry], updates: Sequence[GenerationUpdate], figures: RoundFigures) -> None:
        """Take note of a round. `updates`: one for each entry."""

    def flush(self) -> None:
        """Note that all updates of a round were given out, or nothing is left to do."""


class RoundCommit(NamedTuple):
    """The outcome of a round for one request."""

    entry: Entry
    result: Result
    tokens: Sequence[int]
    """The committed tokens."""
    finish_reason: FinishReason | None

    def update(self) -> GenerationUpdate:
        """Return the request's update; after a chunk of prefill it has at most log-probabilities of the prompt."""
        # Without a draft, an answer that is complete before the failure would not have met it.
        error = self.result.error if self.finish_reason is None else None
        chunk_logprobs = self.result.prompt_logprobs
        prompt_logprobs = () if chunk_logprobs is None else (chunk_logprobs,)
        if not self.tokens:
            return GenerationUpdate(prompt_logprobs=prompt_logprobs, error=error)
        num_nodes, num_accepted = len(self.entry.nodes), self.result.num_accepted
        own = TokenOrigin.BONUS if num_nodes else TokenOrigin.PLAIN
        return GenerationUpdate(
            token_ids=self.tokens,
            origins=[TokenOrigin.ACCEPTED if i < num_accepted else own for i in range(len(self.tokens))],
            logprobs=self.result.logprobs[: len(self.tokens)],
            rounds=(RoundCounts(num_nodes, min(num_accepted, len(self.tokens))),),
            cached_prompt_tokens=self.entry.request.num_cached_prompt_tokens or 0,
            queue_seconds=self.entry.request.queue_seconds,
            finish_reason=self.finish_reason,
            prompt_logprobs=prompt_logprobs,
            round_trees=(self._tree(),) if self.entry.request.params.trace else (),
            error=error,
        )

    def _tree(self) -> RoundTree:
        """Return the tree that the round verified. Call this before the request's next round is committed."""
        nodes, sources, tokens = self.entry.nodes, self.entry.node_sources, self.tokens
        position = len(self.entry.request.tokens) - len(tokens)
        if sources is None:  # the round held no nodes
            return RoundTree(position, len(tokens))
        accepted = follow(nodes.parents, nodes.token_ids, tokens)
        drafters, scores, names = sources
        return RoundTree(
            position, len(tokens), nodes.parents, nodes.token_ids, drafters, scores, accepted, drafter_names=names
        )


class RoundDone(NamedTuple):
    """A committed round whose updates and commits were not sent yet. Times in seconds."""

    batch: Batch
    results: Sequence[Result]
    commits: Sequence[RoundCommit | None]
    """None for a request that had ended before the round did."""
    pending: Pending
    num_tokens: int
    prefills: bool
    """Whether the round had prefill, so that its time says little about rounds of as many tokens."""
    seconds: float
    host_gap: float | None
    """From the end of the round before to this one's launch, waits for drafts aside; None after a pause."""
    phases: str = ""
    """Phases of the host's time between the round before and this one."""

    @property
    def num_sampled(self) -> tuple[int, int]:
        """The number of requests whose next token was sampled, and of committed tokens."""
        num_requests = sum(entry.samples for entry in self.batch.entries)
        return num_requests, sum(len(commit.tokens) for commit in self.commits if commit is not None)

    @property
    def wall_seconds(self) -> float:
        """From the end of the round before to this round's end; after a pause, only this round and its wait."""
        return self.seconds + self.batch.wait_seconds + (self.host_gap or 0.0)

    @property
    def gap(self) -> float | None:
        """How long the device was idle before the round, waits for drafts aside; by its own clock if it has one."""
        if self.host_gap is None or self.pending.gap_seconds is None:
            return self.host_gap
        return max(self.pending.gap_seconds - self.batch.wait_seconds, 0.0)

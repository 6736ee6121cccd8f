"""What follows from a round, dealt with while the next one runs."""

from __future__ import annotations

from verify_service.engine.active_requests import ActiveRequests
from verify_service.engine.figures import RoundFigures
from verify_service.engine.gaps import tell_long
from verify_service.engine.observer import Observer
from verify_service.engine.outcome import Commit, RoundDone
from verify_service.engine.scheduler import Scheduler
from verify_service.features.sender import FeatureSender
from verify_service.frames.submission import Update
from verify_service.speculation.budget import CostModel
from verify_service.speculation.drafts import Drafts

_FEW_COMMITS = 4
"""A commit takes some 20 us to tell, and the device may have nothing to do meanwhile."""


class RoundPostprocessor:
    """Tells drafts, clients and metrics of the last round, and learns from it. The engine thread alone uses it."""

    def __init__(
        self,
        scheduler: Scheduler,
        drafts: Drafts,
        features: FeatureSender,
        unfinished: ActiveRequests,
        observer: Observer,
        cost: CostModel,
        max_nodes: int,
    ) -> None:
        """`max_nodes`: of a round."""
        self._scheduler = scheduler
        self._drafts = drafts
        self._features = features
        self._unfinished = unfinished
        self._observer = observer
        self._cost = cost
        self._max_nodes = max_nodes
        self._done: RoundDone | None = None
        self._told = False
        """Whether drafts know of the round that was noted."""
        self._prefilled = False

    def note(self, done: RoundDone) -> None:
        """A round was committed; `settle` deals with the rest."""
        self._done, self._told = done, False

    def tell_few_drafts(self) -> None:
        """Tell drafts of the round that was noted before the next one is launched, if that takes a moment.

        To be called where that one has no nodes: it brings little, and the draft's answer is what the one after needs.
        """
        if self._done is not None and not self._told and len(self._done.commits) <= _FEW_COMMITS:
            self._tell_drafts(self._done)
            self._told = True

    def settle(self, with_features: bool = True) -> None:
        """Deal with the round that was noted, if that has not been done.

        `with_features`: also have features copied that drafts lack, which takes a device that works.
        """
        done, self._done = self._done, None
        if done is None:
            return
        if not self._told:
            self._tell_drafts(done)
        if with_features:
            self._features.collect(done.pending)
        updates = [self._tell(commit) for commit in done.commits]
        drafted = any(entry.samples and self._drafts.serves(entry.request) for entry in done.entries)
        self._scheduler.release_ended()
        figures = RoundFigures(
            seconds=done.seconds,
            held=done.held,
            gap=done.gap,
            gpu=done.pending.gpu_seconds,
            ready=done.ready if drafted else None,
            answers=self._drafts.take_answers(),
        )
        self._observer.round(done.entries, updates, figures)
        self._observer.flush()
        tell_long(done.gap, done.phases)
        self._drafts.learn()
        # Behind a round with prefill the device may still be busy with it.
        if not done.prefills and not self._prefilled:
            self._cost.observe(done.num_tokens, done.seconds + (done.host_gap or 0.0))
        self._prefilled = done.prefills

    def _tell_drafts(self, done: RoundDone) -> None:
        share = self._max_nodes // max(len(self._scheduler.running), 1)
        for commit in done.commits:
            if commit is None or not commit.tokens or (request := commit.entry.request).finished:
                continue
            credit = self._drafts.credit(request, share, len(commit.entry.nodes.token_ids))
            self._drafts.report(request, len(commit.tokens), credit)
        self._drafts.flush()

    def _tell(self, commit: Commit | None) -> Update:
        """Send a request what the round did for it, if anything."""
        update = Update() if commit is None else commit.update()
        if commit is not None and update.last:
            self._unfinished.discard(commit.entry.request)
        if commit is not None and (update.token_ids or update.last or update.prompt_logprobs is not None):
            commit.entry.request.sink(update)
        return update

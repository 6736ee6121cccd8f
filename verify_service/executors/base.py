"""What the engine needs of an executor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cache.kv import FeatureStore
from outrider.models.base import LanguageModel
from verify_service.engine.request import Request
from verify_service.engine.round import Entry, Growth, Pending
from verify_service.features.staging import FeaturePlan, FeatureStaging, Ring, StagedRows


class Executor:
    """Runs a round's forward, sampling walk and KV compaction. Rounds run in the order of their launches.

    What has to do with features, which all executors can store, is called between two rounds, but for `read_features`.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._features: FeatureStore | None = None
        self._staging: FeatureStaging | None = None

    @property
    def launches_ahead(self) -> bool:
        """Whether a round may be launched before the one before was waited for; then there are two under way.

        Such a round has roots alone, those of its entries that `is_ahead` are what the device has just sampled.
        """
        raise NotImplementedError

    def launch(self, entries: Sequence[Entry], growth: Growth | None = None) -> Pending:
        """Queue a round, and the growth of trees behind it; returns before it has run.

        Page tables cover every token of it. What entries and requests say is read here: between `launch` and `wait`
        the engine takes messages in, which may end requests of the round.
        """
        raise NotImplementedError

    def dry_run(self, entries: Sequence[Entry]) -> None:
        """Run what `launch` does on the host, without effect, also while a round runs; or do nothing.

        Called where the engine never sleeps: code that has not run for a round's time is slow at first.
        """
        raise NotImplementedError

    def forget(self, request: Request) -> None:
        """The request ended or gave up its pages, perhaps while a round with it is under way.

        Whatever is kept for it may be reused by the next launch, behind all that was launched before. A preempted
        request comes back with `cached_len` at what the radix cache had.
        """
        raise NotImplementedError

    @property
    def feature_format(self) -> tuple[int, str]:
        """Values of a layer's hidden state, and their dtype."""
        return self._model.config.hidden_size, str(self._model.dtype).removeprefix("torch.")

    @property
    def lends_features(self) -> bool:
        """Whether features may be stored for drafts."""
        return True

    def begin_features(self, plan: FeaturePlan) -> None:
        """Prepare for rounds that store what the plan says, and nothing else, for every KV slot.

        Until `refresh_features` has said that nothing is left to be done, rounds go on as before. Raises OutriderError,
        and nothing has changed, where there is no memory for them.
        """
        raise NotImplementedError

    def refresh_features(self) -> int:
        """Do a piece of that; how many are left. 0: every round from now on stores features."""
        raise NotImplementedError

    def lend_ring(self) -> Ring | None:
        """Memory that a draft on this host may map; None where there is none to share."""
        try:
            return self._stage().rings.lend()
        except torch.OutOfMemoryError:
            return None

    def take_back_ring(self, ring: Ring) -> None:
        """The draft does not use it, or is gone."""
        self._stage().rings.take_back(ring)

    def read_features(
        self, slots: NDArray[np.int32], parts: tuple[int, ...], after: Pending | None, ring: Ring | None = None
    ) -> StagedRows | None:
        """Copy features at KV slots [N] once the round `after` has run, to the ring or else to the host.

        None if too much is being copied, or lies in the ring, already. While a later round is under way, slots of
        committed positions alone may be asked for.
        """
        if self._features is None:
            raise RuntimeError("features are not stored")
        return self._stage().read(self._features, slots, parts, self._completion(after), ring)

    def _completion(self, round_: Pending | None) -> torch.cuda.Event | None:
        """Event of a round that has stored its features; None where it has once it was waited for."""
        return None

    def _stage(self) -> FeatureStaging:
        """Raises torch.OutOfMemoryError where there is no memory for it."""
        if self._staging is None:
            self._staging = FeatureStaging(self._model.device)
        return self._staging

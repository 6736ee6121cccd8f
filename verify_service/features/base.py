"""What the feature sender needs of others: what to store, an executor that stores it, a stream that carries it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.cache.features import FeatureStore
from outrider.models.base import LanguageModel
from outrider.tree.projection import PROJECTED, Projection
from verify_service.engine.round import Executor, Pending
from verify_service.features.staging import FeatureStaging, Ring, StagedRows


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """Layers that are stored as they are, and the matrix whose product with some is stored, if any is."""

    layers: tuple[int, ...] = ()
    """Ascending."""
    projection: Projection | None = None

    @property
    def inputs(self) -> tuple[int, ...]:
        """Layers that a forward must give, ascending."""
        return tuple(sorted({*self.layers, *(self.projection.layers if self.projection is not None else ())}))

    def holds(self, parts: tuple[int, ...], projection_name: str) -> bool:
        """Whether these parts are stored, and the product, if it is among them, is of this projection."""
        if PROJECTED in parts and (self.projection is None or self.projection.name != projection_name):
            return False
        return set(parts) <= {*self.layers, PROJECTED}


@dataclass(eq=False, slots=True)
class FeatureLine:
    """The features stream of a draft: what is sent and not released is bounded."""

    row_bytes: int
    """Bytes of the features of one position."""
    dtype: str
    ring: Ring | None = None
    """Where its features are put; None where they are in the messages, or until the draft has said that it reads it."""
    window: int = 0
    """Bytes that may be under way."""
    accepted: bool = False
    """Whether the draft is there to read it."""
    open: bool = False
    """Whether that is so, and what it takes is stored."""
    sequence: int = 0
    """Number of the last message."""
    under_way: deque[tuple[int, int]] = field(default_factory=deque)
    """Number and bytes of messages that were not released."""
    num_bytes: int = 0
    lent: deque[tuple[int, StagedRows]] = field(default_factory=deque)
    """Rows in the ring, and the last message that speaks of them."""

    @property
    def room(self) -> int:
        """Bytes that may be sent now; a window that is smaller than one position lets one through at a time."""
        return max(self.window - self.num_bytes, 0 if self.under_way else self.row_bytes)

    def take(self, num_bytes: int) -> int:
        """The number of a new message of so many bytes."""
        self.sequence += 1
        self.under_way.append((self.sequence, num_bytes))
        self.num_bytes += num_bytes
        return self.sequence

    def release(self, through: int) -> None:
        """The draft is done with messages up to this number."""
        while self.under_way and self.under_way[0][0] <= through:
            self.num_bytes -= self.under_way.popleft()[1]
        while self.lent and self.lent[0][0] <= through:
            self.lent.popleft()[1].free()


class FeatureExecutor(Executor):
    """An executor that can store features, as all can. Called between two rounds, but for `read_features`."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._features: FeatureStore | None = None
        self._staging: FeatureStaging | None = None

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

"""What features need of an executor that stores them, and of a session that carries them."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from outrider.protocol.messages import MAX_FEATURE_BYTES, Features, FeaturesBegin
from verify_service.engine.round import Pending
from verify_service.features.plan import FeaturePlan
from verify_service.features.ring import Ring
from verify_service.speculation.link import DraftPort, Staged

STAGE_BYTES = MAX_FEATURE_BYTES
"""Features that are copied to the host, and sent, in one go: more at once could hold up the end of a round."""

Found = TypeVar("Found")


@runtime_checkable
class FeatureExecutor(Protocol):
    """An executor that can store features. Called between two rounds, but for `read_features`."""

    @property
    def feature_format(self) -> tuple[int, str]:
        """Values of a layer's hidden state, and their dtype."""

    def begin_features(self, plan: FeaturePlan) -> None:
        """Prepare for rounds that store what the plan says, and nothing else, for every KV slot.

        Until `refresh_features` has said that nothing is left to be done, rounds go on as before. Raises OutriderError,
        and nothing has changed, where there is no memory for them.
        """

    def refresh_features(self) -> int:
        """Do a piece of that; how many are left. 0: every round from now on stores features."""

    def lend_ring(self) -> Ring | None:
        """Memory that a draft on this host may map; None where there is none to share."""

    def take_back_ring(self, ring: Ring) -> None:
        """The draft does not use it, or is gone."""

    def read_features(
        self, slots: NDArray[np.int32], parts: tuple[int, ...], after: Pending | None, ring: Ring | None = None
    ) -> Staged | None:
        """Copy features at KV slots [N] once the round `after` has run, to the ring or else to the host.

        None if too much is being copied, or lies in the ring, already.

        While a later round is under way, slots of committed positions alone may be asked for.
        """


@runtime_checkable
class FeaturePort(DraftPort, Protocol):
    """A session that can carry features. Methods must not block."""

    @property
    def has_room(self) -> bool:
        """Whether features should be sent now."""

    def begin_features(self, begin: FeaturesBegin) -> None:
        """Open the features stream, under the session's own token; `FeatureSender.opened` hears when it is."""

    def send_features(self, messages: list[Features]) -> None:
        """Queue features, in order. Their bytes are good during the call alone."""


def require(value: Found | None) -> Found:
    """The value. Raises RuntimeError before features were begun."""
    if value is None:
        raise RuntimeError("features are not stored")
    return value

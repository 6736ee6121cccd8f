"""What a host knows of the lengths of a forward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class HostLengths:
    """A copy of a batch's lengths in host memory, for attention that is planned there. int32; B rows.

    Attributes:
        first: [B + 1], where each row's tokens begin; tokens behind first[B] are padding.
        cached_len: [B], tokens of each row with valid KV.
    """

    first: NDArray[np.int32]
    cached_len: NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        """Tokens that are no padding."""
        return int(self.first[-1])

    @property
    def num_keys(self) -> NDArray[np.int32]:
        """[B], keys that each row's last token sees; 0 for an empty row."""
        own = np.diff(self.first)
        keys: NDArray[np.int32] = np.where(own > 0, self.cached_len + own, 0).astype(np.int32)
        return keys

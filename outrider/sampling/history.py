"""The tokens that penalties look at, counted as they are committed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """Prompt and output of one request as dense counts over the vocabulary (5 bytes a vocabulary entry).

    A tree node's own history adds its path; that gives a new array, so nodes never see each other's tokens.
    """

    def __init__(self, prompt_ids: Sequence[int], vocab_size: int) -> None:
        """Count a prompt. Raises ValueError for ids outside the vocabulary."""
        self._in_prompt = np.zeros(vocab_size, np.bool_)
        self._in_prompt[self._checked(prompt_ids)] = True
        self._counts = np.zeros(vocab_size, np.int32)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed output tokens."""
        np.add.at(self._counts, self._checked(token_ids), 1)

    def counts(self, path: Sequence[int]) -> NDArray[np.int32]:
        """How often each token occurs in output + path: int32 [vocab_size]. Not to be written to."""
        if not len(path):
            return self._counts
        counts = self._counts.copy()
        np.add.at(counts, self._checked(path), 1)
        return counts

    def present(self, counts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which tokens occur in the prompt or in what `counts` counted: bool [vocab_size]."""
        return self._in_prompt | (counts > 0)

    def _checked(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        ids = np.asarray(token_ids, np.int64)
        size = len(self._in_prompt)
        # A negative id would silently count for another token.
        if ids.size and (ids.min() < 0 or ids.max() >= size):
            raise ValueError(f"token ids must be between 0 and {size - 1}, not {ids.min()} to {ids.max()}")
        return ids

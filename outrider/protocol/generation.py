"""What gateways and verify services say of requests, in gRPC and in frames between door and engine. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec
import numpy as np
from numpy.typing import NDArray


class TokenOrigin(IntEnum):
    """Where a committed token came from; numbers as in common.proto."""

    UNSPECIFIED = 0
    """A newer protocol's word."""
    ACCEPTED = 1
    """A draft token that the target agreed with."""
    BONUS = 2
    """The target's own token, in a round with draft tokens."""
    PLAIN = 3
    """The target's own token, in a round without."""


class FinishReason(IntEnum):
    """Why an answer ended; numbers as in common.proto."""

    STOP = 1
    """A stop token, the end-of-sequence token or a stop string."""
    LENGTH = 2
    """max_tokens or the context length."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one committed token, under the raw distribution."""

    logprob: float
    top: Sequence[tuple[int, float]]
    """(token id, log-probability), likeliest first."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Natural-log probabilities of N consecutive prompt tokens, each given all before it; of the raw distribution."""

    start: int
    """Position of the first one; at least 1, since the prompt's first token has none."""
    logprobs: NDArray[np.float32]
    """[N]."""
    ranks: NDArray[np.uint32]
    """[N]: place of the prompt's token among all tokens, ties going to the lower id; 1 is the likeliest."""
    top_ids: NDArray[np.int32]
    """[N, K]: the K most likely tokens, likeliest first, equal ones in the order of their ids."""
    top_logprobs: NDArray[np.float32]
    """[N, K]."""

    def __len__(self) -> int:
        return len(self.logprobs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PromptLogprobs):
            return NotImplemented
        return self.start == other.start and all(
            np.array_equal(getattr(self, name), getattr(other, name))
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs")
        )


class RoundTree(msgspec.Struct, frozen=True, array_like=True):
    """What a round verified for one request, and what became of it. Nodes are parents first."""

    position: int
    """Of the first token that the round committed."""
    num_tokens: int
    """Committed by the round: the accepted ones, then the target's own unless a limit or a stop token cut it off."""
    parents: Sequence[int] = ()
    """Index of each node's parent; -1 below the root."""
    token_ids: Sequence[int] = ()
    drafters: Sequence[int] = ()
    """Who found each node, as an index into `drafter_names`."""
    scores: Sequence[float] = ()
    """The drafter's natural-log chance that a node is committed given that its parent is."""
    accepted: Sequence[int] = ()
    """Indices of accepted nodes, the child of the root first."""
    drafter_names: Sequence[str] = ()

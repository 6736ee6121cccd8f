"""What is known of a committed token, on its way from verify to a client. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


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


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one committed token, under the raw distribution."""

    logprob: float
    top: Sequence[tuple[int, float]]
    """(token id, log-probability), likeliest first."""

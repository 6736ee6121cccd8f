"""What `propose` reads on the device beside logits: requests' parameters, and scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_BRANCHING = 16
"""Candidates of a node at most."""
GROUP = 64
"""Tokens of the vocabulary whose best one is found first."""
TEMPERATURE, TAU = range(2)
"""Columns of `ProposeTables.floats`."""
SEED_LOW, SEED_HIGH, CHOICE_INDEX, FLAGS = range(4)
"""Columns of `ProposeTables.ints`."""
RANK_BY_NOISE = 1
"""Bit of the column FLAGS: rank by the shared noise where there is a temperature."""
MIN_TEMPERATURE = 1e-6
"""Temperatures between 0 and this count as this."""


@dataclass(frozen=True, slots=True)
class ProposeTables:
    """Sampling parameters of R requests on the device, one row each."""

    floats: Tensor
    """float32 [R, 2]: temperature, tau (> 0)."""
    ints: Tensor
    """int32 [R, 4]: seed (low word, high word), choice index, flags."""

    @classmethod
    def new(cls, num_rows: int, device: torch.device | str) -> ProposeTables:
        """Tables of zeros, which mean greedy decoding, for `num_rows` requests."""
        return cls(
            torch.zeros(num_rows, 2, dtype=torch.float32, device=device),
            torch.zeros(num_rows, 4, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class ProposeBuffers:
    """Scratch memory of `propose` for M tokens; one call at a time may use it."""

    tops: Tensor
    """float32 [M, ceil(V / GROUP)], the best score of each group of tokens."""
    masses: Tensor
    """float32 of the same shape: sum of exp(score - top) over the group."""

    @classmethod
    def new(cls, num_tokens: int, vocab_size: int, device: torch.device | str) -> ProposeBuffers:
        """Buffers for up to `num_tokens` tokens over a draft vocabulary of `vocab_size`."""
        shape = (num_tokens, -(-vocab_size // GROUP))
        return cls(*(torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2)))

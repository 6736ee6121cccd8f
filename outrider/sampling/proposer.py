"""Candidates of draft models on a device: parameters in tables, one row a request."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.propose import propose
from kernels.propose_state import RANK_BY_NOISE, ProposeBuffers, ProposeTables
from outrider.device import put
from outrider.sampling.edge_scale import PLAIN_SCALE, EdgeScale
from outrider.sampling.params import SamplingParams


class Proposer:
    """The k best children of draft nodes, ranked with the noise that their requests are sampled by."""

    def __init__(
        self,
        num_rows: int,
        max_tokens: int,
        vocab_size: int,
        vocab_limit: int,
        target_ids: Tensor | None,
        device: torch.device,
        rank_by_noise: bool = True,
        scale: EdgeScale = PLAIN_SCALE,
    ) -> None:
        """`vocab_size` is the draft's; `vocab_limit` bounds the target's ids, into which int32 `target_ids` map."""
        self._tables = ProposeTables.new(num_rows, device)
        self._buffers = ProposeBuffers.new(max_tokens, vocab_size, device)
        self._vocab_limit = vocab_limit
        self._target_ids = target_ids
        self._rank_by_noise = rank_by_noise
        self._scale = scale

    def admit(self, row: int, params: SamplingParams) -> None:
        """Give a row to a request."""
        divisor, tau, noisy = self._scale.columns(params.temperature, self._rank_by_noise)
        words = [params.seed & 0xFFFFFFFF, params.seed >> 32, params.choice_index, RANK_BY_NOISE * noisy]
        tables, device = self._tables, self._tables.ints.device
        put(np.array(words, np.uint32).view(np.int32), device, into=tables.ints[row])
        put(np.array([divisor, tau], np.float32), device, into=tables.floats[row])

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, scores: Tensor) -> None:
        """Write int32 `tokens` [M, k] and float32 edge `scores` [M, k] of nodes with `logits` [M, vocab_size].

        `rows` int32 [M] are the nodes' rows, negative for padding; `positions` int32 [M] those of their own tokens. May
        be captured.
        """
        propose(
            logits,
            rows,
            positions,
            self._tables,
            self._buffers,
            tokens,
            scores,
            vocab_limit=self._vocab_limit,
            target_ids=self._target_ids,
        )

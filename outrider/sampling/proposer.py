"""Finds the candidates of draft models, which are the best children of draft nodes, on a device or on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.cpu.head_step import Ranking
from kernels.cpu.layout import MAX_BEST
from kernels.cpu.rows import fits_top_k, prepare_top_k, write_top_k
from kernels.sampling import propose
from kernels.sampling_state import RANK_BY_NOISE, ProposeBuffers, ProposeTables
from outrider.device import put
from outrider.sampling.noise import gumbel
from outrider.sampling.params import SamplingParams

# Lower temperatures above 0 count as this, so that the results of `columns` stay clear of the kernels' own bound.
_MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class EdgeScale:
    """Edge scores are log softmax(log_q * logit + noise * T * G), at temperature 0 log softmax(log_q * logit).

    The target takes the largest logit / T + G. The error of a drafter's logits does not depend on the temperature, so
    the error of logit / T grows with 1/T, and at a low temperature the noise says little. Without noise, the chance
    that a token is the target's likeliest is not the chance that it is drawn: where a drafter would draw its first
    token with 0.65, that token is right in 0.85 of cases. Both factors are above 0.

    Attributes:
        log_q: above `noise` for models that learned from the target's own distributions: such a model gives means over
            what it does not see, which are flatter than each distribution.
        noise: together with `log_q`, how exact the logits are: at temperature 1 both are 1 / tau if the logits' errors
            are Gumbel variates of scale tau.
    """

    log_q: float = 1.25
    noise: float = 1.25

    def columns(self, temperature: float, rank_by_noise: bool) -> tuple[float, float, bool]:
        """Return (divisor, tau, whether noise is added).

        Ranks are (logit / divisor + G) / tau with noise, and logit / divisor without. Without `rank_by_noise`, logits
        are divided by the temperature alone.
        """
        if not temperature > 0:
            return 1 / self.log_q, 1.0, False
        temperature = max(temperature, _MIN_TEMPERATURE)
        if not rank_by_noise:
            return temperature, 1.0, False
        spread = self.noise * temperature
        return spread / self.log_q, 1 / spread, True


PLAIN_SCALE = EdgeScale()
# Fitted for the EAGLE-3 head of SmolLM2-135M-Instruct, on text of prompts that no measurement uses
# (benchmarks/notes/training.md); depths up to 8 and temperatures from 0.5 to 1 give nearly the same.
HEAD_SCALE = EdgeScale(log_q=1.26, noise=1.05)


class Proposer:
    """Finds the k best children of draft nodes, ranked with the noise that their requests are sampled with."""

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
        """`vocab_size` is the draft's; int32 `target_ids` map its ids to the target's, which `vocab_limit` bounds."""
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

        `rows` int32 [M] are the nodes' rows, negative for padding; `positions` int32 [M] are the positions of the
        nodes' own tokens. May be captured.
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


# Values to look at beyond the best k, so that equal ones at the border are chosen by their place.
_SPARE = 8


class HostProposer:
    """Computes what `Proposer` does on a CPU, in a few passes over the vocabulary. Parameters lie in host memory."""

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        vocab_limit: int,
        target_ids: Tensor | None,
        rank_by_noise: bool = True,
        scale: EdgeScale = PLAIN_SCALE,
    ) -> None:
        """See Proposer. For 49152 tokens, a node takes 1.5 ms with noise on one Zen 4 core, and 0.2 ms without."""
        self._ids = torch.arange(vocab_size, dtype=torch.int32) if target_ids is None else target_ids
        self._mapped = None if target_ids is None else target_ids.clamp(min=0).numpy()
        self._id_end = int(self._ids.max()) + 1 if vocab_size else 0
        illegal = (self._ids < 0) | (self._ids >= vocab_limit)
        self._illegal = illegal if bool(illegal.any()) else None
        self._params = [SamplingParams(temperature=0.0)] * num_rows
        self._rank_by_noise = rank_by_noise
        self._scale = scale
        prepare_top_k()

    def admit(self, row: int, params: SamplingParams) -> None:
        """Give a row to a request."""
        self._params[row] = params

    def ranking(self, rows: Sequence[int], best: int) -> Ranking | None:
        """Return how a draft head's step ranks these rows' `best` candidates; None if a divisor alone does not do."""
        columns = [self._scale.columns(self._params[row].temperature, self._rank_by_noise) for row in rows]
        if self._illegal is not None or any(noisy for _, _, noisy in columns):
            return None
        divisors = torch.tensor([divisor for divisor, _, _ in columns], dtype=torch.float32)
        return Ranking(divisors, self._ids, best) if best <= min(MAX_BEST, len(self._ids)) else None

    def __call__(self, logits: Tensor, rows: Tensor, positions: Tensor, tokens: Tensor, scores: Tensor) -> None:
        """See Proposer. `logits` float32 are overwritten."""
        for index, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
            if row >= 0:
                self._rank(logits[index], self._params[row], position + 1)
        if self._illegal is not None:
            logits.masked_fill_(self._illegal, -torch.inf)
        count = tokens.shape[1]
        if fits_top_k(logits, count):
            write_top_k(logits, self._ids, tokens, scores)
            absent = (rows < 0)[:, None]
            tokens.masked_fill_(absent, -1)
            scores.masked_fill_(absent, -torch.inf)
            return
        best = logits.topk(min(count + _SPARE, logits.shape[1]))
        # Sort by place first, then stably by value, so that equal values stay in order of their places.
        places = best.indices.sort(1).values
        values, order = logits.gather(1, places).sort(stable=True, dim=1, descending=True)
        values, places = values[:, :count], places.gather(1, order)[:, :count]
        edges = values - logits.logsumexp(1, keepdim=True)
        there = edges.isfinite() & (rows >= 0)[:, None]
        tokens.fill_(-1)
        scores.fill_(-torch.inf)
        found = values.shape[1]
        tokens[:, :found] = torch.where(there, self._ids[places], -1)
        scores[:, :found] = torch.where(there, edges.clamp(max=0.0), -torch.inf)

    def _rank(self, logits: Tensor, params: SamplingParams, position: int) -> None:
        """Turn a node's logits into ranks in place; `position` is that of the node's children."""
        divisor, tau, noisy = self._scale.columns(params.temperature, self._rank_by_noise)
        ranks = logits.numpy()
        if divisor != 1.0:
            ranks /= np.float32(divisor)
        if noisy:
            noise = gumbel(params.seed, params.choice_index, position, vocab_size=self._id_end)
            ranks += noise if self._mapped is None else noise[self._mapped]
            ranks /= np.float32(tau)

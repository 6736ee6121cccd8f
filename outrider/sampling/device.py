"""Sampling for all requests of a round on the GPU: parameters and histories in tables, one row per request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling import logprobs, sample_rows
from kernels.sampling_state import (
    BIASED,
    ENDS_ANSWER,
    GOES_ON,
    ILLEGAL_TOKEN,
    IN_PROMPT,
    LAST_TOKEN,
    MASKED,
    PENALIZED,
    LogprobOutputs,
    RoundTokens,
    SampleBuffers,
    SamplingTables,
    WalkOutputs,
)
from kernels.tree import walk
from outrider.device import put
from outrider.errors import InternalError
from outrider.protocol.generation import TokenLogprobs
from outrider.sampling.params import ANY_END, AnswerEnd, SamplingParams
from outrider.sampling.sampler import AcceptRule

__all__ = ["DeviceSampler", "LogprobOutputs", "failure", "read_logprobs"]


def failure(error: int) -> InternalError:
    """Return the error for a row's nonzero `error` of `DeviceSampler.commit`."""
    if error == ILLEGAL_TOKEN:
        return InternalError("sampling gave a token outside the vocabulary", code="illegal_token")
    return InternalError("the model's logits are unusable", code="unusable_logits")


class DeviceSampler:
    """Samples the tokens of the requests in its tables. docs/sampling.md says what is computed."""

    def __init__(
        self, num_rows: int, max_tokens: int, max_depth: int, vocab_size: int, device: torch.device, rule: AcceptRule
    ) -> None:
        """Most requests (`num_rows`), tokens of a round, and committed tokens of a request in a round (`max_depth`)."""
        self._vocab_size = vocab_size
        self._rule = rule
        self._tables = SamplingTables(
            float_params=torch.zeros(num_rows, 8, dtype=torch.float32, device=device),
            int_params=torch.zeros(num_rows, 8, dtype=torch.int32, device=device),
            counts=torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device),
            bias=torch.zeros(num_rows, vocab_size, dtype=torch.float32, device=device),
        )
        self._buffers = SampleBuffers.new(max_tokens, vocab_size, device)
        self._mask = torch.full((max_tokens, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
        self._pinned_mask = torch.full(self._mask.shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._logprobs = LogprobOutputs.new(num_rows, max_depth, device)

    def admit(
        self,
        row: int,
        params: SamplingParams,
        tokens: Sequence[int],
        prompt_len: int,
        end: AnswerEnd = ANY_END,
        masked: bool = False,
    ) -> None:
        """Give a row to a request whose committed tokens are `tokens`.

        `masked`: the request has masks (`set_masks`) in every round; always so with a grammar.
        """
        flags = PENALIZED * params.penalized + BIASED * bool(params.logit_bias)
        flags += MASKED * (masked or params.grammar is not None) + GOES_ON * (end.min_tokens > 0)
        wanted = -1 if params.num_logprobs is None else params.num_logprobs
        words = [params.seed & 0xFFFFFFFF, params.seed >> 32, params.choice_index]
        more = [min(params.top_k, self._vocab_size), wanted & 0xFFFFFFFF, flags, prompt_len + end.min_tokens, 0]
        ints = np.array([*words, *more], np.uint32)
        penalties = [params.presence_penalty, params.frequency_penalty, params.repetition_penalty]
        thresholds = [self._rule.single, self._rule.acc]
        floats = np.array([params.temperature, params.top_p, params.min_p, *penalties, *thresholds], np.float32)
        tables, device = self._tables, self._tables.bias.device
        put(ints.view(np.int32), device, into=tables.int_params[row])
        put(floats, device, into=tables.float_params[row])
        if params.penalized or end.min_tokens:
            put(self._history(tokens, prompt_len, end), device, into=tables.counts[row])
        if params.logit_bias:
            dense = np.zeros(self._vocab_size, np.float32)
            dense[list(params.logit_bias)] = list(params.logit_bias.values())
            put(dense, device, into=tables.bias[row])

    @property
    def int_params(self) -> Tensor:
        """See SamplingTables."""
        return self._tables.int_params

    def set_masks(self, runs: Sequence[tuple[int, Sequence[NDArray[np.int32]]]]) -> None:
        """Set the masks of a round's tokens, for requests that have some.

        `runs`: in order, the index of a run's first token in the round, and the masks of the run's tokens. A mask is
        int32 [ceil(V / 32)]; bit v % 32 of word v // 32 is set where token v is allowed. Queues one copy ahead of the
        round; the last round must be over. Rows of requests without masks may hold anything.
        """
        if not runs:
            return
        rows = self._pinned_mask.numpy()
        for first, masks in runs:
            rows[first : first + len(masks)] = masks
        begin, end = runs[0][0], runs[-1][0] + len(runs[-1][1])
        self._mask[begin:end].copy_(self._pinned_mask[begin:end], non_blocking=True)

    def commit(
        self,
        logits: Tensor,
        tokens: RoundTokens,
        max_row_tokens: int,
        num_tokens: Tensor,
        error: Tensor,
        committed: Tensor,
        accepted: Tensor,
    ) -> None:
        """Sample at every token of a round and walk its trees, on the device.

        Writes for B rows, all int32: `num_tokens` [B] and `committed` [B, D], the tokens committed; `accepted` [B, D],
        the accepted nodes' places in the round; `error` [B], not 0 where a row failed, see `failure`.
        """
        out = WalkOutputs(num_tokens, committed, accepted, error)
        size, tables, lossy = self._vocab_size, self._tables, self._rule.lossy
        mask = self._mask[: tokens.token_ids.shape[0]]
        sample_rows(logits, size, tokens, tables, self._buffers, vocab_mask=mask, lossy=lossy)
        walk(tokens, tables, self._buffers, out, max_row_tokens=max_row_tokens, vocab_size=size, lossy=lossy)
        num_rows = num_tokens.shape[0]
        listed = self._logprobs
        view = LogprobOutputs(listed.logprobs[:num_rows, :], listed.top_ids[:num_rows], listed.top_logprobs[:num_rows])
        logprobs(logits, size, tokens, tables, out, view)

    def note_last(self, tokens: RoundTokens, num_tokens: Tensor, committed: Tensor) -> None:
        """Note the last tokens of a round that was sampled elsewhere, as `commit` does; arguments are the same."""
        rows = tokens.table_rows.long()
        last = committed.gather(1, (num_tokens - 1).clamp(min=0).long()[:, None])[:, 0]
        before = self._tables.int_params[rows, LAST_TOKEN]
        self._tables.int_params[rows, LAST_TOKEN] = torch.where(num_tokens > 0, last, before)

    def copy_logprobs(self, num_rows: int) -> LogprobOutputs:
        """Queue a copy to the host of the last queued round's logprobs: later rounds write to the same memory."""
        listed = self._logprobs
        parts = (listed.logprobs, listed.top_ids, listed.top_logprobs)
        return LogprobOutputs(*(part[:num_rows].to("cpu", non_blocking=True, copy=True) for part in parts))

    def _history(self, tokens: Sequence[int], prompt_len: int, end: AnswerEnd) -> NDArray[np.int32]:
        ids = np.asarray(tokens, np.int64)
        counts: NDArray[np.int32] = np.bincount(ids[prompt_len:], minlength=self._vocab_size).astype(np.int32)
        counts[ids[:prompt_len]] |= IN_PROMPT
        counts[[token for token in end.token_ids if token < self._vocab_size]] |= ENDS_ANSWER
        return counts


def read_logprobs(listed: LogprobOutputs, row: int, token_ids: Sequence[int], num_logprobs: int) -> list[TokenLogprobs]:
    """Return the logprobs of the tokens that a row committed in a round, from a finished copy."""
    count = len(token_ids)
    own = listed.logprobs[row, :count].tolist()
    ids = listed.top_ids[row, :count, :num_logprobs].tolist()
    values = listed.top_logprobs[row, :count, :num_logprobs].tolist()
    return [
        TokenLogprobs(own[i], [(token, value) for token, value in zip(ids[i], values[i], strict=True) if token >= 0])
        for i in range(count)
    ]

"""Runs bursts with plain torch operations on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draft_service.burst.buckets import Bucket
from draft_service.burst.runner import Pending, Runner, on_device
from outrider.attention.base import ForwardBatch, Segment
from outrider.attention.frontier import StepTokens
from outrider.sampling.host_proposer import HostProposer


class TorchRunner(Runner):
    """See BurstRunner. Nothing works in the background: a burst runs when it is waited for or has to be over."""

    @on_device
    def _settle(self) -> None:
        for pending in self._launched:
            if not pending.ran:
                try:
                    self._run(pending)
                except Exception as error:
                    # It is the burst's failure, not that of the call that found it waiting.
                    pending.error = error

    def _make_proposer(self) -> HostProposer:
        model, options = self._model, self.options
        limits = (model.vocab_size, self._vocab_limit)
        return HostProposer(self.shape.num_rows, *limits, model.target_ids, options.rank_by_noise, options.tau)

    def _queue(self, pending: Pending) -> None:
        """Left to `_settle`: the host may first pass on what the burst before brought."""

    def _run_step(self, bucket: Bucket) -> None:
        self._step(bucket)

    def _propose(self, bucket: Bucket, step: StepTokens, tokens: Tensor, scores: Tensor) -> None:
        if int(step.first[-1]):
            super()._propose(bucket, step, tokens, scores)

    def _step_batch(self, bucket: Bucket, step: StepTokens) -> ForwardBatch:
        """A segment for each row that has nodes. Padding is left out."""
        rows, first = self._input.rows, step.first.tolist()
        seen = np.unpackbits(step.mask.numpy().view(np.uint8), axis=1, bitorder="little").astype(np.bool_)
        segments = []
        for row in range(bucket.rows):
            begin, end = first[row], first[row + 1]
            if begin < end:
                table_row, length = int(rows.table_rows[row]), int(rows.context_len[row])
                segments.append(self._segment(table_row, length, step.slots[begin:end].numpy(), seen[begin:end]))
        count = first[-1]
        return ForwardBatch(step.token_ids[:count].long(), step.rotary[:count].long(), segments)

    def _segment(self, row: int, context_len: int, own: NDArray[np.int32], seen: NDArray[np.bool_]) -> Segment:
        """Context, then the tree slots that any node sees, the nodes' own last."""
        others = np.flatnonzero(seen.any(0))
        tree = np.concatenate([np.setdiff1d(others, own), own])
        context = self.memory.context_slots(row, 0, context_len)
        slots = np.concatenate([context, tree + self.memory.region_start(row)])
        return Segment(len(own), torch.from_numpy(slots.astype(np.int64)), torch.from_numpy(seen[:, tree]))

    def _prompt_batch(self, row: int, tokens: Sequence[int], position: int) -> ForwardBatch:
        count = len(tokens)
        slots = self.memory.context_slots(row, 0, position + count)
        segment = Segment(count, torch.from_numpy(slots.astype(np.int64)))
        return ForwardBatch(torch.tensor(tokens), torch.arange(position, position + count), [segment])

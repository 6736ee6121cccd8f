"""See kernels.logprobs."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import sampling_state as state
from kernels.sampling_state import LogprobOutputs, RoundTokens, SamplingTables, WalkOutputs


def logprobs(
    logits: Tensor,
    vocab_size: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    walked: WalkOutputs,
    out: LogprobOutputs,
) -> None:
    """As kernels.logprobs.logprobs."""
    for row in range(tokens.root.shape[0]):
        wanted = int(tables.int_params[int(tokens.table_rows[row]), state.NUM_LOGPROBS])
        wanted = min(wanted, state.MAX_TOP_LOGPROBS, vocab_size)
        for place in range(int(walked.num_tokens[row]) if wanted >= 0 else 0):
            node = int(walked.accepted[row, place - 1] if place else tokens.root[row])
            values = logits[node, :vocab_size].double()
            log_total = values.max() + (values - values.max()).exp().sum().log()
            out.logprobs[row, place] = (values[int(walked.tokens[row, place])] - log_total).float()
            likeliest = values.sort(descending=True, stable=True).indices[:wanted]
            out.top_ids[row, place], out.top_logprobs[row, place] = -1, -torch.inf
            out.top_ids[row, place, :wanted] = likeliest.int()
            out.top_logprobs[row, place, :wanted] = (values[likeliest] - log_total).float()

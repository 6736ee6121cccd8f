"""Log-probabilities of committed tokens and of the likeliest beside them."""

from __future__ import annotations

from torch import Tensor

from kernels.launch import use_triton
from kernels.reference import logprobs as reference
from kernels.sampling_state import LogprobOutputs, RoundTokens, SamplingTables, WalkOutputs


def logprobs(
    logits: Tensor,
    vocab_size: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    walked: WalkOutputs,
    out: LogprobOutputs,
) -> None:
    """Log-softmax of the raw logits at each committed token of requests that want it; writes `out`.

    Token k of a row was sampled at the root (k = 0) or at accepted node k - 1. Sums are float64 and values are rounded
    to float32 once, so a committed token's value equals its entry in the list. Equal logits stand in the order of
    their ids. Entries behind a row's tokens, and of requests that want no log-probabilities, are not written.

    Args:
        logits: [M, V or wider], as given to `sample_rows`.
        vocab_size: V.
        tokens: the round.
        tables: parameters of the requests.
        walked: as `walk` left it.
        out: of the same B and D as `walked`.

    Raises:
        ValueError: shapes do not fit.
    """
    if out.logprobs.shape != walked.tokens.shape:
        raise ValueError(f"outputs of {tuple(out.logprobs.shape)} for a walk of {tuple(walked.tokens.shape)}")
    if logits.dim() != 2 or logits.shape[1] < vocab_size or logits.stride(1) != 1:
        raise ValueError(f"log-probabilities of {vocab_size} tokens from logits of {tuple(logits.shape)}")
    if use_triton(logits):
        from kernels.jit import logprobs as jit

        jit.logprobs(logits, vocab_size, tokens, tables, walked, out)
    else:
        reference.logprobs(logits, vocab_size, tokens, tables, walked, out)

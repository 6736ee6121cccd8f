"""Drafter-invariant sampling at every token of a round."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import use_triton
from kernels.reference import sampling as reference
from kernels.sampling_state import RoundTokens, SampleBuffers, SamplingTables


def sample_rows(
    logits: Tensor,
    vocab_size: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    buffers: SampleBuffers,
    *,
    vocab_mask: Tensor | None = None,
    lossy: bool = False,
) -> None:
    """Sample one token at every root and node of a round; writes `buffers.sampled` and `buffers.bad`.

    The token is the one that outrider.sampling.sampler.RequestSampler takes from the same logits: the processors in the
    order of docs/sampling.md over the token's own history (the request's counts and the path from below the root
    to the token), Gumbel noise of position + 1, ties to the lowest id. Tokens before the root, of rows that do not
    sample, and padding get -1.

    Args:
        logits: [M, V or wider], float32, bfloat16 or float16, rows contiguous; the first `vocab_size` columns count.
        vocab_size: V, the legal token ids.
        tokens: the round, of M tokens.
        tables: parameters of R requests.
        buffers: for at least M tokens.
        vocab_mask: int32 [M, ceil(V / 32)], bit v % 32 of word v // 32 set where token v is allowed; looked at for
            requests with the flag MASKED, and needed if there are any.
        lossy: also keep what `walk` needs to apply acceptance thresholds; for requests with one below 1.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    num_tokens = tokens.token_ids.shape[0]
    if logits.dim() != 2 or logits.shape[0] < num_tokens or logits.shape[1] < vocab_size or logits.stride(1) != 1:
        raise ValueError(f"sampling {num_tokens} tokens of {vocab_size} from logits of {tuple(logits.shape)}")
    if tables.counts.shape[1] != vocab_size or tables.bias.shape[1] != vocab_size:
        raise ValueError(f"tables of {tables.counts.shape[1]} tokens for a vocabulary of {vocab_size}")
    most, width = buffers.processed.shape[0], buffers.processed.shape[1] - buffers.candidate_ids.shape[1]
    if most < num_tokens or width != vocab_size:
        raise ValueError(f"buffers for {most} tokens of {width}, not {num_tokens} of {vocab_size}")
    if vocab_mask is not None and (vocab_mask.dtype != torch.int32 or vocab_mask.shape[1] < -(-vocab_size // 32)):
        raise ValueError(f"a vocabulary mask of {tuple(vocab_mask.shape)} {vocab_mask.dtype}")
    if use_triton(logits):
        from kernels.jit import sampling

        sampling.sample_rows(logits, vocab_size, tokens, tables, buffers, vocab_mask, lossy)
    else:
        reference.sample_rows(logits, vocab_size, tokens, tables, buffers, vocab_mask, lossy)

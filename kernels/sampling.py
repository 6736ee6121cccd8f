"""Drafter-invariant sampling: the shared noise, drafts' proposals, and a round's tokens and log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import backend, use_triton
from kernels.reference import sampling as reference
from kernels.sampling_state import (
    GROUP,
    MAX_BRANCHING,
    LogprobOutputs,
    ProposeBuffers,
    ProposeTables,
    RoundTokens,
    SampleBuffers,
    SamplingTables,
    WalkOutputs,
)


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
    """Return the noise of N rows: float32 [N, vocab_size], or [N, K] for `token_ids` [N, K].

    The same function as outrider.sampling.noise.gumbel: Philox 4x32-10, logarithms in float64, rounded to float32 once.
    Values may differ in the last bit where the float64 logarithms of two devices do.

    Args:
        keys: int32 [N, 3]: seed (low word, high word) and choice index, as bit patterns; rows may be strided.
        positions: int32 [N], absolute position of the token to be sampled.
        vocab_size: V; ignored with `token_ids`.
        token_ids: int32 [N, K].
    """
    count = positions.shape[0]
    if keys.shape != (count, 3) or keys.stride(1) != 1:
        raise ValueError(f"noise keys of {tuple(keys.shape)} for {count} positions")
    if token_ids is not None and (token_ids.dim() != 2 or token_ids.shape[0] != count):
        raise ValueError(f"noise of tokens {tuple(token_ids.shape)} for {count} positions")
    if not use_triton(positions):
        ids = torch.arange(vocab_size, device=positions.device).expand(count, -1) if token_ids is None else token_ids
        return reference.gumbel(keys, positions, ids)
    from kernels.jit import gumbel as jit

    return jit.gumbel(keys, positions, vocab_size, token_ids)


def propose(
    logits: Tensor,
    rows: Tensor,
    positions: Tensor,
    tables: ProposeTables,
    buffers: ProposeBuffers,
    tokens: Tensor,
    scores: Tensor,
    *,
    vocab_limit: int,
    target_ids: Tensor | None = None,
) -> None:
    """Write the k best children of M nodes, best first, and their edge scores.

    A token's rank is its logit at temperature T = 0, logit / T without RANK_BY_NOISE, and otherwise (logit / T + G) /
    tau. G is the noise of the request's seed and choice index, the child's position (one more than the node's) and the
    token's id in the target's vocabulary. The edge score is the log softmax of the rank over the legal tokens of the
    draft vocabulary, at most 0. Ties go to the lower index in the draft vocabulary.

    Two launches. The host reads nothing, so they can be captured. The noise is computed in float32 and differs from
    that of outrider.sampling.noise by at most 1e-5.

    Args:
        logits: [M, V] float32, bfloat16 or float16, rows contiguous; V is the draft vocabulary.
        rows: int32 [M], each node's row in the tables; negative for padding.
        positions: int32 [M], absolute positions of the nodes' own tokens.
        buffers: for at least M tokens of V.
        tokens: int32 [M, k], written: ids in the target's vocabulary, 1 <= k <= MAX_BRANCHING. -1 for padding, for
            nodes whose legal logits contain NaN or +inf, and where fewer than k tokens are legal and above -inf.
        scores: float32 [M, k], written; -inf where the token is -1, otherwise finite.
        vocab_limit: target ids from this on are illegal: neither proposed nor part of the softmax.
        target_ids: int32 [V], the target's id of each draft token; None if the ids are the same. Negative ids are
            illegal.
    """
    count, size = logits.shape
    if rows.shape != (count,) or positions.shape != (count,) or (size > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits of {list(logits.shape)} for {rows.shape[0]} rows and {positions.shape[0]} positions")
    branching = tokens.shape[1]
    if tokens.shape != (count, branching) or scores.shape != tokens.shape or not 1 <= branching <= MAX_BRANCHING:
        raise ValueError(f"{list(tokens.shape)} tokens and {list(scores.shape)} scores of {count} nodes")
    if not (tokens.is_contiguous() and scores.is_contiguous()):
        raise ValueError("tokens and scores must be contiguous")
    if buffers.tops.shape[0] < count or buffers.tops.shape[1] != -(-size // GROUP):
        raise ValueError(f"buffers of {list(buffers.tops.shape)} for logits of {list(logits.shape)}")
    if target_ids is not None and (target_ids.shape != (size,) or target_ids.dtype != torch.int32):
        raise ValueError(f"target ids of {list(target_ids.shape)} {target_ids.dtype} for {size} draft tokens")
    if count == 0:
        return
    backend(logits, "proposals").propose(
        logits, rows, positions, tables, buffers, tokens, scores, vocab_limit, target_ids
    )


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
    """Sample one token at every root and node of a round; write `buffers.sampled` and `buffers.bad`.

    The result equals what outrider.sampling.sampler.RequestSampler samples from the same logits: the processors run in
    the order of docs/sampling.md over the token's own history (the request's counts and the path from below the root to
    the token), Gumbel noise is that of position + 1, and ties go to the lowest id. Tokens before the root, tokens of
    rows that do not sample, and padding get -1.

    Args:
        logits: [M, V or wider], float32, bfloat16 or float16, rows contiguous; columns from `vocab_size` on are
            ignored.
        vocab_size: V, the legal token ids.
        tokens: the round, of M tokens.
        tables: parameters of R requests.
        buffers: for at least M tokens.
        vocab_mask: int32 [M, ceil(V / 32)], bit v % 32 of word v // 32 set where token v is allowed. Read for requests
            with the flag MASKED; required if there are any.
        lossy: for requests with an acceptance threshold below 1, also keep what `walk` needs to apply it.
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
    backend(logits, "sampling").sample_rows(logits, vocab_size, tokens, tables, buffers, vocab_mask, lossy)


def logprobs(
    logits: Tensor,
    vocab_size: int,
    tokens: RoundTokens,
    tables: SamplingTables,
    walked: WalkOutputs,
    out: LogprobOutputs,
) -> None:
    """Write the log-softmax of the raw logits at each committed token of requests that want it to `out`.

    Token k of a row was sampled at the root (k = 0) or at accepted node k - 1. Sums are float64 and values are rounded
    to float32 once, so a committed token's value equals its entry in the list. Equal logits are listed in the order of
    their ids. Entries past a row's tokens, and entries of requests that want no log-probabilities, are not written.

    Args:
        logits: [M, V or wider], as given to `sample_rows`.
        walked: as `walk` left it.
        out: of the same B and D as `walked`.
    """
    if out.logprobs.shape != walked.tokens.shape:
        raise ValueError(f"outputs of {tuple(out.logprobs.shape)} for a walk of {tuple(walked.tokens.shape)}")
    if logits.dim() != 2 or logits.shape[1] < vocab_size or logits.stride(1) != 1:
        raise ValueError(f"log-probabilities of {vocab_size} tokens from logits of {tuple(logits.shape)}")
    backend(logits, "sampling").logprobs(logits, vocab_size, tokens, tables, walked, out)

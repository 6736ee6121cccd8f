"""Drafts' proposals: the best children of nodes, by logits and the shared noise of drafter-invariant sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import backend
from kernels.sampling_state import GROUP, MAX_BRANCHING, ProposeBuffers, ProposeTables


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

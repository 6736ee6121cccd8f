"""Batches of a CPU's forwards as bytes, for ranks that compute their part of them."""

from __future__ import annotations

import numpy as np
import torch

from outrider.attention.base import ForwardBatch, Segment

_CAUSAL = -1
"""In the place of a mask's width."""


def pack_batch(batch: ForwardBatch) -> bytes:
    """int32 words of tokens, positions and segments, and behind them the masks' bytes."""
    words = [len(batch.token_ids), len(batch.segments)]
    masks = []
    for segment in batch.segments:
        width = _CAUSAL
        if segment.mask is not None:
            width = segment.mask.shape[1]
            masks.append(segment.mask.contiguous().numpy().tobytes())
        words += [segment.num_queries, len(segment.kv_slots), segment.num_spare, width]
    arrays = [batch.token_ids, batch.positions, *(segment.kv_slots for segment in batch.segments)]
    parts = [np.array(words, np.int32), *(array.numpy().astype(np.int32) for array in arrays)]
    return b"".join([np.concatenate(parts).tobytes(), *masks])


def unpack_batch(data: bytes) -> ForwardBatch:
    """What `pack_batch` was given."""
    num_tokens, num_segments = np.frombuffer(data, np.int32, 2).tolist()
    heads = np.frombuffer(data, np.int32, 4 * num_segments, 8).reshape(-1, 4).tolist()
    at = 4 * (2 + 4 * num_segments)

    def ints(count: int) -> torch.Tensor:
        nonlocal at
        found = torch.from_numpy(np.frombuffer(data, np.int32, count, at).astype(np.int64))
        at += 4 * count
        return found

    token_ids, positions = ints(num_tokens), ints(num_tokens)
    slots = [ints(length) for _, length, _, _ in heads]
    segments = []
    for (queries, _, spare, width), own in zip(heads, slots, strict=True):
        mask = None
        if width != _CAUSAL:
            mask = torch.from_numpy(np.frombuffer(data, np.bool_, queries * width, at).reshape(queries, width).copy())
            at += queries * width
        segments.append(Segment(queries, own, mask, spare))
    return ForwardBatch(token_ids, positions, segments)

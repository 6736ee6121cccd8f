"""What processors leave, as one row of the whole vocabulary."""

from __future__ import annotations

import numpy as np

from outrider.sampling.sampler import Candidates


def dense(candidates: Candidates, vocab_size: int) -> np.ndarray:
    """The processed logits, -inf elsewhere: float32 [vocab_size]."""
    if candidates.token_ids is None:
        return candidates.logits
    row = np.full(vocab_size, -np.inf, np.float32)
    row[candidates.token_ids] = candidates.logits
    return row

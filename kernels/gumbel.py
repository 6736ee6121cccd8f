"""The shared noise of drafter-invariant sampling, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.launch import use_triton
from kernels.reference import gumbel as reference


def gumbel(keys: Tensor, positions: Tensor, vocab_size: int, token_ids: Tensor | None = None) -> Tensor:
    """Noise of N rows: float32 [N, vocab_size], or [N, K] for `token_ids` [N, K].

    The same function as outrider.sampling.noise.gumbel: Philox 4x32-10, logarithms in float64, rounded to float32 once.
    Values may differ from it in the last bit where the float64 logarithms of the two devices do.

    Args:
        keys: int32 [N, 3]: seed (low word, high word) and choice index, as bit patterns; rows may be strided.
        positions: int32 [N], absolute position of the token to be sampled.
        vocab_size: V; ignored with `token_ids`.
        token_ids: int32 [N, K].

    Raises:
        ValueError: shapes do not fit.
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
